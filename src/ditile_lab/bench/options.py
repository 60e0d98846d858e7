"""The options of `ditile bench`: the comparison and the measured work. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ditile.plan.errors import PlanError
from ditile.plan.option_classes import Counts, Ranks, Seconds, define_option, options
from ditile.runner.requests.options import DeviceOptions, ModelName, ModelOptions
from ditile.runner.requests.outputs import check_output_files
from ditile_lab.rows import list_folder_outputs

SWEEPS = ("methods", "scaling", "patches", "warmup", "resolution", "cache")
RANDOM = "random-"
"""The prefix of the names of models with random weights."""


@options()
class Comparison:
    """The plans and caches that are compared.

    Raises:
        PlanError: if a value is out of its range, or two of them contradict each other.
    """

    plans: str | None = define_option(
        None, "plans with ; between them, a cache after |: 'ulysses=2; ulysses=2 | F=1 W=4 R=0.12'"
    )
    alone: bool = define_option(
        False, "measure ranks of the plans by themselves, one after the other on one device; links are computed"
    )
    all_ranks: bool = define_option(False, "alone, measure every rank; by default the first, the last and the busiest")
    recorded: bool | None = define_option(
        None, "alone, measure each rank with recorded steps (cuda_graphs) too; by default where there is a GPU"
    )
    sweep: str | None = define_option(None, f"instead of plans: {', '.join(SWEEPS)}, or several", metavar="NAMES")
    ranks: Ranks | None = define_option(None, "ranks of a sweep; by default all of torchrun's, one for each GPU, or 2")
    sizes: Counts | None = define_option(
        None,
        "pixels of a side for --sweep resolution; once, twice and four times the model's own by default",
        metavar="N,N,..",
        example="256,512",
    )
    rounds: Annotated[int, Field(ge=1, le=10_000)] = define_option(3, "interleaved rounds that count")
    out: str = define_option("ditile-bench", "folder for rows and runs; resumes what it has", metavar="FOLDER")
    submit: str | None = define_option(
        None, "write a file for docs/results.md: card, versions, plans, seconds, digests of images", metavar="FILE"
    )
    profile: str | None = define_option(
        None,
        "predict for this machine, as `ditile calibrate` wrote it; by default what it keeps",
        reads=True,
    )
    hardware: str | None = define_option(
        None, "predict for hardware of `ditile plan` instead, such as l40-pcie", metavar="NAME"
    )

    def __post_init__(self) -> None:
        if (self.plans is None) == (self.sweep is None):
            raise PlanError("give --plans 'ulysses=2; ring=2' or --sweep methods, and one of them alone")
        self._check_sweeps()
        if self.alone and self.plans is None:
            raise PlanError("--alone measures ranks of --plans, such as --plans 'pipefusion=8 patches=8; ulysses=4'")
        if self.all_ranks and not self.alone:
            raise PlanError("all_ranks=True is for --alone; without it all ranks are measured")
        if self.recorded is not None and not self.alone:
            raise PlanError(f"recorded={self.recorded} is for --alone; other ranks record where that is faster")
        if self.submit is not None and self.alone:
            raise PlanError(f"submit={self.submit!r} is for whole images, and --alone makes none")
        if self.hardware is not None and self.profile is not None:
            raise PlanError(f"hardware={self.hardware!r} and profile={self.profile!r}: give one of them")

    def _check_sweeps(self) -> None:
        for name in self.sweep_names:
            if name not in SWEEPS:
                raise PlanError(f"sweep {name!r} is not known; there are {', '.join(SWEEPS)}")
        if self.ranks is not None and self.sweep is None:
            raise PlanError(f"ranks={self.ranks} is for --sweep; plans say how many they need")
        if self.ranks == 1:
            raise PlanError(f"ranks={self.ranks} leave nothing to divide; try ranks=2")
        if self.sizes is not None and "resolution" not in self.sweep_names:
            raise PlanError("--sizes are for --sweep resolution; give --height and --width")

    def check_output_folder(self, *others: Any) -> None:
        """Raise `ModelError` unless the folder is writable, without overwriting a file read by this or `others`."""
        written = list_folder_outputs(self.out, ["runs.jsonl", "rows.jsonl", "alone.jsonl"])
        if self.submit is not None:
            written.append(("submit", Path(self.submit)))
        check_output_files(written, self, *others)

    @property
    def sweep_names(self) -> list[str]:
        """Return the names of the sweeps."""
        if self.sweep is None:
            return []
        return [name.strip() for name in self.sweep.split(",")]


@options()
class Workload(DeviceOptions, ModelOptions):
    """The call of a model that is measured."""

    model: ModelName = define_option(
        "shapes-pixart",
        "a bundled model, a folder, a hub id, or random weights: 'random-flux blocks=57', random-qwen-image",
        metavar="NAME",
    )
    prompt: str = define_option("a red circle on a white background", "what to generate", metavar="TEXT")
    output: Literal["image", "latent"] = define_option("image", "measure whole calls, or without the decode")
    threads: Ranks | None = define_option(
        None, "CPU threads of each rank, and of the one rank; the cores are divided by default"
    )
    stall_timeout: Seconds = define_option(
        3600.0, "seconds after which a run is ended in which no rank reads, computes or makes progress"
    )

    @property
    def has_random_weights(self) -> bool:
        """Return whether the model has random weights."""
        return self.model.startswith(RANDOM)

"""What `ditile evaluate` takes: what is compared, how it is judged, and how it is run. Nothing here imports torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ditile.cache.line import NONE
from ditile.cli.cache_options import Cache
from ditile.cli.options import Generate, check_stall_timeout
from ditile.errors import ModelError, PlanError
from ditile.plan.flags import option
from ditile.plan.plan import Plan
from ditile.runner.load import DTYPES

PLANS = "pipefusion=2 patches=4; ulysses=2"
CACHES = f"{NONE}; F=1 W=4 R=0.12 taylor=1"


class Setting(NamedTuple):
    """A plan and a cache, as text; equal text is one setting.

    Attributes:
        plan: as `str(Plan)`.
        cache: in one line (`ditile.cache.line`), or `none`.
    """

    plan: str
    cache: str

    def __str__(self) -> str:
        return "original" if self == ORIGINAL else f"{self.plan}; {self.cache}" if self.cache != NONE else self.plan

    @property
    def world(self) -> int:
        """The number of ranks."""
        return Plan.parse(self.plan).world

    @property
    def configs(self) -> dict[str, Any]:
        """The keyword arguments of `enable_cache`; what there is to cache may be None."""
        return Cache(cache_line=self.cache).configs()

    @property
    def is_alone(self) -> bool:
        """Whether one process draws by itself, with the pipeline as it is but for a cache."""
        return self.plan == ORIGINAL.plan


ORIGINAL = Setting(str(Plan()), NONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """What is drawn: every caption by the original pipeline, and by each plan with each cache.

    Raises:
        ModelError: if a value is out of its range, or a cache is not known.
        PlanError: if a plan is none, or makes more pictures rather than a picture sooner.
    """

    model: str = option("shapes-pixart", "a bundled model, a folder or a hub id", metavar="NAME")
    plans: str = option(PLANS, "plans, with ; between them; pipefusion=1 is one process", metavar="PLANS")
    caches: str = option(
        CACHES, f"caches for each plan, with ; between them (docs/caching.md); {NONE} is no cache", metavar="CACHES"
    )
    captions: str = option("bundled", "bundled, a file of one per line, or coco:FILE of annotations", metavar="FILE")
    num: int | None = option(None, "captions to draw; 10, or all if there are fewer", metavar="N")
    seed: int = option(0, "seed of the first caption; they count up", metavar="N")
    steps: int | None = option(None, "denoising steps; the model's own by default", metavar="N")
    guidance: float | None = option(None, "how strongly the prompt guides; as the model has it by default", metavar="X")
    negative_prompt: str | None = option(None, "what to keep out", metavar="TEXT")
    height: int | None = option(None, "pixels; the model's own size by default", metavar="N")
    width: int | None = option(None, "pixels; the model's own size by default", metavar="N")

    def __post_init__(self) -> None:
        if self.num is not None and self.num < 1:
            raise ModelError(f"num={self.num} is not a whole number of at least 1")
        self.generate("a caption")
        if not self.settings:
            raise PlanError(f"plans={self.plans!r} and caches={self.caches!r} leave nothing beside the original")

    @property
    def settings(self) -> list[Setting]:
        """All plans with all caches, each once, without the original.

        Raises:
            ModelError, PlanError: as for the whole.
        """
        plans = [Plan.parse(text) for text in _split(self.plans) or [ORIGINAL.plan]]
        for plan in plans:
            if plan.data > 1:
                raise PlanError(
                    f"data={plan.data} makes more pictures at a time, each as before; leave data out of '{plan}'"
                )
        caches = [" ".join(line.split()) for line in _split(self.caches) or [NONE]]
        made = [Setting(str(plan), cache) for plan, cache in itertools.product(plans, caches)]
        for setting in made:
            _ = setting.configs
        return [setting for setting in dict.fromkeys(made) if setting != ORIGINAL]

    def generate(self, prompt: str) -> Generate:
        """The picture of a caption, as `ditile generate` would be asked for it.

        Raises:
            ModelError: if a value is out of its range.
        """
        return Generate(
            prompt=prompt, model=self.model, steps=self.steps, guidance=self.guidance, seed=self.seed,
            negative_prompt=self.negative_prompt, height=self.height, width=self.width,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """How pictures are judged. What is not named is used where its package and its weights are there.

    Raises:
        ModelError: if a value is out of its range, or a folder has no picture.
    """

    resize: int | None = option(None, "pixels of a side that pictures get before they are judged", metavar="N")
    references: str | None = option(None, "folder of reference pictures, for the Frechet distance", metavar="FOLDER")
    clip: str | None = option(None, "a CLIP that transformers loads from disk, for the CLIP score", metavar="NAME")

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < 8:
            raise ModelError(f"resize={self.resize} is too small to judge; try resize=256")
        if self.references is not None and not pictures_in(Path(self.references)):
            raise ModelError(f"references={self.references!r} is no folder with pictures (.png, .jpg, .jpeg, .webp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Where it runs, and where to write.

    Raises:
        ModelError: if a value is out of its range.
    """

    out: str = option("evaluation", "folder for all that is written; resumes what is there", metavar="FOLDER")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "float32 for bundled models and on CPUs, else bfloat16", choices=DTYPES
    )
    device: str | None = option(None, "each rank's own GPU where there are some, else cpu", metavar="DEVICE")
    threads: int | None = option(
        None, "CPU threads of each rank and of the original; by default the cores over the most ranks", metavar="N"
    )
    one_at_a_time: bool = option(
        False, "hold one setting in memory at a time: for large models; latencies are then not interleaved"
    )
    stall_timeout: float = option(600.0, "seconds without progress after which a run is ended", metavar="S")

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ModelError(f"threads={self.threads} is not a whole number of at least 1")
        check_stall_timeout(self.stall_timeout)
        out = Path(self.out)
        if out.exists() and not out.is_dir():
            raise ModelError(f"out={self.out!r} is a file; give a folder")
        if not out.exists() and not out.absolute().parent.is_dir():
            raise ModelError(f"out={self.out!r}: there is no folder {str(out.parent)!r}; make it first")


def pictures_in(folder: Path) -> list[Path]:
    """The pictures of a folder, not of those in it, in the order of their names; none if there is no such folder."""
    suffixes = (".png", ".jpg", ".jpeg", ".webp")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes) if folder.is_dir() else []


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]

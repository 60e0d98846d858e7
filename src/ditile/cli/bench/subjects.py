"""Subjects: what is measured. A stored model or one of random weights: what fits it, its pipeline, and the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from ditile.cli.bench.cells import ONE_RANK, Cell
from ditile.cli.bench.options import Workload
from ditile.cli.bench.random_models import VAE_SCALE, RandomModel
from ditile.cli.dry_run import job_of
from ditile.cli.generate import arguments, planned_call
from ditile.cli.options import Generate
from ditile.errors import ModelError
from ditile.hooks.placeholders import weightless
from ditile.plan.cost import Job
from ditile.plan.plan import Plan
from ditile.planner.subject import Subject as Described
from ditile.runner.load import defaults, find, load

SIZE, STEPS = 512, 20
"""Of a random model, where nothing is said."""


class Subject(Protocol):
    """What is measured."""

    @property
    def name(self) -> str:
        """Of the model."""

    def steps(self) -> int | None:
        """Denoising steps, where they are known."""

    def side(self) -> int | None:
        """Pixels of a side of its own size, where they are known."""

    @property
    def described(self) -> Described:
        """The model without its weights."""

    def numbers(self, cell: Cell) -> dict[str, Any]:
        """What of a call changes how long it takes."""

    def job(self, cell: Cell) -> Job | None:
        """A cell as numbers; None where nothing is known of the model.

        Raises:
            DitileError: if the cell does not fit it.
        """

    def pipeline(self, plan: Plan | None) -> Any:
        """The pipeline on the CPU: whole, or what this rank of a plan owns."""

    def call(self, pipe: Any, cell: Cell) -> dict[str, Any]:
        """The arguments of a call, for as many pictures as the cell has; made anew each time."""


def subject_of(work: Workload) -> Subject:
    """The subject.

    Raises:
        ModelError, LoadError: if there is no such model.
    """
    if work.is_random:
        return Random(work, str(RandomModel.parse(work.model)))
    find(work.model)
    return Stored(work, work.model)


@dataclass(frozen=True)
class Stored:
    """A bundled model, a folder or a hub id."""

    work: Workload
    name: str

    @cached_property
    def described(self) -> Described:
        """From its configs."""
        return Described.of(self.name, find(self.name))

    def steps(self) -> int | None:
        """As asked for, or as the model has them beside it."""
        return self.work.steps or defaults(self.name).get("num_inference_steps")

    def side(self) -> int | None:
        """The model's own height."""
        job = self.job(Cell(ONE_RANK))
        return None if job is None else job.shape.height

    def numbers(self, cell: Cell) -> dict[str, Any]:
        """With the model's own options."""
        return planned_call(replace(self._wanted(cell), num_images=cell.pictures), defaults(self.name))

    def job(self, cell: Cell) -> Job | None:
        """From the configs alone."""
        try:
            return job_of(self.described, cell.parsed, self.numbers(cell), cell.configs)
        except ModelError:
            if cell.parsed.divides_the_batch_alone and not cell.cache and not self._is_known:
                return None
            raise

    def pipeline(self, plan: Plan | None) -> Any:
        """Its progress bar is off."""
        pipe: Any = load(self.name, dtype=self.work.dtype, plan=plan)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(self, pipe: Any, cell: Cell) -> dict[str, Any]:
        """With the model's own options."""
        call = arguments(pipe, self._wanted(cell), defaults(self.name))
        if cell.pictures > 1:
            call["num_images_per_prompt"] = cell.pictures
        return call | {"generator": torch.Generator("cpu").manual_seed(0), "output_type": _output(self.work)}

    @property
    def _is_known(self) -> bool:
        """Whether there is a spec of its transformer."""
        try:
            return bool(self.described.spec)
        except ModelError:
            return False

    def _wanted(self, cell: Cell) -> Generate:
        work = self.work
        return Generate(prompt=work.prompt, model=self.name, steps=work.steps, height=cell.height, width=cell.width)


@dataclass(frozen=True)
class Random:
    """A model of random weights."""

    work: Workload
    name: str

    @property
    def model(self) -> RandomModel:
        """Its sizes."""
        return RandomModel.parse(self.name)

    @cached_property
    def described(self) -> Described:
        """From the model on the meta device."""
        with weightless():
            transformer = self.model.transformer(SIZE)
        return Described(self.name, self.model.pipeline_class, transformer, VAE_SCALE)

    def steps(self) -> int:
        """As asked for, or 20."""
        return self.work.steps or STEPS

    def side(self) -> int:
        """512."""
        return SIZE

    def numbers(self, cell: Cell) -> dict[str, Any]:
        """With embeddings for a prompt."""
        call = self.model.arguments(*self._size(cell), self.steps(), self._dtype)
        return call | {"num_images_per_prompt": cell.pictures}

    def job(self, cell: Cell) -> Job:
        """From the model on the meta device."""
        return job_of(self.described, cell.parsed, self.numbers(cell), cell.configs)

    def pipeline(self, plan: Plan | None) -> Any:
        """Whole, whatever the plan: `parallelize` cuts it."""
        return self.model.pipeline(SIZE, self._dtype)

    def call(self, pipe: Any, cell: Cell) -> dict[str, Any]:
        """With embeddings for a prompt."""
        return self.numbers(cell) | {"output_type": _output(self.work)}

    @property
    def _dtype(self) -> torch.dtype:
        wanted = self.work.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        found: torch.dtype = getattr(torch, wanted)
        return found

    def _size(self, cell: Cell) -> tuple[int, int]:
        return cell.height or SIZE, cell.width or SIZE


def _output(work: Workload) -> str:
    return "latent" if work.output == "latent" else "pil"

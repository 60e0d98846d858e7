"""Subjects: what is measured. A stored model or one of random weights: what fits it, its pipeline, and the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ditile.bench.cache_settings import OURS, Setting
from ditile.bench.cells import Cell
from ditile.bench.options import Workload
from ditile.bench.random_models import PREFIX, VAE_SCALE, RandomModel
from ditile.cost import Job
from ditile.dry_run import job_of, planned
from ditile.errors import ModelError
from ditile.generate import arguments, planned_call
from ditile.load import defaults, find, load
from ditile.options import Generate
from ditile.plan import Plan

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
    if work.model.startswith(PREFIX):
        return Random(work, str(RandomModel.parse(work.model)))
    find(work.model)
    return Stored(work, work.model)


@dataclass(frozen=True, slots=True)
class Stored:
    """A bundled model, a folder or a hub id."""

    work: Workload
    name: str

    def steps(self) -> int | None:
        """As asked for, or as the model has them beside it."""
        return self.work.steps or defaults(self.name).get("num_inference_steps")

    def side(self) -> int | None:
        """The model's own height."""
        job = self._job(Plan(), Cell(""), {"cache_config": None})
        return None if job is None else job.shape.height

    def job(self, cell: Cell) -> Job | None:
        """From the configs alone."""
        cache = {"cache_config": Setting(OURS, cell.cache).cache if cell.cache else None}
        return self._job(cell.parsed, cell, cache)

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

    def _wanted(self, cell: Cell) -> Generate:
        work = self.work
        return Generate(prompt=work.prompt, model=self.name, steps=work.steps, height=cell.height, width=cell.width)

    def _job(self, plan: Plan, cell: Cell, cache: Mapping[str, Any]) -> Job | None:
        call = planned_call(replace(self._wanted(cell), num_images=plan.data), defaults(self.name))
        try:
            return planned(self.name, plan, call, cache)
        except ModelError:
            if plan.divides_the_batch_alone and not cell.cache:  # needs no spec
                return None
            raise


@dataclass(frozen=True, slots=True)
class Random:
    """A model of random weights."""

    work: Workload
    name: str

    @property
    def model(self) -> RandomModel:
        """Its sizes."""
        return RandomModel.parse(self.name)

    def steps(self) -> int:
        """As asked for, or 20."""
        return self.work.steps or STEPS

    def side(self) -> int:
        """512."""
        return SIZE

    def job(self, cell: Cell) -> Job:
        """From the model on the meta device."""
        model, (height, width) = self.model, self._size(cell)
        with torch.device("meta"):
            transformer = model.transformer(SIZE)
        call = model.arguments(height, width, self.steps())
        cache = {"cache_config": Setting(OURS, cell.cache).cache if cell.cache else None}
        call["num_images_per_prompt"] = cell.pictures
        return job_of(model.pipeline_class, transformer, VAE_SCALE, cell.parsed, call, cache)

    def pipeline(self, plan: Plan | None) -> Any:
        """Whole, whatever the plan: `parallelize` cuts it."""
        return self.model.pipeline(SIZE, self._dtype)

    def call(self, pipe: Any, cell: Cell) -> dict[str, Any]:
        """With embeddings for a prompt."""
        call = self.model.arguments(*self._size(cell), self.steps(), self._dtype)
        if cell.pictures > 1:
            call["num_images_per_prompt"] = cell.pictures
        return call | {"output_type": _output(self.work)}

    @property
    def _dtype(self) -> torch.dtype:
        wanted = self.work.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        found: torch.dtype = getattr(torch, wanted)
        return found

    def _size(self, cell: Cell) -> tuple[int, int]:
        return cell.height or SIZE, cell.width or SIZE


def _output(work: Workload) -> str:
    return "latent" if work.output == "latent" else "pil"

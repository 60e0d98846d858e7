"""The measured model, a stored one or one with random weights, with its pipeline and its call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.planner.dry_run import build_subject_job
from ditile.planner.subject import PlanSubject
from ditile.runner.load import load
from ditile.runner.model_files import defaults, find_model_source
from ditile.runner.requests.arguments import build_call_arguments
from ditile.runner.requests.facts import build_dry_run_call
from ditile.runner.requests.options import GenerateOptions
from ditile_lab.bench.cells import ONE_RANK, BenchCell
from ditile_lab.bench.options import Workload
from ditile_lab.bench.random_models import VAE_SCALE, RandomModel
from ditile_lab.bench.random_weights import PublishedConfigs, make_random_arguments

SIZE = 512
"""Pixels of a side of a random model's images, by default."""
STEPS = 20
OUTPUT_TYPES = {"image": "pil", "latent": "latent"}


def create_bench_subject(work: Workload) -> BenchSubject:
    """Create the subject of a workload. Raises `ModelError` or `LoadError` if the model is unknown or cannot be
    read."""
    published = PublishedConfigs.find_by_model_name(work.model)
    if published is not None and not work.components:
        return RandomWeightsSubject(work, str(published))
    if work.has_random_weights:
        return RandomSubject(work, str(RandomModel.parse_model_name(work.model)))
    find_model_source(work.model, components=work.components)
    return StoredSubject(work, work.model)


@dataclass(frozen=True)
class StoredSubject:
    """A bundled model, a folder or a hub id."""

    work: Workload
    name: str

    @cached_property
    def planner_subject(self) -> PlanSubject:
        """Return the model without its weights, from its configs."""
        source = find_model_source(self.name, components=self.work.components)
        return PlanSubject.from_configs(self.name, source, components=self.work.components)

    def get_num_steps(self) -> int | None:
        """Return the number of denoising steps: the user's, or that of the model's `generation.json`."""
        return self.work.steps or defaults(self.name).get("num_inference_steps")

    def get_native_side(self) -> int | None:
        """Return the pixels of a side at the model's own size, if known."""
        job = self.make_cost_job(BenchCell(ONE_RANK))
        if job is None:
            return None
        return job.shape.height

    def make_planning_arguments(self, cell: BenchCell) -> CallArguments:
        """Make the arguments that determine a call's latency, with the model's own options."""
        options = replace(self._make_generate_options(cell), num_images=cell.num_images)
        return build_dry_run_call(options, defaults(self.name))

    def make_cost_job(self, cell: BenchCell) -> PlannedCall | None:
        """Describe a cell in numbers, only from configs; None if the model is not known and the plan needs none.

        Raises:
            DitileError: if the cell does not fit the model.
        """
        try:
            return build_subject_job(
                self.planner_subject, cell.plan_object, self.make_planning_arguments(cell), cell.cache_configs
            )
        except ModelError:
            # Such a model can still be replicated, or have its guidance branches on two ranks.
            if cell.plan_object.divides_the_batch_alone and not cell.cache and not self._is_known:
                return None
            raise

    def create_pipeline(self, plan: Plan | None) -> Any:
        """Create the pipeline on the CPU, without its progress bar: whole, or this rank's part of a plan."""
        pipe: Any = load(self.name, dtype=self.work.dtype, plan=plan, components=self.work.components)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def create_whole_pipeline(self, device: torch.device) -> Any:
        """Create the whole pipeline on a device."""
        return self.create_pipeline(None).to(device)

    def make_call_arguments(self, pipe: Any, cell: BenchCell, device: torch.device) -> CallArguments:
        """Make new arguments for a call with the cell's number of images. The pipeline moves its prompt's
        embeddings."""
        call = build_call_arguments(pipe, self._make_generate_options(cell), defaults(self.name))
        if cell.num_images > 1:
            call["num_images_per_prompt"] = cell.num_images
        # The noise is the same in every run, so that a cache decides the same.
        call["generator"] = torch.Generator("cpu").manual_seed(0)
        call["output_type"] = OUTPUT_TYPES[self.work.output]
        return call

    @property
    def _is_known(self) -> bool:
        """Return whether its transformer is known."""
        try:
            return bool(self.planner_subject.family)
        except ModelError:
            return False

    def _make_generate_options(self, cell: BenchCell) -> GenerateOptions:
        return self.work.to_generate_options(model=self.name, height=cell.height, width=cell.width)


@dataclass(frozen=True)
class RandomSubject:
    """A model with random weights."""

    work: Workload
    name: str

    @property
    def random_model(self) -> RandomModel:
        """Return the model's sizes."""
        return RandomModel.parse_model_name(self.name)

    @cached_property
    def planner_subject(self) -> PlanSubject:
        """Return the model without its weights."""
        # There may not be enough memory for weights of this size.
        with init_on_meta_device():
            transformer = self.random_model.create_transformer(SIZE)
        return PlanSubject(self.name, self.random_model.pipeline_class, transformer, VAE_SCALE)

    def get_num_steps(self) -> int | None:
        """Return the number of denoising steps: the user's, or 20."""
        return self.work.steps or STEPS

    def get_native_side(self) -> int | None:
        """Return the pixels of a side: 512."""
        return SIZE

    def make_planning_arguments(self, cell: BenchCell) -> CallArguments:
        """Make the arguments of a call, with embeddings in place of a prompt, on the CPU."""
        return self._make_arguments_on(torch.device("cpu"), cell)

    def make_cost_job(self, cell: BenchCell) -> PlannedCall:
        """Describe a cell in numbers. Raises `DitileError` if the cell does not fit the model."""
        return build_subject_job(
            self.planner_subject, cell.plan_object, self.make_planning_arguments(cell), cell.cache_configs
        )

    def create_pipeline(self, plan: Plan | None) -> Any:
        """Create the whole pipeline, whatever the plan: `parallelize` divides it."""
        return self.random_model.create_pipeline(SIZE, self.torch_dtype)

    def create_whole_pipeline(self, device: torch.device) -> Any:
        """Create the whole pipeline, with weights created on the device."""
        return self.random_model.create_pipeline(SIZE, self.torch_dtype, device)

    def make_call_arguments(self, pipe: Any, cell: BenchCell, device: torch.device) -> CallArguments:
        """Make the arguments of a call on a device, with the measured output type."""
        return self._make_arguments_on(device, cell) | {"output_type": OUTPUT_TYPES[self.work.output]}

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the type of its weights: the user's, otherwise bfloat16 on a GPU."""
        name = self.work.dtype
        if name is None:
            on_gpu = torch.cuda.is_available() and not (self.work.device or "cuda").startswith("cpu")
            name = "bfloat16" if on_gpu else "float32"
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def _make_arguments_on(self, device: torch.device, cell: BenchCell) -> CallArguments:
        call = self.random_model.make_call_arguments(
            cell.height or SIZE, cell.width or SIZE, self.work.steps or STEPS, self.torch_dtype, device
        )
        return call | {"num_images_per_prompt": cell.num_images}


class RandomWeightsSubject(RandomSubject):
    """A published model with random weights, and embeddings in place of a prompt."""

    @property
    def published(self) -> PublishedConfigs:
        """Return the model's configs."""
        published = PublishedConfigs.find_by_model_name(self.name)
        assert published is not None
        return published

    @cached_property
    def planner_subject(self) -> PlanSubject:
        """Return the model without its weights."""
        return PlanSubject.from_pipeline_configs(self.name, self.published.read_configs())

    def get_num_steps(self) -> int | None:
        """Return the number of denoising steps: the user's, or its authors' recommendation."""
        return self.work.steps or defaults(self.published.model).get("num_inference_steps")

    def get_native_side(self) -> int | None:
        """Return the pixels of a side at the model's own size."""
        return self.make_cost_job(BenchCell(ONE_RANK)).shape.height

    def make_planning_arguments(self, cell: BenchCell) -> CallArguments:
        """Make the arguments that determine a call's latency, with the options recommended by its authors."""
        options = self.work.to_generate_options(
            model=self.published.model, height=cell.height, width=cell.width, num_images=cell.num_images
        )
        return build_dry_run_call(options, defaults(self.published.model))

    def create_pipeline(self, plan: Plan | None) -> Any:
        """Create the whole pipeline, whatever the plan: `parallelize` divides it."""
        return self.create_whole_pipeline(torch.device("cpu"))

    def create_whole_pipeline(self, device: torch.device) -> Any:
        """Create the whole pipeline, with weights created on the device."""
        return self.published.create_pipeline(self.torch_dtype, device)

    def make_call_arguments(self, pipe: Any, cell: BenchCell, device: torch.device) -> CallArguments:
        """Make the arguments of a call on a device, with the measured output type."""
        call = self.planner_subject.fill_arguments(self.make_planning_arguments(cell))
        arguments = make_random_arguments(pipe, call, self.torch_dtype, device)
        arguments["num_inference_steps"] = self.get_num_steps()
        return arguments | {"output_type": OUTPUT_TYPES[self.work.output]}


BenchSubject: TypeAlias = StoredSubject | RandomSubject
"""The measured model: both classes have the same methods."""

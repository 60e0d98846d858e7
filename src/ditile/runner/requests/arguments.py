"""The arguments of a runner's call, from the options of a request and the model's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ditile.model.pipeline_calls import find_call_owner
from ditile.model.probe import COUNTS
from ditile.plan.checks import is_whole_number
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS, check_image_size
from ditile.runner.load import read_model_index
from ditile.runner.model_files import FRAME_RATE, defaults, find_model_source, read_generation_defaults
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.conditions import bind_conditions, choose_requested_class, read_call_conditions
from ditile.runner.requests.facts import collect_call_facts, find_size_multiple
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import (
    FRAME_RATES,
    check_num_frames,
    check_prompt_cleaner,
    find_argument,
    find_frames_ratio,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def build_call_arguments(pipe: DiffusionPipeline, wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The call arguments that are plain values: the model's own options, overridden by the given ones.

    Raises:
        ModelError: if this pipeline does not take an argument that is given, cannot make the size or the frames, or
            needs a package that is not installed.
    """
    check_prompt_cleaner(find_call_owner(pipe))
    rate = find_argument(pipe, FRAME_RATES)
    if rate is not None and rate not in base and wanted.fps is None:
        # The rate of the model's files is that of its videos, which the call may be told.
        wanted = dataclasses.replace(wanted, fps=read_generation_defaults(wanted.model).get(FRAME_RATE))
    # A modular pipeline may have no config.
    call = merge_call_arguments(find_call_owner(pipe), wanted, base, dict(getattr(pipe, "config", {})))
    _check_picture_size(pipe, call)
    check_num_frames(pipe, call)
    _check_rotary_table(pipe, call)
    return call


def merge_call_arguments(
    pipeline: Any, wanted: GenerateOptions, base: dict[str, Any], config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The same for a class of pipelines with some config, without a check of the size."""
    return collect_call_facts(pipeline, config).merge_arguments(wanted, base)


def check_request_by_files(wanted: GenerateOptions, plan: Plan) -> None:
    """Checks, before weights are read, what the files of a model say of a request.

    Raises:
        LoadError: if the files cannot be read.
        ModelError: if its class does not take an argument that is given, or starts from what is not given.
        PlanError: if the plan divides branches of guidance that the call has not.
    """
    kind, _ = choose_requested_class(wanted)
    if kind is None:
        return
    config = read_model_index(find_model_source(wanted.model, weights=False))
    facts = collect_call_facts(kind, config)
    facts.check_cfg(plan, facts.merge_arguments(wanted, defaults(wanted.model)))


def build_object_arguments(
    pipe: DiffusionPipeline,
    wanted: GenerateOptions,
    seeds: Sequence[int],
    *,
    conditions: Mapping[str, Any] | None = None,
    alone: bool | None = None,
) -> dict[str, Any]:
    """The call arguments that are objects: generators, which every rank makes alike, and what it starts from.

    With several generators the call makes as many pictures, each with the noise of its own generator.

    Args:
        pipe: the pipeline.
        wanted: the options.
        seeds: of the generators.
        conditions: as of `bind_conditions`.
        alone: False makes a list of one generator, as of a batch.
    """
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {"generator": generators[0] if len(seeds) == 1 and alone is not False else generators}
    if wanted.num_images > 1:
        call[find_argument(pipe, COUNTS) or COUNTS[0]] = wanted.num_images
    if not conditions:
        return call
    copies = len(seeds) if isinstance(call["generator"], list) else None
    return call | bind_conditions(read_call_conditions(find_call_owner(pipe)), conditions, copies)


def build_batch_call(
    pipe: DiffusionPipeline,
    bases: Sequence[Mapping[str, Any]],
    wanted: GenerateOptions,
    seeds: Sequence[int],
    *,
    conditions: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One call that makes several pictures of one shape, each of a prompt and a seed of its own.

    Args:
        pipe: the pipeline.
        bases: the arguments of each picture, which are alike but for the prompts.
        wanted: the options of the first one.
        seeds: of each picture.
        conditions: what all of them start from, as of `bind_conditions`.
    """
    one = dataclasses.replace(wanted, num_images=1)
    objects = build_object_arguments(pipe, one, seeds, conditions=conditions, alone=False)
    prompts = {name: [base[name] for base in bases] for name in ("prompt", "negative_prompt") if name in bases[0]}
    return {**bases[0], **objects, **prompts}


def check_cache_steps(cache: CacheOptions, call: Mapping[str, Any]) -> None:
    """Raises `ModelError`, before a step is made, for a step mask that is too short or steps that must all compute."""
    from ditile.cache.build import explain_idle_steps

    config = cache.build_cache_arguments()["cache_config"]
    if config is not None and "num_inference_steps" in call:
        steps = call["num_inference_steps"]
        if reason := explain_idle_steps(config, max(1, min(steps, int(steps * call.get("strength", 1))))):
            raise ModelError(reason)


def _check_rotary_table(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a size with more rows, columns or frames of tokens than a model has rotations for."""
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    most, patch = getattr(config, "rope_max_seq_len", None), getattr(config, "patch_size", None)
    if not is_whole_number(most) or not isinstance(patch, list | tuple):
        return
    side, frames = most * find_size_multiple(pipe), most * patch[0]
    limits = {"height": side, "width": side}
    if (count := find_argument(pipe, FRAME_COUNTS)) is not None:
        limits[count] = 1 + (frames - 1) * find_frames_ratio(pipe)
    for name, limit in limits.items():
        if is_whole_number(value := call.get(name)) and value > limit:
            raise ModelError(
                f"{name}={value} is more than the rotary table of {type(pipe.transformer).__name__} has rows for; try "
                f"{name}={limit}"
            )


def _check_picture_size(pipe: Any, call: dict[str, Any]) -> None:
    """Checks the size if a `ModelSpec` knows a token's side; other pipelines check it (see `convert_value_errors`)."""
    from ditile.model.registry import find_model_spec

    transformer: Any = getattr(pipe, "transformer", None)
    spec = find_model_spec(transformer)
    if spec is not None:
        check_image_size(call, pipe.vae_scale_factor * spec.latent_per_token(transformer.config))

"""Builds the arguments of a runner's call, from the options of a request and the model's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ditile.model.pipeline_calls import COUNTS, find_call_owner
from ditile.plan.errors import ModelError
from ditile.plan.numbers import is_whole_number
from ditile.plan.option_classes import CallArguments
from ditile.plan.shape import FRAME_COUNTS, check_image_size
from ditile.runner.model_files import FRAME_RATE, read_generation_defaults
from ditile.runner.requests.conditions import bind_conditions, read_call_conditions
from ditile.runner.requests.facts import collect_call_facts, collect_request_arguments, find_size_multiple
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import (
    FRAME_RATES,
    check_num_frames,
    find_argument,
    find_frames_ratio,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def build_call_arguments(pipe: DiffusionPipeline, request: GenerateOptions, base: CallArguments) -> CallArguments:
    """Build the plain values of the call arguments: the model's own options, overridden by the request.

    Raises:
        ModelError: if this pipeline does not take an argument that is given, or cannot make the size or the frames.
    """
    rate_name = find_argument(pipe, FRAME_RATES)
    if rate_name is not None and rate_name not in base and request.fps is None:
        # The model's files say the rate of its videos; a class that conditions on the rate is called with it.
        request = dataclasses.replace(request, fps=read_generation_defaults(request.model).get(FRAME_RATE))
    # A modular pipeline may have no config.
    facts = collect_call_facts(find_call_owner(pipe), dict(getattr(pipe, "config", {})))
    call = facts.merge_arguments(request, base)
    from ditile.model.call_families import find_call_family

    if find_call_family(getattr(pipe, "transformer", None)) is not None:
        # Other pipelines check the size themselves; see `convert_value_errors`.
        check_image_size(call, find_size_multiple(pipe))
    check_num_frames(pipe, call)
    # Where neither the request nor the model's files say a size, the default of the class counts.
    check_rotary_table(pipe, facts.defaults | call)
    return call


def build_object_arguments(
    pipe: DiffusionPipeline,
    request: GenerateOptions,
    seeds: Sequence[int],
    *,
    conditions: CallArguments | None = None,
    alone: bool | None = None,
) -> CallArguments:
    """Build the objects among the call arguments: generators, the same on every rank, and the call's inputs.

    With several generators the call makes as many images, each with the noise of its own generator.

    Args:
        conditions: as in `bind_conditions`.
        alone: False gives even a single generator as a list, as a batch needs it.
    """
    # On the CPU: every rank and every device then generates the same noise.
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: CallArguments = {"generator": generators}
    copies: int | None = len(seeds)
    if len(seeds) == 1 and alone is not False:
        call["generator"] = generators[0]
        copies = None
    if request.num_images > 1:
        call[find_argument(pipe, (*COUNTS, "num_waveforms_per_prompt")) or COUNTS[0]] = request.num_images
    if conditions:
        call |= bind_conditions(read_call_conditions(find_call_owner(pipe)), conditions, copies)
    return call


def build_batch_call(
    pipe: DiffusionPipeline,
    bases: Sequence[CallArguments],
    request: GenerateOptions,
    seeds: Sequence[int],
    *,
    conditions: CallArguments | None = None,
) -> CallArguments:
    """Build one call for several images of one shape, each with its own prompt and seed.

    Args:
        bases: the arguments of each image, which differ only in the prompts.
        conditions: what all images start from, as in `bind_conditions`.
    """
    # The generators say how many images there are.
    single = dataclasses.replace(request, num_images=1)
    call = {**bases[0], **build_object_arguments(pipe, single, seeds, conditions=conditions, alone=False)}
    for name in ("prompt", "negative_prompt"):
        if name in bases[0]:
            call[name] = [base[name] for base in bases]
    return call


def check_guidance(pipe: Any, request: GenerateOptions, base: CallArguments) -> None:
    """Raise `ModelError` for a scale that a model does not embed. Its pipeline would ignore it.

    Servers do not check it: clients of other interfaces send a scale with every request.
    """
    scale = collect_request_arguments(request, base).get("guidance_scale", 0)
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    # Where `guidance_scale` is the only scale, the pipeline guides by it.
    has_true_scale = find_argument(pipe, ("true_cfg_scale",)) is not None
    if scale > 1 and getattr(config, "guidance_embeds", None) is False and has_true_scale:
        raise ModelError(
            f"guidance={scale:g}: {type(pipe.transformer).__name__} embeds no guidance here, so {type(pipe).__name__} "
            f"would ignore it; try true_cfg={scale:g}"
        )


def check_rotary_table(pipe: Any, call: CallArguments) -> None:
    """Raise `ModelError` for a size with more rows, columns or frames of tokens than a model has rotations for."""
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    table_rows = getattr(config, "rope_max_seq_len", None)
    patch = getattr(config, "patch_size", None)
    if not is_whole_number(table_rows) or not isinstance(patch, list | tuple):
        return
    side = table_rows * find_size_multiple(pipe)
    limits = {"height": side, "width": side}
    count_name = find_argument(pipe, FRAME_COUNTS)
    if count_name is not None:
        # The first latent frame is decoded into one frame, and each later one into several.
        limits[count_name] = 1 + (table_rows * patch[0] - 1) * find_frames_ratio(pipe)
    for name, limit in limits.items():
        value = call.get(name)
        if is_whole_number(value) and value > limit:
            raise ModelError(
                f"{name}={value} is more than the rotary table of {type(pipe.transformer).__name__} has rows for; try "
                f"{name}={limit}"
            )

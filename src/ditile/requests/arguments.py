"""The arguments of a runner's call, from the options of a request and the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ditile.errors import ModelError
from ditile.models.probe import COUNTS
from ditile.plan.flags import format_flag
from ditile.plan.shape import check_image_size
from ditile.requests.cache_options import CacheOptions
from ditile.requests.options import GenerateOptions
from ditile.requests.pipelines import (
    FRAME_COUNTS,
    FRAME_RATES,
    check_num_frames,
    find_argument,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def build_call_arguments(pipe: DiffusionPipeline, wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The call arguments that are plain values: the model's own options, overridden by the given ones.

    Raises:
        ModelError: if this pipeline does not take an argument that is given, or cannot make the size or the frames.
    """
    call = merge_call_arguments(type(pipe), wanted, base)
    _check_picture_size(pipe, call)
    check_num_frames(pipe, call)
    return call


def merge_call_arguments(pipeline: type, wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The same for a class of pipelines, without a check of the size."""
    known = inspect.signature(pipeline.__call__).parameters
    kind, given = pipeline.__name__, _collect_request_arguments(wanted, base)
    given = _rename_video_arguments(pipeline, wanted, given)
    if wanted.image is None and _needs_picture(known):
        raise ModelError(f"{kind} starts from a picture; add --image FILE")
    if wanted.image is not None and wanted.prompt is None and wanted.prompts_file is None and "prompt" in known:
        raise ModelError(f"{kind} draws from a picture and a prompt; give a PROMPT, or --prompts-file FILE")
    if refused := sorted(set(given) - set(known)):
        raise ModelError(f"{kind} takes no {', '.join(map(_flag_of_argument, refused))}; leave it out")
    call = {name: value for name, value in base.items() if name in known} | given
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")  # without one, diffusers does no true guidance
    if wanted.negative_prompt is not None:
        _check_negative_prompt(kind, call, known)
    _check_strength(call, known)
    return call


def build_dry_run_call(wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The call of a dry run, which has no pipeline to ask."""
    call = base | _collect_request_arguments(wanted, base) | {"num_images_per_prompt": wanted.num_images}
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")
    return call


def build_object_arguments(
    pipe: DiffusionPipeline, wanted: GenerateOptions, seeds: Sequence[int], *, alone: bool | None = None
) -> dict[str, Any]:
    """The call arguments that are objects: generators, which every rank makes alike, and the picture to start from.

    With several generators the call makes as many pictures, each with the noise of its own generator.
    """
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {"generator": generators[0] if len(seeds) == 1 and alone is not False else generators}
    if wanted.num_images > 1:
        call[find_argument(type(pipe), COUNTS) or COUNTS[0]] = wanted.num_images
    if wanted.image is not None:
        from ditile.requests.pictures import read_picture

        picture = read_picture(wanted.image, "image")
        several = isinstance(call["generator"], list)
        call["image"] = [picture] * len(seeds) if several else picture
    return call


def check_cache_steps(cache: CacheOptions, call: Mapping[str, Any]) -> None:
    """Raises `ModelError`, before a step is made, for a step mask that is too short or steps that must all compute."""
    from ditile.cache.build import explain_idle_steps

    config = cache.build_cache_arguments()["cache_config"]
    if config is not None and "num_inference_steps" in call:
        steps = call["num_inference_steps"]
        if reason := explain_idle_steps(config, max(1, min(steps, int(steps * call.get("strength", 1))))):
            raise ModelError(reason)


def _collect_request_arguments(wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The given arguments. --guidance sets true guidance if the model's own options do and --true-cfg is not given."""
    given = wanted.to_call_arguments()
    if wanted.guidance is None:
        return given
    true = "true_cfg_scale" in base and wanted.true_cfg is None
    return given | {"true_cfg_scale" if true else "guidance_scale": wanted.guidance}


def _rename_video_arguments(pipeline: type, wanted: GenerateOptions, given: dict[str, Any]) -> dict[str, Any]:
    """The given arguments with the frames and the rate under the names of this class, if it is told the rate at all."""
    count, rate = find_argument(pipeline, FRAME_COUNTS), find_argument(pipeline, FRAME_RATES)
    if "num_frames" in given and count is not None:
        given = {count if name == "num_frames" else name: value for name, value in given.items()}
    if wanted.fps is not None and rate is not None:
        given[rate] = int(wanted.fps) if float(wanted.fps).is_integer() else wanted.fps
    return given


def _needs_picture(known: Mapping[str, inspect.Parameter]) -> bool:
    return "image" in known and known["image"].default is inspect.Parameter.empty


def _check_negative_prompt(kind: str, call: dict[str, Any], known: Any) -> None:
    scale = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    value, flag_name = call.get(scale, known[scale].default if scale in known else 1.0), _flag_of_argument(scale)
    if value <= 1:
        raise ModelError(
            f"{kind} ignores a negative prompt at {flag_name} {value:g}; try {flag_name} above 1, or leave it out"
        )


def _flag_of_argument(argument: str) -> str:
    """The flag that sets an argument of a pipeline's call."""
    names = {"true_cfg_scale": "true_cfg", "guidance_scale": "guidance", "num_inference_steps": "steps"}
    names["num_frames"] = "frames"
    return format_flag(names.get(argument, argument))


def _check_picture_size(pipe: Any, call: dict[str, Any]) -> None:
    """Checks the size if a `ModelSpec` knows a token's side; other pipelines check it (see `convert_value_errors`)."""
    from ditile.models.registry import find_model_spec

    transformer: Any = getattr(pipe, "transformer", None)
    spec = find_model_spec(transformer)
    if spec is not None:
        check_image_size(call, pipe.vae_scale_factor * spec.latent_per_token(transformer.config))


def _check_strength(call: dict[str, Any], known: Any) -> None:
    if "strength" in known:
        strength = call.get("strength", known["strength"].default)
        steps = call.get("num_inference_steps", known["num_inference_steps"].default)
        if int(steps * strength) < 1:
            raise ModelError(f"strength={strength} of {steps} steps is less than one step; raise either")

"""Calls a pipeline so that its transformer's calls tell what their dimensions count: other sizes, texts, batches.

No call gets further than the transformer: it is left there. Sizes are small.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy
from PIL import Image
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.errors import ModelError
from ditile.models.derive import derive_anatomy
from ditile.models.pipeline_calls import list_call_parameters
from ditile.models.record import CapturedCall, capture_call
from ditile.plan.anatomy import Anatomy

SHORT_TEXT, LONG_TEXT = "a red ring", "a small red ring on the left of a large blue square above a green circle"
SIZES = ((6, 10), (10, 14))
"""Rows and columns of the small and the large picture, in `UNIT` pixels of the VAE's latents."""
UNIT = 2
SEQUENCE_LENGTHS = (19, 29)
COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")


def derive_from_pipeline(pipe: Any, transformer: nn.Module, twin: nn.Module) -> tuple[Anatomy, list[CapturedCall]]:
    """The anatomy of a pipeline's transformer, and the calls that it was derived from.

    Args:
        pipe: a pipeline that makes pictures or videos of a size that its call is given.
        transformer: its model.
        twin: a copy of it with few blocks, on which calls are run.

    Raises:
        ModelError: if the pipeline cannot be called so, or something in the transformer cannot be divided.
    """
    calls = []
    for what, arguments in list_probe_arguments(pipe).items():
        try:
            call = capture_call(pipe, transformer, arguments, functools.partial(_run_twin, twin))
        except ModelError:
            raise
        except Exception as error:
            if what in ("small", "large"):
                raise ModelError(
                    f"{type(transformer).__name__} is not in the table of known anatomies, and {type(pipe).__name__} "
                    f"could not be called with a {what} picture to look at it: {type(error).__name__}: "
                    f"{' '.join(str(error).split())[:200]}; use a plan of data or cfg"
                ) from error
            continue
        calls.append(_convert_call(call))
    try:
        return derive_anatomy(twin, calls), calls
    except ModelError:
        raise
    except Exception as error:  # whatever the model runs into where its calls are made without the pipeline
        raise ModelError(
            f"{type(transformer).__name__} could not be called to learn what its dimensions count: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}; {_advise(transformer)}"
        ) from error


def _advise(transformer: nn.Module) -> str:
    for path, module in transformer.named_modules():
        if isinstance(processor := getattr(module, "processor", None), nn.Module):
            return f"unload the IP-adapter that brought {type(processor).__name__} to {path}"
    return "use a plan of data or cfg"


def _convert_call(call: CapturedCall) -> CapturedCall:
    converted = CapturedCall(pytree.tree_map_only(Tensor, _convert_to_float32, dict(call)))
    converted.before = (
        None if call.before is None else pytree.tree_map_only(Tensor, _convert_to_float32, dict(call.before))
    )
    return converted


def _run_twin(twin: nn.Module, **call: Any) -> Any:
    """What a twin makes of a call, on the device and in the dtype of its latents."""
    latents = next(x for x in pytree.tree_leaves(list(call.values())) if isinstance(x, Tensor))
    result = twin(**pytree.tree_map_only(Tensor, _convert_to_float32, call))
    return pytree.tree_map_only(Tensor, lambda x: x.to(latents.device, latents.dtype), result)


def _convert_to_float32(x: Tensor) -> Tensor:
    return x.detach().cpu().float() if x.is_floating_point() else x.detach().cpu()


def list_probe_arguments(pipe: Any) -> dict[str, dict[str, Any]]:
    """What a pipeline is called with, by what is special about the call.

    Raises:
        ModelError: if its call needs an argument that is not known.
    """
    parameters = list_call_parameters(pipe)
    scale = int(getattr(pipe, "vae_scale_factor", None) or getattr(pipe, "vae_scale_factor_spatial", None) or 8) * UNIT
    small = _fill_arguments(pipe, parameters, *(side * scale for side in SIZES[0]))
    large = _fill_arguments(pipe, parameters, *(side * scale for side in SIZES[1]))
    calls = {"small": small, "large": large}
    if "prompt" in parameters:
        calls["text"] = {**small, "prompt": LONG_TEXT}
        if "max_sequence_length" in parameters:
            calls["text"]["max_sequence_length"] = SEQUENCE_LENGTHS[1]
    for name in COUNTS:
        if name in parameters:
            calls["two"] = {**small, name: 2}
    return calls


def _fill_arguments(pipe: Any, parameters: Mapping[str, inspect.Parameter], height: int, width: int) -> dict[str, Any]:
    known: dict[str, Any] = {
        "height": height,
        "width": width,
        "prompt": SHORT_TEXT,
        "num_inference_steps": 2,
        "output_type": "latent",
        "max_sequence_length": SEQUENCE_LENGTHS[0],
        "num_frames": 9,
        "use_resolution_binning": False,
    }
    arguments = {name: value for name, value in known.items() if name in parameters}
    for name, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if name in arguments or not (is_needed or name == "image"):
            continue
        if "image" not in name:
            raise ModelError(
                f"{type(pipe).__name__} needs {name}, and its transformer is not in the table of known anatomies; use "
                "a plan of data or cfg"
            )
        pixels = numpy.random.default_rng(0).integers(0, 256, (height, width, 3), dtype="uint8")
        arguments[name] = Image.fromarray(pixels)
    return arguments

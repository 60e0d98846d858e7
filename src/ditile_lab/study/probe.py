"""Calls a pipeline with other sizes, texts and batches, to learn what the dimensions of its transformer's calls count.

No call gets further than the transformer: it is left there. Sizes are small. If ditile cannot make up a pipeline's
arguments, for example without a text encoder, it changes one thing at a time in those of an example.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import list_tensors
from ditile.model.hooks.overrides import find_latents_parameter
from ditile.model.pipeline_calls import COUNTS, find_pipeline_device, list_call_parameters
from ditile.plan.anatomy import Anatomy
from ditile.plan.errors import ModelError, ProbeError, describe_class_and_text
from ditile_lab.study.capture import CapturedCall, capture_call
from ditile_lab.study.derive import derive_anatomy

SHORT_TEXT, LONG_TEXT = "a red ring", "a small red ring on the left of a large blue square above a green circle"
SIZES = ((6, 10), (10, 14))
"""Rows and columns of the small and the large image, in `UNIT` pixels of the VAE's latents."""
UNIT = 2
SEQUENCE_LENGTHS = (19, 29)
"""Tokens of the short and the long text: different from the tokens of any image, with or without a text."""
REMEDY = "give parallelize the arguments of a call that works, as example=dict(...), or use a plan of data or cfg"


def derive_from_pipeline(
    pipe: Any, transformer: nn.Module, twin: nn.Module, example: Mapping[str, Any] | None = None
) -> tuple[Anatomy, list[CapturedCall]]:
    """Derive the anatomy of a pipeline's transformer; also return the calls from which it was derived.

    Args:
        pipe: a pipeline that makes images or videos.
        twin: a copy of the transformer with few blocks, which runs the calls.
        example: the arguments of a call of the pipeline; without them it is called with a prompt and a size.

    Raises:
        ProbeError: if the pipeline cannot be called with these arguments.
        ModelError: if something in the transformer cannot be divided.
    """

    def capture(arguments: Mapping[str, Any]) -> CapturedCall:
        call = capture_call(pipe, transformer, arguments, functools.partial(_run_twin, twin))
        converted = CapturedCall(pytree.tree_map_only(Tensor, _convert_to_float32, dict(call)))
        if call.before is not None:
            converted.before = pytree.tree_map_only(Tensor, _convert_to_float32, dict(call.before))
        return converted

    if example is None:
        calls = _capture_known_calls(pipe, transformer, capture)
    else:
        calls = _capture_variations(pipe, transformer, capture, _clean_example(pipe, example))
    try:
        return derive_anatomy(twin, calls), calls
    except ModelError as error:
        raise ModelError(f"{error}; use a plan of data or cfg") from error
    # The model may raise anything when its calls are made without the pipeline.
    except Exception as error:
        raise ModelError(
            f"{type(transformer).__name__} could not be called to learn what its dimensions count: "
            f"{describe_class_and_text(error)}; {_advise(transformer)}"
        ) from error


Capture = Callable[[Mapping[str, Any]], CapturedCall]


def _capture_known_calls(pipe: Any, transformer: nn.Module, capture: Capture) -> list[CapturedCall]:
    """Capture the calls of a pipeline that takes a prompt and a size."""
    calls = []
    for variant, arguments in list_probe_arguments(pipe).items():
        try:
            calls.append(capture(arguments))
        except ModelError:
            raise
        except Exception as error:
            # Calls of two sizes are needed; the others add information if the pipeline accepts them.
            if variant not in ("small", "large"):
                continue
            raise ProbeError(
                f"{type(transformer).__name__} is not in the table of known anatomies, and {type(pipe).__name__} "
                f"could not be called with a {variant} image to look at it: {describe_class_and_text(error)}; {REMEDY}"
            ) from error
    return calls


def _capture_variations(
    pipe: Any, transformer: nn.Module, capture: Capture, example: Mapping[str, Any]
) -> list[CapturedCall]:
    """Capture the calls of a pipeline with the arguments of an example, also with one thing changed.

    Small images are preferred. If no change of the arguments changes the size, the size is the model's.
    """
    latents = find_latents_parameter(transformer)
    try:
        whole = capture(example)
    except ModelError:
        raise
    except Exception as error:
        raise ProbeError(
            f"{type(transformer).__name__} is not in the table of known anatomies, and {type(pipe).__name__} could not "
            f"be called with these arguments to look at it: {describe_class_and_text(error)}"
        ) from error
    shrunk = {**example, **_shrink_example(pipe, example)}
    small = _try_call(capture, shrunk)
    if small is not None and _count_numbers(small, latents) < _count_numbers(whole, latents):
        changes = _capture_changes(pipe, capture, shrunk, small, latents)
        if "size" in changes:
            return [small, *changes.values()]
    # The small image is refused, or does not show the size, so the example itself is varied.
    changes = _capture_changes(pipe, capture, example, whole, latents)
    return [whole, changes.pop("size", whole), *changes.values()]


def _try_call(capture: Capture, arguments: Mapping[str, Any]) -> CapturedCall | None:
    """Capture a call of the model; return None if the pipeline does not accept these arguments together."""
    try:
        return capture(arguments)
    # The call requested something that the pipeline does not support, and may raise anything.
    except Exception:
        return None


def _count_numbers(call: CapturedCall, latents: str) -> int:
    return sum(x.numel() for x in list_tensors(call.get(latents)))


def _capture_changes(
    pipe: Any, capture: Capture, example: Mapping[str, Any], first: CapturedCall, latents: str
) -> dict[str, CapturedCall]:
    """Capture calls with a changed "size", and if arguments can change them, "text" and "rows"."""
    changes = dict[str, CapturedCall]()
    for arguments in _list_variations(pipe, example):
        call = _try_call(capture, arguments)
        change = "" if call is None else describe_change(first, call, latents)
        if call is not None and change:
            changes.setdefault(change, call)
        # All three kinds of change have been seen now: of size, text and rows.
        if len(changes) == 3:
            break
    # The derivation expects the second call to have another size.
    return {change: changes[change] for change in ("size", "text", "rows") if change in changes}


def describe_change(first: Mapping[str, Any], other: Mapping[str, Any], latents: str) -> str:
    """Describe the difference between two calls of a transformer: "size", "rows", "text", or nothing that counts.

    Args:
        first, other: the arguments, by parameter.
        latents: the parameter of the latents.
    """
    before = _list_shapes(first.get(latents))
    after = _list_shapes(other.get(latents))
    if before != after:
        if isinstance(first.get(latents), list):
            return "rows" if set(before) == set(after) else "size"
        # Latents with two dimensions are the tokens of all rows.
        is_longer = any(len(shape) > 2 for shape in before) and _drop_rows(before) == _drop_rows(after)
        return "rows" if is_longer else "size"
    before = _list_shapes(list(first.values()))
    after = _list_shapes(list(other.values()))
    # If only one argument has more rows, the text is the same: the rows may belong to another argument joined with it.
    if before != after and _list_rows(before) == _list_rows(after):
        return "text"
    return ""


def _list_rows(shapes: list[tuple[int, ...]]) -> list[int]:
    return [shape[0] for shape in shapes if len(shape) > 2]


def _drop_rows(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shape[1:] for shape in shapes]


def _list_shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in list_tensors(value)]


def _clean_example(pipe: Any, example: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments of an example for probes: without callbacks, with new generators."""
    device = find_pipeline_device(pipe)

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return torch.Generator(device).manual_seed(0)
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device, copy=True)
        return leaf

    cleaned = {}
    for name, value in example.items():
        if value is not None and not name.startswith("callback"):
            cleaned[name] = pytree.tree_map(copy_leaf, value)
    return cleaned


def _shrink_example(pipe: Any, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a small image, if the pipeline tells the size of a token in pixels."""
    scale = _find_scale(pipe)
    if scale is None:
        return {}
    known = _list_known_arguments(SIZES[0], scale)
    if not isinstance(example.get("prompt"), str | list):
        del known["prompt"]
        del known["max_sequence_length"]
    return {name: value for name, value in known.items() if name in list_call_parameters(pipe)}


def _list_variations(pipe: Any, example: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield calls with one thing of an example changed, the most informative first."""
    defaults = {name: parameter.default for name, parameter in list_call_parameters(pipe).items()}
    values = {**defaults, **example}
    numbers = {name: value for name, value in values.items() if type(value) is int and value}
    wider: dict[str, Any] = {}
    if "width" in numbers:
        wider["width"] = 2 * numbers["width"]
    yield {**example, **wider}
    yield {**example, **wider, **{name: _widen(name, value) for name, value in example.items()}}
    prompts = {name: value for name, value in example.items() if "prompt" in name}
    texts = pytree.tree_map_only(str, lambda text: LONG_TEXT, prompts)
    if "max_sequence_length" in example:
        texts["max_sequence_length"] = SEQUENCE_LENGTHS[1]
    yield {**example, **texts}
    for length in _list_text_lengths(example):
        yield {**example, **{name: _lengthen(value, length) for name, value in example.items()}}
    for name in COUNTS:
        if name in defaults:
            yield {**example, name: 2}
    rows = _count_rows(example)
    yield {**example, **{name: _repeat_rows(value, rows) for name, value in example.items()}}
    # Only the pipeline knows the meaning of such a number, for example a number of frames or a label of the only row.
    for name, value in numbers.items():
        yield {**example, name: 2 * value}
        if name in example:
            yield {**example, name: [value, value]}
    for name, value in values.items():
        if isinstance(value, tuple) and value and all(type(number) is int for number in value):
            yield {**example, name: (*value[:-1], 2 * value[-1])}


def _widen(name: str, value: Any) -> Any:
    """Make an image, a video, or latents twice as wide."""

    def widen_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Image.Image):
            return leaf.resize((2 * leaf.width, leaf.height))
        if isinstance(leaf, numpy.ndarray) and leaf.ndim > 2:
            return leaf.repeat(2, axis=-2)
        if not isinstance(leaf, Tensor) or leaf.ndim < 3:
            return leaf
        if leaf.ndim == 3 and "latents" in name:
            return leaf.repeat_interleave(2, dim=1)
        if leaf.ndim > 3 or "image" in name or "mask" in name:
            return leaf.repeat_interleave(2, dim=-1)
        return leaf

    return pytree.tree_map(widen_leaf, value)


def _list_text_lengths(example: Mapping[str, Any]) -> list[int]:
    """List the lengths of an example's embeddings: [B, T, C], or in a list [T, C] for each row."""
    lengths = dict[int, None]()
    for value in example.values():
        least = 2 if isinstance(value, list | tuple) else 3
        for x in list_tensors(value):
            if least <= x.ndim <= 3 and x.shape[-2] > 1:
                lengths[x.shape[-2]] = None
    return list(lengths)


def _lengthen(value: Any, length: int) -> Any:
    """Double each token of tensors with `length` tokens in their first or second dimension; padding stays last."""

    def lengthen_leaf(leaf: Tensor) -> Tensor:
        if leaf.ndim < 2 or length not in leaf.shape[:2]:
            return leaf
        dim = 1 if leaf.shape[1] == length else 0
        return leaf.repeat_interleave(2, dim=dim)

    return pytree.tree_map_only(Tensor, lengthen_leaf, value)


def _count_rows(example: Mapping[str, Any]) -> int:
    """Return the most common number of rows in arguments with rows."""
    sizes = Counter(len(value) for value in example.values() if _has_rows(value))
    return sizes.most_common(1)[0][0] if sizes else 1


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _repeat_rows(value: Any, rows: int) -> Any:
    """Repeat the rows of an argument, if it has `rows` rows."""
    if isinstance(value, dict):
        return {name: _repeat_rows(part, rows) for name, part in value.items()}
    if _has_rows(value) and len(value) == rows:
        if isinstance(value, list):
            return [*value, *value]
        return torch.cat([value, value])
    if rows == 1 and isinstance(value, str | Image.Image):
        return [value, value]
    return value


def _advise(transformer: nn.Module) -> str:
    for path, module in transformer.named_modules():
        processor = getattr(module, "processor", None)
        if isinstance(processor, nn.Module):
            return f"unload the IP-adapter that brought {type(processor).__name__} to {path}"
    return "use a plan of data or cfg"


def _run_twin(twin: nn.Module, **call: Any) -> Any:
    """Run a call on a twin, and return its result on the device and in the dtype of the latents."""
    # Results have to be where the pipeline has its latents.
    latents = list_tensors(list(call.values()))[0]
    result = twin(**pytree.tree_map_only(Tensor, _convert_to_float32, call))
    return pytree.tree_map_only(Tensor, lambda x: x.to(latents.device, latents.dtype), result)


def _convert_to_float32(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.float() if x.is_floating_point() else x


def list_probe_arguments(pipe: Any) -> dict[str, dict[str, Any]]:
    """Make the arguments for a pipeline's probe calls, by the property that each varies.

    Raises:
        ProbeError: if its call needs an unknown argument.
    """
    parameters = list_call_parameters(pipe)
    scale = _find_scale(pipe) or 8 * UNIT
    small = _fill_arguments(pipe, parameters, SIZES[0], scale)
    large = _fill_arguments(pipe, parameters, SIZES[1], scale)
    calls = {"small": small, "large": large}
    if "prompt" in parameters:
        calls["text"] = {**small, "prompt": LONG_TEXT}
        if "max_sequence_length" in parameters:
            calls["text"]["max_sequence_length"] = SEQUENCE_LENGTHS[1]
    for name in COUNTS:
        if name in parameters:
            calls["two"] = {**small, name: 2}
    return calls


def _find_scale(pipe: Any) -> int | None:
    """Return the number of pixels that a pipeline's sizes are multiples of; None if unknown."""
    factor = getattr(pipe, "vae_scale_factor", None) or getattr(pipe, "vae_scale_factor_spatial", None)
    return int(factor) * UNIT if factor else None


def _list_known_arguments(size: tuple[int, int], scale: int) -> dict[str, Any]:
    return {
        "height": size[0] * scale,
        "width": size[1] * scale,
        "prompt": SHORT_TEXT,
        "num_inference_steps": 2,
        "output_type": "latent",
        "max_sequence_length": SEQUENCE_LENGTHS[0],
        # VAEs of videos turn the first frame into one latent frame, and every 4 or 8 further frames into another one.
        "num_frames": 9,
        "use_resolution_binning": False,
    }


def _fill_arguments(
    pipe: Any, parameters: Mapping[str, inspect.Parameter], size: tuple[int, int], scale: int
) -> dict[str, Any]:
    known = _list_known_arguments(size, scale)
    arguments = {name: value for name, value in known.items() if name in parameters}
    for name, parameter in parameters.items():
        is_rest = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        is_needed = parameter.default is parameter.empty and not is_rest
        if name in arguments or not (is_needed or name == "image"):
            continue
        if "image" not in name:
            raise ProbeError(
                f"{type(pipe).__name__} needs {name}, and its transformer is not in the table of known anatomies; "
                f"{REMEDY}"
            )
        pixels = numpy.random.default_rng(0).integers(0, 256, (known["height"], known["width"], 3), dtype="uint8")
        arguments[name] = Image.fromarray(pixels)
    return arguments

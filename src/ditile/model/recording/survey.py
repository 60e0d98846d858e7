"""The state behind a recorded call besides its arguments: the addresses of a model's weights, and its settings.

A tape reads weights at their addresses from the recording, so it sees new numbers written there. It does not see
weights that move, another structure, or other settings (scales of LoRAs, active adapters, kernels). Nor does it see
tensors that a module keeps as plain attributes, in lists or in tables. If two surveys of a model differ, its tapes are
of no use any more.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ditile.distributed.recording.segments import has_own_operators

_NAMES_OF_MODULES = frozenset(vars(nn.Module()))
_NUMBERS = (bool, int, float, str)
_DESCRIBED = (*_NUMBERS, Tensor, dict, list, tuple)
_PLAIN_WEIGHTS = frozenset((nn.Parameter, Tensor, type(None)))
_READ_ADDRESS = operator.methodcaller("data_ptr")
_READ_STRIDES = operator.methodcaller("stride")
_READ_FORM = operator.attrgetter("shape", "dtype")


def survey_model(model: nn.Module) -> tuple[Any, str]:
    """Return the addresses of a model's weights and its settings, and why it cannot be recorded; "" if it can.

    The loop reads the modules' tables, because torch's own iterators make twenty times as many Python calls.
    """
    problem = ""
    weights: list[Tensor | None] = []
    settings: list[Any] = [_describe_process()]
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        contents = vars(module)
        # Each table may have names without a value.
        weights.extend(contents["_parameters"].values())
        weights.extend(contents["_buffers"].values())
        modules.extend(contents["_modules"].values())
        settings.append(type(module))
        # These are, for example, scales of adapters. They are sorted, because the order of a set depends on all names.
        for name in sorted(contents.keys() - _NAMES_OF_MODULES):
            value = contents[name]
            # Other values may be hooks of a call, which are there only in some calls.
            if isinstance(value, _DESCRIBED):
                settings.append((name, _describe_value(value)))
        processor = contents.get("processor")
        if processor is not None and not isinstance(processor, nn.Module):
            # Processors of ditile are new in each call, so only the class and numbers count.
            settings.append(type(processor))
            for name, value in vars(processor).items():
                if isinstance(value, _DESCRIBED):
                    settings.append((name, _describe_value(value)))
        if module is not model and (contents["_forward_hooks"] or contents["_forward_pre_hooks"]):
            problem = f"hooks are on a {type(module).__name__}"
        # diffusers' `cache_context` leaves a registry without hooks on each model.
        if "_hf_hook" in contents or getattr(contents.get("_diffusers_hook"), "hooks", None):
            problem = f"hooks are on a {type(module).__name__}"
    parts: list[Tensor] = []
    if not _PLAIN_WEIGHTS.issuperset(map(type, weights)):
        classes, parts = _unwrap_weights(weights)
        settings.append(classes)
        weights = [weight for weight in weights if type(weight) in _PLAIN_WEIGHTS]
        for part in parts:
            if type(part) not in _PLAIN_WEIGHTS:
                # For example, bitsandbytes keeps the scales of its weights in a state that may be replaced.
                problem = f"weights are of class {type(part).__name__}"
    if problem:
        return (), problem
    tensors = [*filter(torch.is_tensor, (*weights, *parts))]
    # Other weights may have come to the same memory, so strides and forms are compared too.
    places = [tuple(map(read, tensors)) for read in (_READ_ADDRESS, _READ_STRIDES, _READ_FORM)]
    return (places, settings), ""


def list_weight_memory(model: nn.Module) -> list[Tensor]:
    """List the weights of a model, and the tensors inside quantized ones."""
    _, parts = _unwrap_weights((*model.parameters(), *model.buffers()))
    return parts


def _unwrap_weights(weights: Iterable[Tensor | None]) -> tuple[list[Any], list[Tensor]]:
    """Return the classes and metadata of wrapped weights, and the tensors with the numbers of all weights."""
    classes: list[Any] = []
    parts: list[Tensor] = []
    pending = [weight for weight in weights if weight is not None]
    while pending:
        weight = pending.pop()
        if not is_traceable_wrapper_subclass(weight):
            parts.append(weight)
            continue
        names, context = weight.__tensor_flatten__()
        # torchao's context, for example, has the sizes of groups and the types of activations.
        classes.append((type(weight), repr(context)))
        pending += [getattr(weight, name) for name in names]
    return classes, parts


def _describe_process() -> tuple[Any, ...]:
    """Describe the settings of the process that choose kernels."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        _AttentionBackendRegistry.get_active_backend(),
    )


class _KeptTensor:
    """A tensor that a module keeps elsewhere than among its weights: equal to itself, unless it was written to."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._state = (tensor.data_ptr(), None if tensor.is_inference() else tensor._version)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _KeptTensor):
            return False
        # Another tensor may have come to the memory of one that is gone.
        tensor = self._tensor()
        return tensor is not None and tensor is other._tensor() and self._state == other._state


def _describe_value(value: Any) -> Any:
    """Describe values kept by a module: numbers and tensors in tables and lists, and the class of anything else."""
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, Tensor):
        # A number on the host is part of a kernel's launch arguments.
        if value.ndim == 0 and value.device.type == "cpu" and not has_own_operators(type(value)):
            return value.dtype, repr(value.item())
        return _KeptTensor(value)
    if isinstance(value, dict):
        return [(name, _describe_value(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return list(map(_describe_value, value))
    return type(value)

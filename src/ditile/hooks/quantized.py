"""Quantized weights: which parameters of a model are no plain tensors, and how many bytes all of them take.

Whoever cuts, lends or keeps weights asks here; who quantized them, ditile, diffusers or the user, makes no difference.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def list_quantized_parameters(module: nn.Module) -> list[str]:
    """The names of the parameters that are quantized: those of a tensor class other than torch's own."""
    return [name for name, parameter in module.named_parameters() if not is_plain_parameter(parameter)]


def is_plain_parameter(parameter: Tensor) -> bool:
    """Whether a parameter is an ordinary tensor of floating point numbers."""
    return type(parameter) in (nn.Parameter, Tensor) and parameter.is_floating_point()


def count_parameter_bytes(module: nn.Module) -> int:
    """What the parameters of a module take, scales and zero points included."""
    return sum(_count_tensor_bytes(parameter) for parameter in module.parameters())


def _count_tensor_bytes(tensor: Any) -> int:
    """Of a tensor, and of the tensors that it is made of: torchao's are subclasses, bitsandbytes' have a state."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_count_tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    num_bytes = int(tensor.numel() * tensor.element_size())
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        num_bytes += _count_tensor_bytes(state.absmax)
        state = state.state2
    return num_bytes

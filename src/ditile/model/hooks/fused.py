"""One product for q, k and v, because the products of a patch are small, and starting many takes the host long.

Their weights are adjacent in memory and stay three parameters with their names and values. A change to one
in place, as when a LoRA is fused, changes its part of the joint weight, and no weight is in memory twice, unlike with
diffusers' `fuse_qkv_projections`.

A layer with LoRAs that add nothing now counts as the plain layer below them, so that an image without LoRAs is the
same whether some are loaded or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ditile.model.hooks.overrides import has_forward_hooks, override_attribute
from ditile.model.hooks.placeholders import is_plain_parameter

STREAMS = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
"""diffusers' names for the projections of one stream."""


def fuse_projections(stack: ExitStack, attentions: Iterable[tuple[str, Any]], device: torch.device) -> None:
    """Fuse the projections of each stream into one product, where they are plain layers on the device.

    Args:
        stack: undoes the fusion when it is closed; the weights stay adjacent.
        attentions: layers with their names, in which all projections of a stream see the same tokens.
        device: where the layers run. Layers whose weights are elsewhere between calls are left as they are.
    """
    for _, attention in attentions:
        for names in STREAMS:
            layers: list[Any] = [getattr(attention, name, None) for name in names]
            if not all(is_plain_linear(layer, device) for layer in layers):
                continue
            linears = list(map(_unwrap_loras, layers))
            forms = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}
            if len(forms) > 1:
                continue
            fused = FusedProjections(layers)
            for index, layer in enumerate(layers):
                override_attribute(stack, layer, "forward", partial(fused, index))


class FusedProjections:
    """Linear layers with the same input tokens: the first computes the outputs of all.

    A layer that is called with other tokens computes its own output, and so do all layers if a weight was moved in
    memory.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._forwards: list[Callable[[Tensor], Tensor]] = [layer.forward for layer in layers]
        linears = [_unwrap_loras(layer) for layer in layers]
        self._with_loras = [layer for layer in layers if layer not in linears]
        self._widths = [linear.out_features for linear in linears]
        self._weight = pack_parameters([linear.weight for linear in linears])
        self._bias: Tensor | None = None
        names = ["weight"]
        if linears[0].bias is not None:
            self._bias = pack_parameters([linear.bias for linear in linears])
            names.append("bias")
        # A hook of accelerate, or a move to another device, gives a parameter other memory.
        self._addresses: dict[tuple[Any, str], int] = {}
        for linear in linears:
            for name in names:
                self._addresses[linear, name] = getattr(linear, name).data_ptr()
        self._tokens: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """Return the output `[..., n]` of the layer with this index for `[..., C]`."""
        # A layer calls its projections one after the other, with the same tensor.
        if x is self._tokens and index in self._outputs:
            output = self._outputs.pop(index)
            if not self._outputs:
                self._tokens = None
            return output
        if index or torch.is_grad_enabled() or (self._with_loras and any(map(_adds_loras, self._with_loras))):
            return self._forwards[index](x)
        for (linear, name), address in self._addresses.items():
            if getattr(linear, name).data_ptr() != address:
                return self._forwards[index](x)
        product = functional.linear(x, self._weight, self._bias)
        outputs: tuple[Tensor, ...] = product.split(self._widths, dim=-1)
        self._tokens = x
        self._outputs = dict(enumerate(outputs[1:], start=1))
        return outputs[0]


def pack_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Return one tensor whose memory holds all parameters; move them there if they are not yet adjacent."""
    first = parameters[0]
    lengths = [len(parameter) for parameter in parameters]
    # After the first call they are adjacent already.
    if _are_adjacent(parameters):
        return first.data.as_strided((sum(lengths), *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split(lengths), strict=True):
        parameter.data = part
    return whole


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    memory = parameters[0].untyped_storage().data_ptr()
    place = parameters[0].storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != memory:
            return False
        if parameter.storage_offset() != place or not parameter.is_contiguous():
            return False
        place += parameter.numel()
    return True


def is_plain_linear(linear: Any, device: torch.device) -> bool:
    """Return whether a module is an ordinary linear layer on a device, with nothing around its forward.

    The layer may be inside LoRAs of peft, which may add something.
    """
    base = _unwrap_loras(linear)
    if base is not linear:
        return not has_forward_hooks(linear) and is_plain_linear(base, device)
    if type(linear) is not nn.Linear or has_forward_hooks(linear):
        return False
    for parameter in (linear.weight, linear.bias):
        if parameter is None:
            continue
        # A tensor of inference mode must not be written, so it cannot be moved into a larger one.
        if not is_plain_parameter(parameter) or parameter.is_inference():
            return False
        if (parameter.device, parameter.dtype) != (device, linear.weight.dtype):
            return False
    return True


def _unwrap_loras(layer: Any) -> Any:
    """Return the linear layer inside peft's LoRAs, or the layer itself."""
    is_wrapped = type(layer).__module__ == "peft.tuners.lora.layer" and type(layer).__name__ == "Linear"
    if is_wrapped:
        return layer.base_layer
    return layer


def _adds_loras(layer: Any) -> bool:
    """Return whether LoRAs around a layer add something now, or are fused into its weight."""
    is_idle = layer.disable_adapters or layer.lora_A.keys().isdisjoint(layer.active_adapters)
    return not is_idle or layer.merged

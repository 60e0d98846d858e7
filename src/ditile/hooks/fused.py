"""One product for q, k and v of a layer, which has three: a patch has few tokens, and small products are slow ones.

Their weights are laid side by side in memory and stay three parameters, of the names and values that they had: what is
done to one in place, as when a LoRA is fused, is done to its part of the whole. Nothing is held twice, as it is by the
`fuse_qkv_projections` of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ditile.hooks.overrides import override_attribute

STREAMS = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
"""What diffusers calls the projections of one stream."""


def fuse_projections(stack: ExitStack, attentions: Iterable[tuple[str, Any]], device: torch.device) -> None:
    """Makes one product of the projections of each stream, where they are plain ones on the device, until it is closed.

    Args:
        stack: undoes it; the weights stay side by side.
        attentions: layers with their names, in which all projections of a stream see the same tokens.
        device: where they run. Weights that are brought there for a time are left alone.
    """
    for _, attention in attentions:
        for names in STREAMS:
            linears: list[Any] = [getattr(attention, name, None) for name in names]
            if _are_linears_alike(linears, device):
                fused = FusedProjections(linears)
                for index, linear in enumerate(linears):
                    override_attribute(stack, linear, "forward", partial(fused, index))


class FusedProjections:
    """Linear layers that see the same tokens: the first computes what the others are asked for next.

    One that is called with other tokens computes its own, and so do all whose weights do not lie there any more.

    Args:
        linears: whose weights are laid side by side.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._forwards: list[Callable[[Tensor], Tensor]] = [linear.forward for linear in linears]
        self._widths = [linear.out_features for linear in linears]
        self._weight = pack_parameters([linear.weight for linear in linears])
        self._bias = None if linears[0].bias is None else pack_parameters([linear.bias for linear in linears])
        self._addresses = self._read_addresses()
        self._tokens: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """What the layer of this index makes of `[..., C]`."""
        if x is self._tokens and index in self._outputs:
            output = self._outputs.pop(index)
            if not self._outputs:
                self._tokens = None
            return output
        if index or torch.is_grad_enabled() or self._read_addresses() != self._addresses:
            return self._forwards[index](x)
        outputs: tuple[Tensor, ...] = functional.linear(x, self._weight, self._bias).split(self._widths, dim=-1)
        self._tokens, self._outputs = x, dict(enumerate(outputs[1:], start=1))
        return outputs[0]

    def _read_addresses(self) -> list[int]:
        """Where in memory the parameters lie."""
        return [p.data_ptr() for linear in self._linears for p in (linear.weight, linear.bias) if p is not None]


def pack_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters as one tensor, in whose memory each of them has its part; they are moved where they do not yet."""
    first, lengths = parameters[0], [len(p) for p in parameters]
    places = accumulate((p.numel() for p in parameters), initial=first.storage_offset())
    memory = first.untyped_storage().data_ptr()
    if all(
        p.untyped_storage().data_ptr() == memory and p.storage_offset() == place and p.is_contiguous()
        for p, place in zip(parameters, places, strict=False)
    ):
        return first.data.as_strided((sum(lengths), *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split(lengths), strict=True):
        p.data = part
    return whole


def is_plain_linear(linear: Any, device: torch.device) -> bool:
    """Whether a module is a linear layer as torch makes it, with nothing around its forward, on a device."""
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return False
    parameters = [p for p in (linear.weight, linear.bias) if p is not None]
    is_plain = all(type(p) is nn.Parameter and type(p.data) is Tensor and not p.is_inference() for p in parameters)
    is_on_device = {(p.device, p.dtype) for p in parameters} == {(device, linear.weight.dtype)}
    return is_plain and is_on_device and not linear._forward_hooks and not linear._forward_pre_hooks


def _are_linears_alike(linears: Sequence[Any], device: torch.device) -> bool:
    """Whether all are such layers, of one width and type."""
    if not all(is_plain_linear(linear, device) for linear in linears):
        return False
    return len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) == 1

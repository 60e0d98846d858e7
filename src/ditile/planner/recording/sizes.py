"""Runs code only for the sizes of its tensors: values that depend on weights or noise are never computed.

A model's parameters are on the meta device, and its inputs are on the CPU. An operator that reads an unknown value
makes an uninitialized tensor of the right shape, whose memory is never touched. All other operators compute: lengths,
masks and positions must be known, because a pipeline or a forward uses them to decide.

    with SizesOnly() as sizes, torch.no_grad():
        pipe(prompt_embeds=sizes.make_unknown(1, 512, 4096), height=720, width=1280)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from ditile.distributed.recording.segments import list_tensors

LARGE = 2**24
"""An unknown tensor of more elements than this repeats one element in memory."""
CONSTANTS = {
    getattr(torch.ops.aten, name).default
    for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
}
"""Operators that read only the shape of a tensor: their results are known."""
_META = torch.device("meta")
_CPU = torch.device("cpu")


class SizesOnly(TorchDispatchMode):
    """Computes no value that depends on an unknown one. Tensors on the meta device are unknown."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unknown = dict[int, weakref.ref[Any]]()

    def make_unknown(self, *shape: int) -> Tensor:
        """Make a tensor of unknown floats."""
        return self._mark_unknown(_make_empty(shape, None, torch.get_default_dtype()))

    def _mark_unknown(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._unknown[key] = weakref.ref(storage, lambda _: self._unknown.pop(key, None))
        return tensor

    def is_unknown(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor are unknown."""
        return tensor.is_meta or tensor.untyped_storage()._cdata in self._unknown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == _META:
            # Pipelines make tensors on the device of their models, which is meta here.
            kwargs["device"] = _CPU
        tensors = list_tensors((args, kwargs))
        if not any(map(self.is_unknown, tensors)):
            return func(*args, **kwargs)
        # Floats stay unknown: nothing is decided by them, and large ones would take memory.
        if func in CONSTANTS and not kwargs.get("dtype", tensors[0].dtype).is_floating_point:
            return func(*args, **kwargs | {"device": _CPU})
        if func is torch.ops.aten.view_as_complex.default:
            # A view needs both parts of a complex number side by side, and a large unknown tensor repeats one element.
            (parts,) = tensors
            return self._mark_unknown(_make_empty(parts.shape[:-1], None, parts.dtype.to_complex()))
        if func.is_view and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        # An operator that writes into a tensor makes it unknown.
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                return self._mark_unknown(value)
        if "device" in kwargs:
            kwargs["device"] = _META
        try:
            out = func(*tree_map(_copy_to_meta, args), **tree_map(_copy_to_meta, kwargs))
        except (NotImplementedError, RuntimeError):
            # The shape depends on values, such as those of a mask, so these must be known.
            if any(tensor.is_meta or (self.is_unknown(tensor) and not _is_float(tensor)) for tensor in tensors):
                raise
            return tree_map_only(Tensor, self._mark_unknown, func(*args, **kwargs))
        if func is torch.ops.aten.convolution.default:
            # The meta device may put channels last, unlike the CPU.
            out = out.contiguous()
        return tree_map_only(Tensor, self._make_like, out)

    def _make_like(self, out: Tensor) -> Tensor:
        """Make an unknown tensor on the CPU like one on the meta device."""
        if _is_float(out):
            return self._mark_unknown(_make_empty(out.shape, out.stride(), out.dtype))
        # Integers may be indices, and 0 is in the range of any table.
        return self._mark_unknown(torch.zeros(out.shape, dtype=out.dtype, device=_CPU))


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _make_empty(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    if math.prod(shape) > LARGE:
        return torch.empty(1, dtype=dtype, device=_CPU).expand(shape)
    if stride is None:
        return torch.empty(shape, dtype=dtype, device=_CPU)
    return torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)


def _copy_to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)

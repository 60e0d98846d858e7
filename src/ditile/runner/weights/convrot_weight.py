"""A weight that stays in the integers of its file: its inputs are rotated and rounded to int8 for each product.

torchao's base class copies, moves and compiles such tensors. Its own `Int8Tensor` has no rotation, and on a GPU without
compilation its product prints its input, which waits for the device, and copies the weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchao.utils import TorchAOBaseTensor  # type: ignore[import-untyped]

from ditile.runner.weights.convrot import rotate_groups

MOST_INTEGER = 127
"""The largest integer of an input; ComfyUI does not use -128."""
LEAST_SCALE = 1e-30
"""The scale of a token of zeros."""
LEAST_ROWS = 32
"""Fewer rows are padded to this number, because the kernels of GPUs take more than 16."""
MULTIPLE = 8
"""The kernels of GPUs take weights whose numbers of rows and columns are multiples of this."""
HAS_VNNI = torch.cpu._is_vnni_supported()
"""Without these instructions the kernels of CPUs add two products in 16 bits, which large integers exceed."""


class ConvRotInt8(TorchAOBaseTensor):  # type: ignore[misc]
    """A matrix of int8 with a scale for each row, whose columns are rotated in groups.

    Attributes:
        qdata: the integers.
        scale: the scale of each row, in float32.
        block_size: the rows and columns that are rotated together: one row, and the columns of a group.
    """

    tensor_data_names = ["qdata", "scale"]
    tensor_attribute_names = ["block_size", "dtype"]

    def __new__(cls, qdata: Tensor, scale: Tensor, block_size: list[int], dtype: torch.dtype) -> ConvRotInt8:
        """Make a tensor that has the dtype in which it is multiplied."""
        tensor: ConvRotInt8 = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        return tensor

    def __init__(self, qdata: Tensor, scale: Tensor, block_size: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.qdata = qdata
        self.scale = scale
        self.block_size = block_size

    def dequantize(self) -> Tensor:
        """Return the numbers that the integers stand for, rotated back."""
        group_size = self.block_size[1]
        rows = self.qdata.float() * self.scale
        return (rotate_groups(rows, group_size) / math.sqrt(group_size)).to(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what a Linear with this weight returns.

        Each token is rounded by itself and integers are added exactly, so that a token has the same result beside any
        number of others.
        """
        group_size = self.block_size[1]
        rotated = rotate_groups(x.reshape(-1, x.shape[-1]).float(), group_size)
        if self.has_integer_kernel():
            scale = (rotated.abs().amax(-1, keepdim=True) / MOST_INTEGER).clamp(min=LEAST_SCALE)
            integers = (rotated / scale).round().to(torch.int8)
            missing = max(0, LEAST_ROWS - len(integers))
            product = torch._int_mm(functional.pad(integers, (0, 0, 0, missing)), self.qdata.t())
            out = product[: len(integers)] * (scale / math.sqrt(group_size))
        else:
            out = functional.linear(rotated / math.sqrt(group_size), self.qdata.float())
        out = out * self.scale.flatten()
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).reshape(*x.shape[:-1], len(self.qdata))

    def has_integer_kernel(self) -> bool:
        """Return whether its device multiplies its integers exactly."""
        if self.qdata.device.type == "cpu":
            return bool(HAS_VNNI)
        rows, columns = self.qdata.shape
        return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


@ConvRotInt8.implements(torch.ops.aten.linear.default)  # type: ignore[untyped-decorator]
@ConvRotInt8.implements_torch_function(functional.linear)  # type: ignore[untyped-decorator]
def _multiply(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight, *others = args
    bias = kwargs.get("bias")
    if others:
        bias = others[0]
    return weight.multiply(x, bias)  # type: ignore[no-any-return]

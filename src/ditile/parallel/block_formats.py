"""Weights that are stored as blocks of bytes, as of GGUF: how they are measured, unpacked, and made of other memory.

A row of such a weight is a sequence of blocks, each with scales of its own: Q4_K has 256 numbers in 144 bytes, Q8_0 32
in 34. Any rows can be taken as they are; within a row, a part begins and ends where blocks do. diffusers unpacks a
weight each time that it is multiplied, so a rank that has a share of the blocks computes with the same numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RowBlocks(NamedTuple):
    """How a weight is stored.

    Attributes:
        name: such as Q4_K.
        numbers: how many of a row are in a block.
        size: bytes of a block.
    """

    name: str
    numbers: int
    size: int


def find_row_blocks(weight: Any) -> RowBlocks | None:
    """The format of a weight; None if it has as many elements as numbers, or is quantized by another library."""
    # By name, because diffusers' module cannot be imported where the package gguf is not installed.
    if type(weight).__name__ != "GGUFParameter":
        return None
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES

    numbers, size = GGML_QUANT_SIZES[weight.quant_type]
    return RowBlocks(weight.quant_type.name, numbers, size)


def is_block_linear(linear: Any) -> bool:
    """Whether a Linear is the one that diffusers has for such weights, also before its weight is read."""
    return type(linear).__name__ == "GGUFLinear"


def measure_weight(weight: Any) -> tuple[int, ...]:
    """The shape of a weight in numbers, however it is stored."""
    if find_row_blocks(weight) is None:
        return tuple(weight.shape)
    return tuple(weight.quant_shape)


def find_compute_dtype(linear: Any) -> torch.dtype:
    """The type in which a Linear multiplies, however its weight is stored."""
    dtype: torch.dtype = getattr(linear, "compute_dtype", None) or linear.weight.dtype
    return dtype


def locate_number(weight: Any, dim: int, number: int) -> int:
    """Where a number of a dimension begins in what is stored; a number within a row has to be the first of a block."""
    row_blocks = find_row_blocks(weight)
    if row_blocks is None or dim < weight.ndim - 1:
        return number
    assert number % row_blocks.numbers == 0
    return number // row_blocks.numbers * row_blocks.size


def unpack_weight(linear: Any) -> Tensor:
    """The weight of a Linear as its own forward multiplies it."""
    weight: Tensor = linear.weight
    if find_row_blocks(weight) is None:
        return weight
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    unpacked: Tensor = dequantize_gguf_tensor(weight)
    return unpacked.to(linear.compute_dtype)


def make_parameter_like(original: Any, stored: Tensor) -> nn.Parameter:
    """A parameter that is stored as another one is, in other memory."""
    if find_row_blocks(original) is not None:
        parameter: nn.Parameter = type(original)(stored, quant_type=original.quant_type)
        return parameter
    return nn.Parameter(stored, requires_grad=original.requires_grad)

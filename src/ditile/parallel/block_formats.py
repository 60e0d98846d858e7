"""Weights that are stored in blocks, like those of GGUF and torchao: how they are measured, cut, and copied.

A row of such a weight is a sequence of blocks, each with its own scales: a block of Q4_K has 256 numbers in 144 bytes,
one of Q8_0 has 32 in 34. torchao keeps scales in a separate tensor, often one scale for each row. A weight can be cut
between any two rows; within a row, only between two blocks. A weight is unpacked each time that it is multiplied, so a
rank with a share of the blocks computes with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONVROT = "ConvRotInt8"
"""Weights in int8, with a scale for each row, whose columns are rotated in groups."""
TORCHAO_CLASSES = ("Int8Tensor", "Float8Tensor", CONVROT)
"""Subclasses of torchao's base tensor with one stored element for each number. A scale is that of a row, a part of a
row, or the whole weight."""


class RowBlocks(NamedTuple):
    """The format in which a weight is stored.

    Attributes:
        name: the name of the format, such as Q4_K.
        numbers: how many numbers of a row are in a block.
        size: how many stored elements a block takes; for GGUF these are bytes.
    """

    name: str
    numbers: int
    size: int


def find_row_blocks(weight: Any) -> RowBlocks | None:
    """Return the block format of a weight, or None if it cannot be cut by blocks.

    That is so for a plain weight, and for one packed by a library across its rows.
    """
    # Classes are told by their names, because modules that define them may need packages that are not installed.
    name = type(weight).__name__
    # `act_pre_scale` has a factor for each input, and would have to be cut with the inputs.
    if getattr(weight, "act_pre_scale", None) is None and name in TORCHAO_CLASSES:
        return describe_row_blocks(name, weight.block_size, weight.shape)
    if name != "GGUFParameter":
        return None
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES

    numbers, size = GGML_QUANT_SIZES[weight.quant_type]
    return RowBlocks(weight.quant_type.name, numbers, size)


def describe_row_blocks(
    name: str,
    block_size: Sequence[int] | None,
    shape: Sequence[int],
) -> RowBlocks | None:
    """Return the block format of a torchao weight, or None if it cannot be cut.

    It depends on the weight's class, its shape and the shape of a block.
    """
    if name not in TORCHAO_CLASSES or block_size is None or len(block_size) != 2:
        return None
    rows, numbers = block_size
    # A block is a group of columns that are rotated together, although one scale belongs to a whole row.
    if name == CONVROT:
        return RowBlocks(name, numbers, numbers)
    # A scale of the whole weight, or of whole rows, holds for any part.
    if numbers == shape[1] and rows in (1, shape[0]):
        return RowBlocks(name, 1, 1)
    if rows > 1:
        return None
    return RowBlocks(name, numbers, numbers)


def is_block_linear(linear: Any) -> bool:
    """Return whether a Linear has diffusers' class for GGUF weights, as it does even before its weight is read."""
    return type(linear).__name__ == "GGUFLinear"


def measure_weight(weight: Any) -> tuple[int, ...]:
    """Return the shape of a weight in numbers, however it is stored."""
    shape: Sequence[int] = getattr(weight, "quant_shape", weight.shape)
    return tuple(shape)


def take_pieces(
    whole: Any,
    dim: int,
    pieces: Sequence[slice],
) -> Tensor:
    """Copy pieces of a weight side by side into new memory, keeping blocks whole."""
    if type(whole).__name__ not in TORCHAO_CLASSES:
        parts = []
        for piece in pieces:
            start = locate_number(whole, dim, piece.start)
            parts.append(whole.narrow(dim, start, locate_number(whole, dim, piece.stop) - start))
        return torch.cat(parts, dim)
    names, attributes = whole.__tensor_flatten__()
    tensors = {}
    for name in names:
        tensor = getattr(whole, name)
        # Scales and zero points have one element for each block, or one for the whole dimension.
        if tensor.ndim == whole.ndim and tensor.shape[dim] > 1:
            size = whole.shape[dim] // tensor.shape[dim]
            block_pieces = []
            for piece in pieces:
                block_pieces.append(slice(piece.start // size, piece.stop // size))
            tensor = take_pieces(tensor, dim, block_pieces)
        tensors[name] = tensor.clone()
    block_size = list(whole.block_size)
    length = sum(piece.stop - piece.start for piece in pieces)
    # A block cannot be larger than the weight.
    block_size[dim] = min(block_size[dim], length)
    attributes["block_size"] = block_size
    taken: Tensor = type(whole).__tensor_unflatten__(tensors, attributes, None, None)
    return taken


def locate_number(weight: Any, dim: int, place: int) -> int:
    """Convert a place along a dimension, counted in numbers, to one counted in stored elements.

    A place within a row must be the beginning of a block.
    """
    row_blocks = find_row_blocks(weight)
    if row_blocks is None or dim < weight.ndim - 1:
        return place
    assert place % row_blocks.numbers == 0
    return place // row_blocks.numbers * row_blocks.size


def unpack_weight(linear: Any) -> Tensor:
    """Return the weight of a Linear in the form that its forward multiplies."""
    weight: Tensor = linear.weight
    # The weights of torchao unpack themselves when they are multiplied.
    if type(weight).__name__ != "GGUFParameter":
        return weight
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    unpacked: Tensor = dequantize_gguf_tensor(weight)
    return unpacked.to(linear.compute_dtype)


def make_parameter_like(original: Any, stored: Tensor) -> nn.Parameter:
    """Make a parameter of stored elements in the format of the original."""
    if type(original).__name__ == "GGUFParameter":
        parameter: nn.Parameter = type(original)(stored, quant_type=original.quant_type)
        return parameter
    return nn.Parameter(stored, requires_grad=original.requires_grad)

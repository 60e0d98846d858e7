"""Weights that ComfyUI stores in integers: int8, with or without ConvRot (arXiv 2512.03673), and int4 with it.

ConvRot rotates each group of a weight's columns before it rounds them. The rules are those of comfy-kitchen, which
ComfyUI computes with (`tensor/int8.py` and `backends/eager/convrot_w4a4.py` there):

- The JSON beside a weight names the format, and for int8 whether it is rotated.
- `weight_scale` has a factor for each row, or one for all rows of int8 that is not rotated.
- Each group of a row is multiplied with a regular Hadamard matrix, the Kronecker power of one of 4 x 4.
- A byte of int4 has an even column in its lower bits, and the next one in its upper bits, both signed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import AliasChoices, AliasPath, BaseModel, Field
from torch import Tensor

from ditile.parallel.block_formats import CONVROT, RowBlocks

INT8 = "int8_tensorwise"
INT4 = "convrot_w4a4"
INTEGER_FORMATS = (INT8, INT4)
"""ComfyUI's names for the formats."""
GROUP_SIZES = tuple(4**power for power in range(8))
"""The sizes of regular Hadamard matrices of this kind. Files use 256, and a few 64; with size 1 nothing is rotated."""


def _define_setting(default: Any, name: str) -> Any:
    # Some converters write the settings into an inner object, where ComfyUI looks too.
    return Field(default, validation_alias=AliasChoices(name, AliasPath("params", name)))


class WeightSettings(BaseModel):
    """The JSON in which ComfyUI says how a weight is stored."""

    format: Any = None
    is_rotated: bool | None = _define_setting(False, "convrot")
    group_size: int | None = _define_setting(256, "convrot_groupsize")


class FileSettings(BaseModel):
    """The settings of a file's weights, by module, as the file's header lists them."""

    layers: dict[str, WeightSettings] = {}


class IntegerFormat(NamedTuple):
    """How a weight is stored in integers.

    Attributes:
        name: the name of the format.
        group_size: the columns that are rotated together; 1 if none are.
        numbers: the numbers in a block of `num_bytes`.
    """

    name: str
    group_size: int
    numbers: int
    num_bytes: int = 1

    @classmethod
    def from_settings(cls, settings: WeightSettings) -> IntegerFormat:
        """Return the format of a weight with these settings."""
        if settings.format == INT4:
            return cls(INT4, settings.group_size or 0, 2)
        return cls(settings.format, (settings.group_size or 0) if settings.is_rotated else 1, 1)

    @property
    def row_blocks(self) -> RowBlocks:
        """Return the blocks for cutting the weight."""
        return RowBlocks(CONVROT, self.group_size, self.group_size)

    def unpack_integers(self, stored: Tensor) -> Tensor:
        """Return whole rows with one integer in each byte."""
        if self.numbers == 1:
            return stored
        # Shifts to the right repeat the sign.
        return torch.stack([stored << 4 >> 4, stored >> 4], -1).flatten(-2)

    def unpack_rows(self, stored: Tensor, scales: Tensor) -> Tensor:
        """Return whole rows of a weight in float32, rotated back."""
        rows = self.unpack_integers(stored).float().mul_(scales)
        # The matrix is symmetric and orthogonal, so it is its own inverse.
        return rotate_groups(rows, self.group_size).div_(self.group_size**0.5)


def rotate_groups(rows: Tensor, size: int) -> Tensor:
    """Multiply each group of columns with the regular Hadamard matrix of a size, which is not divided by its norm.

    The 4 x 4 factor with its rows reversed maps each number to the sum of all four less twice itself. Elementwise sums
    are used in place of a matrix product, so that a row has the same result beside any number of others.
    """
    stride = 1
    while stride < size:
        quarters = rows.unflatten(-1, (-1, 4, stride))
        first, second, third, fourth = quarters.unbind(-2)
        sums = (first + second) + (third + fourth)
        rows = torch.sub(sums.unsqueeze(-2), quarters, alpha=2).flatten(-3)
        stride *= 4
    # Reversed rows of each factor give the whole matrix reversed rows, which are put back in order here.
    rotated: Tensor = rows.unflatten(-1, (-1, size)).flip(-1).flatten(-2)
    return rotated

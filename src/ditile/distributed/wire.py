"""Sends messages in fewer bytes: numbers of eight bits, and their scales in the same message.

A message `[..., n]` travels as bytes `[..., n + 2 g]`: the n codes of a vector, and after them g scales in bf16, by
which the largest number of each run of n / g gets the largest code. A vector is a token's activation, or a head of its
query, key or value, so a token of large numbers costs no other token precision. What was NaN or infinite arrives as
NaN, and so does all that shares its scale.

- `fp8` (e4m3): one scale for a vector. Its codes are floating: the relative error is 2.6 % whatever they are scaled by.
- `int8`: one scale for at most 16 numbers. Its codes are even steps, of 1/127 of the largest number: the error of r
  numbers is about sqrt(r / 12) / 127 of the largest one. That is 0.9 % for 16, whatever the numbers are; with one scale
  for a token of 128 channels the bundled models have up to 2.3 %.

Only kinds of messages between the blocks and within them are packed (`PACKED_KINDS`). Latents, predictions, guidance,
weights, masks, text, the decode and all that ranks decide by travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ditile.plan.cost import PACKED_KINDS, SCALE_BYTES, find_scaled_run
from ditile.plan.plan import Plan

SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""The scale of numbers that are all zero."""
ROUND_UP = 1 + torch.finfo(torch.bfloat16).eps
"""A factor on each scale: one that was rounded down would make codes that are too large."""
CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST_CODE = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": torch.iinfo(torch.int8).max}


@dataclass(frozen=True, slots=True)
class VectorPacking:
    """The packing of vectors.

    Attributes:
        wire_dtype: "fp8" or "int8".
    """

    wire_dtype: str

    def pack_vectors(self, x: Tensor) -> Tensor:
        """Pack `[..., n]` of any floating type into bytes `[..., n + 2 g]`."""
        shape = x.shape[:-1]
        size = x.shape[-1]
        code_dtype = CODES[self.wire_dtype]
        largest_code = LARGEST_CODE[self.wire_dtype]
        run = find_scaled_run(self.wire_dtype, size)
        # The largest number of a run by a norm, which reads the numbers once and keeps NaN.
        runs = x.reshape(*shape, size // run, run)
        largest = torch.linalg.vector_norm(runs, math.inf, dim=-1, keepdim=True).to(torch.float32)
        scales = largest.mul_(ROUND_UP / largest_code).clamp_min_(SMALLEST_SCALE).to(torch.bfloat16)
        numbers = runs / scales.to(torch.float32)
        if code_dtype == torch.int8:
            numbers.round_()
        packed = torch.empty(self.pack_shape(x.shape), dtype=torch.uint8, device=x.device)
        packed[..., :size].view(code_dtype).copy_(numbers.flatten(-2))
        packed[..., size:].copy_(scales.flatten(-2).view(torch.uint8))
        return packed

    def unpack_vectors(self, packed: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Unpack bytes `[..., n + 2 g]` to `[..., n]` of a type, with n as `size`."""
        # A copy, because bytes that follow others need not begin where a number of two bytes may.
        scales = packed[..., size:].contiguous().view(torch.bfloat16).to(torch.float32)
        codes = packed[..., :size].view(CODES[self.wire_dtype]).to(torch.float32)
        run = size // scales.shape[-1]
        codes.view(*scales.shape, run).mul_(scales.unsqueeze(-1))
        return codes.to(dtype)

    def pack_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a packed message."""
        size = shape[-1]
        return (*shape[:-1], size + size // find_scaled_run(self.wire_dtype, size) * SCALE_BYTES)


def select_packings(plan: Plan) -> Mapping[str, VectorPacking]:
    """Select the packing of each kind of messages under a plan. Kinds that are not there travel unpacked."""
    if plan.wire_dtype is None:
        return {}
    return dict.fromkeys(PACKED_KINDS, VectorPacking(plan.wire_dtype))

"""Sends messages in fewer bytes: as codes of eight bits, or of four or three bits for differences, and their scales.

A message `[..., n]` travels as bytes, `[..., n + 2 g]` with codes of eight bits: the n codes of a vector, and after
them g scales in bf16, by which the largest number of each run of n / g gets the largest code. A vector is a token's
activation, or a head of its query, key or value, so a token of large numbers costs no other token precision. What was
NaN or infinite arrives as NaN, and so does all that shares its scale.

- `fp8` (e4m3): one scale for a vector. Its codes are floating: the relative error is 2.6 % whatever they are scaled by.
- `int8`: one scale for at most 16 numbers. Its codes are even steps, of 1/127 of the largest number: the error of r
  numbers is about sqrt(r / 12) / 127 of the largest one. That is 0.9 % for 16, whatever the numbers are; with one scale
  for a token of 128 channels the bundled models have up to 2.3 %.
- `residual4`, `residual3`: one scale for at most 32 numbers, of the difference from what arrived at the same site in
  the step before (arXiv 2507.17511). A site is a layer's message of a patch and a branch of guidance. Both ends keep
  what arrived there as a base, and add each decoded difference to it, so that errors do not add up. The first message
  of a site travels as it is.

Only kinds of messages between the blocks and within them are packed (`PACKED_KINDS`). Latents, predictions, guidance,
weights, masks, text, the decode and all that ranks decide by travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ditile.distributed import env
from ditile.plan.cost import (
    PACKED_KINDS,
    RESIDUAL_BITS,
    RESIDUAL_GROUP,
    count_code_bytes,
    count_vector_bytes,
    find_scaled_run,
)
from ditile.plan.errors import StateError
from ditile.plan.plan import Plan

SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""The scale of numbers that are all zero."""
ROUND_UP = 1 + torch.finfo(torch.bfloat16).eps
"""A factor on each scale: a scale that was rounded down would make codes that are too large."""
CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST_CODE = {
    "fp8": torch.finfo(torch.float8_e4m3fn).max,
    "int8": torch.iinfo(torch.int8).max,
    # These codes are symmetric about zero, so that zero has a code.
    "residual4": 7,
    "residual3": 3,
}
SENT = -1
"""The place of a sent message among the bases of a site; received ones are numbered."""
DIGEST_BYTES = 4

SiteBases = dict[int, Tensor]
"""What last arrived at a site, at both ends: the sent message and the received ones, by number."""


@dataclass(frozen=True, slots=True)
class VectorPacking:
    """The packing of vectors.

    Attributes:
        wire_dtype: "fp8" or "int8".
    """

    wire_dtype: str
    dtype = torch.uint8

    def begin_message(self, bases: SiteBases | None) -> VectorPacking:
        """Return itself: messages do not depend on earlier ones."""
        return self

    def pack_vectors(self, x: Tensor) -> Tensor:
        """Pack `[..., n]` of any floating type into bytes `[..., n + 2 g]`."""
        code_dtype = CODES[self.wire_dtype]
        runs, scales = _find_scales(x, self.wire_dtype)
        numbers = runs / scales.to(torch.float32)
        if code_dtype == torch.int8:
            numbers.round_()
        parts = (numbers.to(code_dtype), scales)
        return torch.cat([part.flatten(-2).view(torch.uint8) for part in parts], dim=-1)

    def unpack_vectors(self, packed: Tensor, size: int, dtype: torch.dtype, index: int = 0) -> Tensor:
        """Unpack bytes `[..., n + 2 g]` to `[..., n]` of a type, with n as `size`."""
        scales = _read_scales(packed[..., size:])
        codes = packed[..., :size].view(CODES[self.wire_dtype]).to(torch.float32)
        run = size // scales.shape[-1]
        codes.view(*scales.shape, run).mul_(scales.unsqueeze(-1))
        return codes.to(dtype)

    def pack_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a packed message."""
        return (*shape[:-1], count_vector_bytes(self.wire_dtype, shape[-1]))


@dataclass(frozen=True, slots=True)
class ResidualPacking:
    """The packing of differences from bases.

    Attributes:
        wire_dtype: "residual4" or "residual3".
        checks: whether each vector carries a digest of the sender's base, with which the receiver compares its own.
        bases: the bases of the message's site.
        is_first: whether the message is its site's first, which travels as it is and becomes the base. This follows
            from the site, which all ranks know, and never from numbers.
    """

    wire_dtype: str
    checks: bool = False
    bases: SiteBases = field(default_factory=dict)
    is_first: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the type of a packed message; None if it keeps its own."""
        return None if self.is_first else torch.uint8

    @property
    def bits(self) -> int:
        """Return the bits of a code."""
        return RESIDUAL_BITS[self.wire_dtype]

    def begin_message(self, bases: SiteBases | None) -> ResidualPacking | None:
        """Return the packing of the next message of a site; None without a site, where it travels as it is."""
        if bases is None:
            return None
        return replace(self, bases=bases, is_first=not bases)

    def pack_vectors(self, x: Tensor) -> Tensor:
        """Pack the message to send, `[..., n]`."""
        if self.is_first:
            return self.unpack_vectors(x, SENT)  # which keeps it as the base
        return self.pack_difference(x.detach(), self.bases[SENT])

    def unpack_vectors(self, packed: Tensor, index: int, **_: Any) -> Tensor:
        """Unpack the received message with a number."""
        if not self.is_first:
            return self.unpack_difference(packed, self.bases[index])
        # A copy: the model may write into what it gets.
        self.bases[index] = torch.nan_to_num(packed.detach(), 0.0, 0.0, 0.0)
        return packed

    def pack_difference(self, x: Tensor, base: Tensor) -> Tensor:
        """Pack the difference between a base `[..., n]` and x, and move the base to what the receiver then has."""
        # In fp32, because a difference in fp16 may be too large for it.
        difference = torch.sub(base.to(torch.float32), x)
        runs, scales = _find_scales(difference, self.wire_dtype)
        # An infinite scale times a code may be infinite, and must arrive as NaN.
        scales.masked_fill_(scales.isinf(), math.nan)
        precise_scales = scales.to(torch.float32)
        codes = (runs / precise_scales).round_().add_(LARGEST_CODE[self.wire_dtype])
        parts = [self._write_codes(codes.flatten(-2)), scales.flatten(-2).view(torch.uint8)]
        if self.checks:
            parts.append(_compute_digests(base))
        self._move_base(base, codes, precise_scales)
        return torch.cat(parts, dim=-1)

    def unpack_difference(self, packed: Tensor, base: Tensor) -> Tensor:
        """Move a base by a packed difference, and return what arrived.

        Raises:
            StateError: if bases are checked, and this one is not the sender's.
        """
        size = base.shape[-1]
        ends = (count_code_bytes(self.wire_dtype, size), count_vector_bytes(self.wire_dtype, size))
        codes, scale_bytes, digest = packed.tensor_split(ends, -1)
        if self.checks and not torch.equal(digest, _compute_digests(base)):
            raise StateError(f"wire_dtype={self.wire_dtype}: a base of {tuple(base.shape)} is not that of its sender")
        runs = _split_runs(self._read_codes(codes)[..., :size], find_scaled_run(self.wire_dtype, size))
        return self._move_base(base, runs, _read_scales(scale_bytes).unsqueeze(-1))

    def pack_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a packed message."""
        if self.is_first:
            return tuple(shape)
        size = count_vector_bytes(self.wire_dtype, shape[-1])
        return (*shape[:-1], size + self.checks * DIGEST_BYTES)

    def _write_codes(self, codes: Tensor) -> Tensor:
        """Return the bytes of codes `[..., n]`, each 0 or more: eight codes of b bits make b bytes."""
        # NaN has no code, and must not spoil the codes beside it.
        padded = functional.pad(codes.nan_to_num(), (0, -codes.shape[-1] % RESIDUAL_GROUP))
        groups = _split_runs(padded, RESIDUAL_GROUP).to(torch.int32)
        words = (groups << self._list_shifts(codes)).sum(-1, keepdim=True, dtype=torch.int32)
        # The lower bytes come first.
        return words.view(torch.uint8)[..., : self.bits].flatten(-2)

    def _read_codes(self, code_bytes: Tensor) -> Tensor:
        """Read codes `[..., n]` as floating numbers."""
        words = functional.pad(_split_runs(code_bytes, self.bits), (0, 4 - self.bits)).view(torch.int32)
        codes: Tensor = (words >> self._list_shifts(words)) & (2**self.bits - 1)
        return codes.flatten(-2).to(torch.float32)

    def _list_shifts(self, like: Tensor) -> Tensor:
        return torch.arange(0, RESIDUAL_GROUP * self.bits, self.bits, dtype=torch.int32, device=like.device)

    def _move_base(self, base: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Subtract decoded codes from a base, and return the result.

        Where the result is not finite the base becomes zero, so that the next difference carries the number itself.
        """
        # Products of codes and scales are exact in fp32, so both ends round once, alike. Code zero is +0, whose
        # subtraction keeps the sign of a zero.
        decoded = codes.sub_(LARGEST_CODE[self.wire_dtype]).mul_(scales).flatten(-2)
        moved = torch.sub(base, decoded, out=torch.empty_like(base))
        torch.nan_to_num(moved, 0.0, 0.0, 0.0, out=base)
        return moved


MessagePacking = VectorPacking | ResidualPacking


def select_packings(plan: Plan) -> Mapping[str, MessagePacking]:
    """Select the packing for each kind of messages under a plan. A kind without a packing travels as it is."""
    if plan.wire_dtype is None:
        return {}
    packing: MessagePacking = VectorPacking(plan.wire_dtype)
    if plan.wire_dtype in RESIDUAL_BITS:
        packing = ResidualPacking(plan.wire_dtype, checks=env.should_check_key_ages())
    return dict.fromkeys(PACKED_KINDS, packing)


def _split_runs(x: Tensor, run: int) -> Tensor:
    """Split the last dimension into runs of a length. `unflatten` cannot, where there are no vectors."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // run, run)


def _find_scales(x: Tensor, wire_dtype: str) -> tuple[Tensor, Tensor]:
    """Split vectors into runs, and find the scale in bf16 with which a run's largest number gets the largest code."""
    runs = _split_runs(x, find_scaled_run(wire_dtype, x.shape[-1]))
    # A norm finds the largest number of a run, because it reads the numbers once and keeps NaN.
    largest = torch.linalg.vector_norm(runs, math.inf, dim=-1, keepdim=True).to(torch.float32)
    scales = largest.mul_(ROUND_UP / LARGEST_CODE[wire_dtype]).clamp_min_(SMALLEST_SCALE)
    return runs, scales.to(torch.bfloat16)


def _read_scales(scale_bytes: Tensor) -> Tensor:
    """Read the scales of packed vectors."""
    # A copy, because bytes that follow others need not begin where a number of two bytes may.
    return scale_bytes.contiguous().view(torch.bfloat16).to(torch.float32)


def _compute_digests(base: Tensor) -> Tensor:
    """Compute the sum of the bytes of each vector of a base, as bytes."""
    return base.contiguous().view(torch.uint8).sum(-1, keepdim=True, dtype=torch.int32).view(torch.uint8)

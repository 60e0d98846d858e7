"""How much a probe changed since its last computed step: the mean absolute difference over the mean absolute value.

It is kept as two sums, so that ranks that share out tokens, heads or guidance add theirs up before they divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The measure.

    Attributes:
        important: count only tokens that changed by more than this share of themselves; 0 counts all.
        every: count every so many-th channel.
    """

    important: float = 0.0
    every: int = 1

    def sums(self, before: Tensor, now: Tensor) -> Tensor:
        """`[2]`, fp64: the absolute difference and the absolute value before, of `[rows, tokens, channels]` each.

        They are added up in fp32 (in fp64 of fp64).
        """
        if self.every > 1:
            before, now = before[..., :: self.every], now[..., :: self.every]
        before = before.to(now.dtype)
        kind = torch.float64 if now.dtype == torch.float64 else torch.float32
        if self.important <= 0:
            sums = [torch.linalg.vector_norm(x, ord=1, dtype=kind) for x in (now - before, before)]
        else:
            changes, sizes = (torch.linalg.vector_norm(x, ord=1, dim=-1, dtype=kind) for x in (now - before, before))
            counted = changes > self.important * sizes
            sums = [(x * counted).sum() for x in (changes, sizes)]
        return torch.stack(sums).double()


def ratio(change: float, size: float) -> float:
    """The relative difference. Nothing that changed into something is infinitely different."""
    if size > 0:
        return change / size
    return 0.0 if change == 0 else float("inf")

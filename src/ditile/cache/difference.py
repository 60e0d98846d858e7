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

    def sum_change_and_size(self, before: Tensor, now: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The absolute difference and the absolute value before, of `[rows, tokens, channels]` each.

        They are added up in fp32 (in fp64 of fp64), and are numbers of that type.

        Args:
            size: that of `before`, if it is known; it is only where all tokens count.
        """
        if self.every > 1:
            before, now = before[..., :: self.every], now[..., :: self.every]
        if before.dtype != now.dtype:
            before = before.to(now.dtype)
        kind, norm = self.choose_sum_dtype(now), torch.linalg.vector_norm
        if self.important <= 0:
            change = norm(now - before, ord=1, dtype=kind)
            return change, norm(before, ord=1, dtype=kind) if size is None else size
        changes, sizes = norm(now - before, ord=1, dim=-1, dtype=kind), norm(before, ord=1, dim=-1, dtype=kind)
        counted = changes > self.important * sizes
        return (changes * counted).sum(), (sizes * counted).sum()

    @staticmethod
    def choose_sum_dtype(probe: Tensor) -> torch.dtype:
        """The type in which a probe is added up."""
        return torch.float64 if probe.dtype == torch.float64 else torch.float32


def compute_relative_difference(change: float, size: float) -> float:
    """The relative difference. Nothing that changed into something is infinitely different."""
    if size > 0:
        return change / size
    return 0.0 if change == 0 else float("inf")

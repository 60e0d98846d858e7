"""Drift: how much latents, keys and values change from one step to the next, which decides on synchronous steps.

A change is the length of the difference over the length, of each row of the batch by itself: where one picture or its
prompt jumps, no other one hides it. Both are taken where the tensors are. What they come to leaves a GPU by one
asynchronous copy per step, and whoever reads it waits for that copy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ditile.distributed.departure import Departure

SCALE = 1_000_000
"""Changes travel as whole millionths: a sum of whole numbers is the same on every rank, in whatever order."""

BEYOND = 1_000 * SCALE  # stands for what is no number


class Row(NamedTuple):
    """What changes: `kind` is "keys" (and values) or "latents". A half of the guidance may have branches of its own."""

    kind: str
    half: int
    branch: int
    row: int


class Copy:
    """Mean changes on their way from a device.

    Args:
        means: one for each row that changed.
        counts: how many changes each is the mean of.
    """

    def __init__(self, means: Tensor, counts: Sequence[int]) -> None:
        self._means, self._counts = Departure(means), counts

    @property
    def is_here(self) -> bool:
        """Whether nobody has to wait."""
        return self._means.is_here

    def wait(self) -> list[int]:
        """Sum and number of the changes of each row, when they are here."""
        pairs = zip(self._means.wait().tolist(), self._counts, strict=True)
        return [number for mean, count in pairs for number in (_whole(mean) * count, count)]


class Drift:
    """The changes of one step on this rank, in a half of the guidance."""

    def __init__(self, half: int = 0) -> None:
        self._half = half
        self._changes: dict[Row, list[tuple[Tensor, Tensor]]] = {}

    def note(self, what: tuple[str, int, int], fresh: Tensor, stale: Tensor) -> None:
        """Tensors of some rows of a batch, and those that they replace; `what` is their kind, branch and first row."""
        kind, branch, row = what
        pair = (_length(fresh - stale), _length(fresh))
        self._changes.setdefault(Row(kind, self._half, branch, row), []).append(pair)

    def close(self, rows: Sequence[Row]) -> Copy:
        """Ends the step: the changes start on their way, and the next step begins.

        Args:
            rows: every row that may have changed on some rank, one by one, in an order that all ranks agree on.
        """
        means: dict[Row, Tensor] = {}
        counts: dict[Row, int] = {}
        for first, pairs in self._changes.items():
            distances, lengths = (torch.stack(part) for part in zip(*pairs, strict=True))
            mean = (distances / lengths.clamp_min(torch.finfo(torch.float32).tiny)).mean(dim=0)
            for row, value in enumerate(mean.unbind(), start=first.row):
                means[first._replace(row=row)], counts[first._replace(row=row)] = value, len(pairs)
        self._changes = {}
        zero = torch.zeros(()) if not means else torch.zeros_like(next(iter(means.values())))
        return Copy(torch.stack([means.get(row, zero) for row in rows]), [counts.get(row, 0) for row in rows])


def largest(numbers: Sequence[int]) -> float:
    """The largest mean change of any row, from sums and numbers over all ranks; 0 if nothing changed."""
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return max((total / count / SCALE for total, count in pairs if count), default=0.0)


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), dtype=torch.float32)
    return length


def _whole(change: float) -> int:
    return min(round(change * SCALE), BEYOND) if math.isfinite(change) else BEYOND

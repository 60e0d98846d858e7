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

from ditile.distributed.departure import HostCopy

MILLIONTHS = 1_000_000
"""Changes travel as whole millionths: a sum of whole numbers is the same on every rank, in whatever order."""

NOT_FINITE = 1_000 * MILLIONTHS  # stands for what is no number


class ChangeKey(NamedTuple):
    """What changes: `kind` is "keys" (and values) or "latents". A half of the guidance may have branches of its own."""

    kind: str
    half: int
    branch: int
    row: int


class ChangeCopy:
    """Mean changes on their way from a device.

    Args:
        means: one for each row that changed.
        counts: how many changes each is the mean of.
    """

    def __init__(self, means: Tensor, counts: Sequence[int]) -> None:
        self._means, self._counts = HostCopy(means), counts

    @property
    def has_arrived(self) -> bool:
        """Whether nobody has to wait."""
        return self._means.needs_no_wait

    def wait_for_changes(self) -> list[int]:
        """Sum and number of the changes of each row, when they are here."""
        pairs = zip(self._means.wait_for_numbers().tolist(), self._counts, strict=True)
        return [number for mean, count in pairs for number in (_round_to_millionths(mean) * count, count)]


class RelativeChange:
    """The changes of one step on this rank, in a half of the guidance."""

    def __init__(self, half: int = 0) -> None:
        self._half = half
        self._changes: dict[ChangeKey, list[tuple[Tensor, Tensor]]] = {}

    def record_change(self, what: tuple[str, int, int], fresh: Tensor, stale: Tensor) -> None:
        """Tensors of some rows of a batch, and those that they replace; `what` is their kind, branch and first row."""
        kind, branch, row = what
        pair = (_compute_row_norms(fresh - stale), _compute_row_norms(fresh))
        self._changes.setdefault(ChangeKey(kind, self._half, branch, row), []).append(pair)

    def start_change_copy(self, keys: Sequence[ChangeKey]) -> ChangeCopy:
        """Ends the step: the changes start on their way, and the next step begins.

        Args:
            rows: every row that may have changed on some rank, one by one, in an order that all ranks agree on.
        """
        means: dict[ChangeKey, Tensor] = {}
        counts: dict[ChangeKey, int] = {}
        for first_key, pairs in self._changes.items():
            distances, lengths = (torch.stack(part) for part in zip(*pairs, strict=True))
            mean = (distances / lengths.clamp_min(torch.finfo(torch.float32).tiny)).mean(dim=0)
            for row, value in enumerate(mean.unbind(), start=first_key.row):
                means[first_key._replace(row=row)], counts[first_key._replace(row=row)] = value, len(pairs)
        self._changes = {}
        zero = torch.zeros(()) if not means else torch.zeros_like(next(iter(means.values())))
        return ChangeCopy(torch.stack([means.get(row, zero) for row in keys]), [counts.get(row, 0) for row in keys])


def find_largest_change(numbers: Sequence[int]) -> float:
    """The largest mean change of any row, from sums and numbers over all ranks; 0 if nothing changed."""
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return max((total / count / MILLIONTHS for total, count in pairs if count), default=0.0)


def _compute_row_norms(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), dtype=torch.float32)
    return length


def _round_to_millionths(change: float) -> int:
    return min(round(change * MILLIONTHS), NOT_FINITE) if math.isfinite(change) else NOT_FINITE

"""Stages: contiguous runs of blocks, one per rank, cut by hand or so that the costliest is as cheap as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def cut(
    costs: Sequence[float], stages: int, by_hand: Sequence[int] | None = None, speeds: Sequence[float] | None = None
) -> list[range]:
    """The blocks of each stage.

    Args:
        costs: the cost of each block, in any unit.
        stages: the number of stages, from 1 to the number of blocks.
        by_hand: the number of blocks of each stage; by default the slowest stage is made as fast as possible.
        speeds: of each stage's device; equal by default.
    """
    if by_hand is not None:
        ends = list(accumulate(by_hand))
        return [range(end - size, end) for end, size in zip(ends, by_hand, strict=True)]
    return _balanced(list(costs), speeds or [1.0] * stages)


def _balanced(costs: list[float], speeds: Sequence[float]) -> list[range]:
    """The linear partition problem, by dynamic programming over (stages, blocks)."""
    total = [0.0, *accumulate(costs)]
    best = [total[end] / speeds[0] for end in range(len(total))]  # one stage for the first `end` blocks
    cuts: list[list[int]] = []
    for stage, speed in enumerate(speeds[1:], start=2):
        row, where = [float("inf")] * len(total), [0] * len(total)
        for end in range(stage, len(total)):
            for start in range(stage - 1, end):
                worst = max(best[start], (total[end] - total[start]) / speed)
                if worst < row[end]:
                    row[end], where[end] = worst, start
        best, cuts = row, [*cuts, where]
    ends = [len(costs)]
    for where in reversed(cuts):
        ends.insert(0, where[ends[0]])
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

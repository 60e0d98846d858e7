"""Stages: contiguous runs of blocks, one per rank, cut by hand or so that the slowest is as fast as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def cut_stages(
    costs: Sequence[float],
    stages: int,
    by_hand: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
) -> list[range]:
    """Cut the blocks into stages.

    Args:
        costs: the cost of each block, in any unit.
        stages: the number of stages, from 1 to the number of blocks.
        by_hand: the number of blocks of each stage; by default the slowest stage is made as fast as possible.
        speeds: the speed of each stage's device, in any unit; equal by default.
        ends: what the first stage (embedding) and the last one (head) cost besides their blocks.
    """
    if by_hand is not None:
        return _make_ranges(accumulate(by_hand))
    return _balance_stages(costs, speeds or [1.0] * stages, ends)


def _make_ranges(stops: Iterable[int]) -> list[range]:
    """Return the runs of blocks between these stops, the first run from block 0."""
    ranges = []
    start = 0
    for stop in stops:
        ranges.append(range(start, stop))
        start = stop
    return ranges


def _balance_stages(costs: Sequence[float], speeds: Sequence[float], ends: tuple[float, float]) -> list[range]:
    """Solve the linear partition problem, by dynamic programming over (stages, blocks)."""
    costs_before = [0.0, *accumulate(costs)]
    num_blocks = len(costs)
    last = len(speeds) - 1

    def time_stage(stage: int, start: int, stop: int) -> float:
        cost = costs_before[stop] - costs_before[start]
        if stage == 0:
            cost += ends[0]
        if stage == last:
            cost += ends[1]
        return cost / speeds[stage]

    # `slowest[stop]` is the time of the slowest stage over the first `stop` blocks; at first they are all one stage.
    slowest = [time_stage(0, 0, stop) for stop in range(num_blocks + 1)]
    # For each later stage, an entry at `stop` is where the stage begins if it ends there.
    starts_of_stages = []
    for stage in range(1, len(speeds)):
        next_slowest = [float("inf")] * (num_blocks + 1)
        starts = [0] * (num_blocks + 1)
        for stop in range(stage + 1, num_blocks + 1):
            for start in reversed(range(stage, stop)):
                stage_time = time_stage(stage, start, stop)
                # An earlier start would only make this stage slower.
                if stage_time > next_slowest[stop]:
                    break
                worst = max(slowest[start], stage_time)
                # Of equally good cuts, the one whose last stage is longest comes last, and stays.
                if worst <= next_slowest[stop]:
                    next_slowest[stop] = worst
                    starts[stop] = start
        slowest = next_slowest
        starts_of_stages.append(starts)
    stops = [num_blocks]
    for starts in reversed(starts_of_stages):
        stops.append(starts[stops[-1]])
    return _make_ranges(reversed(stops))

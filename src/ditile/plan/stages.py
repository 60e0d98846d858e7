"""Stages: contiguous runs of blocks, one per rank, cut by hand or so that the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def cut_stages(
    costs: Sequence[float],
    stages: int,
    by_hand: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
) -> list[range]:
    """The blocks of each stage.

    Args:
        costs: the cost of each block, in any unit.
        stages: the number of stages, from 1 to the number of blocks.
        by_hand: the number of blocks of each stage; by default the slowest stage is made as fast as possible.
        speeds: of each stage's device, in any unit; equal by default.
        ends: what the first stage (embedding) and the last one (head) cost besides their blocks.
    """
    if by_hand is not None:
        stops = list(accumulate(by_hand))
        return [range(stop - size, stop) for stop, size in zip(stops, by_hand, strict=True)]
    return _balance_stages(list(costs), list(speeds or [1.0] * stages), ends)


def select_local_blocks(stages: Sequence[range], stage: int, warmup_group_size: int) -> range:
    """The blocks whose weights a stage holds: its own, or all if it is one of a warmup group."""
    return range(stages[-1].stop) if stage < warmup_group_size else stages[stage]


def compute_stage_loads(
    costs: Sequence[float],
    stages: Sequence[range],
    speeds: Sequence[float] | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
) -> list[float]:
    """The time of each stage, in the unit of cost over speed."""
    stage_loads = [sum(costs[block] for block in stage) for stage in stages]
    stage_loads[0] += ends[0]
    stage_loads[-1] += ends[1]
    return [load / speed for load, speed in zip(stage_loads, speeds or [1.0] * len(stages), strict=True)]


def _balance_stages(costs: list[float], speeds: list[float], ends: tuple[float, float]) -> list[range]:
    """The linear partition problem, by dynamic programming over (stages, blocks)."""
    total = [0.0, *accumulate(costs)]
    last = len(speeds) - 1

    def time_stage(stage: int, start: int, stop: int) -> float:
        extra = ends[0] * (stage == 0) + ends[1] * (stage == last)
        return (total[stop] - total[start] + extra) / speeds[stage]

    # At `stop`: the time of the slowest stage over the first `stop` blocks. At first one stage has them all.
    best = [time_stage(0, 0, stop) for stop in range(len(total))]
    cuts: list[list[int]] = []
    for stage in range(1, len(speeds)):
        row = [float("inf")] * len(total)
        where = [0] * len(total)
        for stop in range(stage + 1, len(total)):
            for start in reversed(range(stage, stop)):
                stage_time = time_stage(stage, start, stop)
                # An earlier start would only make this stage slower.
                if stage_time > row[stop]:
                    break
                worst = max(best[start], stage_time)
                if worst <= row[stop]:
                    row[stop], where[stop] = worst, start
        best = row
        cuts = [*cuts, where]
    stops = [len(costs)]
    for where in reversed(cuts):
        stops.insert(0, where[stops[0]])
    return [range(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]

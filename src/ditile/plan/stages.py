"""Stages: contiguous runs of blocks, one per rank, cut by hand or so that the slowest is as fast as possible.

`weigh_shares` and `weigh_ends` say by which weights stages and ranks of unlike devices end together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ditile.plan.plan import Plan, compute_coordinates

ALIKE = 1.02
"""Speeds that differ by a smaller factor make equal shares."""


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
        speeds: of each stage's device, in any unit; equal by default.
        ends: what the first stage (embedding) and the last one (head) cost besides their blocks.
    """
    if by_hand is not None:
        return _make_ranges(accumulate(by_hand))
    return _balance_stages(costs, speeds or [1.0] * stages, ends)


def _make_ranges(stops: Iterable[int]) -> list[range]:
    """Return the runs that end at these blocks."""
    ranges = []
    start = 0
    for stop in stops:
        ranges.append(range(start, stop))
        start = stop
    return ranges


def weigh_shares(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Return the plan with shares that let ranks of unlike speeds end together. It is unchanged where none differ.

    Args:
        plan: with equal shares.
        speeds: of each rank's device, in any unit.
    """
    token_speeds = [0.0] * (plan.token_ranks * plan.distrifusion)
    tensor_speeds = [0.0] * plan.tensor
    places = []
    for rank in range(plan.world):
        place = compute_coordinates(plan, rank)
        token_place = plan.find_token_place(place)
        places.append((place["pipefusion"], token_place, place["tensor"]))
        token_speeds[token_place] += speeds[rank]
        tensor_speeds[place["tensor"]] += speeds[rank]
    stage_speeds = [float("inf")] * plan.pipefusion
    for rank, (stage, token_place, tensor_place) in enumerate(places):
        # A stage is done when its last rank is.
        token_share = token_speeds[token_place] / sum(token_speeds)
        tensor_share = tensor_speeds[tensor_place] / sum(tensor_speeds)
        share = token_share * tensor_share
        stage_speeds[stage] = min(stage_speeds[stage], speeds[rank] / share)
    return dataclasses.replace(
        plan,
        stage_weights=_round_weights(stage_speeds),
        token_weights=_round_weights(token_speeds),
        tensor_weights=_round_weights(tensor_speeds),
    )


def weigh_ends(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Return the plan with weights for decode and text on ranks of unlike speeds.

    They make the ranks end together, if the plan divides these parts.

    Args:
        plan: made by `weigh_shares` or by the user; it is unchanged where its other weights say the same.
        speeds: of each rank's device, in any unit.
    """
    plan = dataclasses.replace(plan, rank_weights=None)
    if not plan.divides_ends:
        return plan
    num_ranks = plan.world // plan.data
    # The weights serve all replicas, so the slowest rank at each place decides.
    weights = _round_weights([min(speeds[rank : plan.world : num_ranks]) for rank in range(num_ranks)])
    if weights == _round_weights(plan.list_rank_weights()):
        return plan
    return dataclasses.replace(plan, rank_weights=weights or (1.0,) * num_ranks)


def _round_weights(speeds: Sequence[float]) -> tuple[float, ...] | None:
    """Return speeds as multiples of the lowest one, in two decimals. None where they are alike."""
    lowest = min(speeds)
    if max(speeds) < ALIKE * lowest:
        return None
    return tuple(round(speed / lowest, 2) for speed in speeds)


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

    # `slowest[stop]` is the time of the slowest stage over the first `stop` blocks. At first one stage has them all.
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

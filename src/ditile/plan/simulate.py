"""Runs a schedule without processes: it finds when each op starts and ends, and how long a generation takes.

The planner prices a plan by `simulate_schedule`. It raises an error if the schedule would deadlock, so tests find this
without starting a rank.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ditile.plan.schedule import SEND_OF_RECEIVE, MicroStep, Op, OpKind, PatchSchedule

_SENDS = frozenset(SEND_OF_RECEIVE.values())


class Span(NamedTuple):
    """An `Op` on a stage with its start and end, in the unit of the costs."""

    stage: int
    op: Op
    start: float
    end: float


def simulate_schedule(
    schedule: PatchSchedule,
    cost: Callable[[int, Op], float] | None = None,
    calls: int | Callable[[int], int] = 1,
    travel: Callable[[int, Op], float] | None = None,
) -> list[Span]:
    """Run the programs of all stages against each other, sending each message at the earliest time.

    Args:
        cost: the time of an op on a stage; by default a whole step takes 1 on one rank, divided evenly, and only
            computing takes time.
        calls: transformer calls in every step, or a function of the step.
        travel: how long a message travels after the op that sends it has ended; by default no time.

    Raises:
        RuntimeError: if the stages wait for each other forever.
    """

    cost = cost or functools.partial(_compute_unit_cost, schedule, calls)
    programs = [deque(schedule.iter_program(stage, calls)) for stage in range(schedule.stages)]
    clocks = [0.0] * schedule.stages
    spans: list[Span] = []
    # A message -> when it arrives, or the stage that waits for it.
    arrivals: dict[tuple[object, ...], float] = {}
    waiting: dict[tuple[object, ...], int] = {}
    ready = deque(range(schedule.stages))
    while ready:
        stage = ready.popleft()
        while programs[stage]:
            op = programs[stage][0]
            start = clocks[stage]
            sender = SEND_OF_RECEIVE.get(op.kind)
            if sender is not None:
                message: tuple[object, ...] = (sender, op.peer, stage, op.step, op.patch, op.branch, op.micro_batch)
                if message not in arrivals:
                    waiting[message] = stage
                    break
                start = max(start, arrivals[message])
            programs[stage].popleft()
            end = start + cost(stage, op)
            clocks[stage] = end
            spans.append(Span(stage, op, start, end))
            if op.kind in _SENDS:
                message = (op.kind, stage, op.peer, op.step, op.patch, op.branch, op.micro_batch)
                arrivals[message] = end
                if travel is not None:
                    arrivals[message] += travel(stage, op)
                if message in waiting:
                    ready.append(waiting.pop(message))
    if waiting:
        raise RuntimeError(f"deadlock: stages wait at {[program[0] for program in programs if program]}")
    return sorted(spans, key=lambda span: span.start)


def _compute_unit_cost(schedule: PatchSchedule, calls: int | Callable[[int], int], _: int, op: Op) -> float:
    """Return the time of an op if a whole step takes 1 on one rank."""
    if op.kind is not OpKind.COMPUTE:
        return 0.0
    if callable(calls):
        calls = calls(op.step)
    if op.patch is None:
        micro = MicroStep(op.step, None)
        ranks = len(schedule.select_warmup_group(micro)) or schedule.stages
        rows = schedule.split_micro_batches(micro)[op.micro_batch]
        return len(rows) / schedule.batch / (ranks * calls)
    num_references = schedule.num_references
    if op.patch < num_references:
        share = schedule.reference_share / num_references
    else:
        share = (1 - schedule.reference_share) / (schedule.patches - num_references)
    return share / (schedule.stages * calls)


def bound_speedup(schedule: PatchSchedule, calls: int = 1) -> float:
    """Return the upper bound of the speed-up over one rank, with equal stages and free messages.

    In serial mode with one call it is `S / (W + (S - W) / min(N, M) + (min(N, M) - 1) / (N M))`. With W = 0 and
    M >= N the useful share of the stages' time is the paper's `M S / (M S + N - 1)`.
    """
    return schedule.steps / max(span.end for span in simulate_schedule(schedule, calls=calls))

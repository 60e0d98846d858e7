"""Runs a schedule without processes: it finds when each op starts and ends, how long a generation takes, and draws a
chart.

The planner prices a plan by `simulate_schedule`. A schedule that would deadlock raises an error here, so tests find it
without starting a rank. Several generations in flight on the same stages are simulated too: the executor runs one at a
time, and this says what more of them could bring a server (docs/serving.md).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ditile.plan.schedule import SEND_OF_RECEIVE, MicroStep, Op, OpKind, PatchSchedule

_SENDS = frozenset(SEND_OF_RECEIVE.values())
_FOLLOWING = _SENDS | {OpKind.STEP}
"""Ops that follow a computation on the same stage, with nothing between."""


class Span(NamedTuple):
    """An `Op` on a stage with its start and end, in the unit of the costs; `generation` counts the images."""

    stage: int
    op: Op
    start: float
    end: float
    generation: int = 0


def simulate_schedule(
    schedule: PatchSchedule,
    cost: Callable[[int, Op], float] | None = None,
    calls: int | Callable[[int], int] = 1,
    travel: Callable[[int, Op], float] | None = None,
    *,
    generations: int = 1,
    in_flight: int = 1,
) -> list[Span]:
    """Run the programs of all stages against each other, with each message sent at the earliest time.

    A stage does one op at a time. Of several generations the one that is least far goes first, so that synchronous
    steps fill each other's gaps.

    Args:
        cost: the time of an op on a stage; by default a whole step takes 1 on one rank, divided evenly, and only
            computing takes time.
        calls: transformer calls in every step, or a function of the step.
        travel: how long a message travels after the op that sends it has ended; by default no time.
        generations: how many images are generated.
        in_flight: of how many of them at most ops may run in turns. Another one begins when one has ended on all
            stages, as in a server in which jobs wait.

    Raises:
        RuntimeError: if the stages wait for each other forever.
    """

    def compute_default_cost(stage: int, op: Op) -> float:
        calls_of_step = calls(op.step) if callable(calls) else calls
        return _compute_unit_cost(schedule, op, calls_of_step)

    run = _StageRun(schedule, cost or compute_default_cost, calls, travel)
    num_begun = 0
    num_ended = 0
    now = 0.0
    while num_ended < generations:
        while num_begun < min(generations, num_ended + in_flight):
            run.begin_generation(num_begun, now)
            num_begun += 1
        now = run.run_until_next_end()
        num_ended += 1
    return run.spans


class _StageRun:
    """Stages that run the programs of generations in the order of time; see `simulate_schedule` for the arguments.

    Attributes:
        spans: the ops so far.
    """

    def __init__(
        self,
        schedule: PatchSchedule,
        cost: Callable[[int, Op], float],
        calls: int | Callable[[int], int],
        travel: Callable[[int, Op], float] | None,
    ) -> None:
        self.spans: list[Span] = []
        self._schedule = schedule
        self._cost = cost
        self._calls = calls
        self._travel = travel
        self._clocks = [0.0] * schedule.stages
        # The time at which a generation ended on the stages that are done with it.
        self._ends: dict[int, float] = {}
        # The ops to come, by generation and stage.
        self._programs: dict[tuple[int, int], deque[Op]] = {}
        # The time at which the next op of a program may start, its step, its generation and its stage.
        self._ready: list[tuple[float, int, int, int]] = []
        # The time at which a message arrives; the second table has the generation and stage that wait for it.
        self._arrivals: dict[tuple[object, ...], float] = {}
        self._waiting: dict[tuple[object, ...], tuple[int, int]] = {}

    def begin_generation(self, generation: int, now: float) -> None:
        """Let all stages begin a further generation."""
        for stage in range(self._schedule.stages):
            program = deque(self._schedule.iter_program(stage, self._calls))
            # A stage outside of a warmup group does nothing if all steps are synchronous.
            if program:
                self._programs[generation, stage] = program
                self._plan_next_op(generation, stage, now)

    def run_until_next_end(self) -> float:
        """Run ops until a generation has ended on all stages. Returns its end."""
        while self._ready:
            start, step, generation, stage = heapq.heappop(self._ready)
            # A stage may have run something of another generation meanwhile.
            if start < self._clocks[stage]:
                heapq.heappush(self._ready, (self._clocks[stage], step, generation, stage))
                continue
            program = self._programs[generation, stage]
            self._run_next_op(program, generation, stage, start)
            # Ops of another generation may not come between.
            while program and program[0].kind in _FOLLOWING:
                self._run_next_op(program, generation, stage, self._clocks[stage])
            if program:
                self._plan_next_op(generation, stage, self._clocks[stage])
                continue
            del self._programs[generation, stage]
            # Ops come in the order of their starts, and an earlier one may end later.
            self._ends[generation] = max(self._clocks[stage], self._ends.get(generation, 0.0))
            if all((generation, other) not in self._programs for other in range(self._schedule.stages)):
                return self._ends[generation]
        raise RuntimeError(f"deadlock: stages wait at {[program[0] for program in self._programs.values()]}")

    def _run_next_op(self, program: deque[Op], generation: int, stage: int, start: float) -> None:
        op = program.popleft()
        end = start + self._cost(stage, op)
        self._clocks[stage] = end
        self.spans.append(Span(stage, op, start, end, generation))
        if op.kind not in _SENDS:
            return
        message = (generation, op.kind, stage, op.peer, op.step, op.patch, op.branch, op.micro_batch)
        arrival = end
        if self._travel is not None:
            arrival += self._travel(stage, op)
        self._arrivals[message] = arrival
        receiver = self._waiting.pop(message, None)
        if receiver is not None:
            self._plan_next_op(*receiver, arrival)

    def _plan_next_op(self, generation: int, stage: int, now: float) -> None:
        """Note when the next op of a program may start. It may also wait for a message that has not been sent."""
        op = self._programs[generation, stage][0]
        sender = SEND_OF_RECEIVE.get(op.kind)
        if sender is not None:
            message = (generation, sender, op.peer, stage, op.step, op.patch, op.branch, op.micro_batch)
            if message not in self._arrivals:
                self._waiting[message] = (generation, stage)
                return
            now = max(now, self._arrivals[message])
        heapq.heappush(self._ready, (now, op.step, generation, stage))


class Occupancy(NamedTuple):
    """The share of time in which stages compute, with one generation at a time and with several in flight.

    Attributes:
        idle_shares: of each stage, the share of one generation in which it does nothing.
        gain: generations in a time with several in flight, over those of one at a time.
    """

    idle_shares: tuple[float, ...]
    gain: float


# This many generations fill the stages before any are counted, and this many are counted, times those in flight.
_FILLING = 1
_COUNTED = 2


def measure_occupancy(
    schedule: PatchSchedule,
    cost: Callable[[int, Op], float] | None = None,
    calls: int | Callable[[int], int] = 1,
    travel: Callable[[int, Op], float] | None = None,
    in_flight: int = 2,
) -> Occupancy:
    """Measure the gaps of each stage in a generation, and the gain of generations in flight for a server in which jobs
    wait.

    The arguments are those of `simulate_schedule`. Nothing outside of the steps counts: no text, no decode.
    """
    alone = simulate_schedule(schedule, cost, calls, travel)
    latency = max(span.end for span in alone)
    busy = [0.0] * schedule.stages
    for span in alone:
        busy[span.stage] += span.end - span.start
    idle_shares = tuple(1 - seconds / latency for seconds in busy)
    num_counted = _COUNTED * in_flight
    first = _FILLING * in_flight
    last = first + num_counted
    # Others are in flight when the last one that counts ends, as when the first one did.
    spans = simulate_schedule(schedule, cost, calls, travel, generations=last + in_flight, in_flight=in_flight)
    ends = sorted(_find_ends(spans))
    return Occupancy(idle_shares, num_counted * latency / (ends[last] - ends[first]))


def _find_ends(spans: Sequence[Span]) -> Iterable[float]:
    """Find the end of each generation."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.generation] = max(ends.get(span.generation, 0.0), span.end)
    return ends.values()


def _compute_unit_cost(schedule: PatchSchedule, op: Op, calls: int) -> float:
    """Return the time of an op if a whole step takes 1 on one rank."""
    if op.kind is not OpKind.COMPUTE:
        return 0.0
    if op.patch is None:
        micro = MicroStep(op.step, None)
        ranks = len(schedule.select_warmup_group(micro)) or schedule.stages
        rows = schedule.split_micro_batches(micro)[op.micro_batch]
        return len(rows) / schedule.batch / (ranks * calls)
    first = schedule.num_references
    if op.patch < first:
        share = schedule.reference_share / first
    else:
        share = (1 - schedule.reference_share) / (schedule.patches - first)
    return share / (schedule.stages * calls)


def bound_speedup(schedule: PatchSchedule, calls: int = 1) -> float:
    """Return the upper bound of the speed-up over one rank, with equal stages and free messages.

    In serial mode with one call it is `S / (W + (S - W) / min(N, M) + (min(N, M) - 1) / (N M))`. With W = 0 and
    M >= N the useful share of the stages' time is the paper's `M S / (M S + N - 1)`.
    """
    return schedule.steps / compute_makespan(schedule, calls)


def compute_makespan(schedule: PatchSchedule, calls: int = 1) -> float:
    """Compute the time of a generation in units of one step on one rank. `simulate_schedule` finds the same with unit
    costs.

    In units of one stage's time for one patch and call, 1 / (N M c), an asynchronous step takes
    max(M c, N - 1 + c): either the stages are busy, or a patch waits for its return. A synchronous step takes 1; in
    micro-batches (or calls) with q as the share of the largest, (1 + (N - 1) q) / N; in a group of R, 1 / R.
    """
    n = schedule.stages
    m = schedule.patches
    c = calls
    steps = range(schedule.steps)
    if schedule.distrifusion > 1:
        num_shorter = sum(not schedule.computes_references(step) for step in steps)
        return (schedule.steps - schedule.reference_share * num_shorter) / schedule.distrifusion
    # The formula does not cover patches that are left out.
    if schedule.num_references:
        return max(span.end for span in simulate_schedule(schedule, calls=calls))
    num_stale = 0
    num_begins = 0
    for step in steps:
        if schedule.reads_stale_keys(step):
            num_stale += 1
            # The pipeline fills again after a synchronous step.
            if step == 0 or not schedule.reads_stale_keys(step - 1):
                num_begins += 1
    period = max(m * c, n - 1 + c)
    asynchronous = num_stale * period + num_begins * (m * c + n - 1 - period)
    return (schedule.steps - num_stale) * _compute_synchronous_time(schedule, c) + asynchronous / (n * m * c)


def _compute_synchronous_time(schedule: PatchSchedule, calls: int) -> float:
    if schedule.warmup_group_size:
        return 1 / schedule.warmup_group_size
    largest = len(schedule.split_micro_batches(MicroStep(0, None))[0]) / schedule.batch / calls
    return (1 + (schedule.stages - 1) * largest) / schedule.stages


_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def render_gantt_chart(schedule: PatchSchedule, steps: int, calls: int) -> str:
    """Render the first `steps` steps as text, with unit costs: a line for each stage, a column for each unit of
    time."""
    num_chunks = len(schedule.split_micro_batches(MicroStep(0, None))) * max(schedule.warmup_group_size, 1)
    # A cell is the longest time that divides the time of each op.
    cell = 1 / (schedule.stages * math.lcm(schedule.patches, num_chunks) * calls)
    spans = []
    for span in simulate_schedule(schedule, calls=calls):
        if span.op.kind is OpKind.COMPUTE and span.op.step < steps:
            spans.append(span)
    width = max(round(span.end / cell) for span in spans)
    rows = [["."] * width for _ in range(schedule.stages)]
    for span in spans:
        patch = span.op.patch
        mark = "=" if patch is None else _LETTERS[patch % len(_LETTERS)]
        for column in range(round(span.start / cell), round(span.end / cell)):
            rows[span.stage][column] = mark
    lines = [f"stage {stage:<2} |{''.join(row)}|" for stage, row in enumerate(rows)]
    legend = "= a whole synchronous step, 0-9.. a patch of an asynchronous one, . idle"
    return "\n".join([f"steps 0 to {steps - 1} ({legend}):", *lines])

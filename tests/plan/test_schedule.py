"""The schedule is data: its time, its messages and the ages of its keys are proved without starting a process."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditile.plan.plan import Plan
from ditile.plan.schedule import SEND_OF_RECEIVE, MicroStep, Op, OpKind, PatchSchedule
from ditile.plan.simulate import Span, bound_speedup, simulate_schedule

UP_TO_8 = range(1, 9)


def end(spans: list[Span]) -> float:
    return max(span.end for span in spans)


def compute_makespan(schedule: PatchSchedule, calls: int = 1) -> float:
    """The time of a generation by a formula, in units of one step on one rank.

    In units of one stage's time for one patch and call, 1 / (N M c), an asynchronous step takes
    max(M c, N - 1 + c): either the stages are busy, or a patch waits for its return. A synchronous step takes 1; in
    micro-batches (or calls) with q as the share of the largest, (1 + (N - 1) q) / N; in a group of R, 1 / R.
    """
    n, m, c = schedule.stages, schedule.patches, calls
    num_stale, num_begins = 0, 0
    for step in range(schedule.steps):
        if schedule.reads_stale_keys(step):
            num_stale += 1
            # The pipeline fills again after a synchronous step.
            num_begins += step == 0 or not schedule.reads_stale_keys(step - 1)
    period = max(m * c, n - 1 + c)
    asynchronous = num_stale * period + num_begins * (m * c + n - 1 - period)
    largest = len(schedule.split_micro_batches(MicroStep(0, None))[0]) / schedule.batch / c
    synchronous = (1 + (n - 1) * largest) / n
    if schedule.warmup_group_size:
        synchronous = 1 / schedule.warmup_group_size
    return (schedule.steps - num_stale) * synchronous + asynchronous / (n * m * c)


@st.composite
def schedules(draw: st.DrawFn, most: int = 5) -> PatchSchedule:
    """Every warmup mode; any later step may be synchronous again."""
    numbers = st.integers(1, most)
    stages, patches, steps = draw(numbers), draw(numbers), draw(numbers)
    mode = draw(st.sampled_from(get_args(get_type_hints(Plan)["warmup_mode"])))
    again = draw(st.frozensets(st.integers(0, steps)))
    options = {"mode": mode, "batch": draw(numbers)}
    return PatchSchedule(stages, patches, steps, draw(st.integers(0, steps)), again=again, **options)


@pytest.mark.parametrize("stages", UP_TO_8)
def test_makespan_is_the_bound(stages: int) -> None:
    """With equal stages, one call and free messages a generation takes, in steps of one rank,

        W + (S - W) / min(N, M) + (min(N, M) - 1) / (N M)    the last term only if S > W and M > 1.

    W steps are serial. Each later one keeps min(N, M) stages busy; the pipe fills once. For M >= N the last term is the
    usual (N - 1) / (N M); with fewer patches than stages it is (M - 1) / (N M), and not (N - 1) / (N M), because the
    first patch is back, after N stages, only when the others have long been started. A failure means that the formula
    that users and the planner see is not what the stages do.
    """
    for patches, steps in itertools.product(UP_TO_8, UP_TO_8):
        for warmup in range(steps + 1):
            schedule = PatchSchedule(stages, patches, steps, warmup)
            busy, is_async = min(stages, patches), steps > warmup and patches > 1
            wanted = warmup + (steps - warmup) / busy + (busy - 1) / (stages * patches) * is_async
            assert compute_makespan(schedule) == pytest.approx(wanted if patches > 1 else steps), schedule
            assert end(simulate_schedule(schedule)) == pytest.approx(compute_makespan(schedule)), schedule
            assert bound_speedup(schedule) == pytest.approx(steps / compute_makespan(schedule))


@settings(deadline=None, max_examples=300)
@given(schedules(), st.integers(1, 3))
def test_makespan_in_every_mode(schedule: PatchSchedule, calls: int) -> None:
    """Micro-batches of unequal size, warmup groups, several calls, and steps that are synchronous again in mid-run."""
    assert end(simulate_schedule(schedule, calls=calls)) == pytest.approx(compute_makespan(schedule, calls))
    assert bound_speedup(schedule) == pytest.approx(schedule.steps / compute_makespan(schedule))


@settings(deadline=None)
@given(schedules(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_deadlock_in_any_order(schedule: PatchSchedule, calls: int, random: object) -> None:
    """Whichever stage gets the next turn, all programs end, on channels that keep order and have no tags.

    Sends never wait for the receiver, as in the executor. A failure means that ranks would hang, or that one would take
    a message for another.
    """
    programs = [deque(schedule.iter_program(stage, calls)) for stage in range(schedule.stages)]
    channels: dict[tuple[OpKind, int | None, int | None], deque[Op]] = defaultdict(deque)

    def is_ready(stage: int) -> bool:
        program = programs[stage]
        if not program or program[0].kind not in SEND_OF_RECEIVE:
            return bool(program)
        return bool(channels[SEND_OF_RECEIVE[program[0].kind], program[0].peer, stage])

    while ready := [stage for stage in range(schedule.stages) if is_ready(stage)]:
        op = programs[stage := random.choice(ready)].popleft()  # type: ignore[attr-defined]
        if op.kind in SEND_OF_RECEIVE.values():
            channels[op.kind, stage, op.peer].append(op)
        elif op.kind in SEND_OF_RECEIVE:
            message = channels[SEND_OF_RECEIVE[op.kind], op.peer, stage].popleft()
            assert name(message) == name(op), f"stage {stage} expects {op} and gets {message}"
    assert not any(programs), f"stages wait at {[program[0] if program else None for program in programs]}"
    assert not any(channels.values()), "messages that nobody takes"


def name(op: Op) -> tuple[int, int, int, int | None]:
    """What tells a message from others of its channel."""
    return op.step, op.branch, op.micro_batch, op.patch


def messages(schedule: PatchSchedule, stage: int, kind: OpKind, calls: int) -> list[tuple[int, int, int, int | None]]:
    return [name(op) for op in schedule.iter_program(stage, calls) if op.kind is kind]


@settings(deadline=None)
@given(schedules(), st.integers(1, 3))
def test_channels_carry_the_same_in_every_mode(schedule: PatchSchedule, calls: int) -> None:
    """M patches per step and branch in patch order, synchronous or not; what one end sends the other one receives.

    So it is for each micro-batch of a pipelined step; there are none where a warmup group computes the step. A failure
    means that receives cannot be posted ahead of what a step decides.
    """
    first, last = 0, schedule.stages - 1
    for stage in range(last):
        sent = messages(schedule, stage, OpKind.SEND, calls)
        assert sent == messages(schedule, stage + 1, OpKind.RECEIVE, calls)
        for step, branch in itertools.product(range(schedule.steps), range(calls)):
            micro = schedule.list_micro_steps(step)[0]
            times = 0 if schedule.select_warmup_group(micro) else len(schedule.split_micro_batches(micro))
            wanted = list(range(schedule.patches)) * times
            assert [m[3] for m in sent if m[:2] == (step, branch)] == wanted
    returned = messages(schedule, last, OpKind.SEND_STEPPED_PATCH, calls)
    assert returned == messages(schedule, first, OpKind.RECEIVE_STEPPED_PATCH, calls)
    steps = range(schedule.steps - 1) if schedule.stages > 1 else range(0)
    assert returned == [(step, 0, 0, patch) for step in steps for patch in range(schedule.patches)]


def test_a_warmup_group_hands_over() -> None:
    """By hand: 3 stages, one synchronous step of two calls before an asynchronous one.

    A failure means that the last stage steps without a prediction.
    """
    schedule = PatchSchedule(3, 2, 2, 1, mode="sequence")
    ops = [[op for op in schedule.iter_step_ops(stage, 0, 2) if op.kind is not OpKind.STEP] for stage in range(3)]
    words = [" ".join(f"{op.kind.value}{op.branch}" for op in of_stage) for of_stage in ops]
    assert words == [
        "compute0 predict0 compute1 predict1",
        "compute0 predict0 compute1 predict1",
        "compute0 collect0 collect0 compute1 collect1 collect1 return0 return0",
    ]


class Impatient(PatchSchedule):
    """Stage 0 wants the patches of the step that it has not begun."""

    def iter_ops_before_call(self, stage: int, micro: MicroStep, calls: int = 1) -> Iterator[Op]:
        for op in super().iter_ops_before_call(stage, micro, calls):
            yield op._replace(step=micro.step)


def test_a_deadlock_is_found() -> None:
    """A failure means that the tests above would find no deadlock either."""
    for stages, patches in ((2, 2), (3, 4), (4, 2)):
        with pytest.raises(RuntimeError, match="deadlock"):
            simulate_schedule(Impatient(stages, patches, 3, 1))


@settings(deadline=None)
@given(schedules())
def test_ages(schedule: PatchSchedule) -> None:
    """Keys are fresh or one step old; the fresh area grows within a step (figure 4); a synchronous one is all fresh."""
    for step in range(schedule.steps):
        fresh_before = 0
        for micro in schedule.list_micro_steps(step):
            ages = schedule.compute_key_ages(micro)
            assert set(ages) <= {0, 1}
            assert len(ages) == schedule.patches
            fresh = ages.count(0)
            assert ages == (0,) * fresh + (1,) * (schedule.patches - fresh)
            assert fresh > fresh_before
            assert fresh == schedule.patches or (micro.patch is not None and fresh == micro.patch + 1)
            fresh_before = fresh
        assert fresh_before == schedule.patches, "a step ends with everything fresh"
        if schedule.is_synchronous(step):
            assert schedule.list_micro_steps(step) == [MicroStep(step, None)]


@settings(deadline=None)
@given(schedules(), st.integers(1, 3))
def test_ages_agree_with_time(schedule: PatchSchedule, calls: int) -> None:
    """On each stage, keys that should be fresh are there before they are read, and stale ones are not yet replaced.

    Micro-batches of one call read their own rows alone. A failure means that the ages assert something that no order of
    work can give.
    """
    when: dict[tuple[int, int, int, int], Span] = {}
    spans = simulate_schedule(schedule, calls=calls)
    computed = [span for span in spans if span.op.kind is OpKind.COMPUTE]
    for span in computed:
        for patch in schedule.list_patches(MicroStep(span.op.step, span.op.patch)):
            when[span.stage, span.op.branch, span.op.step, patch] = span
    for span in computed:
        for patch, age in enumerate(schedule.compute_key_ages(MicroStep(span.op.step, span.op.patch))):
            source = when.get((span.stage, span.op.branch, span.op.step - age, patch))
            if source is None:
                assert span.op.step == 0 and age == 1, "only the first step may read what was never written"
            else:
                assert source.op[1:4] == span.op[1:4] or source.end <= span.start
            if age == 1:
                assert when[span.stage, span.op.branch, span.op.step, patch].start >= span.end


def test_keys_are_kept_only_if_read() -> None:
    """By hand, for 2 of 4 steps synchronous: those of step 0 are not read, those of steps 1 and 2 are."""
    assert [PatchSchedule(2, 3, 4, 2).keeps_keys(step) for step in range(4)] == [False, True, True, False]
    assert not any(PatchSchedule(2, 3, 4, 4).keeps_keys(step) for step in range(4))
    assert not any(PatchSchedule(2, 1, 4, 0).keeps_keys(step) for step in range(4))


def test_two_stages_by_hand() -> None:
    """2 stages, 2 patches, 1 synchronous step and 1 more, as one would draw it."""
    schedule = PatchSchedule(2, 2, 2, 1)
    first = "compute send0 send1 take0 compute0 send0 take1 compute1 send1"
    last = "receive0 receive1 compute step0 return0 step1 return1 receive0 compute0 step0 receive1 compute1 step1"
    for stage, wanted in enumerate((first, last)):
        shown = (f"{op.kind.value}{'' if op.patch is None else op.patch}" for op in schedule.iter_program(stage))
        assert " ".join(shown) == wanted


@settings(deadline=None)
@given(schedules(), st.integers(0, 3), st.integers(1, 3), st.integers(1, 2))
def test_references_are_computed_in_some_steps(schedule: PatchSchedule, every: int, number: int, calls: int) -> None:
    """Ages are what a store would have that notes each write, and every message that is sent is received.

    A failure means that a stage waits for a patch that nobody computes, or that ages of frozen keys are not counted.
    """
    schedule = replace(schedule, references=every, num_references=min(number, schedule.patches - 1))
    written: dict[int, int] = {}
    for step in range(schedule.steps):
        for micro in schedule.list_micro_steps(step):
            written |= dict.fromkeys(schedule.list_patches(micro), step)
            ages = schedule.compute_key_ages(micro)
            assert all(step - written.get(patch, -1) == age for patch, age in enumerate(ages))
        left_out = {patch for patch, at in written.items() if at < step}
        is_fresh = step < schedule.warmup or step in schedule.again or bool(every and step % every == 0)
        assert left_out <= (set() if is_fresh else set(range(schedule.num_references)))
    ops = [span.op for span in simulate_schedule(schedule, calls=calls)]
    for receive, send in SEND_OF_RECEIVE.items():
        assert sum(op.kind is receive for op in ops) == sum(op.kind is send for op in ops)

"""The schedule is data: its time, its messages and the ages of its keys are proved without starting a process."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditile.blocks.schedule import Kind, Op, Schedule, Span, simulate
from ditile.generation import Micro

UP_TO_8 = range(1, 9)


def end(spans: list[Span]) -> float:
    return max(span.end for span in spans)


@st.composite
def schedules(draw: st.DrawFn, most: int = 5) -> Schedule:
    numbers = st.integers(1, most)
    steps = draw(numbers)
    return Schedule(draw(numbers), draw(numbers), steps, draw(st.integers(0, steps)))


@pytest.mark.parametrize("stages", UP_TO_8)
def test_makespan_is_the_bound(stages: int) -> None:
    """With equal stages, one call and a free wire a generation takes, in steps of one rank,

        W + (S - W) / min(N, M) + (min(N, M) - 1) / (N M)    the last term only if S > W and M > 1.

    W steps are serial. Each later one keeps min(N, M) stages busy; the pipe fills once. For M >= N the last term is the
    usual (N - 1) / (N M); with fewer patches than stages it is (M - 1) / (N M), and not (N - 1) / (N M), because the
    first patch is back, after N stages, only when the others have long been started. A failure means that the formula
    that users and the planner see is not what the stages do.
    """
    for patches, steps in itertools.product(UP_TO_8, UP_TO_8):
        for warmup in range(steps + 1):
            schedule = Schedule(stages, patches, steps, warmup)
            busy, is_async = min(stages, patches), steps > warmup and patches > 1
            wanted = warmup + (steps - warmup) / busy + (busy - 1) / (stages * patches) * is_async
            assert schedule.makespan() == pytest.approx(wanted if patches > 1 else steps), schedule
            assert end(simulate(schedule)) == pytest.approx(schedule.makespan()), schedule
            assert schedule.bound() == pytest.approx(steps / schedule.makespan())


@pytest.mark.parametrize("calls", [2, 3])
def test_more_calls_take_no_longer(calls: int) -> None:
    """Branches of a step follow each other through the stages. A failure means that they wait for each other."""
    for stages, patches, warmup in itertools.product(range(1, 5), range(1, 5), range(4)):
        schedule = Schedule(stages, patches, 3, warmup)
        assert end(simulate(schedule, calls=calls)) <= schedule.makespan() + 1e-9, schedule


def test_useful_share_is_the_papers() -> None:
    """Without warmup and with M >= N, the stages compute M S / (M S + N - 1) of the time (arXiv 2405.14430)."""
    for stages, steps in itertools.product(UP_TO_8, UP_TO_8):
        for patches in range(max(stages, 2), 9):
            spans = simulate(Schedule(stages, patches, steps, 0))
            useful = sum(span.end - span.start for span in spans) / (stages * end(spans))
            assert useful == pytest.approx(patches * steps / (patches * steps + stages - 1))


@settings(deadline=None)
@given(schedules(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_deadlock_in_any_order(schedule: Schedule, calls: int, random: object) -> None:
    """Whichever stage gets the next turn, all programs end, on wires that keep order and know no names.

    Sends never wait for the receiver, as in the executor. A failure means that ranks would hang, or that one would take
    a message for another.
    """
    programs = [deque(schedule.program(stage, calls)) for stage in range(schedule.stages)]
    wires: dict[tuple[Kind, int], deque[Op]] = defaultdict(deque)
    receives = {Kind.RECEIVE: Kind.SEND, Kind.TAKE: Kind.RETURN}

    def is_ready(stage: int) -> bool:
        program = programs[stage]
        return bool(program) and (program[0].kind not in receives or bool(wires[receives[program[0].kind], stage]))

    while ready := [stage for stage in range(schedule.stages) if is_ready(stage)]:
        op = programs[stage := random.choice(ready)].popleft()  # type: ignore[attr-defined]
        if op.kind in (Kind.SEND, Kind.RETURN):
            assert op.peer is not None
            wires[op.kind, op.peer].append(op)
        elif op.kind in receives:
            message = wires[receives[op.kind], stage].popleft()
            assert message[1:4] == op[1:4], f"stage {stage} expects {op} and gets {message}"
    assert not any(programs), f"stages wait at {[program[0] if program else None for program in programs]}"
    assert not any(wires.values()), "messages that nobody takes"


@settings(deadline=None)
@given(schedules(), st.integers(1, 3))
def test_simulation_ends(schedule: Schedule, calls: int) -> None:
    """`simulate` raises if stages wait for each other; it runs every op of every stage once, in order."""
    spans = simulate(schedule, calls=calls)
    for stage in range(schedule.stages):
        mine = [span for span in spans if span.stage == stage]
        assert [span.op for span in mine] == list(schedule.program(stage, calls))
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))


def messages(schedule: Schedule, stage: int, kind: Kind, calls: int) -> list[tuple[int, int | None, int]]:
    return [(op.step, op.patch, op.branch) for op in schedule.program(stage, calls) if op.kind is kind]


@settings(deadline=None)
@given(schedules(), st.integers(1, 3))
def test_the_wire_carries_the_same_in_every_mode(schedule: Schedule, calls: int) -> None:
    """M patches per step and branch in patch order, synchronous or not; what one end sends the other one receives.

    A failure means that receives cannot be posted ahead of what a step decides.
    """
    first, last = 0, schedule.stages - 1
    for stage in range(last):
        sent = messages(schedule, stage, Kind.SEND, calls)
        assert sent == messages(schedule, stage + 1, Kind.RECEIVE, calls)
        for step, branch in itertools.product(range(schedule.steps), range(calls)):
            assert [m[1] for m in sent if m[0] == step and m[2] == branch] == list(range(schedule.patches))
    returned = messages(schedule, last, Kind.RETURN, calls)
    assert returned == messages(schedule, first, Kind.TAKE, calls)
    steps = range(schedule.steps - 1) if schedule.stages > 1 else range(0)
    assert returned == [(step, patch, 0) for step in steps for patch in range(schedule.patches)]


class Impatient(Schedule):
    """Stage 0 wants the patches of the step that it has not begun."""

    def before(self, stage: int, micro: Micro) -> Iterator[Op]:
        for op in super().before(stage, micro):
            yield op._replace(step=micro.step)


def test_a_deadlock_is_found() -> None:
    """A failure means that the tests above would find no deadlock either."""
    for stages, patches in ((2, 2), (3, 4), (4, 2)):
        with pytest.raises(RuntimeError, match="deadlock"):
            simulate(Impatient(stages, patches, 3, 1))


@settings(deadline=None)
@given(schedules())
def test_ages(schedule: Schedule) -> None:
    """Keys are fresh or one step old; the fresh area grows within a step (figure 4); a synchronous one is all fresh."""
    for step in range(schedule.steps):
        fresh_before = 0
        for micro in schedule.micros(step):
            ages = schedule.ages(micro)
            assert set(ages) <= {0, 1}
            assert len(ages) == schedule.patches
            fresh = ages.count(0)
            assert ages == (0,) * fresh + (1,) * (schedule.patches - fresh)
            assert fresh > fresh_before
            assert fresh == schedule.patches or (micro.patch is not None and fresh == micro.patch + 1)
            fresh_before = fresh
        assert fresh_before == schedule.patches, "a step ends with everything fresh"
        if step < schedule.warmup:
            assert schedule.micros(step) == [Micro(step, None)]


@settings(deadline=None)
@given(schedules(), st.integers(1, 3))
def test_ages_agree_with_time(schedule: Schedule, calls: int) -> None:
    """On each stage, keys that should be fresh are there before they are read, and stale ones are not yet replaced.

    A failure means that the ages assert something that no order of work can give.
    """
    when: dict[tuple[int, int, int, int], Span] = {}
    computed = [span for span in simulate(schedule, calls=calls) if span.op.kind is Kind.COMPUTE]
    for span in computed:
        for patch in schedule.patches_of(Micro(span.op.step, span.op.patch)):
            when[span.stage, span.op.branch, span.op.step, patch] = span
    for span in computed:
        for patch, age in enumerate(schedule.ages(Micro(span.op.step, span.op.patch))):
            source = when.get((span.stage, span.op.branch, span.op.step - age, patch))
            if source is None:
                assert span.op.step == 0 and age == 1, "only the first step may read what was never written"
            else:
                assert source is span or source.end <= span.start
            if age == 1:
                assert when[span.stage, span.op.branch, span.op.step, patch].start >= span.end


def test_keys_are_kept_only_if_read() -> None:
    """By hand, for 2 of 4 steps synchronous: those of step 0 are not read, those of steps 1 and 2 are."""
    assert [Schedule(2, 3, 4, 2).keeps_keys(step) for step in range(4)] == [False, True, True, False]
    assert not any(Schedule(2, 3, 4, 4).keeps_keys(step) for step in range(4))
    assert not any(Schedule(2, 1, 4, 0).keeps_keys(step) for step in range(4))


def test_two_stages_by_hand() -> None:
    """2 stages, 2 patches, 1 synchronous step and 1 more, as one would draw it."""
    schedule = Schedule(2, 2, 2, 1)
    first = "compute send0 send1 take0 compute0 send0 take1 compute1 send1"
    last = "receive0 receive1 compute step0 return0 step1 return1 receive0 compute0 step0 receive1 compute1 step1"
    for stage, wanted in enumerate((first, last)):
        shown = (f"{op.kind.value}{'' if op.patch is None else op.patch}" for op in schedule.program(stage))
        assert " ".join(shown) == wanted

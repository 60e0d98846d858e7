"""Seconds of one rank's step: the slope between calls with few and more steps, so that nothing else counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ditile.distributed.backend import release_memory, synchronize
from ditile.distributed.mesh import Communicators
from ditile.plan import cost
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.runner.runner import Runner, parallelize
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from ditile_lab.machine.recorded_cases import compare_recorded_calls

WARMUPS = 2
"""Calls that are not timed: kernels are chosen in the first one, and calls are recorded in the second one."""

MakeArguments = Callable[[Any, int], dict[str, Any]]
"""(pipeline, steps) -> new arguments of a call."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCalls:
    """Settings of the measured calls.

    Attributes:
        device: the device that computes them.
        steps: the numbers of steps in a short and in a long call.
        rounds: how often each call is timed; the shortest time counts.
    """

    device: torch.device
    steps: tuple[int, int]
    rounds: int
    make_arguments: MakeArguments

    @property
    def num_between(self) -> int:
        """Return the difference of their steps."""
        return self.steps[1] - self.steps[0]


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """A step of one rank measured alone.

    Attributes:
        recorded: whether its calls of the model should be recorded, and played.
        as_code: why no call was played, although calls should be recorded; empty if some were, or none should be.
        problem: what is wrong with recorded steps; empty if nothing is.
        step_s: the seconds of the step.
        host_s: seconds until the host has started everything; None on a CPU, which is host and device at once.
        device_s: seconds in which kernels run; None on a CPU.
        messages: messages and collectives that it starts.
        sent_bytes: bytes that it would send, by kind.
        call_s: seconds of the short and of the long calls.
    """

    rank: int
    step_s: float
    recorded: bool = False
    as_code: str = ""
    problem: str = ""
    host_s: float | None = None
    device_s: float | None = None
    messages: float = 0.0
    sent_bytes: dict[str, float] = field(default_factory=dict)
    call_s: tuple[list[float], list[float]] = ([], [])


class CallSeconds(NamedTuple):
    """Seconds of a call until the host has started everything, and until the device has finished."""

    host: float
    total: float


def measure_rank(pipe: Any, plan: Plan, rank: int, calls: MeasuredCalls, *, recorded: bool = False) -> RankStep:
    """Measure a step of a plan's rank, with a whole pipeline that is restored on return or error.

    Args:
        recorded: whether calls of the model are recorded, in the untimed calls, and then played.
    """
    messages = LoneMessages(rank, plan.world, calls.device)
    with _run_alone(pipe, plan, messages, calls, recorded=recorded) as runner:
        step = measure_step(lambda steps: runner(**calls.make_arguments(pipe, steps), output_on="first"), calls, rank)
        step = _count_traffic(runner, messages, calls, step)
        if not recorded:
            return step
        step = replace(step, recorded=True, as_code=_explain_code(runner))
    if step.as_code:
        return step
    return replace(step, problem=_find_recording_problem(pipe, plan, messages, calls))


def _find_recording_problem(pipe: Any, plan: Plan, messages: LoneMessages, calls: MeasuredCalls) -> str:
    """Return what is wrong with recorded steps of a rank, by the cases of `ditile verify --recorded`, or nothing."""

    def call_rank(runner: Runner, more: CallArguments) -> Any:
        return runner(**calls.make_arguments(pipe, calls.steps[0]) | more)[0]

    with ExitStack() as stack:

        def make_runner(recorded: bool) -> Runner:
            # There is one runner at a time, so the last one is restored first.
            stack.close()
            runner = stack.enter_context(_run_alone(pipe, plan, messages, calls, recorded=recorded))
            # This makes noise for the longest message. Later calls then receive the same numbers.
            call_rank(runner, {})
            return runner

        cases = compare_recorded_calls(make_runner, call_rank)
    return "; ".join(f"{name}: {says}" for name, is_right, says in cases if not is_right)


@contextmanager
def _run_alone(
    pipe: Any, plan: Plan, messages: LoneMessages, calls: MeasuredCalls, *, recorded: bool
) -> Iterator[Runner]:
    """Yield the runner of one rank of a plan, and restore its pipeline."""
    # Synchronous steps do not count, and stages that share them ask each other for facts that only a block's owner
    # knows.
    if plan.warmup_mode in ("sequence", "auto"):
        plan = replace(plan, warmup_mode="serial")
    with ExitStack() as stack:
        # A plan with one rank runs like in any process.
        if plan.world > 1:
            stack.enter_context(replace_torch_distributed(messages))
        runner = parallelize(pipe, plan, calls.device, keep_weights=True, groups=Communicators(), cuda_graphs=recorded)
        stack.callback(pipe.to, calls.device)
        stack.callback(runner.restore)
        yield runner


def _explain_code(runner: Runner) -> str:
    """Explain why the last call of a recording runner played nothing; empty if it did."""
    report = runner.report
    if report is None or report.recorded is None:
        return "nothing is recorded here"
    if report.recorded.played:
        return ""
    reasons = report.recorded.as_code
    return max(reasons, key=reasons.__getitem__, default="it makes no calls")


def measure_plain(pipe: Any, calls: MeasuredCalls) -> RankStep:
    """Measure a step of the plain pipeline."""
    return measure_step(lambda steps: pipe(**calls.make_arguments(pipe, steps)), calls)


def measure_step(run: Callable[[int], Any], calls: MeasuredCalls, rank: int = 0) -> RankStep:
    """Measure a step from calls with different numbers of steps.

    Args:
        rank: the rank that makes them.
    """
    short, long = calls.steps
    for _ in range(WARMUPS):
        run(short)
    times: dict[int, list[CallSeconds]] = {short: [], long: []}
    # The calls take turns, so that a machine that becomes slower slows both.
    for _ in range(calls.rounds):
        for steps in calls.steps:
            synchronize(calls.device)
            began = time.perf_counter()
            run(steps)
            host = time.perf_counter() - began
            synchronize(calls.device)
            times[steps].append(CallSeconds(host, time.perf_counter() - began))
    short_s = [time.total for time in times[short]]
    long_s = [time.total for time in times[long]]
    step = RankStep(
        rank=rank, step_s=compute_step_seconds(short_s, long_s, calls.num_between), call_s=(short_s, long_s)
    )
    if calls.device.type != "cuda":
        return step
    short_host = [time.host for time in times[short]]
    long_host = [time.host for time in times[long]]
    busy = [_measure_busy_seconds(run, steps, calls.device) for steps in calls.steps]
    return replace(
        step,
        host_s=compute_step_seconds(short_host, long_host, calls.num_between),
        device_s=compute_step_seconds(busy[:1], busy[1:], calls.num_between),
    )


def compute_step_seconds(short: Sequence[float], long: Sequence[float], num_between: int) -> float:
    """Compute the slope between the shortest of the short and of the long calls, which have `num_between` more steps.

    Raises:
        ModelError: if the long ones took no longer.
    """
    slope = (min(long) - min(short)) / num_between
    if slope <= 0:
        raise ModelError(
            f"calls of {num_between} more steps took no longer ({min(short):.3g} and {min(long):.3g} s): give more "
            "--steps, or wait until this machine is quiet"
        )
    return slope


def _measure_busy_seconds(run: Callable[[int], Any], steps: int, device: torch.device) -> float:
    """Return the seconds in which the kernels and copies of a call run on a GPU."""
    # `torch.profiler` cannot be used: it asks torch.distributed for groups that do not exist here.
    profiler = torch.autograd.profiler.profile(use_device=device.type, use_cpu=False, use_kineto=True)
    with profiler:
        run(steps)
        synchronize(device)
    microseconds: float = sum(event.self_device_time_total for event in profiler.key_averages())
    return microseconds / 1e6


def _count_traffic(runner: Runner, messages: LoneMessages, calls: MeasuredCalls, step: RankStep) -> RankStep:
    """Add the step's traffic: the difference between a short and a long call."""
    counted = []
    for steps in calls.steps:
        before = messages.num_messages
        runner(**calls.make_arguments(runner.pipe, steps), output_on="first")
        assert runner.report is not None
        sent = {kind: runner.report.sent.get(kind, 0) for kind in cost.KINDS}
        counted.append((messages.num_messages - before, sent))
    (few, short), (many, long) = counted
    sent_bytes = {}
    for kind in cost.KINDS:
        if long[kind] > short[kind]:
            sent_bytes[kind] = (long[kind] - short[kind]) / calls.num_between
    release_memory()
    return replace(step, messages=(many - few) / calls.num_between, sent_bytes=sent_bytes)

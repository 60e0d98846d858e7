"""Predicts the latency of a plan: simulates the schedule of its stages with counted work, on a measured machine.

    compute      seconds that the busiest stage computes
    exposed      seconds that messages add: ranks wait within a call, and messages between stages travel under work
    bubble       seconds that the busiest stage waits for others even if messages take no time: filling and warmup

The latency of the denoising loop is the sum of the three. A cache leaves out steps; a computed step among them fills
the pipeline anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ditile.plan import cost
from ditile.plan.cost import PlannedCall
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, Op, OpKind, Schedule, Span, simulate_schedule
from ditile.planner.ops import Basis, CacheSkips, OpPricer

ROUNDED = 1e-12
"""Share of a latency by which sums in another order differ."""
STEADY = 3
"""Steps after the warmup that are simulated; all later steps take as long as the last of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a plan is predicted to cost.

    Attributes:
        plan: the plan.
        latency_s: seconds of the denoising loop.
        compute_s: seconds that the busiest stage computes.
        exposed_s: seconds that messages add.
        bubble_s: seconds that the busiest stage waits for others even if messages take no time.
        bytes_per_step: bytes that all ranks send in a step, the mean over the steps.
        memory_bytes: peak memory of the rank that needs most.
        text_s, decode_s: seconds of the text encoders before the loop, and of the decode behind it; 0 where there are
            more than `FEW_STEPS` steps, of which they are a small part.
    """

    plan: Plan
    latency_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    bytes_per_step: float
    memory_bytes: int
    text_s: float = 0.0
    decode_s: float = 0.0

    @property
    def call_s(self) -> float:
        """Seconds of the whole call."""
        return self.text_s + self.latency_s + self.decode_s


@dataclass(frozen=True)
class Pricer(Basis):
    """Prices the calls of one model on one machine."""

    def price_call(self, job: PlannedCall, skips: CacheSkips | None = None, memory_bytes: int = 0) -> Price:
        """The price of a call."""
        run = _Run(self, job, skips or CacheSkips())
        latency, _ = run.simulate_loop(free=False)
        free, compute = run.simulate_loop(free=True)
        bubble = free - compute if free - compute > ROUNDED * free else 0.0
        return Price(
            plan=job.plan,
            latency_s=latency,
            compute_s=compute,
            exposed_s=latency - free,
            bubble_s=bubble,
            bytes_per_step=run.count_sent_bytes() / job.shape.steps,
            memory_bytes=memory_bytes,
        )

    def predict_latency(self, job: PlannedCall) -> float:
        """The latency of a price, without the rest of it."""
        return _Run(self, job, CacheSkips()).simulate_loop(free=False)[0]

    def estimate_latency(self, job: PlannedCall, skips: CacheSkips | None = None, most: float = math.inf) -> float:
        """Seconds of the loop by a formula and not by simulation; the search sorts plans by them.

        The count stops above `most`; the latency is then at least what is returned.
        """
        return _Run(self, job, skips or CacheSkips()).estimate_latency(most)


class _Hop(NamedTuple):
    """Seconds for which a message occupies its sender, and seconds on its way."""

    seconds: float
    travel: float


class _Run:
    """One call under one plan."""

    def __init__(self, basis: Basis, job: PlannedCall, skips: CacheSkips) -> None:
        self._ops = OpPricer(basis, job, skips)
        self._job = job
        self._schedule = self._ops.op_schedule

    def simulate_loop(self, *, free: bool) -> tuple[float, float]:
        """Seconds of the loop, and those that its busiest stage works; with `free`, messages take no time."""
        schedule = self._schedule
        steps = self._job.shape.steps
        # Which steps compute references depends on their number.
        is_steady = not self._ops.skips.steps and not (schedule.num_references and schedule.references)
        shown = min(steps, schedule.warmup + STEADY) if is_steady else steps
        spans = simulate_schedule(
            replace(schedule, steps=shown),
            lambda stage, op: self._ops.get_op_seconds(stage, op, free=free),
            self._job.count_calls_in_step,
            lambda stage, op: 0.0 if free else self._ops.get_travel_seconds(stage, op),
        )
        ends = _find_step_ends(spans, shown)
        tail = ends[-1] - ends[-2] if shown > 1 else ends[-1]
        busy = [0.0] * schedule.stages
        for span in spans:
            busy[span.stage] += (span.end - span.start) * (1 + steps - shown if span.op.step == shown - 1 else 1)
        return ends[-1] + (steps - shown) * tail, max(busy)

    def count_sent_bytes(self) -> int:
        """Bytes that all ranks send in the whole call. Steps of one kind send the same, as do most stages."""
        job = self._job
        plan = self._job.plan
        schedule = self._schedule
        last = self._job.shape.steps - 1
        kinds: dict[tuple[bool, ...], list[int]] = {}
        for step in range(last + 1):
            kind = (
                schedule.reads_stale_keys(step),
                schedule.keeps_keys(step),
                schedule.computes_references(step),
                step == 0,
                step == last,
            )
            kinds.setdefault(kind, []).append(step)
        inner = plan.world // (plan.data * plan.cfg * plan.pipefusion)
        total = 0
        alike = list(range(plan.pipefusion)) if schedule.warmup_group_size else self._ops.first_alike_stages
        for rank in range(plan.world):
            stage = rank // inner % plan.pipefusion
            if alike[stage] == stage:
                for steps in kinds.values():
                    in_step = sum(cost.count_traffic_in_step(job, rank, steps[0]).values())
                    total += alike.count(stage) * len(steps) * in_step
        return total

    def estimate_latency(self, most: float) -> float:
        """Seconds of the loop by the formula of `Schedule.compute_makespan`, from the first and the last patch alone.

        It exceeds the simulation by less than a hundredth, which `search` relies on.
        """
        schedule = self._schedule
        steps = self._job.shape.steps
        if schedule.num_references:  # steps are of unlike patches, for which there is no formula
            return self.simulate_loop(free=False)[0]
        kinds = _group_alike_steps(
            schedule, self._ops.skips.steps, self._job.count_calls_in_step(0) == self._job.count_calls_in_step(1)
        )
        total = 0.0
        warm = sum(len(alike) for is_stale, alike in kinds if not is_stale)
        for is_stale, alike in kinds:
            if total > most:
                return total
            # The first step of the loop has more to do, so the second step of a kind is counted for all.
            like = alike[min(1, len(alike) - 1)]
            if is_stale:
                total += len(alike) * self._estimate_asynchronous_step(like, (most - total) / len(alike))
            else:
                total += len(alike) * self._estimate_synchronous_step(like)
        if self._job.plan.pipefusion > 1:
            total += min(warm, steps - 1) * self._ops.get_travel_seconds(
                self._job.plan.pipefusion - 1, Op(OpKind.SEND_STEPPED_PATCH, 0, 0)
            )
        return total + (self._estimate_drain_time(steps - 1) if schedule.reads_stale_keys(steps - 1) else 0.0)

    def _estimate_synchronous_step(self, step: int) -> float:
        """Seconds of a synchronous step, without the way of its patches back to the first stage."""
        schedule = self._schedule
        last = self._job.plan.pipefusion - 1
        calls = self._job.count_calls_in_step(step)
        op = Op(OpKind.COMPUTE, step, None)
        stepped = self._ops.get_op_seconds(last, Op(OpKind.STEP, 0, None), free=False)
        patches = self._num_patches
        num_micro_batches = len(schedule.split_micro_batches(MicroStep(0, None))) * calls
        hops, back = self._list_patch_hops(step, patches - 1)
        if schedule.warmup_group_size:
            return (
                calls * self._compute_mean_seconds(0, op)
                + self._estimate_warmup_messages(step)
                + stepped
                + patches * back.seconds
            )
        whole = self._list_stage_seconds(op)
        one = sum(whole) + sum(patches * hop.seconds for hop in hops) + (num_micro_batches - 1) * max(whole)
        return calls * one / num_micro_batches + sum(hop.travel for hop in hops) + stepped + patches * back.seconds

    def _estimate_warmup_messages(self, step: int) -> float:
        """Seconds of a warmup group's messages: keys to others, predictions to the last stage, latents to members."""
        schedule = self._schedule
        last = self._job.plan.pipefusion - 1
        calls = self._job.count_calls_in_step(step)
        given = last + 1 - schedule.warmup_group_size if schedule.keeps_keys(step) else 0
        op = Op(OpKind.SEND_PREDICTION, step, None)
        # Stage 0 is counted for all senders: it is in every warmup group, and never the last stage.
        message_seconds = calls * self._ops.get_op_seconds(0, op, free=False) + self._ops.get_travel_seconds(0, op)
        if given:
            message_seconds += calls * given * self._ops.get_op_seconds(0, Op(OpKind.SEND_KEYS, step, None), free=False)
        others = sum(0 < member < last for member in range(schedule.warmup_group_size))
        if others and step + 1 < self._job.shape.steps and not schedule.reads_stale_keys(step + 1):
            latents = Op(OpKind.SEND_WHOLE_LATENTS, step, None)
            message_seconds += others * self._ops.get_op_seconds(last, latents, free=False)
        return message_seconds

    def _estimate_asynchronous_step(self, step: int, most: float) -> float:
        """Seconds from one asynchronous step to the next: either a stage is busy, or a patch waits for its return.

        If the seconds in which the first stage is busy are above `most`, only these are counted.
        """
        calls = self._job.count_calls_in_step(step)
        patches = self._num_patches
        ops = [Op(OpKind.COMPUTE, step, self._select_patch(patch)) for patch in (0, patches - 1)]
        # Without messages first: they take longest to count, and most plans are too slow without any.
        for free in (True, False):
            alone = calls * (
                self._compute_mean_seconds(0, ops[0], free=free)
                + (patches - 1) * self._compute_mean_seconds(0, ops[1], free=free)
            )
            if alone > most:
                return alone
        first = self._list_patch_seconds(step, 0)
        other = self._list_patch_seconds(step, patches - 1)
        hops, back = self._list_patch_hops(step, patches - 1)
        step_op = Op(OpKind.STEP, step, self._select_patch(0))
        stepped = self._ops.get_op_seconds(self._job.plan.pipefusion - 1, step_op, free=False)
        sends = [calls * hop.seconds for hop in hops] + [stepped + back.seconds]
        busy = [calls * (one + (patches - 1) * each) for one, each in zip(first, other, strict=True)]
        ways = [
            sum(each) + sum(hop.seconds + hop.travel for hop in of_patch) + (calls - 1) * max(each)
            for each, of_patch in ((first, self._list_patch_hops(step, 0)[0]), (other, hops))
        ]
        round_trip = max(ways) + stepped + back.seconds + back.travel
        return max(*(work + patches * send for work, send in zip(busy, sends, strict=True)), round_trip)

    def _estimate_drain_time(self, step: int) -> float:
        """Seconds in which the last patch of the loop goes through the stages behind the busiest one."""
        last = self._num_patches - 1
        each = self._list_patch_seconds(step, last)
        hops = self._list_patch_hops(step, last)[0]
        return sum(each) + sum(hop.seconds + hop.travel for hop in hops) - max(each)

    @property
    def _num_patches(self) -> int:
        """Patches of an asynchronous step."""
        plan = self._job.plan
        return plan.num_patches if plan.distrifusion == 1 else 1

    def _select_patch(self, patch: int) -> int | None:
        return patch if self._job.plan.distrifusion == 1 else None

    def _list_patch_seconds(self, step: int, patch: int) -> list[float]:
        return self._list_stage_seconds(Op(OpKind.COMPUTE, step, self._select_patch(patch)))

    def _list_patch_hops(self, step: int, patch: int) -> tuple[list[_Hop], _Hop]:
        """A patch's messages: from each stage to the next, and from the last one back to the first."""
        last = self._job.plan.pipefusion - 1
        if not last:
            return [], _Hop(0.0, 0.0)
        ops = [
            *((stage, Op(OpKind.SEND, step, patch)) for stage in range(last)),
            (last, Op(OpKind.SEND_STEPPED_PATCH, step, patch)),
        ]
        hops = [
            _Hop(self._ops.get_op_seconds(stage, op, free=False), self._ops.get_travel_seconds(stage, op))
            for stage, op in ops
        ]
        return hops[:-1], hops[-1]

    def _list_stage_seconds(self, op: Op) -> list[float]:
        """Seconds of a call on every stage."""
        alike = self._ops.first_alike_stages
        seconds_of_stage = {stage: self._compute_mean_seconds(stage, op) for stage in set(alike)}
        return [seconds_of_stage[stage] for stage in alike]

    def _compute_mean_seconds(self, stage: int, op: Op, *, free: bool = False) -> float:
        """Mean seconds of a step's calls on a stage; the first call has more to do than the others."""
        calls = self._job.count_calls_in_step(op.step)
        first = self._ops.get_op_seconds(stage, op, free=free)
        others = self._ops.get_op_seconds(stage, op._replace(branch=1), free=free) if calls > 1 else 0.0
        return (first + (calls - 1) * others) / calls


@lru_cache(maxsize=1024)
def _group_alike_steps(
    schedule: Schedule, skipped_steps: frozenset[int], even: bool
) -> Sequence[tuple[bool, Sequence[int]]]:
    """(whether they are stale, the steps) for each group of steps that are alike, the largest group first.

    Args:
        schedule: that of a plan; many plans have the same, so the result is cached.
        skipped_steps: steps that a cache leaves out.
        even: whether the first step has as many calls as the others.
    """
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}
    for step in range(schedule.steps):
        kinds.setdefault((schedule.reads_stale_keys(step), step in skipped_steps, even or step > 0), []).append(step)
    return sorted(((kind[0], alike) for kind, alike in kinds.items()), key=lambda each: -len(each[1]))


def _find_step_ends(spans: list[Span], steps: int) -> list[float]:
    """When the scheduler has stepped the last patch of each step."""
    ends = [0.0] * steps
    for span in spans:
        if span.op.kind is OpKind.STEP:
            ends[span.op.step] = max(ends[span.op.step], span.end)
    return ends

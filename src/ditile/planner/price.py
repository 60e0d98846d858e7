"""Predicts the latency of a plan: simulates the schedule of its stages with counted work, on a measured machine.

    compute      seconds that the busiest stage computes
    exposed      seconds that messages add: ranks wait for those within a call; those between stages overlap with work
    bubble       seconds that the busiest stage waits for others even if messages take no time: filling and warmup

The latency of the denoising loop is the sum of the three. A cache leaves out steps, and each computed step after them
fills the pipeline again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ditile.plan import cost
from ditile.plan.cost import PlannedCall
from ditile.plan.plan import Plan
from ditile.plan.schedule import Op, OpKind
from ditile.plan.simulate import Span, simulate_schedule
from ditile.planner.ops import NO_SKIPS, CacheSkips, MachineWork, OpPricer, UnlikeOpPricer

ROUNDED = 1e-12
"""Share of a latency by which sums in another order may differ."""
STEADY = 3
"""Simulated steps after the warmup. All later steps take the time of the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The predicted cost of a plan.

    Attributes:
        latency_s: seconds of the denoising loop.
        compute_s: seconds that the busiest stage computes.
        exposed_s: seconds that messages add.
        bubble_s: seconds that the busiest stage waits for others even if messages take no time.
        bytes_per_step: bytes that all ranks send in a step, the mean over the steps.
        memory_bytes: peak memory of the rank that needs most.
        is_recorded: whether its steps are recorded as CUDA graphs.

        text_s, decode_s: seconds of the text encoders before the loop, and of the decode after it; 0 with more than
            `FEW_STEPS` steps, since they are a small part then.
    """

    plan: Plan
    latency_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    bytes_per_step: float
    memory_bytes: int
    is_recorded: bool = False

    text_s: float = 0.0
    decode_s: float = 0.0

    @property
    def call_s(self) -> float:
        """Return the seconds of the whole call."""
        return self.text_s + self.latency_s + self.decode_s


@dataclass(frozen=True)
class Pricer(MachineWork):
    """Prices the calls of one model on one machine."""

    def make_op_pricer(self, job: PlannedCall, skips: CacheSkips) -> OpPricer:
        """Make the pricer for the ops of a call. Raises `PlanError` if the devices of some ranks are not known."""
        self.profile.check_rank_count(job.plan.world)
        works = self._work_of_ranks
        # Ranks with alike devices and unlike shares differ too.
        if not works and job.plan.has_unlike_ranks:
            works = [self] * job.plan.world
        if works and job.plan.world > 1:
            return UnlikeOpPricer(works, job, skips)
        return OpPricer(self, job, skips)

    @cached_property
    def _work_of_ranks(self) -> Sequence[MachineWork]:
        """Return the model's work on the device of each rank; empty if all devices are alike."""
        devices = self.profile.by_rank
        works: list[MachineWork] = []
        for rank, device in enumerate(devices):
            # Ranks with equal devices share one object, and with it the seconds that were computed before.
            first_alike = devices.index(device)
            if first_alike < rank:
                works.append(works[first_alike])
                continue
            profile = self.profile.get_rank_profile(rank)
            works.append(
                MachineWork(self.transformer_work, profile, self.text_tokens, self.host, self.records, self.stored)
            )
        return works

    def price_call(self, job: PlannedCall, skips: CacheSkips = NO_SKIPS, memory_bytes: int = 0) -> Price:
        """Compute the price of a call."""
        ops = self.make_op_pricer(job, skips)
        latency, _ = _simulate_loop(ops, free=False)
        free, compute = _simulate_loop(ops, free=True)
        # Sums in another order differ in the last bits. These differences are not bubbles.
        bubble = free - compute
        if bubble <= ROUNDED * free:
            bubble = 0.0
        # Steps of one kind send the same bytes, and so do stages that are alike, so one of each is counted.
        last = job.shape.steps - 1
        steps_by_kind: dict[tuple[Any, ...], list[int]] = {}
        for step, kind in enumerate(ops.step_kinds):
            # Only the last step sends no latents to the first stage.
            steps_by_kind.setdefault((kind, step == last), []).append(step)
        first_alike = ops.first_alike_stages
        if ops.schedule.warmup_group_size:
            first_alike = list(range(job.plan.pipefusion))
        sent = 0
        for rank in range(job.plan.world):
            stage = rank // job.ranks_of_stage % job.plan.pipefusion
            if first_alike[stage] != stage:
                continue
            for steps in steps_by_kind.values():
                traffic = cost.count_traffic_in_step(job, rank, steps[0])
                sent += first_alike.count(stage) * len(steps) * sum(traffic.values())
        return Price(
            plan=job.plan,
            latency_s=latency,
            compute_s=compute,
            exposed_s=latency - free,
            bubble_s=bubble,
            bytes_per_step=sent / job.shape.steps,
            memory_bytes=memory_bytes,
            is_recorded=ops.records,
        )

    def predict_latency(self, job: PlannedCall, skips: CacheSkips = NO_SKIPS) -> float:
        """Predict the latency of a call, without the rest of its price."""
        latency, _ = _simulate_loop(self.make_op_pricer(job, skips), free=False)
        return latency

    def bound_latency(self, job: PlannedCall, skips: CacheSkips = NO_SKIPS) -> float:
        """Return the seconds the busiest stage is occupied. The loop takes at least as long, however stages wait."""
        return max(self._sum_stage_seconds(job, skips).values())

    def find_busiest_stage(self, job: PlannedCall, skips: CacheSkips = NO_SKIPS) -> int:
        """Return the stage occupied longest. Of alike ones, it is the first."""
        seconds = self._sum_stage_seconds(job, skips)
        return max(seconds, key=seconds.__getitem__)

    def _sum_stage_seconds(self, job: PlannedCall, skips: CacheSkips) -> dict[int, float]:
        """Sum the seconds each stage is occupied. Stages that are alike have one entry, under the first of them."""
        ops = self.make_op_pricer(job, skips)
        # Steps of one kind have the same work, and so have stages that are alike.
        steps_by_kind: dict[tuple[tuple[bool, ...], int], list[int]] = {}
        for step, kind in enumerate(ops.step_kinds):
            steps_by_kind.setdefault((kind, job.count_calls_in_step(step)), []).append(step)
        seconds_by_stage = {}
        for stage in set(ops.first_alike_stages):
            occupied = 0.0
            for (_, calls), steps in steps_by_kind.items():
                step_ops = ops.schedule.iter_step_ops(stage, steps[0], calls)
                occupied += len(steps) * sum(ops.get_op_seconds(stage, op, free=False) for op in step_ops)
            seconds_by_stage[stage] = occupied
        return seconds_by_stage


def _simulate_loop(ops: OpPricer, *, free: bool) -> tuple[float, float]:
    """Simulate the loop. Return its seconds, and those its busiest stage works. With `free`, messages take no time."""
    steps = ops.job.shape.steps
    simulated, spans = simulate_steps(ops, free=free)
    ends = find_step_ends(spans, simulated)
    last_step_seconds = ends[-1]
    if simulated > 1:
        last_step_seconds -= ends[-2]
    busy = [0.0] * ops.schedule.stages
    for span in spans:
        seconds = span.end - span.start
        # The last step that is simulated stands for all later ones.
        if span.op.step == simulated - 1:
            seconds *= 1 + steps - simulated
        busy[span.stage] += seconds
    return ends[-1] + (steps - simulated) * last_step_seconds, max(busy)


def simulate_steps(ops: OpPricer, *, free: bool) -> tuple[int, list[Span]]:
    """Return the number of simulated steps, and their ops."""
    schedule = ops.schedule
    # Whether a step computes references or is skipped depends on its number, so no step stands for the others.
    is_steady = not ops.skips.steps and not (schedule.num_references and schedule.references)
    steps = ops.job.shape.steps
    simulated = min(steps, schedule.warmup + STEADY) if is_steady else steps

    def get_travel_seconds(stage: int, op: Op) -> float:
        return 0.0 if free else ops.get_travel_seconds(stage, op)

    spans = simulate_schedule(
        replace(schedule, steps=simulated),
        lambda stage, op: ops.get_op_seconds(stage, op, free=free),
        ops.job.count_calls_in_step,
        get_travel_seconds,
    )
    return simulated, spans


def find_step_ends(spans: list[Span], steps: int) -> list[float]:
    """Return the time at which the scheduler has denoised the last patch of each step."""
    ends = [0.0] * steps
    for span in spans:
        if span.op.kind is OpKind.STEP:
            ends[span.op.step] = max(ends[span.op.step], span.end)
    return ends

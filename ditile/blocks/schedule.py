"""The schedule of PipeFusion as data: what each stage does, in order (arXiv 2405.14430, section 3.4, figures 3 and 4).

A step is synchronous (the whole image at once, exact) or asynchronous (patch by patch, keys and values of the patches
that are still to come taken from the step before). One unit of the pipeline's loop is a `Micro`: a whole synchronous
step, or one patch of an asynchronous one. `before`, `call` and `after` say what a stage does around it; the executor
runs these, `simulate` prices them, and a test proves them free of deadlock without starting a process.

The wire carries the same messages in every mode: M patches per step and branch, in patch order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ditile.generation import Micro
from ditile.plan import Plan


class Kind(Enum):
    """What an `Op` does."""

    RECEIVE = "receive"  # activations of a patch, from the stage before
    COMPUTE = "compute"  # the stage's own blocks, on a patch or on the whole image (patch None)
    SEND = "send"  # activations of a patch, to the stage behind
    STEP = "step"  # the scheduler, on a patch (last stage)
    RETURN = "return"  # the stepped patch, from the last stage to the first
    TAKE = "take"  # the stepped patch of the step before, on the first stage


class Op(NamedTuple):
    """One thing that one stage does. `branch` is the transformer call within the step; `peer` the other stage."""

    kind: Kind
    step: int
    patch: int | None
    branch: int = 0
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """N stages, M patches, S steps, the first W of them synchronous.

    With `distrifusion` patches, one per rank, an asynchronous step is one micro-step on every rank.
    """

    stages: int
    patches: int
    steps: int
    warmup: int
    distrifusion: int = 1

    @classmethod
    def of(cls, plan: Plan, steps: int) -> Schedule:
        """The schedule of a plan over some steps."""
        return cls(plan.pipefusion, plan.num_patches, steps, min(plan.least_warmup, steps), plan.distrifusion)

    def synchronous(self, step: int) -> bool:
        """Whether nothing is stale in a step. With one patch nothing can be."""
        return step < self.warmup or self.patches * self.distrifusion == 1

    def is_stale(self, step: int) -> bool:
        """Whether keys of the step before are read in a step."""
        return not self.synchronous(step)

    def keeps_keys(self, step: int) -> bool:
        """Whether keys and values of a step are read in the next one."""
        return step + 1 < self.steps and self.is_stale(step + 1)

    def micros(self, step: int) -> list[Micro]:
        """The iterations of the pipeline's loop that make up a step."""
        if self.synchronous(step) or self.distrifusion > 1:
            return [Micro(step, None)]
        return [Micro(step, patch) for patch in range(self.patches)]

    def patches_of(self, micro: Micro) -> range:
        """The patches that a micro-step computes."""
        return range(self.patches) if micro.patch is None else range(micro.patch, micro.patch + 1)

    def closes(self, micro: Micro) -> bool:
        """Whether a micro-step is the last of its step."""
        return micro.patch is None or micro.patch == self.patches - 1

    def ages(self, micro: Micro) -> tuple[int, ...]:
        """The age in steps of each patch's keys while a micro-step attends: 0 fresh, 1 from the step before.

        The fresh area grows within a step, as in figure 4 of the paper. Every stage and branch sees the same ages.
        """
        last = self.patches - 1 if micro.patch is None else micro.patch
        return tuple(int(patch > last) for patch in range(self.patches))

    def before(self, stage: int, micro: Micro) -> Iterator[Op]:
        """What a stage does before the transformer is called: the first one takes the stepped patches."""
        if stage == 0 and self.stages > 1 and micro.step > 0:
            for patch in self.patches_of(micro):
                yield Op(Kind.TAKE, micro.step - 1, patch, peer=self.stages - 1)

    def call(self, stage: int, micro: Micro, branch: int) -> Iterator[Op]:
        """What a stage does in one call of the transformer."""
        if stage > 0:
            for patch in self.patches_of(micro):
                yield Op(Kind.RECEIVE, micro.step, patch, branch, stage - 1)
        yield Op(Kind.COMPUTE, micro.step, micro.patch, branch)
        if stage < self.stages - 1:
            for patch in self.patches_of(micro):
                yield Op(Kind.SEND, micro.step, patch, branch, stage + 1)

    def after(self, stage: int, micro: Micro) -> Iterator[Op]:
        """What a stage does when the scheduler steps: the last one steps and returns the patches to the first."""
        if stage < self.stages - 1:
            return
        for patch in self.patches_of(micro):
            yield Op(Kind.STEP, micro.step, patch)
            if self.stages > 1 and micro.step < self.steps - 1:
                yield Op(Kind.RETURN, micro.step, patch, peer=0)

    def step_ops(self, stage: int, step: int, calls: int = 1, branches: Sequence[int] | None = None) -> Iterator[Op]:
        """All that a stage does in a step of `calls` transformer calls, or of those of them that `branches` names."""
        for micro in self.micros(step):
            yield from self.before(stage, micro)
            for branch in range(calls) if branches is None else branches:
                yield from self.call(stage, micro, branch)
            yield from self.after(stage, micro)

    def program(self, stage: int, calls: int = 1) -> Iterator[Op]:
        """All that a stage does in a generation."""
        for step in range(self.steps):
            yield from self.step_ops(stage, step, calls)

    def bound(self) -> float:
        """The speed-up over one rank that no implementation exceeds, with equal stages and a free wire.

        `S / (W + (S - W) / min(N, M) + (min(N, M) - 1) / (N M))`. With W = 0 and M >= N the useful share of the
        stages' time is the paper's `M S / (M S + N - 1)`.
        """
        return self.steps / self.makespan()

    def makespan(self) -> float:
        """The time of a generation in units of one step on one rank; `simulate` with unit costs gives the same."""
        n, m, s = self.stages, self.patches, self.steps
        if self.distrifusion > 1:
            return s / self.distrifusion
        w = s if m == 1 else min(self.warmup, s)
        busy = min(n, m)
        return w + (s - w) / busy + (busy - 1) / (n * m) * (s > w)


class Span(NamedTuple):
    """An `Op` on a stage with its start and end, in the unit of the costs."""

    stage: int
    op: Op
    start: float
    end: float


def simulate(schedule: Schedule, cost: Callable[[int, Op], float] | None = None, calls: int = 1) -> list[Span]:
    """Runs the programs of all stages against each other, each message free and as early as it can be.

    Args:
        schedule: the schedule.
        cost: the time of an op on a stage; by default a whole step takes 1 on one rank, divided evenly, all else 0.
        calls: transformer calls per step.

    Raises:
        RuntimeError: if the stages wait for each other for ever.
    """
    price = cost or (lambda stage, op: _unit_cost(schedule, op, calls))
    programs = [deque(schedule.program(stage, calls)) for stage in range(schedule.stages)]
    clocks, sent, spans = [0.0] * schedule.stages, dict[tuple[str, int, int, int | None, int], float](), list[Span]()
    while any(programs):
        moved = False
        for stage, program in enumerate(programs):
            while program and (arrival := _arrival(sent, stage, program[0])) is not None:
                op = program.popleft()
                start = max(clocks[stage], arrival)
                clocks[stage] = start + price(stage, op)
                spans.append(Span(stage, op, start, clocks[stage]))
                if op.kind in (Kind.SEND, Kind.RETURN) and op.peer is not None:
                    sent[(op.kind.value, op.peer, op.step, op.patch, op.branch)] = clocks[stage]
                moved = True
        if not moved:
            raise RuntimeError(f"deadlock: stages wait at {[p[0] if p else None for p in programs]}")
    return spans


def _arrival(sent: dict[tuple[str, int, int, int | None, int], float], stage: int, op: Op) -> float | None:
    """When what an op waits for is there; None if it was not sent yet."""
    sender = {Kind.RECEIVE: Kind.SEND, Kind.TAKE: Kind.RETURN}.get(op.kind)
    return 0.0 if sender is None else sent.get((sender.value, stage, op.step, op.patch, op.branch))


def _unit_cost(schedule: Schedule, op: Op, calls: int) -> float:
    if op.kind is not Kind.COMPUTE:
        return 0.0
    return 1 / (schedule.stages * calls * (1 if op.patch is None else schedule.patches))

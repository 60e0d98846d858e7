"""Seconds of each op of a schedule: what a stage computes in a micro-step, what its ranks exchange, what it sends on.

Work that was counted (`kernels`) takes what the machine takes for it (`seconds`); messages go over the links that an
axis crosses (`links`). `price` puts the ops one behind the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ditile.parallel.pipefusion.weight_streaming import AHEAD
from ditile.plan import cost
from ditile.plan.cost import Job, Place
from ditile.plan.schedule import Kind, Micro, Op, Schedule
from ditile.planner.kernel_times import Counted, Mix, Work
from ditile.planner.links import Together, crossed, crowd, exposed, of_crew, share
from ditile.planner.profile import FUSED, Link, Profile
from ditile.planner.seconds import Device, Load, Tokens, together

TOKENS = ("ring", "distrifusion", "ulysses")
"""Axes that share out tokens, over all of which the prediction is gathered; the outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a cache is expected to leave out.

    Attributes:
        steps: those whose blocks do not run.
        first, last: blocks that run all the same: its probe and its tail.
    """

    steps: frozenset[int] = frozenset()
    first: int = 1
    last: int = 0

    def may(self, block: int, blocks: int) -> bool:
        """Whether a block of so many does not run in those steps."""
        return self.first <= block < blocks - self.last


@dataclass(frozen=True)
class Basis:
    """One model on one machine, with what is remembered of its work.

    Attributes:
        counted: the model's work.
        profile: the machine.
        words: tokens of text that cross attention sees, which are not in the sequence.
        host: ranks that fill a host, one host after the other; None where all are in one.
    """

    counted: Counted
    profile: Profile
    words: int = 0
    host: int | None = None
    _loads: dict[tuple[int, tuple[float, ...]], Load] = field(default_factory=dict)
    _attends: dict[int, bool] = field(default_factory=dict)
    _attentions: dict[range, Work] = field(default_factory=dict)
    _alike: dict[range, frozenset[Any]] = field(default_factory=dict)
    _mixes: dict[tuple[range, Left | None], Mix] = field(default_factory=dict)

    def attention(self, blocks: range) -> Work:
        """The attention of some blocks."""
        if blocks not in self._attentions:
            every = together([self.counted.blocks[block] for block in blocks])
            self._attentions[blocks] = {kernel: n for kernel, n in every.items() if kernel.kind == "attention"}
        return self._attentions[blocks]

    def alike(self, blocks: range) -> frozenset[Any]:
        """What tells some blocks from others with other work."""
        if blocks not in self._alike:
            counted = self.counted
            work = Counter((id(counted.blocks[block]), id(counted.block_steps[block])) for block in blocks)
            self._alike[blocks] = frozenset(work.items())
        return self._alike[blocks]

    def mix(self, blocks: range, left: Left | None) -> Mix:
        """The work of some blocks, of which a cache leaves some out."""
        if (blocks, left) not in self._mixes:
            runs = [0.0 if left and left.may(block, len(self.counted.blocks)) else 1.0 for block in blocks]
            self._mixes[blocks, left] = self.counted.mix(blocks, runs)
        return self._mixes[blocks, left]

    def work(self, key: int, work: Work, tokens: Tokens) -> Load:
        """Seconds of some work, remembered by what it is, and by what tokens it depends on."""
        if key not in self._attends:
            self._attends[key] = any(kernel.kind == "attention" for kernel in work)
        known = key, tokens if self._attends[key] else tokens[:3] + (tokens.split, tokens.fused)
        if known not in self._loads:
            self._loads[known] = self.device.load(work, tokens)
        return self._loads[known]

    @cached_property
    def device(self) -> Device:
        """Of the machine."""
        return Device(self.profile)


class StepKind(NamedTuple):
    """What steps with the same work and messages share."""

    first: bool
    stale: bool
    keeps: bool
    left: bool


class Ops:
    """Seconds of the ops of one call under one plan, each kind of them priced once.

    Args:
        basis: the model and the machine.
        job: the plan and the call.
        left: what a cache leaves out.
    """

    def __init__(self, basis: Basis, job: Job, left: Left) -> None:
        self._basis, self.job, self.left = basis, job, left
        self._profile = basis.profile
        self._places = [Place(0, 0, stage, 0, 0, 0, 0) for stage in range(job.plan.pipefusion)]
        self._host = min(job.plan.world, basis.host or job.plan.world)
        self._crowd = crowd(basis.profile, self._host)
        self._fuses = FUSED in basis.profile.pointwise
        self._seen: dict[Any, float] = {}
        self._links: dict[str, Link] = {}

    @cached_property
    def schedule(self) -> Schedule:
        """Of the job."""
        return self.job.schedule

    @cached_property
    def like(self) -> list[int]:
        """Of each stage, the first one that has the same to do."""
        found: list[int] = []
        seen: dict[Any, int] = {}
        last = self.job.plan.pipefusion - 1
        for stage, blocks in enumerate(self.job.stages):
            left = sum(map(self._may_be_left, blocks)) if self.left.steps else 0
            what = (self._basis.alike(blocks), left, stage == 0, stage == last, stage < self.schedule.crew)
            found.append(seen.setdefault(what, stage))
        return found

    def cost(self, stage: int, op: Op, *, free: bool) -> float:
        """Seconds that an op takes of its stage; `free`: with messages that take no time."""
        stage = self.like[stage]
        key = (stage, op.kind, self.kinds[op.step], op.patch, op.branch == 0, op.piece, free)
        seconds = self._seen.get(key)
        if seconds is None:
            seconds = self._seen[key] = self._priced(stage, op, free=free)
        return seconds

    @cached_property
    def kinds(self) -> Sequence[StepKind]:
        """Of each step what it shares with those that have the same work and messages."""
        return _kinds(self.schedule, self.left.steps)

    def _priced(self, stage: int, op: Op, *, free: bool) -> float:
        micro = self._micro(op)
        if op.kind is Kind.COMPUTE:
            own = self._compute(self._places[stage], micro, op)
            own = Load(own.device * self._crowd, own.host * self._crowd)
            exchanged = self._together if self.schedule.crew_of(micro) else self._exchanged
            return (own if free else exchanged(self._places[stage], micro, own)).seconds(self._profile)
        if op.kind is Kind.STEP:
            patches = self.job.plan.num_patches if micro.patch is None else 1
            taken = self._profile.micro_s / (patches if op.patch is not None and micro.patch is None else 1)
            return taken if free else taken + self._guidance(micro) / patches
        if free or op.kind not in (Kind.SEND, Kind.RETURN, Kind.SHARE, Kind.PREDICT, Kind.GIVE):
            return 0.0
        link = self.link("pipefusion")
        return (1 - link.overlap) * self._message(stage, op)

    def travel(self, stage: int, op: Op) -> float:
        """Seconds of a message on its way, behind those that it takes of its sender."""
        key = ("travel", self.like[stage], op.kind, op.patch, op.piece, self.kinds[op.step])
        if key not in self._seen:
            link = self.link("pipefusion")
            self._seen[key] = link.latency_s + link.overlap * self._message(stage, op)
        return self._seen[key]

    def _message(self, stage: int, op: Op) -> float:
        """Seconds of a message on an idle link."""
        job, place = self.job, self._places[stage]
        if op.kind is Kind.SEND and op.patch is not None:
            pieces = len(self.schedule.pieces(self._micro(op)))
            size = cost.between(job, place, op.patch) / pieces
        elif op.kind is Kind.GIVE:  # the mean of those that get some
            owners = range(self.schedule.crew, job.plan.pipefusion)
            layers = [(owner, joint, n) for owner in owners for joint, n in job.layers(self._places[owner]).items()]
            size = sum(n * cost.given(job, owner, joint=joint) for owner, joint, n in layers) / len(owners)
        elif op.kind is Kind.PREDICT:
            size = cost.predicted(job, place)
        else:
            rows = 1.0 if op.patch is None else job.layout.rows(op.patch) / job.layout.grid.rows
            size = job.own(place.data).latent_bytes * rows
        return size / self.link("pipefusion").bandwidth

    def _micro(self, op: Op) -> Micro:
        stale = self.schedule.is_stale(op.step) and self.job.plan.distrifusion == 1
        return Micro(op.step, op.patch if stale else None)

    def _compute(self, place: Place, micro: Micro, op: Op) -> Load:
        """A stage's own blocks, the ends with them, in one call or a piece of it."""
        job, counted, work = self.job, self._basis.counted, self._basis.work
        tokens = self._tokens(place, micro, op)
        crew = len(self.schedule.crew_of(micro))
        left = self.left if op.step in self.left.steps and not crew else None
        mix = self._basis.mix(range(len(counted.blocks)) if crew else job.stages[place.stage], left)
        total = work(-1, counted.every, tokens)
        for each, times in mix.blocks:
            total = total.plus(work(id(each), each, tokens), times)
        if place.stage == 0 or crew:
            total = total.plus(work(-2, counted.first, tokens))
        if place.stage == job.plan.pipefusion - 1 or crew:
            total = total.plus(work(-3, counted.last, tokens))
        if op.branch == 0 and op.piece == 0 and micro.patch in (None, 0):
            total = total.plus(work(-4, counted.step, tokens))
            for each, times in mix.steps:
                total = total.plus(work(id(each), each, tokens), times)
        if op.step == 0:
            total = total.plus(work(-5, counted.once, tokens))
            for each, times in mix.once:
                total = total.plus(work(id(each), each, tokens), times)
        return total

    def _kept(self, place: Place, step: int) -> float:
        """The share of a stage's blocks that run in a step: those that are left out exchange nothing."""
        if step not in self.left.steps:
            return 1.0
        stage = self.job.stages[place.stage]
        return 1 - sum(map(self._may_be_left, stage)) / len(stage)

    def _may_be_left(self, block: int) -> bool:
        return self.left.may(block, len(self._basis.counted.blocks))

    def _tokens(self, place: Place, micro: Micro, op: Op) -> Tokens:
        job, plan = self.job, self.job.plan
        image, text = cost.tokens(job, place, micro)
        crew = len(self.schedule.crew_of(micro))
        if crew:
            image, text = -(-job.layout.image // crew), -(-text // crew)
        own = job.own(place.data)
        rows = len(self.schedule.pieces(micro)[op.piece]) if plan.warmup_mode == "pipelined" else own.batch
        keys = job.layout
        line = cost.line(job, place, micro) if plan.ulysses > 1 else 0
        return Tokens(
            rows=rows, image=image, text=text or self._words, image_keys=keys.image,
            text_keys=keys.text or self._basis.words, heads=job.heads(place) / job.shape.heads, split=plan.tensor,
            share=line / (image + text) if line else 1.0,
            fused=self._fuses and (plan.rounds_otherwise or self.schedule.is_stale(micro.step)),
        )  # fmt: skip

    @property
    def _words(self) -> int:
        """Tokens of text beside the sequence that a rank computes: all, unless ranks share them out."""
        ranks = self.job.split.ranks if self.job.shape.words else 1
        return -(-self._basis.words // ranks)

    def _exchanged(self, place: Place, micro: Micro, own: Load) -> Load:
        """A call with what its ranks send each other: the device waits for bytes, the host starts every exchange."""
        total = own
        for kind, (exchanges, sent) in cost.in_call(self.job, place, micro).items():
            axes = [axis for axis in (TOKENS if kind == "prediction" else (kind,)) if getattr(self.job.plan, axis) > 1]
            link, n = self.link(axes[0]), math.prod(getattr(self.job.plan, axis) for axis in axes)
            made = 1.0 if kind == "prediction" else self._kept(place, micro.step)
            calls = made * exchanges * {"ring": n - 1, "ulysses": 2}.get(kind, 1)
            sending = made * sent / (link.bandwidth * share(link, kind, n)) + calls * link.latency_s
            if kind == "distrifusion" and self.schedule.is_stale(micro.step):
                sending = exposed(sending, link.overlap, own.device)
            elif kind == "ring":
                sending = exposed(sending, link.overlap, self._attention(place, micro))
            started = link.call_s if link.sum_s is None or kind != "tensor" else link.sum_s
            total = total.plus(Load(sending, calls * started))
        return total

    def _together(self, place: Place, micro: Micro, own: Load) -> Load:
        """A crew's call: weights of blocks come while others compute, keys of every layer are waited for."""
        job, counted, lends = self.job, self._basis.counted, self.job.plan.warmup_mode == "sequence"
        link, n = self.link("pipefusion"), len(self.schedule.crew_of(micro))
        rate, tokens = (
            link.bandwidth * share(link, "pipefusion", n),
            self._tokens(place, micro, Op(Kind.COMPUTE, *micro)),
        )
        blocks, exchanges = [], 0
        for block, layers in enumerate(job.weights.layers):
            whole, before = (
                self._basis.work(id(work), work, tokens).device * self._crowd
                for work in (counted.blocks[block], counted.before[block])
            )
            sent = (n - 1) * sum(cost.gathered(job, place, joint=joint) for joint in layers)
            gathers = len(layers) if n > 1 else 0
            weights = cost.lent(job, block) / rate + link.latency_s if lends else 0.0
            blocks.append(Together(weights, before, sent / rate + gathers * link.latency_s, whole - before))
            exchanges += gathers + lends
        alone = sum(block.before + block.after for block in blocks)
        took = of_crew(blocks, AHEAD, link.overlap)
        return Load(own.device - alone + took, own.host + exchanges * link.call_s)

    def _attention(self, place: Place, micro: Micro) -> float:
        """Seconds of attention in a call: what a ring's messages travel under."""
        tokens = self._tokens(place, micro, Op(Kind.COMPUTE, micro.step, micro.patch))
        n, found = self.job.plan.ring, self._basis.attention(self.job.stages[place.stage])
        return self._basis.work(id(found), found, tokens).device * (n - 1) / n

    def _guidance(self, micro: Micro) -> float:
        place = self._places[-1]
        size = cost.guidance(self.job, place, micro)
        link = self.link("cfg")
        return link.latency_s + size / link.bandwidth if size else 0.0

    def link(self, axis: str) -> Link:
        """The link that an axis crosses at its widest, and what each of the ranks that share it has of it."""
        if axis not in self._links:
            self._links[axis] = crossed(self.job.plan, self._profile, self._host, axis)
        return self._links[axis]


@lru_cache(maxsize=1024)
def _kinds(schedule: Schedule, left: frozenset[int]) -> Sequence[StepKind]:
    """Of each step, of which some are left out: the same for many plans."""
    return [
        StepKind(step == 0, schedule.is_stale(step), schedule.keeps_keys(step), step in left)
        for step in range(schedule.steps)
    ]

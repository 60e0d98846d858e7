"""What a plan costs before it runs: the schedule of its stages with counted work, on a machine that was measured.

    compute      the longest line of work through the stages, as `simulate` finds it with free messages
    exposed      what messages add: those within a call wait for each other, those between stages travel under work
    bubble       time in which the busiest stage waits for others with nothing sent late: filling and warmup

The three make up the latency of the denoising loop. Caches enter by the share of steps that they leave out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ditile import cost
from ditile.blocks.schedule import Kind, Op, Schedule, Span, simulate
from ditile.cost import Job, Place
from ditile.generation import Micro
from ditile.plan import Plan
from ditile.planner.kernels import Counted, Mix, Work
from ditile.planner.links import crossed, crowd, exposed, share
from ditile.planner.profile import Link, Profile
from ditile.planner.seconds import Load, Tokens, load, together

STEADY = 3  # steps after the warmup that are simulated; the others are like the last of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a cache is expected to leave out.

    Attributes:
        share: of the steps.
        first, last: blocks that run all the same: its probe and its tail.
    """

    share: float = 0.0
    first: int = 1
    last: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a plan is predicted to cost.

    Attributes:
        plan: the plan.
        latency_s: of the denoising loop.
        compute_s: of the busiest stage.
        exposed_s: that messages add.
        bubble_s: in which that stage waits for others all the same.
        bytes_per_step: that all ranks send, over the steps.
        memory_bytes: of the rank that needs most.
    """

    plan: Plan
    latency_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    bytes_per_step: float
    memory_bytes: int


@dataclass(frozen=True)
class Pricer:
    """Prices the calls of one model on one machine.

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
    _loads: dict[tuple[int, Tokens], Load] = field(default_factory=dict)
    _attentions: dict[range, Work] = field(default_factory=dict)

    def attention(self, blocks: range) -> Work:
        """The attention of some blocks."""
        if blocks not in self._attentions:
            every = together([self.counted.blocks[block] for block in blocks])
            self._attentions[blocks] = {kernel: n for kernel, n in every.items() if kernel.kind == "attention"}
        return self._attentions[blocks]

    def price(self, job: Job, left: Left | None = None, memory_bytes: int = 0) -> Price:
        """The price of a call."""
        run = _Run(self, job, left or Left())
        latency, _ = run.walk(free=False)
        free, compute = run.walk(free=True)
        return Price(
            plan=job.plan, latency_s=latency, compute_s=compute, exposed_s=latency - free,
            bubble_s=max(free - compute, 0.0), bytes_per_step=run.sent() / job.shape.steps, memory_bytes=memory_bytes,
        )  # fmt: skip

    def latency(self, job: Job) -> float:
        """The latency of a price, without the rest of it."""
        return _Run(self, job, Left()).walk(free=False)[0]

    def estimate(self, job: Job, left: Left | None = None) -> float:
        """Seconds of the loop, from its formula instead of the simulation: what plans are sifted by."""
        return _Run(self, job, left or Left()).estimate()

    def work(self, key: int, work: Work, tokens: Tokens) -> Load:
        """Seconds of some work, remembered by what it is."""
        if (key, tokens) not in self._loads:
            self._loads[key, tokens] = load(work, tokens, self.profile)
        return self._loads[key, tokens]


class _Hop(NamedTuple):
    """Seconds that a message takes of its sender, and on its way."""

    seconds: float
    travel: float


class _Run:
    """One call under one plan."""

    def __init__(self, pricer: Pricer, job: Job, left: Left) -> None:
        self._pricer, self._job, self._left = pricer, job, left
        self._profile = pricer.profile
        self._places = [Place(0, 0, stage, 0, 0, 0, 0) for stage in range(job.plan.pipefusion)]
        self._host = min(job.plan.world, pricer.host or job.plan.world)
        self._crowd = crowd(pricer.profile, self._host)
        self._seen: dict[Any, float] = {}
        self._links: dict[str, Link] = {}
        self._mixes: dict[range, Mix] = {}

    @cached_property
    def _schedule(self) -> Schedule:
        return self._job.schedule

    @cached_property
    def _calls(self) -> int:
        return self._job.own(self._places[0]).calls

    @cached_property
    def _like(self) -> list[int]:
        """Of each stage, the first one that has the same to do."""
        found: list[int] = []
        seen: dict[Any, int] = {}
        counted, last = self._pricer.counted, self._job.plan.pipefusion - 1
        for stage, blocks in enumerate(self._job.stages):
            work = Counter((id(counted.blocks[block]), id(counted.block_steps[block])) for block in blocks)
            what = (frozenset(work.items()), stage == 0, stage == last, stage < self._schedule.crew)
            found.append(seen.setdefault(what, stage))
        return found

    def walk(self, *, free: bool) -> tuple[float, float]:
        """Seconds of the loop, and those that its busiest stage works; `free`: with messages that take no time."""
        schedule, steps = self._schedule, self._job.shape.steps
        shown = min(steps, schedule.warmup + STEADY)
        spans = simulate(
            replace(schedule, steps=shown), lambda stage, op: self._cost(stage, op, free=free), self._calls,
            lambda stage, op: 0.0 if free else self._travel(stage, op),
        )  # fmt: skip
        ends = _ends(spans, shown)
        tail = ends[-1] - ends[-2] if shown > 1 else ends[-1]
        busy = [0.0] * schedule.stages
        for span in spans:
            busy[span.stage] += (span.end - span.start) * (1 + steps - shown if span.op.step == shown - 1 else 1)
        return ends[-1] + (steps - shown) * tail, max(busy)

    def sent(self) -> int:
        """Bytes that all ranks send in the whole call; steps of one kind are alike, and so are stages."""
        job, plan, last = self._job, self._job.plan, self._job.shape.steps - 1
        kinds: dict[tuple[bool, ...], list[int]] = {}
        for step in range(last + 1):
            kind = (job.schedule.is_stale(step), job.schedule.keeps_keys(step), step == 0, step == last)
            kinds.setdefault(kind, []).append(step)
        inner, total = plan.world // (plan.data * plan.cfg * plan.pipefusion), 0
        for rank in range(plan.world):
            stage = rank // inner % plan.pipefusion
            if self._like[stage] == stage:
                sizes = [len(steps) * sum(cost.sent_in_step(job, rank, steps[0]).values()) for steps in kinds.values()]
                total += self._like.count(stage) * sum(sizes)
        return total

    def estimate(self) -> float:
        """Seconds of the loop by `Schedule.makespan`'s formula: the first and the last patch stand for all.

        Above the simulation, which knows of every wait, by less than a hundredth: `search` relies on it.
        """
        schedule, plan, steps = self._schedule, self._job.plan, self._job.shape.steps
        calls, last = self._calls, plan.pipefusion - 1
        warm = steps if schedule.synchronous(steps - 1) else min(schedule.warmup, steps)
        first, later = min(1, steps - 1), min(warm, steps - 1)
        whole = self._of_stages(Op(Kind.COMPUTE, first, None))
        step = self._cost(last, Op(Kind.STEP, 0, None), free=False)
        patches = plan.num_patches if plan.distrifusion == 1 else 1
        hops, back = self._hops(later, patches - 1)
        if schedule.crew:
            total = warm * (calls * max(whole) + step)
        else:
            pieces = len(schedule.pieces(Micro(0, None))) * calls
            way = sum(whole) + sum(patches * hop.seconds for hop in hops)
            one = way + (pieces - 1) * max(whole)
            total = warm * (calls * one / pieces + sum(hop.travel for hop in hops) + step + patches * back.seconds)
        total += min(warm, steps - 1) * back.travel
        if warm == steps:
            return total
        ends = [self._of_stages(Op(Kind.COMPUTE, warm, patch))
                for patch in ((0, patches - 1) if plan.distrifusion == 1 else (None,))]  # fmt: skip
        micro = self._cost(last, Op(Kind.STEP, warm, None if plan.distrifusion > 1 else 0), free=False)
        sends = [calls * hop.seconds for hop in hops] + [micro + back.seconds]
        busy = [calls * (one + (patches - 1) * other) for one, other in zip(ends[0], ends[-1], strict=True)]
        ways = [sum(each) + sum(hop.seconds + hop.travel for hop in of_patch) + (calls - 1) * max(each)
                for each, of_patch in zip(ends, (self._hops(later, 0)[0], hops), strict=False)]  # fmt: skip
        round_trip = max(ways) + micro + back.seconds + back.travel
        period = max(*(work + patches * send for work, send in zip(busy, sends, strict=True)), round_trip)
        return total + (steps - warm) * period + ways[-1] - calls * max(ends[-1])

    def _hops(self, step: int, patch: int) -> tuple[list[_Hop], _Hop]:
        """A patch's messages: from each stage to the next, and from the last one back to the first."""
        last = self._job.plan.pipefusion - 1
        if not last:
            return [], _Hop(0.0, 0.0)
        ops = [*((stage, Op(Kind.SEND, step, patch)) for stage in range(last)), (last, Op(Kind.RETURN, step, patch))]
        found = [_Hop(self._cost(stage, op, free=False), self._travel(stage, op)) for stage, op in ops]
        return found[:-1], found[-1]

    def _of_stages(self, op: Op) -> list[float]:
        """Seconds of a call on every stage, the mean of a step's calls: the first one has more to do."""
        found: dict[int, float] = {}
        for stage in dict.fromkeys(self._like):
            first = self._priced(stage, op, free=False)
            others = self._priced(stage, op._replace(branch=1), free=False) if self._calls > 1 else 0.0
            found[stage] = (first + (self._calls - 1) * others) / self._calls
        return [found[stage] for stage in self._like]

    def _cost(self, stage: int, op: Op, *, free: bool) -> float:
        stage = self._like[stage]
        key = (stage, op.kind, self._kinds[op.step], op.patch, op.branch == 0, op.piece, free)
        seconds = self._seen.get(key)
        if seconds is None:
            seconds = self._seen[key] = self._priced(stage, op, free=free)
        return seconds

    @cached_property
    def _kinds(self) -> list[int]:
        """Of each step a number, which steps with the same work and messages share."""
        schedule, steps = self._schedule, range(self._job.shape.steps)
        return [2 * (2 * (step == 0) + schedule.is_stale(step)) + schedule.keeps_keys(step) for step in steps]

    def _priced(self, stage: int, op: Op, *, free: bool) -> float:
        micro = self._micro(op)
        if op.kind is Kind.COMPUTE:
            own = self._compute(self._places[stage], micro, op)
            own = Load(own.device * self._crowd, own.host * self._crowd)
            return (own if free else self._exchanged(self._places[stage], micro, own)).seconds(self._profile)
        if op.kind is Kind.STEP:
            patches = self._job.plan.num_patches if micro.patch is None else 1
            taken = self._profile.micro_s / (patches if op.patch is not None and micro.patch is None else 1)
            return taken if free else taken + self._guidance(micro) / patches
        if free or op.kind not in (Kind.SEND, Kind.RETURN, Kind.SHARE, Kind.PREDICT, Kind.GIVE):
            return 0.0
        link = self._link("pipefusion")
        return (1 - link.overlap) * self._message(stage, op)

    def _travel(self, stage: int, op: Op) -> float:
        key = ("travel", self._like[stage], op.kind, op.patch, op.piece, self._kinds[op.step])
        if key not in self._seen:
            link = self._link("pipefusion")
            self._seen[key] = link.latency_s + link.overlap * self._message(stage, op)
        return self._seen[key]

    def _message(self, stage: int, op: Op) -> float:
        """Seconds of a message on an idle link."""
        job, place = self._job, self._places[stage]
        if op.kind is Kind.SEND and op.patch is not None:
            pieces = len(self._schedule.pieces(self._micro(op)))
            size = cost.between(job, place, op.patch) / pieces
        elif op.kind is Kind.GIVE:
            size = cost.key_bytes(job, 0)
        else:
            rows = 1.0 if op.patch is None else job.layout.rows(op.patch) / job.layout.grid.rows
            size = job.own(place).latent_bytes * rows
        return size / self._link("pipefusion").bandwidth

    def _micro(self, op: Op) -> Micro:
        stale = self._schedule.is_stale(op.step) and self._job.plan.distrifusion == 1
        return Micro(op.step, op.patch if stale else None)

    def _compute(self, place: Place, micro: Micro, op: Op) -> Load:
        """A stage's own blocks, the ends with them, in one call or a piece of it."""
        job, counted, work = self._job, self._pricer.counted, self._pricer.work
        tokens = self._tokens(place, micro, op)
        crew = len(self._schedule.crew_of(micro))
        mix = self._mix(range(len(counted.blocks)) if crew else job.stages[place.stage])
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

    def _mix(self, stage: range) -> Mix:
        if stage not in self._mixes:
            runs = [1 - self._left.share * self._may_be_left(block) for block in stage]
            self._mixes[stage] = self._pricer.counted.mix(stage, runs)
        return self._mixes[stage]

    def _kept(self, place: Place) -> float:
        """The share of a stage's blocks that run, of all steps: blocks that are left out exchange nothing."""
        stage = self._job.stages[place.stage]
        return 1 - self._left.share * sum(map(self._may_be_left, stage)) / len(stage)

    def _may_be_left(self, block: int) -> bool:
        last = len(self._pricer.counted.blocks) - self._left.last
        return self._left.first <= block < last

    def _tokens(self, place: Place, micro: Micro, op: Op) -> Tokens:
        job, plan = self._job, self._job.plan
        image, text = cost.tokens(job, place, micro)
        crew = len(self._schedule.crew_of(micro))
        if crew:
            image, text = -(-job.layout.image // crew), -(-text // crew)
        own = job.own(place)
        rows = len(self._schedule.pieces(micro)[op.piece]) if plan.warmup_mode == "pipelined" else own.batch
        keys = job.layout
        line = cost.line(job, place, micro) if plan.ulysses > 1 else 0
        return Tokens(
            rows=rows, image=image, text=text or self._pricer.words, image_keys=keys.image,
            text_keys=keys.text or self._pricer.words, heads=job.heads(place) / job.shape.heads, split=plan.tensor,
            share=line / (image + text) if line else 1.0,
        )  # fmt: skip

    def _exchanged(self, place: Place, micro: Micro, own: Load) -> Load:
        """A call with what its ranks send each other: the device waits for bytes, the host starts every exchange."""
        total = own
        for kind, sizes in cost.in_call(self._job, place, micro).items():
            axis = "ulysses" if kind == "prediction" else kind
            link, n = self._link(axis), max(getattr(self._job.plan, axis), 2)
            made = 1.0 if kind == "prediction" else self._kept(place)
            calls = made * len(sizes) * {"ring": n - 1, "ulysses": 2}.get(kind, 1)
            sending = made * sum(sizes) / (link.bandwidth * share(link, kind, n)) + calls * link.latency_s
            if kind == "distrifusion" and self._schedule.is_stale(micro.step):
                sending = exposed(sending, link.overlap, own.device)
            elif kind == "ring":
                sending = exposed(sending, link.overlap, self._attention(place, micro))
            started = link.call_s if link.sum_s is None or kind != "tensor" else link.sum_s
            total = total.plus(Load(sending, calls * started))
        return total

    def _attention(self, place: Place, micro: Micro) -> float:
        """Seconds of attention in a call: what a ring's messages travel under."""
        tokens = self._tokens(place, micro, Op(Kind.COMPUTE, micro.step, micro.patch))
        n, found = self._job.plan.ring, self._pricer.attention(self._job.stages[place.stage])
        return load(found, tokens, self._profile).device * (n - 1) / n

    def _guidance(self, micro: Micro) -> float:
        place = self._places[-1]
        size = cost.guidance(self._job, place, micro)
        link = self._link("cfg")
        return link.latency_s + size / link.bandwidth if size else 0.0

    def _link(self, axis: str) -> Link:
        """The link that an axis crosses at its widest, and what each of the ranks that share it has of it."""
        if axis not in self._links:
            self._links[axis] = crossed(self._job.plan, self._profile, self._host, axis)
        return self._links[axis]


def _ends(spans: list[Span], steps: int) -> list[float]:
    """When the scheduler has stepped the last patch of each step."""
    ends = [0.0] * steps
    for span in spans:
        if span.op.kind is Kind.STEP:
            ends[span.op.step] = max(ends[span.op.step], span.end)
    return ends

"""What a rank sends and keeps, as formulas in the lengths of its tokens: for the table, the tests and `verify`.

p image and t text tokens, C channels, e bytes of a number, b rows, n ranks of an axis, L attention layers; per call:

    activations    b (p + t) C e           a stage to the next one, over all ranks that share out the tokens
    ulysses        4 (n - 1) / n^2 L b (p + t) C e    q, k, v out, the output back
    ring           2 (n - 1) / n L b (p + t) C e      keys and values round; with a store gathered once
    distrifusion   2 (n - 1) / n L b p C e            keys and values of the own patch to all
    tensor         2 (n - 1) / n b l C e for each sum over l tokens; a gather of them (split_scheme=sequence) is half
    prediction     the own part of the prediction, to the n - 1 that share out the tokens; where they share out a text
                   that cross attention sees (LTX-Video), 2 (n - 1) / n L b t C e more, its keys and values
    cfg            b p P e: the own branches' prediction, P numbers of a token, from the last stage to the other half
    latents        the stepped patches, from the last stage to the first; a crew's other members get the whole
    weights        warmup_mode=sequence: own blocks to each of the n - 1 others, in every call of a synchronous step
    keys           a crew of n: 2 (n - 1) / n L b (p + t) C e, own keys and values to the others; all those of a layer
                   to the stage that owns it, where that is no member; their prediction goes to the last stage
    data           a replica's own latents to the others, once; result: all latents to all stages, once

Shares that do not divide differ by a token or a head, and are counted as they are. Nothing is said of headers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ditile.plan.layout import DUMMY_TEXT, Layout, Part, Split, share
from ditile.plan.plan import Plan, coordinates
from ditile.plan.schedule import Micro, Schedule
from ditile.plan.shape import Shape, Weights
from ditile.plan.spec import ModelSpec

ALIGNED = 16  # bytes; where each tensor begins in a buffer


KINDS = (
    "activations", "tensor", "ulysses", "ring", "distrifusion", "prediction", "cfg", "latents", "weights", "keys",
    "data", "result",
)  # fmt: skip
"""The kinds of traffic that have a formula here."""


class Sent(NamedTuple):
    """Exchanges of a kind within a call that are alike: the bytes of each, and how many there are."""

    kind: str
    size: int
    times: int = 1


class Place(NamedTuple):
    """A rank's stage; its rank among those that share out the tokens, `outer` of them along ring or distrifusion."""

    data: int
    cfg: int
    stage: int
    rank: int
    outer: int
    ulysses: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """A call under a plan.

    Attributes:
        shape: of the call of all replicas.
        weights: the blocks of the undivided transformer.
        stages: the blocks of each stage.
    """

    plan: Plan
    spec: ModelSpec
    shape: Shape
    weights: Weights
    stages: Sequence[range]

    @cached_property
    def schedule(self) -> Schedule:
        """The order of work."""
        return Schedule.of(self.plan, self.shape.steps, self.shape.shared_out(self.plan).batch)

    def own(self, data: int) -> Shape:
        """The shape of the calls of a replica's ranks: its images, and their half of the branches."""
        if data not in self._owned:
            self._owned[data] = self.shape.shared_out(self.plan, data)
        return self._owned[data]

    @cached_property
    def _owned(self) -> dict[int, Shape]:
        return {}

    def calls(self, step: int) -> int:
        """Transformer calls that a rank makes in a step; in the first one, in which they are counted, all."""
        return self.shape.calls if step == 0 else self.own(0).calls

    @cached_property
    def layout(self) -> Layout:
        """The cuts of the image."""
        return self.shape.layout(self.plan, self.spec)

    @cached_property
    def split(self) -> Split:
        """How the tokens are shared out."""
        return Split(self.plan.ring, self.plan.distrifusion, self.plan.ulysses, self.plan.uaa is not False)

    def parts(self, patch: int | None) -> tuple[Part, ...]:
        """What each rank that shares out the tokens has of a patch, or of the whole image (None)."""
        if patch not in self._parted:
            self._parted[patch] = self.split.parts(self.layout, patch)
        return self._parted[patch]

    @cached_property
    def _parted(self) -> dict[int | None, tuple[Part, ...]]:
        return {}

    @cached_property
    def crew(self) -> tuple[Part, ...]:
        """What each stage of a crew has of the image in the steps that it computes; none without one."""
        return Split(self.schedule.crew).parts(self.layout, None) if self.schedule.crew else ()

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        at = coordinates(self.plan, rank)
        outer = at["ring"] + at["distrifusion"]
        token_rank = outer * self.plan.ulysses + at["ulysses"]
        return Place(at["data"], at["cfg"], at["pipefusion"], token_rank, outer, at["ulysses"], at["tensor"])

    def heads(self, place: Place) -> int:
        """Heads that a rank attends with."""
        return len(share(range(self.shape.heads // self.plan.tensor), self.plan.ulysses, place.ulysses))

    def layers(self, place: Place) -> Mapping[bool, int]:
        """The attention layers of a rank that see the text, and those that do not: how many there are."""
        return self._of(place.stage)[0]

    def exchanges(self, place: Place) -> Mapping[tuple[str, str], int]:
        """What tensor parallelism exchanges in a rank's blocks: ("sum" or "gather", stream) -> how often."""
        return self._of(place.stage)[1]

    def _of(self, stage: int) -> tuple[Counter[bool], Counter[tuple[str, str]]]:
        if stage not in self._of_stages:
            own = slice(self.stages[stage].start, self.stages[stage].stop)
            layers, exchanges = (itertools.chain(*kept[own]) for kept in (self.weights.layers, self.weights.exchanges))
            self._of_stages[stage] = Counter(layers), Counter(exchanges)
        return self._of_stages[stage]

    @cached_property
    def _of_stages(self) -> dict[int, tuple[Counter[bool], Counter[tuple[str, str]]]]:
        return {}


def sent(job: Job, rank: int) -> dict[str, int]:
    """Bytes that a rank sends in a whole call, by kind."""
    place, total = job.place(rank), dict.fromkeys(KINDS, 0)
    for step in range(job.shape.steps):
        for kind, size in sent_in_step(job, rank, step).items():
            total[kind] += size
    if place.stage == job.plan.pipefusion - 1:
        total["data"] = (job.plan.data - 1) * job.own(place.data).latent_bytes
        total["result"] = job.shape.latent_bytes if job.plan.pipefusion > 1 else 0
    return {kind: size for kind, size in total.items() if size}


def sent_in_step(job: Job, rank: int, step: int) -> dict[str, int]:
    """The same of one step."""
    place, total = job.place(rank), dict.fromkeys(KINDS, 0)
    own = job.own(place.data)
    if not own.images:
        return {}  # an idle replica calls no model
    for micro in job.schedule.micros(step):
        for formula in (_activations, _tensor, _ulysses, _ring, _distrifusion, _prediction, _lent, _together):
            for kind, size, times in formula(job, place, micro):
                total[kind] += job.calls(step) * size * times
        total["cfg"] += _cfg(job, place, micro)
        total["latents"] += own.latent_bytes * _adopting(job, place, micro)
    last = place.stage == job.plan.pipefusion - 1 > 0
    total["latents"] += own.latent_bytes if last and step < job.shape.steps - 1 else 0
    return {kind: size for kind, size in total.items() if size}


def in_call(job: Job, place: Place, micro: Micro) -> dict[str, tuple[int, int]]:
    """The exchanges of a rank within one transformer call and their bytes, by kind; those between stages apart."""
    found: dict[str, tuple[int, int]] = {}
    for formula in (_tensor, _ulysses, _ring, _distrifusion, _prediction):
        for kind, size, times in formula(job, place, micro):
            exchanges, total = found.get(kind, (0, 0))
            found[kind] = exchanges + times, total + times * size
    return found


def between(job: Job, place: Place, patch: int) -> int:
    """Bytes that a rank hands to the next stage for a patch, in one call."""
    part = job.parts(patch)[place.rank]
    return _between(job, place, len(part.text) + part.image_tokens)


def lent(job: Job, block: int) -> int:
    """Bytes of a block's weights on their way to one other stage; see `blocks.lending`."""
    return _flat(job.weights.tensors[block], job.shape.element_size)


def gathered(job: Job, place: Place, *, joint: bool) -> int:
    """Bytes of a layer's keys and values that a stage of a crew sends to each other one, in one call."""
    return 2 * _seen(job.crew[place.stage], joint=joint) * _number(job, place)


def given(job: Job, owner: int, *, joint: bool) -> int:
    """Bytes of a layer's keys and values that a crew sends to the stage that owns it, in one call."""
    return 2 * (job.layout.image + (job.layout.text if joint else 0)) * _number(job, Place(0, 0, owner, 0, 0, 0, 0))


def predicted(job: Job, place: Place) -> int:
    """Bytes of the prediction of a crew member's tokens, in one call."""
    size = job.crew[place.stage].image_tokens * job.weights.out * job.shape.element_size
    return size * job.own(place.data).batch


def guidance(job: Job, place: Place, micro: Micro) -> int:
    """Bytes that a rank hands to the other half of guidance behind a micro-step."""
    return _cfg(job, place, micro)


def tokens(job: Job, place: Place, micro: Micro) -> tuple[int, int]:
    """Image and text tokens that a rank computes in a micro-step; dummies count."""
    part = job.parts(micro.patch)[place.rank]
    text = 0 if job.spec.joint == "none" else len(part.text) or DUMMY_TEXT
    return part.image_tokens, text


def line(job: Job, place: Place, micro: Micro) -> int:
    """Tokens of all ranks on a rank's line along ulysses, each once."""
    return sum(map(_length, _row(job, place, micro)))


def key_bytes(job: Job, rank: int, *, text: bool = True) -> int:
    """Bytes of the keys and values that a rank keeps: of all tokens, or the image's, for its own layers and heads."""
    if job.plan.distrifusion == 1 and not any(job.schedule.keeps_keys(step) for step in range(job.shape.steps)):
        return 0
    place, layout = job.place(rank), job.layout
    layers = job.layers(place).items()
    tokens = sum(times * (layout.image + (layout.text if joint and text else 0)) for joint, times in layers)
    return 2 * job.own(place.data).calls * tokens * _number(job, place)


def _activations(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    if place.stage < job.plan.pipefusion - 1 and not job.schedule.crew_of(micro):
        for patch in job.schedule.patches_of(micro):
            yield Sent("activations", between(job, place, patch))


def _tensor(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    """Sums behind the row-parallel Linears; in the other scheme half of it there, and gathers, also of whole steps."""
    n, gathers = job.plan.tensor, job.plan.split_scheme == "sequence"
    if n == 1:
        return
    part = job.parts(micro.patch)[place.rank]
    text = tokens(job, place, micro)[1]
    lengths = {"image": part.image_tokens, "text": text, "text+image": part.image_tokens + text}
    sizes = [
        (lengths[stream] * job.shape.channels * (2 if kind == "sum" and not gathers else 1), times)
        for (kind, stream), times in job.exchanges(place).items()
        if kind == "sum" or gathers
    ]
    if gathers:
        whole_step = micro.patch is None and job.plan.num_patches > 1
        if place.stage == job.plan.pipefusion - 1:
            sizes.append((part.image_tokens * job.weights.out, 1))
        elif whole_step:
            sizes.append((part.image_tokens * job.shape.channels, 1))
        if place.stage > 0 and whole_step:
            patches = job.schedule.patches_of(micro)
            sizes += [(job.parts(p)[place.rank].image_tokens * job.shape.channels, 1) for p in patches]
    for size, times in sizes:
        yield Sent("tensor", size * job.own(place.data).batch * job.shape.element_size * (n - 1) // n, times)


def _ulysses(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    """Heads of the other ranks go out for own tokens, three times; own heads go back for theirs."""
    if job.plan.ulysses == 1:
        return
    parts, heads = _row(job, place, micro), job.shape.heads // job.plan.tensor
    each = job.own(place.data).batch * job.shape.head_dim * job.shape.element_size
    mine = job.heads(place)
    for joint, times in job.layers(place).items():
        lengths = [_length(part) if joint else part.image_tokens for part in parts]
        own = lengths[place.ulysses]
        yield Sent("ulysses", each * (3 * own * (heads - mine) + (sum(lengths) - own) * mine), times)


def _ring(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    """Round without a store: all blocks but the one that belongs to the next rank. With one: the own to all."""
    n = job.plan.ring
    if n == 1:
        return
    kept = job.plan.num_patches > 1 and (micro.patch is not None or job.schedule.keeps_keys(micro.step))
    rows = [_row(job, place._replace(outer=outer), micro) for outer in range(n)]
    for joint, times in job.layers(place).items():
        lengths = [sum(_length(part) if joint else part.image_tokens for part in row) for row in rows]
        tokens = (n - 1) * lengths[place.outer] if kept else sum(lengths) - lengths[(place.outer + 1) % n]
        yield Sent("ring", 2 * tokens * _number(job, place), times)


def _distrifusion(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    schedule, n = job.schedule, job.plan.distrifusion
    if n == 1 or (schedule.is_stale(micro.step) and not schedule.keeps_keys(micro.step)):
        return
    image = sum(part.image_tokens for part in _row(job, place, micro))
    yield Sent("distrifusion", 2 * (n - 1) * image * _number(job, place), sum(job.layers(place).values()))


def _prediction(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    if job.split.ranks > 1 and place.stage == job.plan.pipefusion - 1:
        n, of_layers = job.split.ranks, sum(job.layers(place).values())
        number = (n - 1) * job.own(place.data).batch * job.shape.element_size
        yield Sent("prediction", number * job.parts(micro.patch)[place.rank].image_tokens * job.weights.out)
        words = len(share(range(job.shape.words), n, place.rank))
        yield Sent("prediction", 2 * number * words * job.shape.channels, of_layers if words else 0)


def _lent(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    """Own blocks to all others, which keep none of them for the next call."""
    if job.plan.warmup_mode == "sequence" and job.schedule.crew_of(micro):
        for block in job.stages[place.stage]:
            yield Sent("weights", (job.plan.pipefusion - 1) * lent(job, block))


def _together(job: Job, place: Place, micro: Micro) -> Iterator[Sent]:
    """What a crew exchanges in a call: keys of all layers among its members, what others need of it to them."""
    crew, last = job.schedule.crew_of(micro), job.plan.pipefusion - 1
    if place.stage in crew:
        for joint, times in Counter(itertools.chain.from_iterable(job.weights.layers)).items():
            yield Sent("keys", (len(crew) - 1) * gathered(job, place, joint=joint), times)
        if place.stage != last:
            yield Sent("prediction", predicted(job, place))
    if crew and place.stage == 0 and job.schedule.keeps_keys(micro.step):
        for owner in range(len(crew), last + 1):
            for joint, times in job.layers(place._replace(stage=owner)).items():
                yield Sent("keys", given(job, owner, joint=joint), times)


def _adopting(job: Job, place: Place, micro: Micro) -> int:
    """Members of a crew that the last stage sends the whole latents before a step; the first one takes its patches."""
    last = job.plan.pipefusion - 1
    if place.stage < last or micro.step == 0:
        return 0
    return sum(0 < member < last for member in job.schedule.crew_of(micro))


def _cfg(job: Job, place: Place, micro: Micro) -> int:
    """What is fresh of the own branches: in each call, or, of branches that are calls, after all of a later step."""
    by_calls = job.shape.rows == 1
    if place.stage < job.plan.pipefusion - 1 or job.plan.cfg == 1 or (by_calls and micro.step == 0):
        return 0
    tokens = job.layout.image if micro.patch is None else len(range(job.layout.image)[job.layout.tokens(micro.patch)])
    own = job.own(place.data)
    return (job.plan.cfg - 1) * own.calls * own.batch * tokens * job.weights.out * job.shape.element_size


def _between(job: Job, place: Place, length: int) -> int:
    """Bytes of what a rank has of a stream between two blocks: with split_scheme=sequence its share."""
    if job.plan.split_scheme == "sequence":
        length = len(share(range(length), job.plan.tensor, place.tensor))
    return length * job.own(place.data).batch * job.shape.channels * job.shape.element_size


def _row(job: Job, place: Place, micro: Micro) -> tuple[Part, ...]:
    """What the ranks on a line along ulysses have."""
    first = place.outer * job.plan.ulysses
    return job.parts(micro.patch)[first : first + job.plan.ulysses]


def _length(part: Part) -> int:
    return len(part.text) + part.image_tokens


def _seen(part: Part, *, joint: bool) -> int:
    """Tokens of a part that a layer sees."""
    return _length(part) if joint else part.image_tokens


@lru_cache
def _flat(tensors: tuple[int, ...], size: int) -> int:
    """Bytes of tensors of so many numbers in one buffer, each from where `blocks.lending` has it begin."""
    stop = 0
    for numbers in tensors:
        stop = -(-stop // ALIGNED) * ALIGNED + numbers * size
    return stop


def _number(job: Job, place: Place) -> int:
    """Bytes of a token's keys, or values, on a rank."""
    return job.own(place.data).batch * job.heads(place) * job.shape.head_dim * job.shape.element_size

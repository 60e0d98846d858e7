"""Formulas for what a rank sends and keeps, in the lengths of its tokens: for the table, the tests and `verify`.

p image, t text tokens, C channels, e bytes of a number, b rows of a batch, n ranks of an axis, L layers; per call:

    activations    b (p + t) C e           a stage to the next one, over all ranks that split the tokens
    ulysses        4 (n - 1) / n^2 L b (p + t) C e    q, k and v out, the output back
    ring           2 (n - 1) / n L b (p + t) C e      keys and values, passed round; gathered once for a store
    distrifusion   2 (n - 1) / n L b p C e            keys and values of a rank's own patch to all
    tensor         2 (n - 1) / n b l C e for each sum over l tokens; a gather of them (split_scheme=sequence) is half
    prediction     the own part of the tokens after the last block, to the n - 1 that split the tokens
    cfg            b p P e: the own branches' prediction, P numbers of a token, from the last stage to the other half
    latents        the denoised patches, from the last stage to the first; others of a warmup group get the whole
    weights        warmup_mode=sequence: own blocks to each of the n - 1 others, in every call of a synchronous step
    keys           a warmup group of n: 2 (n - 1) / n L b (p + t) C e, own keys and values to the others; all of a layer
                   to the stage that owns it, if that is not a member; their prediction goes to the last stage
    data           a replica's own latents to the others, once; result: all latents to all stages, once

Shares that do not divide differ by a token or a head, and are counted as they are. Headers are not counted. With
`wire_dtype` a token's activation, or a head of it, is c + 2 c / r bytes instead of c e in the kinds of `PACKED_KINDS`,
where r numbers share a scale (`find_scaled_run`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ditile.plan.layout import (
    DUMMY_TEXT,
    Layout,
    Split,
    TokenShard,
    count_weighted_shares,
    pick_even_chunk,
    pick_weighted_chunk,
)
from ditile.plan.plan import Plan, compute_coordinates
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile.plan.shape import CallFamily, Shape, Weights

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
ALIGNMENT = 16
"""The alignment of tensors in a buffer, in bytes."""

KINDS = (
    "activations", "tensor", "ulysses", "ring", "distrifusion", "prediction", "cfg", "latents", "weights", "keys",
    "data", "result",
)  # fmt: skip
"""The kinds of traffic with a formula here."""
PACKED_KINDS = ("activations", "ulysses", "ring", "distrifusion", "keys")
"""The kinds whose numbers are sent in eight bits each under `Plan.wire_dtype`."""
SCALE_BYTES = 2
MOST_SCALED = 16
"""The most numbers that share a scale when sent as int8 (distributed/wire.py says why)."""


def memoize_method(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Keep the results of a method on its instance, by the arguments, for the lifetime of the instance."""
    attribute = f"_results_of_{method.__qualname__}"

    @wraps(method)
    def look_up(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        results: dict[Any, Result] | None = vars(self).get(attribute)
        if results is None:
            results = vars(self)[attribute] = {}
        key = (*args, *kwargs.items())
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        return results[key]

    return look_up


class RepeatedExchange(NamedTuple):
    """Equal exchanges of a kind within a call: the bytes of each, and their number."""

    kind: str
    size: int
    times: int = 1


class RankCoordinates(NamedTuple):
    """The place of a rank: `rank` among all that split the tokens, `outer` along ring or distrifusion."""

    data: int
    cfg: int
    stage: int
    rank: int
    outer: int
    ulysses: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A call under a plan.

    Attributes:
        plan, family: how it is divided, and the model's family.
        shape: of the whole call, over all replicas.
        weights: the blocks of the undivided transformer.
        stages: the blocks of each stage.
    """

    plan: Plan
    family: CallFamily
    shape: Shape
    weights: Weights
    stages: Sequence[range]

    @cached_property
    def step_schedule(self) -> PatchSchedule:
        """Return the order of work."""
        batch = self.shape.divide_batch(self.plan).batch
        schedule = PatchSchedule.from_plan(self.plan, self.shape.steps, batch)
        if not self.shape.references:
            return schedule
        layout = self.image_layout
        return replace(
            schedule,
            num_references=layout.num_references,
            reference_share=layout.count_reference_tokens() / layout.count_layer_tokens(joint=True),
            uneven_latents=not all(map(self.count_denoised_share, range(layout.num_patches))),
        )

    def count_denoised_share(self, patch: int | None) -> float:
        """Return the share of the latents in a patch. Reference images have no latents."""
        if patch is None:
            return 1.0
        rows = self.shape.latent_rows
        return self.image_layout.count_rows(patch, rows) / rows

    def is_last_stage(self, place: RankCoordinates) -> bool:
        """Return whether a rank is in the stage with the model's end."""
        return place.stage == self.plan.pipefusion - 1

    @memoize_method
    def compute_replica_shape(self, data: int) -> Shape:
        """Return the shape of the calls of a replica's ranks: its images, and their half of the branches."""
        return self.shape.divide_batch(self.plan, data)

    def count_number_bytes(self, place: RankCoordinates) -> int:
        """Count the bytes of one number of each row of a rank's batch."""
        return self.compute_replica_shape(place.data).batch * self.shape.element_size

    def count_packed_bytes(self, place: RankCoordinates, channels: int) -> int:
        """Count the bytes of a vector of each row of a rank's batch, in a message of one of `PACKED_KINDS`."""
        if self.plan.wire_dtype is None:
            return channels * self.count_number_bytes(place)
        scales = channels // find_scaled_run(self.plan.wire_dtype, channels)
        return (channels + scales * SCALE_BYTES) * self.compute_replica_shape(place.data).batch

    def count_calls_in_step(self, step: int) -> int:
        """Count the transformer calls of a rank in a step. Step 0 has all of them, because their number is learnt in
        it."""
        if step == 0:
            return self.shape.calls
        return self.compute_replica_shape(0).calls

    @cached_property
    def image_layout(self) -> Layout:
        """Return the cuts of the image."""
        return self.shape.build_layout(self.plan, self.family.joint)

    @cached_property
    def token_split(self) -> Split:
        """Return the split of the tokens."""
        return make_token_split(self.plan)

    def select_patch(self, micro: MicroStep) -> int | None:
        """Select the patch that a micro-step computes. Under DistriFusion it is only the image where references are
        left out."""
        schedule = self.step_schedule
        if self.plan.distrifusion > 1 and schedule.num_references and not schedule.computes_references(micro.step):
            return schedule.num_references
        return micro.patch

    @memoize_method
    def shard_tokens(self, patch: int | None) -> tuple[TokenShard, ...]:
        """Return the tokens of each rank in a patch, or in the whole image (None)."""
        return self.token_split.shard_tokens(self.image_layout, patch)

    @cached_property
    def warmup_shards(self) -> tuple[TokenShard, ...]:
        """Return the tokens of each stage of the warmup group in synchronous steps. Empty without a group."""
        group_size = self.step_schedule.warmup_group_size
        if group_size == 0:
            return ()
        return Split(group_size).shard_tokens(self.image_layout, None)

    def select_resident_blocks(self, place: RankCoordinates) -> range:
        """Select the blocks whose weights a rank holds."""
        return self.stages[place.stage]

    def locate_rank(self, rank: int) -> RankCoordinates:
        """Return the place of a rank."""
        place = compute_coordinates(self.plan, rank)
        return RankCoordinates(
            data=place["data"],
            cfg=place["cfg"],
            stage=place["pipefusion"],
            rank=self.plan.find_token_place(place),
            outer=max(place["ring"], place["distrifusion"]),
            ulysses=place["ulysses"],
            tensor=place["tensor"],
        )

    @cached_property
    def tensor_shares(self) -> tuple[int, ...]:
        """Return the share of each rank of tensor, in equal parts of heads and features."""
        if not self.plan.has_unlike_tensor_shares:
            return (1,) * self.plan.tensor
        return count_weighted_shares(self.weights.tensor_units, self.plan.list_tensor_weights())

    def compute_tensor_divisor(self, place: RankCoordinates) -> float:
        """Return the whole number of heads and features over a rank's share. With equal shares it is the number of
        ranks."""
        own = self.tensor_shares[place.tensor]
        return sum(self.tensor_shares) / own

    def count_tensor_heads(self, place: RankCoordinates) -> int:
        """Count the heads whose weights a rank has."""
        own = self.tensor_shares[place.tensor]
        return self.shape.heads * own // sum(self.tensor_shares)

    def count_heads(self, place: RankCoordinates) -> int:
        """Count the heads that a rank attends with."""
        weights = self.plan.head_weights or (1.0,) * self.plan.ulysses
        return len(pick_weighted_chunk(range(self.count_tensor_heads(place)), weights, place.ulysses))

    def has_shares_of(self, other: PlannedCall) -> bool:
        """Return whether each rank has the same blocks, tokens and heads as in another division by the same degrees."""
        if self.stages != other.stages or self.shard_tokens(None) != other.shard_tokens(None):
            return False
        places = map(self.locate_rank, range(self.plan.world))
        return all(self.count_heads(place) == other.count_heads(place) for place in places)

    def count_layers(self, place: RankCoordinates) -> Mapping[bool, int]:
        """Count the attention layers of a rank, with sight of the text (True) and without."""
        return self._count_layers_in_stage(place.stage)

    @memoize_method
    def _count_layers_in_stage(self, stage: int) -> Mapping[bool, int]:
        layers = Counter[bool]()
        for block in self.stages[stage]:
            layers.update(self.weights.layers[block])
        return layers

    def count_tensor_exchanges(self, place: RankCoordinates) -> Mapping[tuple[str, str], int]:
        """Count the exchanges of tensor parallelism in a rank's blocks, as ("sum" or "gather", stream) -> how often."""
        return self._count_exchanges_in_stage(place.stage)

    @memoize_method
    def _count_exchanges_in_stage(self, stage: int) -> Mapping[tuple[str, str], int]:
        exchanges = Counter[tuple[str, str]]()
        # Weights without a tensor table have no exchanges.
        if self.weights.exchanges:
            for block in self.stages[stage]:
                exchanges.update(self.weights.exchanges[block])
        return exchanges


def make_token_split(plan: Plan) -> Split:
    """Return how the ranks of a plan split the tokens."""
    return Split(plan.ring, plan.distrifusion, plan.ulysses, plan.uaa is not False, plan.token_weights)


@lru_cache
def find_scaled_run(wire_dtype: str, channels: int) -> int:
    """Return the number of neighbouring numbers of a vector that share a scale."""
    # fp8 has exponents of its own, so that one scale is enough.
    if wire_dtype == "fp8":
        return channels
    for run in reversed(range(1, MOST_SCALED + 1)):
        if channels % run == 0:
            return run
    raise AssertionError("1 divides every number")


def count_traffic_bytes(job: PlannedCall, rank: int) -> dict[str, int]:
    """Count the bytes that a rank sends in a whole call, by kind."""
    place = job.locate_rank(rank)
    total = dict.fromkeys(KINDS, 0)
    for step in range(job.shape.steps):
        for kind, size in count_traffic_in_step(job, rank, step).items():
            total[kind] += size
    if job.is_last_stage(place):
        # A replica without images of its own sends none.
        if place.data < job.shape.images:
            total["data"] = (job.plan.data - 1) * job.compute_replica_shape(place.data).latent_bytes
        if job.plan.pipefusion > 1:
            total["result"] = job.shape.latent_bytes
    return {kind: size for kind, size in total.items() if size}


def count_traffic_in_step(job: PlannedCall, rank: int, step: int) -> dict[str, int]:
    """Count the bytes that a rank sends in one step, by kind."""
    place = job.locate_rank(rank)
    total = dict.fromkeys(KINDS, 0)
    replica_shape = job.compute_replica_shape(place.data)
    calls = job.count_calls_in_step(step)
    for micro in job.step_schedule.list_micro_steps(step):
        # Each formula is of one call, and a step makes several.
        for formula in (*_CALL_FORMULAS, *_STAGE_FORMULAS):
            for kind, size, times in formula(job, place, micro):
                total[kind] += calls * size * times
        total["cfg"] += count_guidance_bytes(job, place, micro)
        total["latents"] += replica_shape.latent_bytes * _count_latent_receivers(job, place, micro)
    # The last stage sends what it has denoised to the first one, except after the last step.
    if job.plan.pipefusion > 1 and job.is_last_stage(place) and step < job.shape.steps - 1:
        total["latents"] += replica_shape.latent_bytes
    return {kind: size for kind, size in total.items() if size}


def count_call_exchanges(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> dict[str, tuple[int, int]]:
    """Return (number, bytes) of a rank's exchanges within one transformer call, by kind. Those between stages are left
    out."""
    by_kind: dict[str, tuple[int, int]] = {}
    for formula in _CALL_FORMULAS:
        for kind, size, times in formula(job, place, micro):
            exchanges, total = by_kind.get(kind, (0, 0))
            by_kind[kind] = (exchanges + times, total + times * size)
    return by_kind


def count_activation_bytes(job: PlannedCall, place: RankCoordinates, patch: int) -> int:
    """Count the bytes that a rank sends to the next stage for a patch, in one call."""
    length = job.shard_tokens(patch)[place.rank].count_tokens()
    if job.plan.split_scheme == "sequence":
        length = len(pick_even_chunk(range(length), job.plan.tensor, place.tensor))
    return length * job.count_packed_bytes(place, job.shape.token_channels)


def count_weight_stream_bytes(job: PlannedCall, block: int) -> int:
    """Count the bytes of a block's weights on their way to one other stage; see
    `parallel.pipefusion.weight_streaming`."""
    return _count_flat_buffer_bytes(job.weights.tensors[block], job.shape.element_size)


def count_group_key_bytes(job: PlannedCall, place: RankCoordinates, *, joint: bool) -> int:
    """Count the bytes of a layer's keys and values that a stage of a warmup group sends to each other one, in one
    call."""
    return 2 * job.warmup_shards[place.stage].count_tokens(joint=joint) * _count_sent_key_bytes(job, place)


def count_prediction_bytes(job: PlannedCall, place: RankCoordinates) -> int:
    """Count the bytes of the prediction of the tokens of one stage of a warmup group, in one call."""
    return job.warmup_shards[place.stage].image_tokens * job.shape.token_channels * job.count_number_bytes(place)


def count_guidance_bytes(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> int:
    """Count the bytes of the own branches' prediction that a rank sends to the other half of guidance after a
    micro-step.

    They are sent in each call; where branches are calls of their own, after all calls of a step, and not in step 0.
    """
    if not job.is_last_stage(place) or job.plan.cfg == 1:
        return 0
    # In step 0 each half makes all calls, to learn how many they are.
    if micro.step == 0 and job.shape.branches_per_call == 1:
        return 0
    layout = job.image_layout
    patch = job.select_patch(micro)
    tokens = layout.grid.num_tokens
    if patch is not None:
        tokens = tokens * layout.count_rows(patch) // layout.grid.rows
    numbers = (job.plan.cfg - 1) * tokens * job.weights.out
    return job.compute_replica_shape(place.data).calls * numbers * job.count_number_bytes(place)


def count_micro_step_tokens(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> tuple[int, int]:
    """Count the image and text tokens that a rank computes in a micro-step. Dummy text counts."""
    shard = job.shard_tokens(job.select_patch(micro))[place.rank]
    text = 0
    if job.family.joint != "none":
        text = len(shard.text) or DUMMY_TEXT
    return shard.image_tokens, text


def count_ulysses_tokens(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> int:
    """Count the tokens of all ranks on a rank's line along ulysses, each once."""
    return sum(part.count_tokens() for part in _select_ulysses_shards(job, place, micro))


def count_key_store_bytes(job: PlannedCall, rank: int, *, text: bool = True) -> int:
    """Count the bytes of the keys and values that a rank keeps: of its own layers and heads, with or without the
    text."""
    if job.plan.distrifusion == 1 and not any(map(job.step_schedule.keeps_keys, range(job.shape.steps))):
        return 0
    place = job.locate_rank(rank)
    layout = job.image_layout
    tokens = 0
    # A store has the keys of all tokens, also of other ranks' tokens.
    for joint, times in job.count_layers(place).items():
        tokens += times * layout.count_layer_tokens(joint=joint and text)
    return 2 * job.compute_replica_shape(place.data).calls * tokens * _count_token_key_bytes(job, place)


def _iterate_activation_exchanges(
    job: PlannedCall, place: RankCoordinates, micro: MicroStep
) -> Iterator[RepeatedExchange]:
    if not job.is_last_stage(place) and not job.step_schedule.select_warmup_group(micro):
        for patch in job.step_schedule.list_patches(micro):
            yield RepeatedExchange("activations", count_activation_bytes(job, place, patch))


def _iterate_tensor_exchanges(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> Iterator[RepeatedExchange]:
    """Yield an all-reduce after each row-parallel Linear. With split_scheme=sequence it is half of that, and gathers of
    tokens."""
    n = job.plan.tensor
    if n == 1:
        return
    gathers = job.plan.split_scheme == "sequence"
    image, text = count_micro_step_tokens(job, place, micro)
    lengths = {"image": image, "text": text, "text+image": image + text}
    channels = job.shape.token_channels
    # An all-reduce sends each number twice, as a reduce-scatter and an all-gather; a norm sums one number per token.
    numbers = {"sum": 2 * channels, "gather": 0, "norm": 2}
    if gathers:
        numbers = {"sum": channels, "gather": channels, "norm": 2}
    sizes = []
    for (kind, stream), times in job.count_tensor_exchanges(place).items():
        if numbers[kind]:
            sizes.append((lengths[stream] * numbers[kind], times))
    if gathers:
        is_whole_step = micro.patch is None and job.plan.num_patches > 1
        # The last stage gathers the tokens of its result, and each stage what the patches of a whole step bring.
        if job.is_last_stage(place) or is_whole_step:
            sizes.append((image * channels, 1))
        if place.stage > 0 and is_whole_step:
            for patch in job.step_schedule.list_patches(micro):
                sizes.append((job.shard_tokens(patch)[place.rank].image_tokens * channels, 1))
    for size, times in sizes:
        yield RepeatedExchange("tensor", size * job.count_number_bytes(place) * (n - 1) // n, times)


def _iterate_ulysses_exchanges(
    job: PlannedCall, place: RankCoordinates, micro: MicroStep
) -> Iterator[RepeatedExchange]:
    """Yield the exchanges of heads. A rank sends the others' heads of its tokens (q, k and v), and returns its own
    heads of their tokens."""
    if job.plan.ulysses == 1:
        return
    # Heads of other ranks of tensor are not here, so they are not exchanged.
    shards = _select_ulysses_shards(job, place, micro)
    heads = job.count_tensor_heads(place)
    own_heads = job.count_heads(place)
    head_bytes = job.count_packed_bytes(place, job.shape.head_dim)
    for joint, times in job.count_layers(place).items():
        lengths = [shard.count_tokens(joint=joint) for shard in shards]
        own_length = lengths[place.ulysses]
        # q, k and v of the own tokens go out; the output of the other ranks' tokens goes back to them.
        sent = 3 * own_length * (heads - own_heads) + (sum(lengths) - own_length) * own_heads
        yield RepeatedExchange("ulysses", head_bytes * sent, times)


def _iterate_ring_exchanges(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> Iterator[RepeatedExchange]:
    """Yield the exchanges of keys. Without a store a rank sends on all blocks but the next rank's; with one, it sends
    its own block to all."""
    n = job.plan.ring
    if n == 1:
        return
    # A store needs the keys of all tokens, so that they are gathered and not passed round.
    stores_keys = job.plan.num_patches > 1 and (micro.patch is not None or job.step_schedule.keeps_keys(micro.step))
    groups = [_select_ulysses_shards(job, place._replace(outer=outer), micro) for outer in range(n)]
    for joint, times in job.count_layers(place).items():
        lengths = []
        for group in groups:
            lengths.append(sum(shard.count_tokens(joint=joint) for shard in group))
        # Around the ring a rank passes all blocks but the next rank's own.
        tokens = sum(lengths) - lengths[(place.outer + 1) % n]
        if stores_keys:
            tokens = (n - 1) * lengths[place.outer]
        yield RepeatedExchange("ring", 2 * tokens * _count_sent_key_bytes(job, place), times)


def _iterate_distrifusion_exchanges(
    job: PlannedCall, place: RankCoordinates, micro: MicroStep
) -> Iterator[RepeatedExchange]:
    schedule = job.step_schedule
    n = job.plan.distrifusion
    if n == 1 or (schedule.reads_stale_keys(micro.step) and not schedule.keeps_keys(micro.step)):
        return
    # The text is on every rank, so its keys are not sent.
    image = sum(part.image_tokens for part in _select_ulysses_shards(job, place, micro))
    size = 2 * (n - 1) * image * _count_sent_key_bytes(job, place)
    yield RepeatedExchange("distrifusion", size, sum(job.count_layers(place).values()))


def _iterate_prediction_exchanges(
    job: PlannedCall, place: RankCoordinates, micro: MicroStep
) -> Iterator[RepeatedExchange]:
    n = job.token_split.num_ranks
    if n == 1 or not job.is_last_stage(place):
        return
    # The scheduler steps whole tokens of the image; the prediction has no text.
    tokens, _ = count_micro_step_tokens(job, place, micro)
    size = (n - 1) * tokens * job.shape.token_channels * job.count_number_bytes(place)
    yield RepeatedExchange("prediction", size)


def _iterate_weight_exchanges(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> Iterator[RepeatedExchange]:
    """Yield the weights that a stage sends. It sends its own blocks to all others, which keep none of them for the next
    call."""
    if job.step_schedule.select_warmup_group(micro):
        for block in job.stages[place.stage]:
            yield RepeatedExchange("weights", (job.plan.pipefusion - 1) * count_weight_stream_bytes(job, block))


def _iterate_warmup_group_exchanges(
    job: PlannedCall, place: RankCoordinates, micro: MicroStep
) -> Iterator[RepeatedExchange]:
    """Yield the messages of a warmup group in a call: keys of all layers to all stages, and the prediction to the
    last."""
    last = job.plan.pipefusion - 1
    if not job.step_schedule.select_warmup_group(micro):
        return
    for joint, times in Counter(itertools.chain(*job.weights.layers)).items():
        yield RepeatedExchange("keys", last * count_group_key_bytes(job, place, joint=joint), times)
    if place.stage != last:
        yield RepeatedExchange("prediction", count_prediction_bytes(job, place))


def _count_latent_receivers(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> int:
    """Count the members of a warmup group that get the whole latents from the last stage before a step. Stage 0 gets
    patches."""
    last = job.plan.pipefusion - 1
    if place.stage < last or micro.step == 0:
        return 0
    return sum(0 < member < last for member in job.step_schedule.select_warmup_group(micro))


def _select_ulysses_shards(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> tuple[TokenShard, ...]:
    """Select the tokens of each rank on a rank's line along ulysses."""
    first = place.outer * job.plan.ulysses
    return job.shard_tokens(job.select_patch(micro))[first : first + job.plan.ulysses]


@lru_cache
def _count_flat_buffer_bytes(tensors: tuple[int, ...], size: int) -> int:
    return count_flat_bytes(numbers * size for numbers in tensors)


def count_flat_bytes(sizes: Iterable[int]) -> int:
    """Count the bytes of one buffer for tensors of these sizes, each of which begins at a multiple of `ALIGNMENT`."""
    stop = 0
    for size in sizes:
        # Each start is rounded up to the alignment.
        stop = -(-stop // ALIGNMENT) * ALIGNMENT + size
    return stop


def _count_token_key_bytes(job: PlannedCall, place: RankCoordinates) -> int:
    """Count the bytes of a token's keys, or values, on a rank."""
    return _count_key_heads(job, place) * job.shape.head_dim * job.count_number_bytes(place)


def _count_sent_key_bytes(job: PlannedCall, place: RankCoordinates) -> int:
    """Count the bytes of a token's keys, or values, in a message."""
    return _count_key_heads(job, place) * job.count_packed_bytes(place, job.shape.head_dim)


def _count_key_heads(job: PlannedCall, place: RankCoordinates) -> int:
    heads = job.count_heads(place)
    weights = job.plan.head_weights
    # With grouped queries several heads share a key, but shares of unlike size may cut through such a group.
    if weights is not None and len(set(weights)) > 1:
        return heads
    return round(heads * job.shape.key_heads)


_CALL_FORMULAS = (
    _iterate_tensor_exchanges,
    _iterate_ulysses_exchanges,
    _iterate_ring_exchanges,
    _iterate_distrifusion_exchanges,
    _iterate_prediction_exchanges,
)
_STAGE_FORMULAS = (_iterate_activation_exchanges, _iterate_weight_exchanges, _iterate_warmup_group_exchanges)

"""Formulas for the bytes that a rank sends and keeps: for the table, the tests and `verify`.

p image, t text tokens, C channels, e bytes of a number, b rows of a batch, n ranks of an axis, L layers; per call:

    activations    b (p + t) C e           a stage to the next one, over all ranks that split the tokens
    ulysses        4 (n - 1) / n^2 L b (p + t) C e    q, k and v out, the output back
    ring           2 (n - 1) / n L b (p + t) C e      keys and values, passed round; gathered once for a store
    gather         as many bytes as ring, gathered in one exchange a layer
    distrifusion   2 (n - 1) / n L b p C e            keys and values of a rank's own patch to all
    tensor         2 (n - 1) / n b l C e for each sum over l tokens; a gather of them (split_scheme=sequence) is half
    prediction     the own part of the tokens after the last block, to the n - 1 other ranks that split the tokens
    cfg            b p P e: the own branches' prediction, P numbers of a token, from the last stage to each other group
    latents        the denoised patches, from the last stage to the first; the whole latents to others of a warmup group
    weights        warmup_mode=sequence: own blocks to each of the n - 1 others, in every call of a synchronous step
    keys           a warmup group of n: 2 (n - 1) / n L b (p + t) C e, own keys and values to the others
    data           a replica's own latents to the others, once; result: all latents to all stages, once

Shares that do not divide evenly differ by a token or a head, and are counted exactly. Headers are not counted. With
`wire_dtype` a token's activation, or a head of it, is c + 2 c / r bytes instead of c e in the kinds of `PACKED_KINDS`,
where r numbers share a scale (`find_scaled_run`); messages that travel as differences have codes of fewer bits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from typing import Any, NamedTuple, cast

from ditile.plan.layout import (
    DUMMY_TEXT,
    Layout,
    Split,
    TokenShard,
    count_weighted_shares,
    pick_even_chunk,
    pick_weighted_chunk,
)
from ditile.plan.option_classes import FunctionT
from ditile.plan.plan import Plan, compute_coordinates, find_outer_place
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile.plan.shape import CallFamily, Shape, Weights

ALIGNMENT = 16
"""The alignment of tensors in a buffer, in bytes."""

KINDS = (
    "activations", "tensor", "ulysses", "ring", "gather", "distrifusion", "prediction", "cfg", "latents", "weights",
    "keys", "data", "result",
)  # fmt: skip
"""The kinds of traffic for which there is a formula here."""
PACKED_KINDS = ("activations", "ulysses", "ring", "gather", "distrifusion", "keys")
"""The kinds of traffic that `Plan.wire_dtype` sends in fewer bits."""
SCALE_BYTES = 2
MOST_SCALED = {"int8": 16, "residual4": 32, "residual3": 32}
"""The most numbers that share a scale (distributed/wire.py says why)."""
RESIDUAL_BITS = {"residual4": 4, "residual3": 3}
"""Bits per number in a message that travels as a difference."""
RESIDUAL_GROUP = 8
"""How many codes of a difference are packed together: they fill whole bytes."""


def memoize_method(method: FunctionT) -> FunctionT:
    """Keep the results of a method on its instance, by the arguments, for the lifetime of the instance."""
    attribute = f"_results_of_{method.__qualname__}"

    @wraps(method)
    def look_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = vars(self).setdefault(attribute, {})
        key = (*args, *kwargs.items())
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        return results[key]

    return cast(FunctionT, look_up)


class RepeatedExchange(NamedTuple):
    """Equal exchanges of a kind within a call: the bytes of each, and their number."""

    kind: str
    size: int
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A call under a plan.

    Attributes:
        plan, family: the division, and the model's family.
        shape: the shape of the whole call, over all replicas.
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
        """Return the schedule of the call's steps."""
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

    def count_calls_in_step(self, step: int) -> int:
        """Count the transformer calls of a rank in a step. In step 0 a rank makes all calls, to learn their number."""
        if step == 0:
            return self.shape.calls
        return self.plan_rank(0).shape.calls

    @cached_property
    def image_layout(self) -> Layout:
        """Return the cuts of the image."""
        return self.shape.build_layout(self.plan, self.family.joint)

    @memoize_method
    def shard_tokens(self, patch: int | None) -> tuple[TokenShard, ...]:
        """Return the tokens of each rank in a patch, or in the whole image (None)."""
        return make_token_split(self.plan).shard_tokens(self.image_layout, patch)

    @cached_property
    def warmup_shards(self) -> tuple[TokenShard, ...]:
        """Return the tokens of each stage of the warmup group in synchronous steps. Empty without a group."""
        group_size = self.step_schedule.warmup_group_size
        if group_size == 0:
            return ()
        return Split(group_size).shard_tokens(self.image_layout, None)

    @memoize_method
    def plan_rank(self, rank: int) -> PlannedRank:
        """Return what a rank holds and computes."""
        coordinates = compute_coordinates(self.plan, rank)
        return PlannedRank(
            job=self,
            number=rank,
            data=coordinates["data"],
            stage=coordinates["pipefusion"],
            token_place=self.plan.find_token_place(coordinates),
            outer=find_outer_place(coordinates),
            ulysses=coordinates["ulysses"],
            tensor=coordinates["tensor"],
        )

    @cached_property
    def end_weights(self) -> tuple[float, ...]:
        """Return the weights by which a replica's ranks divide the decode and the text encoders."""
        return self.plan.list_rank_weights()

    def packs_messages(self, step: int) -> bool:
        """Return whether messages of `PACKED_KINDS` are packed in a step. A difference needs an earlier message."""
        if not self.plan.sends_differences:
            return self.plan.wire_dtype is not None
        return step > 0 and not any(map(self.step_schedule.sends_in_full, (step - 1, step)))

    @property
    def ranks_of_stage(self) -> int:
        """Return the number of ranks with the same blocks, images and branches."""
        return self.plan.token_ranks * self.plan.distrifusion * self.plan.tensor

    @cached_property
    def tensor_shares(self) -> tuple[int, ...]:
        """Return the share of each rank of tensor, in equal parts of heads and features."""
        if not self.plan.has_unlike_tensor_shares:
            return (1,) * self.plan.tensor
        return count_weighted_shares(self.weights.tensor_units, self.plan.list_tensor_weights())

    def has_shares_of(self, other: PlannedCall) -> bool:
        """Return whether each rank has the same blocks, tokens and heads as in another call with the same degrees."""
        if self.stages != other.stages or self.shard_tokens(None) != other.shard_tokens(None):
            return False
        return all(self.plan_rank(rank).heads == other.plan_rank(rank).heads for rank in range(self.plan.world))

    @memoize_method
    def count_layers(self, stage: int) -> Mapping[bool, int]:
        """Count the attention layers of a stage that attend to the text (True), and those that do not (False)."""
        layers = Counter[bool]()
        for block in self.stages[stage]:
            layers.update(self.weights.layers[block])
        return layers

    @memoize_method
    def count_tensor_exchanges(self, stage: int) -> Mapping[tuple[str, str], int]:
        """Count the exchanges of tensor parallelism in a stage, as ("sum", "gather" or "norm", stream) -> how often."""
        exchanges = Counter[tuple[str, str]]()
        # Weights without a tensor table have no exchanges.
        if self.weights.exchanges:
            for block in self.stages[stage]:
                exchanges.update(self.weights.exchanges[block])
        return exchanges


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRank:
    """What one rank holds and computes in a call under a plan.

    Attributes:
        job: the call.
        number: the rank.
        data, stage, ulysses, tensor: its place along these axes.
        token_place: its place among all ranks that split the tokens.
        outer: its place along ring, gather or distrifusion.
    """

    job: PlannedCall
    number: int
    data: int
    stage: int
    token_place: int
    outer: int
    ulysses: int
    tensor: int

    @cached_property
    def shape(self) -> Shape:
        """Return the shape of the rank's calls: the images of its replica, and the branches of its group."""
        return self.job.shape.divide_batch(self.job.plan, self.data)

    @property
    def is_last_stage(self) -> bool:
        """Return whether the rank is in the last stage."""
        return self.stage == self.job.plan.pipefusion - 1

    @property
    def blocks(self) -> range:
        """Return the blocks of the rank's stage."""
        return self.job.stages[self.stage]

    @cached_property
    def divisor(self) -> float:
        """Return all heads and features divided by the rank's share: the number of ranks if shares are equal."""
        return sum(self.job.tensor_shares) / self.job.tensor_shares[self.tensor]

    @cached_property
    def tensor_heads(self) -> int:
        """Return the number of heads whose weights the rank has."""
        shares = self.job.tensor_shares
        return self.job.shape.heads * shares[self.tensor] // sum(shares)

    @cached_property
    def heads(self) -> int:
        """Return the number of query heads in the rank's attention."""
        weights = self.job.plan.head_weights or (1.0,) * self.job.plan.ulysses
        return len(pick_weighted_chunk(range(self.tensor_heads), weights, self.ulysses))

    @cached_property
    def key_heads(self) -> int:
        """Return the number of key heads in the rank's attention."""
        plan = self.job.plan
        weights = plan.head_weights
        groups = round(self.tensor_heads * self.job.shape.key_heads)
        # With grouped queries several heads share a key. Ranks repeat it where they cannot divide the groups evenly.
        if groups % plan.ulysses or (weights is not None and len(set(weights)) > 1):
            return self.heads
        return groups // plan.ulysses

    @property
    def offloads(self) -> bool:
        """Return whether the weights of the rank's blocks stay in the host's memory."""
        return self.job.plan.offloads_rank(self.number)

    @property
    def place_in_replica(self) -> int:
        """Return the rank's index in its replica."""
        return self.number % len(self.job.end_weights)

    @property
    def text_share(self) -> float:
        """Return the rank's part of the text encoders, 0 to 1."""
        if self.job.plan.text == "split":
            return self.job.end_weights[self.place_in_replica] / sum(self.job.end_weights)
        return float(self.job.plan.text == "each" or self.place_in_replica == 0)

    def compute_decode_share(self, rows: int) -> float:
        """Return the part that the rank decodes of its replica's images, 0 to 1, for latents with `rows` rows."""
        if self.job.plan.vae == "rows":
            return count_weighted_shares(rows, self.job.end_weights)[self.place_in_replica] / rows
        return float(self.place_in_replica == 0)

    @property
    def layers(self) -> Mapping[bool, int]:
        """Return the number of the rank's attention layers that attend to the text (True), and that do not (False)."""
        return self.job.count_layers(self.stage)

    @cached_property
    def number_bytes(self) -> int:
        """Return the bytes of one number in every row of the rank's batch."""
        return self.shape.batch * self.shape.element_size

    @memoize_method
    def count_sent_key_bytes(self, step: int) -> int:
        """Count the bytes of a token's keys, or values, in a message of a step."""
        return self.key_heads * self.count_packed_bytes(self.job.shape.head_dim, step)

    @memoize_method
    def count_patch_bytes(self, step: int = 0) -> tuple[int, ...]:
        """Count the bytes sent to the next stage for each patch, in one call of a step."""
        plan = self.job.plan
        token_bytes = self.count_packed_bytes(self.job.shape.token_channels, step)
        sizes = []
        for patch in range(self.job.image_layout.num_patches):
            length = self.job.shard_tokens(patch)[self.token_place].count_tokens()
            if plan.split_scheme == "sequence":
                length = len(pick_even_chunk(range(length), plan.tensor, self.tensor))
            sizes.append(length * token_bytes)
        return tuple(sizes)

    @memoize_method
    def count_kept_key_bytes(self, *, text: bool = True) -> int:
        """Count the bytes of kept keys and values, in the rank's layers and heads. `text` includes the text's keys."""
        job = self.job
        if job.plan.distrifusion == 1 and not any(map(job.step_schedule.keeps_keys, range(job.shape.steps))):
            return 0
        tokens = 0
        # A store has the keys of all tokens, also of other ranks' tokens.
        for joint, times in self.layers.items():
            tokens += times * job.image_layout.count_layer_tokens(joint=joint and text)
        return 2 * self.shape.calls * tokens * self.key_heads * job.shape.head_dim * self.number_bytes

    @cached_property
    def base_bytes(self) -> int:
        """Return the most bytes of sent and received messages that the rank keeps as bases for differences."""
        plan = self.job.plan
        if not plan.sends_differences:
            return 0
        # In tokens of all ranks: queries, keys, values and outputs, at both ends; keys and values, which go round a
        # ring, or are gathered beside a rank's own. DistriFusion sends no text.
        kept = 8 * (plan.ulysses > 1) / plan.ring / plan.gather / plan.distrifusion
        kept += 4 * (plan.ring > 1) + 3 * (plan.gather > 1) + 2 * (plan.distrifusion > 1)
        tokens = sum(self.layers.values()) * self.job.image_layout.count_layer_tokens(joint=plan.distrifusion == 1)
        size = int(kept * tokens) * self.heads * self.job.shape.head_dim * self.number_bytes
        neighbours = (self.stage > 0) + (not self.is_last_stage)
        return self.shape.calls * (size + neighbours * sum(self.count_patch_bytes()))

    def count_packed_bytes(self, channels: int, step: int) -> int:
        """Count the bytes of one vector for each row of the batch, in a message of `PACKED_KINDS` in a step."""
        wire_dtype = self.job.plan.wire_dtype
        if wire_dtype is None or not self.job.packs_messages(step):
            return channels * self.number_bytes
        return count_vector_bytes(wire_dtype, channels) * self.shape.batch

    @memoize_method
    def take_share(self, micro: MicroStep) -> MicroStepShare:
        """Return the rank's share of a micro-step."""
        schedule = self.job.step_schedule
        patch = micro.patch
        # Under DistriFusion the image is the patch after the references, where these are skipped.
        if self.job.plan.distrifusion > 1 and schedule.num_references and not schedule.computes_references(micro.step):
            patch = schedule.num_references
        shards = self.job.shard_tokens(patch)
        text = 0
        if self.job.family.joint != "none":
            text = len(shards[self.token_place].text) or DUMMY_TEXT
        return MicroStepShare(
            rank=self,
            micro=micro,
            patch=patch,
            image=shards[self.token_place].image_tokens,
            text=text,
            warmup_group=schedule.select_warmup_group(micro),
            micro_batches=schedule.split_micro_batches(micro),
            shards=shards,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStepShare:
    """One rank's share of a micro-step.

    Attributes:
        patch: the patch that is computed; None is the whole image.
        image, text: how many tokens the rank computes. Dummy text counts.
        warmup_group: the stages that compute it together; empty if one stage does.
        micro_batches: the rows of the batch that are computed together.
        shards: the tokens of all ranks.
    """

    rank: PlannedRank
    micro: MicroStep
    patch: int | None
    image: int
    text: int
    warmup_group: range
    micro_batches: Sequence[range]
    shards: tuple[TokenShard, ...]

    def select_ulysses_shards(self, outer: int) -> tuple[TokenShard, ...]:
        """Select the tokens of each rank in a ulysses group, by the group's place along the outer axis."""
        ulysses = self.rank.job.plan.ulysses
        return self.shards[outer * ulysses : (outer + 1) * ulysses]

    @property
    def ulysses_shards(self) -> tuple[TokenShard, ...]:
        """Return the tokens of each rank in the rank's own ulysses group."""
        return self.select_ulysses_shards(self.rank.outer)


def make_token_split(plan: Plan) -> Split:
    """Return how the ranks of a plan split the tokens."""
    return Split(plan.ring * plan.gather, plan.distrifusion, plan.ulysses, plan.uaa is not False, plan.token_weights)


@lru_cache
def find_scaled_run(wire_dtype: str, channels: int) -> int:
    """Return how many neighbouring numbers of a vector share a scale."""
    # Each fp8 number has an exponent, so one scale is enough.
    if wire_dtype == "fp8":
        return channels
    return max(run for run in range(1, MOST_SCALED[wire_dtype] + 1) if channels % run == 0)


def count_code_bytes(wire_dtype: str, channels: int) -> int:
    """Count the bytes of a packed vector's codes."""
    if wire_dtype not in RESIDUAL_BITS:
        return channels
    return -(-channels // RESIDUAL_GROUP) * RESIDUAL_BITS[wire_dtype]


def count_vector_bytes(wire_dtype: str, channels: int) -> int:
    """Count the bytes of a packed vector: its codes and their scales."""
    scales = channels // find_scaled_run(wire_dtype, channels)
    return count_code_bytes(wire_dtype, channels) + scales * SCALE_BYTES


def count_traffic_bytes(job: PlannedCall, rank: int) -> dict[str, int]:
    """Count the bytes that a rank sends in a whole call, by kind."""
    planned = job.plan_rank(rank)
    total = dict.fromkeys(KINDS, 0)
    for step in range(job.shape.steps):
        for kind, size in count_traffic_in_step(job, rank, step).items():
            total[kind] += size
    if planned.is_last_stage:
        # A replica without images sends no images.
        if planned.data < job.shape.images:
            total["data"] = (job.plan.data - 1) * planned.shape.latent_bytes
        if job.plan.pipefusion > 1:
            total["result"] = job.shape.latent_bytes
    return {kind: size for kind, size in total.items() if size}


def count_traffic_in_step(job: PlannedCall, rank: int, step: int) -> dict[str, int]:
    """Count the bytes that a rank sends in one step, by kind."""
    planned = job.plan_rank(rank)
    total = dict.fromkeys(KINDS, 0)
    calls = job.count_calls_in_step(step)
    for micro in job.step_schedule.list_micro_steps(step):
        share = planned.take_share(micro)
        # Each formula is for one call, and a step makes several calls.
        for formula in (*_CALL_FORMULAS, *_STAGE_FORMULAS):
            for kind, size, times in formula(share):
                total[kind] += calls * size * times
        total["cfg"] += count_guidance_bytes(share)
        if planned.is_last_stage and step > 0:
            # Stage 0 gets patches, and the other members of a warmup group get the whole latents.
            receivers = sum(0 < member < planned.stage for member in share.warmup_group)
            total["latents"] += planned.shape.latent_bytes * receivers
    # The last stage sends what it has denoised to the first one, except after the last step.
    if job.plan.pipefusion > 1 and planned.is_last_stage and step < job.shape.steps - 1:
        total["latents"] += planned.shape.latent_bytes
    return {kind: size for kind, size in total.items() if size}


def count_call_exchanges(share: MicroStepShare) -> dict[str, tuple[int, int]]:
    """Count a rank's exchanges within one transformer call, except between stages: kind -> (number, bytes)."""
    by_kind: dict[str, tuple[int, int]] = {}
    for formula in _CALL_FORMULAS:
        for kind, size, times in formula(share):
            exchanges, total = by_kind.get(kind, (0, 0))
            by_kind[kind] = (exchanges + times, total + times * size)
    return by_kind


def count_weight_stream_bytes(job: PlannedCall, block: int) -> int:
    """Count the bytes of a block's weights on their way to one other stage; see
    `parallel.pipefusion.weight_streaming`."""
    return _count_flat_buffer_bytes(job.weights.tensors[block], job.shape.element_size)


def count_group_key_bytes(rank: PlannedRank, *, joint: bool) -> int:
    """Count the bytes of a layer's keys and values that a stage of a warmup group sends to each other stage in a
    call."""
    return 2 * rank.job.warmup_shards[rank.stage].count_tokens(joint=joint) * rank.count_sent_key_bytes(0)


def count_prediction_bytes(rank: PlannedRank) -> int:
    """Count the bytes of the prediction for the tokens of one stage of a warmup group, in one call."""
    return rank.job.warmup_shards[rank.stage].image_tokens * rank.shape.token_channels * rank.number_bytes


def count_guidance_bytes(share: MicroStepShare) -> int:
    """Count the bytes of the own branches' prediction that a rank sends to other groups of guidance after a
    micro-step.

    They are sent in each call. If each branch is a separate call, they are sent after all calls of a step, except step
    0.
    """
    rank = share.rank
    job = rank.job
    if not rank.is_last_stage or job.plan.cfg == 1:
        return 0
    # In step 0 each group makes all calls, to learn their number.
    if share.micro.step == 0 and job.shape.branches_per_call == 1:
        return 0
    layout = job.image_layout
    tokens = layout.grid.num_tokens
    if share.patch is not None:
        tokens = tokens * layout.count_rows(share.patch) // layout.grid.rows
    numbers = (job.plan.cfg - 1) * tokens * job.weights.out
    return rank.shape.calls * numbers * rank.number_bytes


def _iterate_activation_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    if not share.rank.is_last_stage and not share.warmup_group:
        for patch in share.rank.job.step_schedule.list_patches(share.micro):
            yield RepeatedExchange("activations", share.rank.count_patch_bytes(share.micro.step)[patch])


def _iterate_tensor_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    """Yield an all-reduce after each row-parallel Linear; with split_scheme=sequence, reduce-scatters and gathers."""
    rank = share.rank
    job = rank.job
    n = job.plan.tensor
    if n == 1:
        return
    gathers = job.plan.split_scheme == "sequence"
    lengths = {"image": share.image, "text": share.text, "text+image": share.image + share.text}
    channels = job.shape.token_channels
    # An all-reduce sends each number twice, as a reduce-scatter and an all-gather; a norm sums one number per token.
    numbers = {"sum": 2 * channels, "gather": 0, "norm": 2}
    if gathers:
        numbers = {"sum": channels, "gather": channels, "norm": 2}
    sizes = []
    for (kind, stream), times in job.count_tensor_exchanges(rank.stage).items():
        if numbers[kind]:
            sizes.append((lengths[stream] * numbers[kind], times))
    if gathers:
        is_whole_step = share.micro.patch is None and job.plan.num_patches > 1
        # The last stage gathers the tokens of its result. Later stages gather patches that they get in a whole step.
        if rank.is_last_stage or is_whole_step:
            sizes.append((share.image * channels, 1))
        if rank.stage > 0 and is_whole_step:
            for patch in job.step_schedule.list_patches(share.micro):
                sizes.append((job.shard_tokens(patch)[rank.token_place].image_tokens * channels, 1))
    for size, times in sizes:
        yield RepeatedExchange("tensor", size * rank.number_bytes * (n - 1) // n, times)


def _iterate_ulysses_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    """Yield the exchanges of heads: a rank sends q, k and v of its tokens for other ranks' heads, and returns outputs
    of its own heads."""
    rank = share.rank
    if rank.job.plan.ulysses == 1:
        return
    head_bytes = rank.count_packed_bytes(rank.job.shape.head_dim, share.micro.step)
    heads_of_others = rank.tensor_heads - rank.heads
    # If heads do not share keys, or repeat them, there are as many keys as queries.
    keys_of_others = heads_of_others
    if rank.key_heads < rank.heads:
        keys_of_others = (rank.job.plan.ulysses - 1) * rank.key_heads
    for joint, times in rank.layers.items():
        lengths = [shard.count_tokens(joint=joint) for shard in share.ulysses_shards]
        own_length = lengths[rank.ulysses]
        # q, k and v of the own tokens go out; the output of the other ranks' tokens goes back to them. Heads of other
        # ranks of tensor are not here, so they are not exchanged.
        sent = own_length * (heads_of_others + 2 * keys_of_others) + (sum(lengths) - own_length) * rank.heads
        yield RepeatedExchange("ulysses", head_bytes * sent, times)


def _iterate_key_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    """Yield the exchanges of keys. Along ring a rank sends all ranks' keys but the next rank's; along gather, or with a
    store, it sends its own keys to all."""
    rank = share.rank
    job = rank.job
    plan = job.plan
    n = plan.ring * plan.gather
    if n == 1:
        return
    kind = "ring" if plan.ring > 1 else "gather"
    # A key store needs the keys of all tokens, so they are gathered and not passed round.
    keeps_keys = share.micro.patch is not None or job.step_schedule.keeps_keys(share.micro.step)
    for joint, times in rank.layers.items():
        lengths = []
        for outer in range(n):
            lengths.append(sum(shard.count_tokens(joint=joint) for shard in share.select_ulysses_shards(outer)))
        # Around the ring a rank passes the keys of all ranks except the next one.
        tokens = sum(lengths) - lengths[(rank.outer + 1) % n]
        if kind == "gather" or (keeps_keys and plan.num_patches > 1):
            tokens = (n - 1) * lengths[rank.outer]
        yield RepeatedExchange(kind, 2 * tokens * rank.count_sent_key_bytes(share.micro.step), times)


def _iterate_distrifusion_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    rank = share.rank
    schedule = rank.job.step_schedule
    n = rank.job.plan.distrifusion
    if n == 1 or (schedule.reads_stale_keys(share.micro.step) and not schedule.keeps_keys(share.micro.step)):
        return
    # The text is on every rank, so its keys are not sent.
    image = sum(part.image_tokens for part in share.ulysses_shards)
    size = 2 * (n - 1) * image * rank.count_sent_key_bytes(share.micro.step)
    yield RepeatedExchange("distrifusion", size, sum(rank.layers.values()))


def _iterate_prediction_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    rank = share.rank
    n = rank.job.plan.token_ranks * rank.job.plan.distrifusion
    if n > 1 and rank.is_last_stage:
        # The scheduler steps whole tokens of the image; the prediction has no text.
        numbers = (n - 1) * share.image * rank.job.shape.token_channels
        yield RepeatedExchange("prediction", numbers * rank.number_bytes)


def _iterate_weight_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    """Yield the weights that a stage sends to all other stages, which drop them after the call."""
    if share.warmup_group:
        job = share.rank.job
        for block in share.rank.blocks:
            yield RepeatedExchange("weights", (job.plan.pipefusion - 1) * count_weight_stream_bytes(job, block))


def _iterate_warmup_group_exchanges(share: MicroStepShare) -> Iterator[RepeatedExchange]:
    """Yield the messages of a warmup group in a call: keys of all layers to all stages, and the prediction to the
    last."""
    rank = share.rank
    last = rank.job.plan.pipefusion - 1
    if not share.warmup_group:
        return
    for joint, times in Counter(itertools.chain(*rank.job.weights.layers)).items():
        yield RepeatedExchange("keys", last * count_group_key_bytes(rank, joint=joint), times)
    if rank.stage != last:
        yield RepeatedExchange("prediction", count_prediction_bytes(rank))


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


_CALL_FORMULAS = (
    _iterate_tensor_exchanges,
    _iterate_ulysses_exchanges,
    _iterate_key_exchanges,
    _iterate_distrifusion_exchanges,
    _iterate_prediction_exchanges,
)
_STAGE_FORMULAS = (_iterate_activation_exchanges, _iterate_weight_exchanges, _iterate_warmup_group_exchanges)

"""Predicts a rank's peak memory in bytes: weights, kept keys, tensors of a call, and the process itself.

`HostMemory` is the memory of the host itself needed by all its ranks, in addition to the memory of their devices.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ditile.model.recording.kept_tapes import SHARE_OF_MEMORY
from ditile.parallel.pipefusion.block_offload import NUM_BUFFERS
from ditile.parallel.pipefusion.prefetch import RECEIVES_AHEAD
from ditile.parallel.pipefusion.weight_streaming import BLOCKS_AHEAD
from ditile.plan import cost
from ditile.plan.cost import PlannedCall, RankCoordinates
from ditile.plan.layout import count_weighted_shares
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile.planner.footprint import Footprint
from ditile.planner.profile import FUSED, Profile
from ditile.planner.subject import PlanSubject

WHOLE_STEP = MicroStep(0, None)
"""A step that computes the whole image."""
NUM_LATENT_COPIES = 6
"""Tensors of the latents' size that a pipeline and its scheduler hold at once: latents, predictions, next latents."""


class RankMemory(NamedTuple):
    """The bytes that a rank needs, by kind.

    Attributes:
        weights, text, vae: its parameters of the transformer, the text encoders, and the VAE.
        keys: keys and values that are kept for the next step.
        activations: all other tensors of a call during denoising; those in the tapes' memory are not counted twice.
        tapes: kept by recorded calls until the pipeline is restored: memory to compute in, and messages.
        decode: the tensors of a call during decoding, when keys have been freed.
        idle: memory of the process before it loads a model.
    """

    weights: int
    text: int
    vae: int
    keys: int
    activations: int
    decode: int
    idle: int
    tapes: int = 0

    @property
    def denoising_peak(self) -> int:
        """Return the bytes at the peak of a denoising step, without the VAE and the process itself."""
        return self.weights + self.text + self.keys + self.activations + self.tapes

    @property
    def peak_bytes(self) -> int:
        """Return the bytes at the peak of the whole call."""
        # Tapes read and write keys in place, so keys stay too.
        decode = self.decode + self.keys if self.tapes else self.decode
        always = self.weights + self.text + self.vae + self.idle + self.tapes
        return always + max(self.keys + self.activations, decode)


class HostMemory(NamedTuple):
    """Bytes of a host's memory that all of its ranks need together.

    Attributes:
        kept: weights that stay there while the ranks generate; with `offload=blocks` they are pinned.
        loading: the peak while the ranks load. All that they read passes through the host's memory on its way to the
            devices, and mapped files count in full.
    """

    kept: int
    loading: int


def count_host_memory(
    subject: PlanSubject, job: PlannedCall, host: int | None = None, *, offloads_text: bool = False
) -> HostMemory:
    """Count the memory of the host with the neediest ranks.

    Args:
        subject, job: the call under its plan.
        host: the number of ranks on a host; None if all are on one.
        offloads_text: whether text encoders wait in the host's memory while the ranks generate.
    """
    world = job.plan.world
    # A host may have room for more ranks than the plan has.
    size = min(host or world, world)
    kept_by_host = Counter[int]()
    read_by_host = Counter[int]()
    for rank in range(world):
        kept, read = _count_host_bytes_of_rank(subject, job, rank, offloads_text)
        kept_by_host[rank // size] += kept
        read_by_host[rank // size] += read
    most_kept = max(kept_by_host.values())
    return HostMemory(most_kept, max(most_kept, *read_by_host.values()))


def _count_host_bytes_of_rank(
    subject: PlanSubject, job: PlannedCall, rank: int, offloads_text: bool
) -> tuple[int, int]:
    """Count the bytes a rank keeps in the host's memory, and the bytes it reads."""
    size = job.shape.element_size
    place = job.locate_rank(rank)
    text = _count_text_parameters(subject, job.plan, rank) * size
    kept = count_offloaded_bytes(subject, job, rank)
    if offloads_text:
        kept += text
    blocks = subject.count_parameters(job.select_resident_blocks(place), job.compute_tensor_divisor(place))
    transformer = job.weights.shared + subject.replicated_numbers + blocks
    read = sum(subject.count_weight_bytes(transformer, size, model) for model in range(subject.models))
    return kept, read + subject.vae * size + text


def count_offloaded_bytes(subject: PlanSubject, job: PlannedCall, rank: int) -> int:
    """Count the bytes of a rank's blocks in the host's memory while it generates; 0 if they are on its device."""
    if not job.plan.offloads_rank(rank):
        return 0
    place = job.locate_rank(rank)
    divisor = job.compute_tensor_divisor(place)
    kept = 0
    for model in range(subject.models):
        for block in job.select_resident_blocks(place):
            kept += _count_pinned_bytes(subject, job, block, divisor, model)
    return kept


def _count_pinned_bytes(subject: PlanSubject, job: PlannedCall, block: int, divisor: float, model: int) -> int:
    """Count the bytes of a transformer's block in pinned memory. torch allocates it in powers of two."""
    size = job.shape.element_size
    if job.plan.tensor == 1:
        sizes = [subject.count_weight_bytes(numbers, size, model) for numbers in job.weights.tensors[block]]
        flat = cost.count_flat_bytes(sizes)
    else:
        numbers = subject.count_parameters(range(block, block + 1), divisor)
        flat = subject.count_weight_bytes(numbers, size, model)
    # The next power of two, which a power of two is itself.
    return 1 << max(flat - 1, 0).bit_length()


def _count_text_parameters(subject: PlanSubject, plan: Plan, rank: int) -> int:
    """Count the text encoders' parameters on a rank."""
    return math.ceil(subject.text * compute_text_share(plan, rank))


def compute_text_share(plan: Plan, rank: int) -> float:
    """Return a rank's part of the text encoders, 0 to 1."""
    if plan.text == "split":
        weights = _list_rank_weights(plan)
        return weights[_find_rank_of_image(plan, rank)] / sum(weights)
    return float(plan.text == "each" or _find_rank_of_image(plan, rank) == 0)


def compute_decode_share(plan: Plan, rank: int, rows: int) -> float:
    """Return the part of a replica's images decoded by a rank, 0 to 1, for latents with `rows` rows."""
    if plan.vae == "rows":
        shares = count_weighted_shares(rows, _list_rank_weights(plan))
        return shares[_find_rank_of_image(plan, rank)] / rows
    return float(_find_rank_of_image(plan, rank) == 0)


def _find_rank_of_image(plan: Plan, rank: int) -> int:
    """Return the place of a rank in its replica."""
    return rank % (plan.world // plan.data)


@lru_cache
def _list_rank_weights(plan: Plan) -> tuple[float, ...]:
    # A cache, because the search asks for every rank of every plan.
    return plan.list_rank_weights()


def count_rank_memory(
    subject: PlanSubject,
    job: PlannedCall,
    profile: Profile,
    rank: int = 0,
    text_tokens: int = 0,
    *,
    records: bool = False,
) -> RankMemory:
    """Count the memory of a rank in a call.

    Args:
        subject, job: the call under its plan.
        text_tokens: the text tokens of its cross attention.
        records: whether calls of the model are recorded.
    """
    place = job.locate_rank(rank)
    plan = job.plan
    profile = profile.get_rank_profile(rank)
    size = job.shape.element_size
    owned = job.select_resident_blocks(place)
    weights = job.weights.shared + subject.replicated_numbers
    divisor = job.compute_tensor_divisor(place)
    buffers = 0
    if plan.offloads_rank(rank):
        buffers = min(NUM_BUFFERS, len(owned)) * _count_largest_block(subject, owned, divisor)
    else:
        weights += subject.count_parameters(owned, divisor)
    if job.step_schedule.mode == "sequence":
        # The largest block counts, since the next weights from another stage may be of any block.
        buffers += (BLOCKS_AHEAD + 1) * _count_largest_block(subject, range(len(job.weights.blocks)), divisor)
    activations = _count_activation_bytes(subject, job, profile, rank, text_tokens)
    # Keys of a transformer stay in memory until the end, even after its last call.
    keys = cost.count_key_store_bytes(job, rank) * subject.models
    tapes = 0
    if records and can_record_calls(plan, profile):
        tapes = _count_tape_bytes(subject, job, rank, text_tokens) * subject.models
        # Tapes and their keys hold no more than their share of memory. Other calls run as code.
        limit = int(profile.memory_bytes * SHARE_OF_MEMORY)
        tapes = min(tapes, max(0, limit - keys))
        # Every step of an exact plan is played in later images, so it computes in the tapes' memory.
        if not job.step_schedule.has_stale_steps:
            activations = max(activations - tapes, 0)
    # Some models have two transformers that take turns. Both are in memory, cut alike, and share the buffers.
    weight_bytes = sum(subject.count_weight_bytes(weights, size, model) for model in range(subject.models))
    weight_bytes += max(subject.count_weight_bytes(buffers, size, model) for model in range(subject.models))
    return RankMemory(
        weights=weight_bytes,
        text=_count_text_parameters(subject, plan, rank) * size,
        vae=subject.vae * size,
        keys=keys,
        activations=activations,
        decode=_count_decode_bytes(subject, job, place, rank),
        idle=profile.idle_bytes,
        tapes=tapes,
    )


def can_record_calls(plan: Plan, profile: Profile) -> bool:
    """Return whether a machine can record the calls of a plan. A CPU has no graphs."""
    return profile.runs_ahead and plan.can_be_recorded


def _count_largest_block(subject: PlanSubject, blocks: range, divisor: float) -> int:
    """Count the parameters of the largest of some blocks, on a rank of tensor parallelism."""
    return max(subject.count_parameters(range(block, block + 1), divisor) for block in blocks)


def count_peaks_of_ranks(
    subject: PlanSubject, job: PlannedCall, profile: Profile, text_tokens: int = 0, *, records: bool = False
) -> dict[int, int]:
    """Count the bytes of the ranks with the largest needs. Of equal shares, the first rank of a stage has the
    largest."""
    plan = job.plan
    last = plan.pipefusion - 1
    # Replicas and both halves of guidance need the same, so that one pipeline of stages is looked at.
    ranks_of_stage = plan.world // (plan.data * plan.cfg * plan.pipefusion)
    counts = {stage: subject.count_parameters(job.stages[stage], 1) for stage in range(1, last)}
    heaviest = max(counts, key=counts.__getitem__, default=0)
    ranks = {stage * ranks_of_stage for stage in (0, heaviest, last)}
    if profile.by_rank or plan.has_unlike_ranks or plan.stage_weights is not None:
        ranks = set(range(plan.world))
    peaks = {}
    for rank in ranks:
        memory = count_rank_memory(subject, job, profile, rank, text_tokens, records=records)
        peaks[rank] = memory.peak_bytes
    return peaks


def _count_activation_bytes(
    subject: PlanSubject, job: PlannedCall, profile: Profile, rank: int, text_tokens: int
) -> int:
    """Count the bytes of tensors kept by steps, or computed, sent and received ahead by the largest micro-step."""
    plan = job.plan
    place = job.locate_rank(rank)
    shape = job.compute_replica_shape(place.data)
    schedule = job.step_schedule
    divisor = job.compute_tensor_divisor(place)
    footprint = subject.get_footprint(divisor)
    if plan.rounds_otherwise and FUSED in profile.pointwise:
        # Such a plan fuses GELU in every step; other plans have steps in which it is not fused.
        footprint = replace(footprint, moments=footprint.fused)
    row = shape.batch * shape.element_size
    computed = 0.0
    for micro in _list_largest_micro_steps(schedule):
        numbers = _count_micro_step_peak(footprint, job, place, micro, text_tokens)
        computed = max(computed, row * numbers + _count_prefetch_bytes(job, place, micro))
    _, text = cost.count_micro_step_tokens(job, place, WHOLE_STEP)
    image = job.image_layout.image_tokens
    kept = subject.count_kept_numbers(job.stages[place.stage], divisor, image, text or text_tokens)
    if place.stage > 0:
        # Later stages keep the embedded latents too, although they do not read them.
        kept += image * shape.token_channels
    if len(schedule.split_micro_batches(WHOLE_STEP)) > 1:
        # These tensors are kept for each micro-batch, and once more for the whole batch.
        kept *= 2
    latents = NUM_LATENT_COPIES * shape.latent_bytes
    in_flight = 0
    # DistriFusion sends the keys of all layers at once; the keys of the text are not sent.
    if plan.distrifusion > 1:
        in_flight = cost.count_key_store_bytes(job, rank, text=False)
    return int(computed + row * kept) + latents + in_flight


def _list_largest_micro_steps(schedule: PatchSchedule) -> list[MicroStep]:
    """List a micro-step for each kind of patch: the first patch, because it is the largest, and the first with
    latents."""
    # The first step and the last synchronous one; and a stale step after the pipeline was filled.
    last_synchronous = max(schedule.warmup - 1, 0)
    filled = min(schedule.warmup + 2, schedule.steps - 1)
    steps = {0, last_synchronous, filled}
    if schedule.num_references:
        steps |= {step for step in range(schedule.warmup, schedule.steps) if schedule.computes_references(step)}
    micro_by_patch = {}
    for step in sorted(steps):
        for micro in schedule.list_micro_steps(step):
            if micro.patch in (None, 0, schedule.num_references):
                micro_by_patch[micro.patch] = micro
    return list(micro_by_patch.values())


def _count_micro_step_peak(
    footprint: Footprint, job: PlannedCall, place: RankCoordinates, micro: MicroStep, text_tokens: int
) -> float:
    """Count the numbers per row of the batch at the peak of a micro-step, including earlier messages to the next
    stage."""
    plan = job.plan
    micro_batches = job.step_schedule.split_micro_batches(micro)
    image, text = cost.count_micro_step_tokens(job, place, WHOLE_STEP)
    steps = 0.0
    if not job.is_last_stage(place):
        steps = min(2, micro.step) + (len(micro_batches) - 1) / len(micro_batches)
    sent = steps * job.count_calls_in_step(1) * (image + text) * job.shape.token_channels
    if plan.split_scheme == "sequence":
        sent /= plan.tensor
    return _count_computed_numbers(footprint, job, place, micro, text_tokens) + sent


def _count_computed_numbers(
    footprint: Footprint, job: PlannedCall, place: RankCoordinates, micro: MicroStep, text_tokens: int
) -> float:
    """Count the numbers per row of the batch computed by a micro-step, at its peak."""
    schedule = job.step_schedule
    micro_batches = schedule.split_micro_batches(micro)
    image, text = cost.count_micro_step_tokens(job, place, WHOLE_STEP)
    if micro.patch is not None:
        image, text = cost.count_micro_step_tokens(job, place, micro)
    elif schedule.warmup_group_size:
        image = -(-image // schedule.warmup_group_size)
        text = -(-text // schedule.warmup_group_size)
    exchanged = _count_exchange_numbers(job, micro, image + text) / job.compute_tensor_divisor(place)
    # If the sequence has no text, cross attention reads it.
    text = text or text_tokens
    most = max(moment.count_numbers(image, text) for moment in footprint.moments)
    attending = max(moment.count_numbers(image, text) for moment in footprint.attending) + exchanged
    return max(most, attending) * len(micro_batches[0]) / schedule.batch


def _count_tape_bytes(subject: PlanSubject, job: PlannedCall, rank: int, text_tokens: int) -> int:
    """Count the bytes held by recorded calls: memory for the largest of them, and each call's inputs, messages and
    results.

    One tape is played at a time, so all compute in the same memory.
    """
    place = job.locate_rank(rank)
    plan = job.plan
    schedule = job.step_schedule
    shape = job.compute_replica_shape(place.data)
    divisor = job.compute_tensor_divisor(place)
    footprint = subject.get_footprint(divisor)
    micro_steps = _list_largest_micro_steps(schedule)
    # Before stale keys, one or two synchronous steps run as code, and so do split ones.
    is_split = len(schedule.split_micro_batches(WHOLE_STEP)) > 1 or bool(schedule.select_warmup_group(WHOLE_STEP))
    if schedule.has_stale_steps and (schedule.warmup < 3 or is_split):
        micro_steps = [micro for micro in micro_steps if schedule.reads_stale_keys(micro.step)]
    computed = 0.0
    for micro in micro_steps:
        # The last synchronous step keeps its keys, so it runs as code.
        if micro.patch is None and plan.distrifusion == 1:
            micro = WHOLE_STEP
        computed = max(computed, _count_computed_numbers(footprint, job, place, micro, text_tokens))
    text = job.image_layout.text or text_tokens
    # Values kept by steps for the next ones are computed again in a tape, because it does not know other tapes.
    image = job.image_layout.image_tokens
    kept = subject.count_kept_numbers(job.stages[place.stage], divisor, image, text)
    computed += kept
    if schedule.has_stale_steps and plan.distrifusion == 1:
        # Tapes of patches also hold their shared outputs, with the embedded latents.
        computed += kept + image * shape.token_channels
    row = shape.batch * shape.element_size
    branches = job.count_calls_in_step(1)
    patches = range(plan.num_patches)
    # Each patch has a tape for each branch of guidance, and returns a prediction of the whole image.
    latents = shape.latent_bytes // shape.images * shape.batch
    results = len(patches) * branches * latents
    if job.is_last_stage(place) and plan.num_patches * plan.token_ranks * plan.distrifusion > 1:
        # All tokens after the last block; a call computes some of them.
        results += branches * image * shape.token_channels * row
    inputs = branches * (latents + text * shape.token_channels * row)
    # Messages to the next stage leave from memory of their own, and those from the one before arrive in such.
    neighbours = (place.stage > 0) + (not job.is_last_stage(place))
    messages = neighbours * branches * sum(cost.count_activation_bytes(job, place, patch) for patch in patches)
    return int(computed * row) + results + inputs + messages


def _count_decode_bytes(subject: PlanSubject, job: PlannedCall, place: RankCoordinates, rank: int) -> int:
    """Count the bytes to decode a replica's images on its first rank; with `vae=rows`, to decode each rank's rows."""
    shape = job.compute_replica_shape(place.data)
    rows = shape.height // subject.vae_scale
    share = compute_decode_share(job.plan, rank, rows)
    pixels = rows * (shape.width // subject.vae_scale)
    numbers = shape.images * pixels * subject.count_decode_numbers(shape.frames)
    return int(numbers * shape.element_size * share)


def _count_exchange_numbers(job: PlannedCall, micro: MicroStep, own: int) -> float:
    """Count the numbers added by an exchange around attention to the other live tensors of a rank."""
    tokens = 0
    lengths = [shard.count_tokens() for shard in job.shard_tokens(job.select_patch(micro))]
    keeps_keys = job.plan.distrifusion == 1 and job.step_schedule.keeps_keys(micro.step)
    if job.plan.ulysses > 1 and micro.patch is not None:
        # The 5 is fitted, like the 8 below.
        tokens = 5 * own
    elif job.plan.ulysses > 1:
        # Queries, keys and values exist three times: sent, received, and in order.
        tokens = 8 * own if keeps_keys else 9 * own
    elif job.plan.ring > 1 and (micro.patch is not None or keeps_keys):
        # Kept keys and values: this rank's, those received from all ranks, and the joined ones.
        tokens = 2 * own + 4 * sum(lengths)
    elif job.plan.ring > 1:
        # The keys and values that are passed on, the next keys and values, and the partial sum.
        tokens = 2 * own + 4 * max(lengths)
    return tokens * job.shape.token_channels


def _count_prefetch_bytes(job: PlannedCall, place: RankCoordinates, micro: MicroStep) -> int:
    """Count the bytes of messages received ahead and of the message being read; 0 in step 0."""
    if place.stage == 0 or micro.step == 0:
        return 0
    # The first patch has the text, and where references come first, another one has the most latents.
    first = {0, job.step_schedule.num_references} & set(range(job.plan.num_patches))
    return (RECEIVES_AHEAD + 1) * max(cost.count_activation_bytes(job, place, patch) for patch in first)

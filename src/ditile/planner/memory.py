"""Predicts a rank's peak memory in bytes: weights, kept keys, tensors of a call, and the process itself.

`HostMemory` is the memory of the host itself needed by all its ranks, in addition to the memory of their devices.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from ditile.model.recording.kept_tapes import SHARE_OF_MEMORY
from ditile.parallel.pipefusion.block_offload import NUM_BUFFERS
from ditile.parallel.pipefusion.prefetch import RECEIVES_AHEAD
from ditile.parallel.pipefusion.weight_streaming import BLOCKS_AHEAD
from ditile.plan import cost
from ditile.plan.cost import MicroStepShare, PlannedCall, PlannedRank
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep
from ditile.planner.profile import Profile
from ditile.planner.subject import PlanSubject

NUM_LATENT_COPIES = 6
"""Tensors of the latents' size that a pipeline and its scheduler hold at once: latents, predictions, next latents."""


class RankMemory(NamedTuple):
    """The bytes that a rank needs, by kind.

    Attributes:
        weights, text, vae: its parameters of the transformer, the text encoders, and the VAE.
        keys: keys and values that are kept for the next step, and messages from which the next ones are differences.
        activations: all other tensors of a call during denoising; those in the tapes' memory are not counted twice.
        tapes: memory that recorded calls hold until the pipeline is restored, to compute in and for messages.
        decode: the tensors of a call during decoding. Keys are freed before it, unless there are tapes.
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


def count_host_memory(subject: PlanSubject, job: PlannedCall, host: int | None = None) -> HostMemory:
    """Count the memory of the host with the neediest ranks.

    Args:
        subject, job: the call under its plan.
        host: the number of ranks on a host; None if all are on one.
    """
    world = job.plan.world
    # A host may have room for more ranks than the plan has.
    host_size = min(host or world, world)
    kept_by_host = Counter[int]()
    read_by_host = Counter[int]()
    for rank in map(job.plan_rank, range(world)):
        element_size = rank.shape.element_size
        kept_by_host[rank.number // host_size] += count_offloaded_bytes(subject, rank)
        blocks = subject.count_block_parameters(rank.divisor)[rank.blocks.start : rank.blocks.stop]
        transformer = job.weights.shared + subject.replicated_numbers + sum(blocks)
        read = sum(subject.count_weight_bytes(transformer, element_size, model) for model in range(subject.models))
        read_by_host[rank.number // host_size] += read + subject.vae * element_size + _count_text_bytes(subject, rank)
    most_kept = max(kept_by_host.values())
    return HostMemory(most_kept, max(most_kept, *read_by_host.values()))


def count_offloaded_bytes(subject: PlanSubject, rank: PlannedRank) -> int:
    """Count the bytes of a rank's blocks in the host's memory while it generates; 0 if they are on its device."""
    job = rank.job
    if not rank.offloads:
        return 0
    size = rank.shape.element_size
    kept = 0
    for model in range(subject.models):
        for block in rank.blocks:
            if job.plan.tensor == 1:
                sizes = [subject.count_weight_bytes(numbers, size, model) for numbers in job.weights.tensors[block]]
                flat = cost.count_flat_bytes(sizes)
            else:
                flat = subject.count_weight_bytes(subject.count_block_parameters(rank.divisor)[block], size, model)
            # torch rounds pinned memory up to a power of two, and a power of two stays as it is.
            kept += 1 << max(flat - 1, 0).bit_length()
    return kept


def _count_text_bytes(subject: PlanSubject, rank: PlannedRank) -> int:
    """Count the bytes of the text encoders on a rank."""
    return math.ceil(subject.text * rank.text_share) * rank.shape.element_size


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
    planned = job.plan_rank(rank)
    shape = planned.shape
    # The first rank of a replica decodes its images; with vae=rows each rank decodes its rows.
    rows = shape.height // subject.vae_scale
    decode_share = planned.compute_decode_share(rows)
    profile = profile.get_rank_profile(rank)
    tensors = _RankTensors(subject, planned, text_tokens)
    activations = tensors.count_activation_bytes()
    # Keys of a transformer stay in memory until the end, even after its last call.
    keys = (planned.count_kept_key_bytes() + planned.base_bytes) * subject.models
    tapes = 0
    if records and can_record_calls(job.plan, profile):
        # Tapes and their keys hold at most `SHARE_OF_MEMORY`. Calls that this leaves without a tape run as code.
        limit = int(profile.memory_bytes * SHARE_OF_MEMORY)
        tapes = min(tensors.count_tape_bytes() * subject.models, max(0, limit - keys))
        # Every step of an exact plan is played in later images, so it computes in the tapes' memory.
        if not job.step_schedule.has_stale_steps:
            activations = max(activations - tapes, 0)
    weights = _count_transformer_bytes(subject, planned)
    decoded = shape.images * rows * (shape.width // subject.vae_scale) * subject.count_decode_numbers(shape.frames)
    return RankMemory(
        weights=weights,
        text=_count_text_bytes(subject, planned),
        vae=subject.vae * shape.element_size,
        keys=keys,
        activations=activations,
        decode=int(decoded * shape.element_size * decode_share),
        idle=profile.idle_bytes,
        tapes=tapes,
    )


def _count_transformer_bytes(subject: PlanSubject, rank: PlannedRank) -> int:
    """Count the bytes of the transformers' weights on a rank's device."""
    parameters = subject.count_block_parameters(rank.divisor)
    owned = parameters[rank.blocks.start : rank.blocks.stop]
    weights = rank.job.weights.shared + subject.replicated_numbers
    buffers = 0
    if rank.offloads:
        buffers = min(NUM_BUFFERS, len(owned)) * max(owned)
    else:
        weights += sum(owned)
    if rank.job.step_schedule.mode == "sequence":
        # The largest block counts, since the next weights from another stage may be of any block.
        buffers += (BLOCKS_AHEAD + 1) * max(parameters)
    size = rank.shape.element_size
    # Some models have two transformers that take turns. Both are in memory, cut alike, and share the buffers.
    weight_bytes = sum(subject.count_weight_bytes(weights, size, model) for model in range(subject.models))
    return weight_bytes + max(subject.count_weight_bytes(buffers, size, model) for model in range(subject.models))


def can_record_calls(plan: Plan, profile: Profile) -> bool:
    """Return whether a machine can record the calls of a plan. A CPU has no graphs."""
    return profile.runs_ahead and plan.can_be_recorded


def count_peaks_of_ranks(
    subject: PlanSubject, job: PlannedCall, profile: Profile, text_tokens: int = 0, *, records: bool = False
) -> dict[int, int]:
    """Return rank -> its peak bytes, for the ranks with the largest needs."""
    plan = job.plan
    last = plan.pipefusion - 1
    # Replicas and groups of cfg need the same, so one pipeline of stages is looked at. With equal shares, the first
    # rank of a stage needs most.
    parameters = subject.count_block_parameters(1)
    heaviest = max(
        range(1, last),
        key=lambda stage: sum(parameters[job.stages[stage].start : job.stages[stage].stop]),
        default=0,
    )
    ranks = {stage * job.ranks_of_stage for stage in (0, heaviest, last)}
    if profile.by_rank or plan.has_unlike_ranks or plan.stage_weights is not None:
        ranks = set(range(plan.world))
    peaks = {}
    for rank in ranks:
        memory = count_rank_memory(subject, job, profile, rank, text_tokens, records=records)
        peaks[rank] = memory.peak_bytes
    return peaks


class _RankTensors:
    """The tensors of one rank's calls, besides weights and keys.

    Args:
        text_tokens: the text tokens of its cross attention.
    """

    def __init__(self, subject: PlanSubject, rank: PlannedRank, text_tokens: int) -> None:
        self._rank = rank
        self._job = rank.job
        self._schedule = rank.job.step_schedule
        self._text_tokens = text_tokens
        self._channels = rank.job.shape.token_channels
        self._footprint = subject.divide_footprint(self._channels, rank.divisor)
        self._image = rank.job.image_layout.image_tokens
        # A synchronous step, which computes the whole image.
        self._whole = rank.take_share(MicroStep(0, None))
        # Messages between stages, by patch.
        self._patch_bytes = rank.count_patch_bytes()
        schedule = self._schedule
        # The largest shares: of the whole image, of the first patch, and of the first patch with latents. They are from
        # the first step, from the last synchronous one, and from a stale step after the pipeline was filled.
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
        self._largest = list(map(rank.take_share, micro_by_patch.values()))

    def count_activation_bytes(self) -> int:
        """Count the bytes that steps keep, and those that the largest micro-step computes, sends and receives ahead."""
        rank = self._rank
        plan = self._job.plan
        computed = 0.0
        for share in self._largest:
            numbers = self._count_computed_numbers(share) + self._count_sent_numbers(share)
            received = 0
            # Messages are received ahead while one is read, but not in step 0.
            if rank.stage > 0 and share.micro.step > 0:
                # The first patch has the text. If it has a reference image, the first one with latents may be larger.
                candidates = {0, self._schedule.num_references} & set(range(plan.num_patches))
                received = (RECEIVES_AHEAD + 1) * max(self._patch_bytes[patch] for patch in candidates)
            computed = max(computed, rank.number_bytes * numbers + received)
        kept = self._count_kept_numbers(self._whole.text)
        if rank.stage > 0:
            # Later stages keep the embedded latents too, although they do not read them.
            kept += self._image * self._channels
        if len(self._whole.micro_batches) > 1:
            # These tensors are kept for each micro-batch, and once more for the whole batch.
            kept *= 2
        in_flight = 0
        # DistriFusion sends the keys of all layers at once; the keys of the text are not sent.
        if plan.distrifusion > 1:
            in_flight = rank.count_kept_key_bytes(text=False)
        return int(computed + rank.number_bytes * kept) + NUM_LATENT_COPIES * rank.shape.latent_bytes + in_flight

    def count_tape_bytes(self) -> int:
        """Count the bytes held by recorded calls: memory for the largest of them, and each call's inputs, messages and
        results.

        One tape is played at a time, so all compute in the same memory.
        """
        rank = self._rank
        plan = self._job.plan
        schedule = self._schedule
        whole = self._whole
        shares = self._largest
        # A warmup of one or two steps before stale keys runs as code, and so do synchronous steps whose call is split.
        is_split = len(whole.micro_batches) > 1 or bool(whole.warmup_group)
        if schedule.has_stale_steps and (schedule.warmup < 3 or is_split):
            shares = [share for share in shares if schedule.reads_stale_keys(share.micro.step)]
        computed = 0.0
        for share in shares:
            # The last synchronous step keeps its keys, so it runs as code, and the first one is counted instead.
            if share.micro.patch is None and plan.distrifusion == 1:
                share = whole
            computed = max(computed, self._count_computed_numbers(share))
        text = self._job.image_layout.text
        # Values that steps keep for the next ones are computed again in each tape, as it reads from no other tape.
        kept = self._count_kept_numbers(text)
        computed += kept
        if schedule.has_stale_steps and plan.distrifusion == 1:
            # Tapes of patches also hold their shared outputs, with the embedded latents.
            computed += kept + self._image * self._channels
        branches = self._job.count_calls_in_step(1)
        # Each patch has a tape for each branch of guidance, and returns a prediction of the whole image.
        latents = rank.shape.latent_bytes // rank.shape.images * rank.shape.batch
        results = plan.num_patches * branches * latents
        token_bytes = self._channels * rank.number_bytes
        if rank.is_last_stage and plan.num_patches * plan.token_ranks * plan.distrifusion > 1:
            # All tokens after the last block; a call computes some of them.
            results += branches * self._image * token_bytes
        inputs = branches * (latents + (text or self._text_tokens) * token_bytes)
        # Messages to the next stage have memory of their own, and so have messages from the previous stage.
        neighbours = (rank.stage > 0) + (not rank.is_last_stage)
        messages = neighbours * branches * sum(self._patch_bytes)
        return int(computed * rank.number_bytes) + results + inputs + messages

    def _count_kept_numbers(self, text: int) -> float:
        """Count the numbers per row kept by the blocks for a whole generation. Text that is not in the sequence is read
        by cross attention."""
        kept = self._footprint.kept
        return sum(kept[block].count_numbers(self._image, text or self._text_tokens) for block in self._rank.blocks)

    def _count_sent_numbers(self, share: MicroStepShare) -> float:
        """Count the numbers per row of earlier messages to the next stage that may be on their way in a micro-step."""
        if self._rank.is_last_stage:
            return 0.0
        num_micro_batches = len(share.micro_batches)
        steps = min(2, share.micro.step) + (num_micro_batches - 1) / num_micro_batches
        tokens = self._whole.image + self._whole.text
        sent = steps * self._job.count_calls_in_step(1) * tokens * self._channels
        if self._job.plan.split_scheme == "sequence":
            sent /= self._job.plan.tensor
        return sent

    def _count_computed_numbers(self, share: MicroStepShare) -> float:
        """Count the numbers alive at the peak of a micro-step's computation, per row of the batch."""
        image = share.image
        text = share.text
        group_size = self._schedule.warmup_group_size
        if share.micro.patch is None:
            image = self._whole.image
            text = self._whole.text
            if group_size:
                image = -(-image // group_size)
                text = -(-text // group_size)
        exchanged = self._count_exchanged_tokens(share, image + text) * self._channels / self._rank.divisor
        # If the sequence has no text, cross attention reads the text.
        text = text or self._text_tokens
        peak = max(moment.count_numbers(image, text) for moment in self._footprint.moments)
        attending = max(moment.count_numbers(image, text) for moment in self._footprint.attending) + exchanged
        return max(peak, attending) * len(share.micro_batches[0]) / self._schedule.batch

    def _count_exchanged_tokens(self, share: MicroStepShare, own: int) -> int:
        """Count the tokens that an exchange around attention adds to the other live tensors of a rank."""
        plan = self._job.plan
        is_patch = share.micro.patch is not None
        keeps_keys = plan.distrifusion == 1 and self._schedule.keeps_keys(share.micro.step)
        if plan.ulysses > 1 and is_patch:
            # The 5 is fitted, like the 8 below.
            return 5 * own
        if plan.ulysses > 1:
            # Queries, keys and values exist three times: sent, received, and in order.
            return 8 * own if keeps_keys else 9 * own
        if plan.ring * plan.gather == 1:
            return 0
        lengths = [shard.count_tokens() for shard in share.shards]
        if is_patch or keeps_keys or plan.gather > 1:
            # Gathered keys and values: this rank's, those received from all ranks, and the joined ones.
            return 2 * own + 4 * sum(lengths)
        # The keys and values that are passed on, the next keys and values, and the partial sum.
        return 2 * own + 4 * max(lengths)

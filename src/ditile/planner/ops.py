"""Seconds of each op of a schedule: the computation of a micro-step, the exchanges within it, and messages.

`kernel_times` counts the work. `seconds` says how long the machine takes for it, and for messages over the link that an
axis crosses. `price` puts the ops together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Any

import torch

from ditile.parallel.pipefusion.block_offload import NUM_BUFFERS
from ditile.parallel.pipefusion.weight_streaming import BLOCKS_AHEAD
from ditile.plan import cost
from ditile.plan.cost import RESIDUAL_BITS, MicroStepShare, PlannedCall, memoize_method
from ditile.plan.plan import AXES, SEQUENCE, Plan
from ditile.plan.schedule import MicroStep, Op, OpKind, PatchSchedule
from ditile.planner.kernel_times import TransformerWork, Work, WorkMix, count_unpacking
from ditile.planner.memory import can_record_calls
from ditile.planner.profile import Link, Profile
from ditile.planner.seconds import (
    DeviceLoad,
    RankTokens,
    RooflineDevice,
    WarmupBlock,
    compute_exposed_seconds,
    compute_merging_load,
    compute_warmup_seconds,
    get_bandwidth_share,
    merge_work,
)
from ditile.runner.weights.prequantized import StoredWeights

SEGMENTS_PER_EXCHANGE = {"ring": 2, "distrifusion": 2}
"""Kind of exchange -> segments of a recorded call that it ends: one at its start, one at its wait; others end one."""
PACKING_KERNELS = {8: 16, 4: 32, 3: 32}
"""Bits of a number -> kernels that pack a message and unpack one (`distributed.wire`)."""
SENDS = {OpKind.SEND, OpKind.SEND_STEPPED_PATCH, OpKind.SEND_WHOLE_LATENTS, OpKind.SEND_PREDICTION}
"""Messages from stage to stage."""


class CachedCalls(Enum):
    """The ways to record calls of a model with a cache."""

    WHOLE = auto()
    """Recorded as without a cache, because the cache leaves out whole calls, or nothing."""
    KNOWN = auto()
    """The skipped blocks are known before the call, and each decision has a tape."""
    PROBED = auto()
    """A probe decides within a call, so stages that compute a part of the probe run as code."""
    CODE = auto()
    """Never recorded: each block decides by its own numbers, or the host computes with them for a forecast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSkips:
    """The work a cache is expected to leave out.

    Attributes:
        steps: the steps that skip the blocks.
        first, last: how many first and last blocks run even in `steps`: the probe and the tail.
        calls: how calls are recorded.
    """

    steps: frozenset[int] = frozenset()
    first: int = 1
    last: int = 0
    calls: CachedCalls = CachedCalls.WHOLE

    def can_be_recorded(self, plan: Plan) -> bool:
        """Return whether calls of some stage may be recorded under a plan."""
        if self.calls is CachedCalls.PROBED:
            # Later stages are told the decision before they compute.
            return plan.pipefusion > 1
        return self.calls is not CachedCalls.CODE

    def has_probe(self, blocks: range) -> bool:
        """Return whether a stage with these blocks computes a part of a probe, or decides by it."""
        return self.calls is CachedCalls.PROBED and blocks.start < max(self.first, 1)

    def can_skip_block(self, block: int, blocks: int) -> bool:
        """Return whether a block, one of `blocks` in the model, is skipped in `steps`."""
        return self.first <= block < blocks - self.last


NO_SKIPS = CacheSkips()
"""Without a cache."""


@dataclass(frozen=True)
class MachineWork:
    """One model on one machine, with the seconds of its work, which are computed once.

    Attributes:
        text_tokens: text tokens of cross attention. They are not in the sequence.
        host: ranks on each host; None if all are on one host.
        records: whether calls are recorded and played in later steps, if plan and machine allow it.
        stored: the formats of weights in separate files, if any; two transformers in turn count as their mean.
    """

    transformer_work: TransformerWork
    profile: Profile
    text_tokens: int = 0
    host: int | None = None
    records: bool = False
    stored: StoredWeights | None = None
    _loads: dict[tuple[int, RankTokens], DeviceLoad] = field(default_factory=dict)

    @memoize_method
    def select_attention(self, blocks: range) -> Work:
        """Return the attention of some blocks."""
        work = merge_work([self.transformer_work.blocks[block] for block in blocks])
        return {kernel: n for kernel, n in work.items() if kernel.kind == "attention"}

    @memoize_method
    def fingerprint_work(self, blocks: range) -> frozenset[Any]:
        """Return a key that is equal for blocks with the same work."""
        # Blocks that are built alike share one object, so their ids are equal.
        works = self.transformer_work
        return frozenset(Counter((id(works.blocks[block]), id(works.block_steps[block])) for block in blocks).items())

    @memoize_method
    def mix_blocks(self, blocks: range, skips: CacheSkips | None) -> WorkMix:
        """Mix the work of some blocks, except blocks left out by a cache."""
        num_blocks = len(self.transformer_work.blocks)
        runs = [1.0] * len(blocks)
        if skips:
            runs = [float(not skips.can_skip_block(block, num_blocks)) for block in blocks]
        return self.transformer_work.mix_blocks(blocks, runs)

    def compute_load(self, work: Work, tokens: RankTokens) -> DeviceLoad:
        """Return the load of some work. It is cached by tokens and the work's `id`, so the work must outlive this."""
        key = id(work), tokens
        if key not in self._loads:
            self._loads[key] = self.roofline_device.compute_load(work, tokens)
        return self._loads[key]

    def compute_slowdown(self, ranks: int) -> float:
        """Compute by which factor work is slower while `ranks` ranks of a host compute."""
        devices = self.profile.devices
        slowdown = max(1.0, ranks / devices)
        if devices == 1:
            return slowdown
        # From one device to all of them, the factor grows linearly.
        most_slowdown = self.profile.together - 1
        return slowdown * (1 + most_slowdown * (min(ranks, devices) - 1) / (devices - 1))

    @cached_property
    def unpacking_load(self) -> DeviceLoad:
        """Return the load to unpack all quantized weights before a call multiplies with them."""
        if self.stored is None or not self.stored.formats:
            return DeviceLoad(0.0, 0.0)
        profile = self.profile
        size = 0.0
        kernels = 0
        # Each weight is unpacked once in a call, and multiplied like a plain one. A machine's curves are measured in
        # one of these two types.
        dtype = torch.float32 if profile.element_size == 4 else torch.bfloat16
        for name, (numbers, weights) in self.stored.formats.items():
            size_of_number, kernels_of_weight = count_unpacking(name, dtype)
            size += numbers * size_of_number
            kernels += weights * kernels_of_weight
        rate = profile.pointwise["pointwise"].interpolate(size / kernels)
        return DeviceLoad(size / rate + kernels * profile.kernel_gap_s, kernels * profile.kernel_s)

    @cached_property
    def roofline_device(self) -> RooflineDevice:
        """Return the machine's device."""
        return RooflineDevice(self.profile)


class OpPricer:
    """Seconds of the ops of one call under one plan, each kind of them priced once.

    Args:
        skips: the work left out by a cache.
        rank: the rank at this one's place is priced in each stage; with even shares, the first place has the largest.
    """

    def __init__(self, basis: MachineWork, job: PlannedCall, skips: CacheSkips, rank: int = 0) -> None:
        self._basis = basis
        self.job = job
        self.skips = skips
        self._profile = basis.profile
        self.schedule = job.step_schedule
        # A host may have room for more ranks than the plan has.
        self._host = min(job.plan.world, basis.host or job.plan.world)
        self._slowdown = basis.compute_slowdown(self._host)
        can_record = can_record_calls(job.plan, self._profile) and skips.can_be_recorded(job.plan)
        self.records = basis.records and can_record
        # Replicas and halves of guidance do the same work, so only the first of each is priced.
        size = job.ranks_of_stage
        self._ranks = [job.plan_rank(stage * size + rank % size) for stage in range(job.plan.pipefusion)]
        self._offloads = job.plan_rank(rank).offloads
        self._seen: dict[Any, float] = {}

    @cached_property
    def first_alike_stages(self) -> list[int]:
        """Return the first stage with the same work, for each stage."""
        first_stages: dict[Any, int] = {}
        last = self.job.plan.pipefusion - 1
        alike = []
        for stage, blocks in enumerate(self.job.stages):
            num_skippable = 0
            if self.skips.steps:
                num_skippable = sum(map(self._is_skippable_block, blocks))
            place = stage == 0, stage == last
            kind = self._basis.fingerprint_work(blocks), num_skippable, self.skips.has_probe(blocks), place
            alike.append(first_stages.setdefault(kind, stage))
        return alike

    def get_op_seconds(self, stage: int, op: Op, *, free: bool) -> float:
        """Return the seconds an op occupies its stage. With `free`, messages take no time."""
        # Stages with the same work take the same time.
        stage = self.first_alike_stages[stage]
        patch = self._first_alike_patches[op.patch]
        # The first call of a step has more to do than the calls of other branches.
        key = (stage, op.kind, self.step_kinds[op.step], patch, op.branch == 0, op.micro_batch, free)
        seconds = self._seen.get(key)
        if seconds is None:
            seconds = self._seen[key] = self._compute_op_seconds(stage, op, free=free)
        return seconds

    @cached_property
    def _first_alike_patches(self) -> dict[int | None, int | None]:
        """Return patch -> the first patch with the same work and messages. None is the whole image."""
        layout = self.job.image_layout
        first_patches: dict[tuple[Any, ...], int] = {}
        alike: dict[int | None, int | None] = {None: None}
        for patch in range(layout.num_patches):
            # The first patch of a step has the work done once in a step. In a step without references, that is the
            # first patch of the latents.
            if patch <= layout.num_references:
                alike[patch] = patch
                continue
            kind = (layout.count_rows(patch), layout.carries_text(patch), self.job.count_denoised_share(patch))
            alike[patch] = first_patches.setdefault(kind, patch)
        return alike

    def is_played(self, step: int, stage: int) -> bool:
        """Return whether a stage plays the calls of a step. The host starts played calls segment by segment."""
        return step in self._played_steps and not self.skips.has_probe(self.job.stages[stage])

    @cached_property
    def _played_steps(self) -> frozenset[int]:
        """Return the steps whose calls later images play. The first images record them."""
        steps = range(self.schedule.steps) if self.records else ()
        return frozenset(step for step in steps if not self._runs_as_code(step))

    def _runs_as_code(self, step: int) -> bool:
        """Return whether the calls of a step run as code in every image."""
        schedule = self.schedule
        if schedule.reads_stale_keys(step):
            return False
        # The first step is not recorded, because stages learn the widths of messages in it. It is played if the
        # second one, which is recorded, is like it.
        is_second_alike = schedule.steps > 1 and not schedule.keeps_keys(1)
        # In the first step, a cache of blocks has nothing to reuse yet.
        has_work_of_its_own = schedule.stages > 1 or self.skips.calls is not CachedCalls.WHOLE
        if step == 0 and (has_work_of_its_own or not is_second_alike):
            return True
        # The last step before stale keys are read makes the memory that they are kept in.
        if schedule.keeps_keys(step):
            return True
        # Split calls run as code too: into micro-batches, or over the stages of a warmup group.
        whole = MicroStep(step, None)
        return len(schedule.split_micro_batches(whole)) > 1 or bool(schedule.select_warmup_group(whole))

    @cached_property
    def step_kinds(self) -> Sequence[tuple[bool, ...]]:
        """Return a key for each step. Steps with equal keys have the same work and messages."""
        kinds = _list_step_kinds(self.schedule, self.skips.steps, self._played_steps)
        return [(*kind, self.job.packs_messages(step)) for step, kind in enumerate(kinds)]

    def _compute_op_seconds(self, stage: int, op: Op, *, free: bool) -> float:
        micro = self._make_micro_step(op)
        if op.kind is OpKind.COMPUTE:
            # A call of the transformer on this stage, or one of its micro-batches.
            share = self._ranks[stage].take_share(micro)
            load = DeviceLoad(0.0, 0.0).combine_loads(self.compute_stage_load(share, op), self._slowdown)
            if not free:
                add_exchanges = self._add_warmup_exchanges if share.warmup_group else self._add_exchanges
                load = add_exchanges(share, load)
                # Offloaded weights arrive while other blocks compute.
                load = load._replace(device=max(load.device, self._get_offload_seconds(stage)))
            return load.get_busy_seconds(self._profile)
        if op.kind is OpKind.STEP:
            # A synchronous step denoises all patches in one iteration of the loop, so each takes a part of its seconds.
            patches = len(self.schedule.list_denoised_patches(micro))
            seconds = self.iteration_seconds
            if op.patch is not None and micro.patch is None:
                seconds /= patches
            sent = cost.count_guidance_bytes(self._ranks[-1].take_share(micro))
            if sent and not free:
                link = self.get_axis_link("cfg")
                seconds += (link.latency_s + sent / link.bandwidth) / patches
            return seconds
        if free or op.kind not in SENDS:
            return 0.0
        link = self.get_axis_link("pipefusion")
        size = self._count_message_bytes(stage, op)
        # The sender is busy for the part of a message that does not overlap with its next work.
        seconds = (1 - link.overlap) * size / link.bandwidth
        if op.kind is OpKind.SEND:
            seconds += self._compute_packing_load(op.step, size, 1).get_busy_seconds(self._profile)
        return seconds

    @property
    def iteration_seconds(self) -> float:
        """Return the seconds of the pipeline and its scheduler for each iteration of the loop."""
        return self._profile.micro_s

    def _get_offload_seconds(self, stage: int) -> float:
        """Return the seconds to load the weights of a stage's blocks from the host's memory during computation."""
        job = self.job
        blocks = job.stages[stage]
        # Blocks that fit the buffers stay on the device.
        if not self._offloads or len(blocks) <= NUM_BUFFERS:
            return 0.0
        whole = sum(job.weights.blocks[block] for block in blocks)
        numbers = whole / self._ranks[stage].divisor
        num_bytes = numbers * job.shape.element_size
        if self._basis.stored is not None:
            num_bytes = self._basis.stored.count_bytes(numbers, job.shape.element_size)
        return num_bytes / self._profile.host_bandwidth

    def get_travel_seconds(self, stage: int, op: Op) -> float:
        """Return the seconds that a message travels after it has left its sender."""
        patch = self._first_alike_patches[op.patch]
        key = ("travel", self.first_alike_stages[stage], op.kind, patch, op.micro_batch, self.step_kinds[op.step])
        if key not in self._seen:
            link = self.get_axis_link("pipefusion")
            size = self._count_message_bytes(stage, op)
            self._seen[key] = link.latency_s + link.overlap * size / link.bandwidth
        return self._seen[key]

    def _count_message_bytes(self, stage: int, op: Op) -> float:
        """Count the bytes of a message from stage to stage."""
        rank = self._ranks[stage]
        if op.kind is OpKind.SEND and op.patch is not None:
            num_micro_batches = len(self.schedule.split_micro_batches(self._make_micro_step(op)))
            return rank.count_patch_bytes(op.step)[op.patch] / num_micro_batches
        if op.kind is OpKind.SEND_PREDICTION:
            return cost.count_prediction_bytes(rank)
        return rank.shape.latent_bytes * self.job.count_denoised_share(op.patch)

    def _make_micro_step(self, op: Op) -> MicroStep:
        # Under DistriFusion each rank owns a patch, and computes it in every step.
        if self.schedule.reads_stale_keys(op.step) and self.job.plan.distrifusion == 1:
            return MicroStep(op.step, op.patch)
        return MicroStep(op.step, None)

    def compute_stage_load(self, share: MicroStepShare, op: Op) -> DeviceLoad:
        """Compute the load of a stage's blocks and its ends of the model, in one call or a micro-batch of it."""
        rank = share.rank
        work = self._basis.transformer_work
        tokens = self._make_rank_tokens(share, op.micro_batch)
        is_group = bool(share.warmup_group)
        blocks = rank.blocks
        skips = None
        computed_share = 1.0
        if is_group:
            blocks = range(len(work.blocks))
        elif op.step in self.skips.steps:
            skips = self.skips
            computed_share = self._get_computed_share(blocks, op.step)
        mix = self._basis.mix_blocks(blocks, skips)
        of_step = [(work.step, 1.0), *mix.steps]
        # Values that are constant in a generation are computed in its first step.
        of_generation = [(work.once, 1.0), *mix.once]
        is_first = self.schedule.is_first_of_step(share.micro)
        parts = [(work.every, 1.0), *mix.blocks]
        if is_first and op.branch == 0 and op.micro_batch == 0:
            parts += of_step
        if op.step == 0:
            parts += of_generation
        total = DeviceLoad(0.0, 0.0)
        for part, times in parts:
            total = total.combine_loads(self._basis.compute_load(part, tokens), times)
        # Outside of its blocks a forward computes all tokens in the call of each patch. This is left out for a
        # `CallFamily`, because the profiles were fitted without it to published latencies of such families.
        end_tokens = tokens if self.job.family.example else tokens.take_all_tokens()
        first_load = self._basis.compute_load(work.first, end_tokens)
        if rank.stage == 0 or is_group:
            total = total.combine_loads(first_load)
        if rank.is_last_stage or is_group:
            total = total.combine_loads(self._basis.compute_load(work.last, end_tokens))
        total = total.combine_loads(self._compute_unpacking_load(blocks, computed_share))
        if self.is_played(op.step, rank.stage):
            # A segment ends where activations arrive, and where they leave.
            num_segments = 1 + (rank.stage > 0) + (not rank.is_last_stage)
            # Tapes read nothing that code has kept, so each played step also makes the values of a generation.
            if is_first and share.micro.patch is not None and any(part for part, _ in of_step + of_generation):
                # A segment after the call copies what the calls of the step's other patches read.
                num_segments += 1
            return total._replace(host=num_segments * self._profile.segment_s)
        # A patch may be so small that its kernels are done before the host has started the next ones.
        started = sum(times for _, times in mix.blocks) * self._profile.block_s
        return total._replace(host=max(total.host, started))

    def _compute_unpacking_load(self, blocks: range, computed_share: float) -> DeviceLoad:
        """Compute the load to unpack a rank's weights, if only a share of its blocks is computed."""
        stored = self._basis.stored
        if stored is None:
            return DeviceLoad(0.0, 0.0)
        weights = self.job.weights
        numbers = weights.shared + computed_share * sum(weights.blocks[block] for block in blocks)
        load = self._basis.unpacking_load
        share = numbers / (stored.quantized + stored.plain)
        # Each rank of the tensor axis starts all kernels, on a part of each weight.
        return DeviceLoad(share * load.device / self.job.plan.tensor, share * load.host)

    def _get_computed_share(self, blocks: range, step: int) -> float:
        """Return which share of some blocks runs in a step. Blocks left out exchange nothing."""
        if step not in self.skips.steps:
            return 1.0
        return 1 - sum(map(self._is_skippable_block, blocks)) / len(blocks)

    def _is_skippable_block(self, block: int) -> bool:
        return self.skips.can_skip_block(block, len(self._basis.transformer_work.blocks))

    def _make_rank_tokens(self, share: MicroStepShare, micro_batch: int = 0) -> RankTokens:
        rank = share.rank
        plan = self.job.plan
        image = share.image
        text = share.text
        group_size = len(share.warmup_group)
        if group_size:
            image = -(-self.job.image_layout.image_tokens // group_size)
            text = -(-text // group_size)
        batch = rank.shape.batch
        # Each micro-batch has some rows of the batch.
        if self.schedule.mode == "pipelined":
            batch = len(share.micro_batches[micro_batch])
        layout = self.job.image_layout
        attended = 1.0
        if plan.ulysses > 1:
            attended = sum(part.count_tokens() for part in share.ulysses_shards) / (image + text)
        return RankTokens(
            batch=batch,
            image=image,
            text=text or self._basis.text_tokens,
            image_keys=layout.image_tokens,
            text_keys=layout.text or self._basis.text_tokens,
            heads=rank.heads / self.job.shape.heads,
            split=rank.divisor,
            attended=attended or 1.0,
        )

    def _add_exchanges(self, share: MicroStepShare, own: DeviceLoad) -> DeviceLoad:
        """Add exchanges to the load of a call. The device waits for the bytes, the host starts each exchange."""
        total = own
        step = share.micro.step
        for kind, (exchanges, sent) in cost.count_call_exchanges(share).items():
            crossed = SEQUENCE if kind == "prediction" else (kind,)
            axes = [axis for axis in crossed if getattr(self.job.plan, axis) > 1]
            link = self.get_axis_link(axes[0])
            n = math.prod(getattr(self.job.plan, axis) for axis in axes)
            # Blocks that a cache leaves out exchange nothing.
            computed_share = 1.0 if kind == "prediction" else self._get_computed_share(share.rank.blocks, step)
            # A ring exchanges with each other rank in turn, and Ulysses before attention and after it.
            calls = computed_share * exchanges * {"ring": n - 1, "ulysses": 2}.get(kind, 1)
            size = computed_share * sent
            sending = size / (link.bandwidth * get_bandwidth_share(link, kind, n)) + calls * link.latency_s
            if kind == "distrifusion" and self.schedule.reads_stale_keys(step):
                sending = compute_exposed_seconds(sending, link.overlap, own.device)
            elif kind == "ring":
                # A ring's messages travel while the others' keys are attended to.
                attention_work = self._basis.select_attention(share.rank.blocks)
                attending = self._basis.compute_load(attention_work, self._make_rank_tokens(share)).device
                sending = compute_exposed_seconds(sending, link.overlap, attending * (n - 1) / n)
                # With patches, keys are gathered and attended to in one piece, so there is nothing to merge.
                merges = calls if self.job.plan.num_patches == 1 else 0.0
                outputs = merges * (share.image + share.text) * share.rank.heads * self.job.shape.head_dim
                merging = compute_merging_load(self._profile, outputs * share.rank.number_bytes, merges)
                if self.is_played(step, share.rank.stage):
                    # The host does not start the kernels of a recorded call one by one.
                    merging = merging._replace(host=0.0)
                total = total.combine_loads(merging)
            if kind in cost.PACKED_KINDS:
                total = total.combine_loads(self._compute_packing_load(step, size, calls))
            starting = link.call_s
            if kind == "tensor" and link.sum_s is not None:
                starting = link.sum_s
            if self.is_played(step, share.rank.stage):
                starting += SEGMENTS_PER_EXCHANGE.get(kind, 1) * self._profile.segment_s
            total = total.combine_loads(DeviceLoad(sending, calls * starting))
        return total

    def _add_warmup_exchanges(self, share: MicroStepShare, own: DeviceLoad) -> DeviceLoad:
        """Add exchanges to the load of a warmup group's call. Weights arrive while it computes, but it waits for
        keys of each layer."""
        job = self.job
        work = self._basis.transformer_work
        link = self.get_axis_link("pipefusion")
        n = len(share.warmup_group)
        rate = link.bandwidth * get_bandwidth_share(link, "pipefusion", n)
        tokens = self._make_rank_tokens(share)
        blocks = []
        exchanges = 0
        for block, layers in enumerate(job.weights.layers):
            whole = self._basis.compute_load(work.blocks[block], tokens).device * self._slowdown
            before = self._basis.compute_load(work.before[block], tokens).device * self._slowdown
            sent = (n - 1) * sum(cost.count_group_key_bytes(share.rank, joint=joint) for joint in layers)
            weights = cost.count_weight_stream_bytes(job, block) / rate + link.latency_s
            keys = sent / rate + len(layers) * link.latency_s
            blocks.append(WarmupBlock(weights, before, keys, after=whole - before))
            exchanges += len(layers) + 1
        alone = sum(block.before + block.after for block in blocks)
        together = compute_warmup_seconds(blocks, BLOCKS_AHEAD, link.overlap)
        packing = self._compute_packing_load(0, sum(block.keys for block in blocks) * rate, exchanges)
        load = DeviceLoad(own.device - alone + together, own.host + exchanges * link.call_s)
        return load.combine_loads(packing)

    def _compute_packing_load(self, step: int, sent: float, messages: float) -> DeviceLoad:
        """Compute the load to pack and unpack messages of a step; none if they are sent unpacked."""
        wire_dtype = self.job.plan.wire_dtype
        if wire_dtype is None or not sent or not messages or not self.job.packs_messages(step):
            return DeviceLoad(0.0, 0.0)
        bits = RESIDUAL_BITS.get(wire_dtype, 8)
        kernels = PACKING_KERNELS[bits]
        # A kernel reads the numbers of one message.
        size = sent * 8 / bits * self._profile.element_size
        device = kernels * size / self._profile.pointwise["pointwise"].interpolate(size / messages)
        return DeviceLoad(device, messages * kernels * self._profile.kernel_s)

    @memoize_method
    def get_axis_link(self, axis: str) -> Link:
        """Return the slowest link on an axis, with the bandwidth of each rank while others share it."""
        plan = self.job.plan
        n = getattr(plan, axis)
        # The axes along which neighbouring ranks differ first.
        inner_axes = AXES[AXES.index(axis) + 1 :]
        inner = math.prod(getattr(plan, name) for name in inner_axes)
        if self._profile.interlink is None or n == 1 or inner * n <= self._host:
            return self._profile.link
        # Only neighbours exchange messages: in each pipeline or ring, one rank of a host sends to another host.
        sharing = min(inner, self._host)
        if axis == "ulysses":
            # Each rank exchanges messages with all others, and some of them are on its own host.
            sharing = self._host * (n - max(1, self._host // inner)) / (n - 1)
        return replace(self._profile.interlink, bandwidth=self._profile.interlink.bandwidth / sharing)


class UnlikeOpPricer(OpPricer):
    """Seconds of ops if ranks differ: an op takes the time of the slowest rank of its stage.

    Args:
        works: the model's work on the device of each rank.
    """

    def __init__(self, works: Sequence[MachineWork], job: PlannedCall, skips: CacheSkips) -> None:
        super().__init__(works[0], job, skips)
        self._pricers_of_stages: list[list[OpPricer]] = [[] for _ in job.stages]
        pricers: dict[tuple[Any, ...], OpPricer] = {}
        for rank in range(job.plan.world):
            planned = job.plan_rank(rank)
            key = id(works[rank]), planned.token_place, planned.tensor, planned.offloads
            if key not in pricers:
                pricers[key] = OpPricer(works[rank], job, skips, rank)
            stage_pricers = self._pricers_of_stages[planned.stage]
            if pricers[key] not in stage_pricers:
                stage_pricers.append(pricers[key])

    @cached_property
    def first_alike_stages(self) -> list[int]:
        """Return each stage itself, because no two count as alike."""
        return list(range(len(self.job.stages)))

    def get_op_seconds(self, stage: int, op: Op, *, free: bool) -> float:
        """Return the seconds an op occupies its stage. With `free`, messages take no time."""
        return max(pricer.get_op_seconds(stage, op, free=free) for pricer in self._pricers_of_stages[stage])

    def get_travel_seconds(self, stage: int, op: Op) -> float:
        """Return the seconds that the slowest message of a stage's ranks travels."""
        return max(pricer.get_travel_seconds(stage, op) for pricer in self._pricers_of_stages[stage])


@lru_cache(maxsize=1024)
def _list_step_kinds(
    schedule: PatchSchedule, skipped_steps: frozenset[int], played_steps: frozenset[int]
) -> Sequence[tuple[bool, ...]]:
    """Compute `OpPricer.step_kinds`. Many plans have the same schedule, so the list is kept."""
    kinds = []
    for step in range(schedule.steps):
        is_stale = schedule.reads_stale_keys(step)
        kept = schedule.keeps_keys(step)
        computes_references = schedule.computes_references(step)
        is_played = step in played_steps
        kinds.append((step == 0, is_stale, kept, computes_references, step in skipped_steps, is_played))
    return kinds

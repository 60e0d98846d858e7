"""Connects caches with a runner: they read the step of its generation, and the ranks of an image decide alike.

Where only the rules decide, each rank applies them by itself. Otherwise the ranks of a stage sum what they measured.
Under PipeFusion the stage with the last block of the probe decides on each patch separately. Each stage sends the
decision to the next one on a CPU group, a few bytes ahead of the activations. Blocks that are left out still pass
tokens on, so the messages between stages do not depend on decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditile.cache.cached import ModelCache
from ditile.cache.calls.policy import CallAgreement
from ditile.distributed.mesh import Mesh, make_subgroup
from ditile.distributed.transport import PeerChannel, connect_group, gather_numbers
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import GenerationMemory
from ditile.model.hooks.protocols import CallPosition, SkipAgreement
from ditile.plan.plan import SEQUENCE, Plan

TRAFFIC_KIND = "decisions"
PROBE_KIND = "probe"
"""The input of a probe is not packed: two stages would measure the change of tokens by different numbers."""


@dataclass
class LoopClock:
    """The position of a runner's loop.

    Attributes:
        now: the generation under way.
        count_steps: returns the number of its steps.
        plan: the plan, which has the patches.
        cache: the cache of the model; its generation begins with the first call, and ends after the last step, before
            the decoder needs the memory.
        images: returns the number of images; None before it is known, or if stale keys belong to the whole batch.
    """

    now: Generation
    count_steps: Callable[[], int]
    plan: Plan
    cache: ModelCache
    images: Callable[[], int | None]
    _seen: GenerationMemory | None = field(default=None, init=False)

    def begin_model_call(self, model: object) -> CallPosition | None:
        """Return the position of this call. It is None, and no block is left out, in four cases: the stages share a
        synchronous step, a batch comes in micro-batches, tokens of several patches are interleaved, or the call does
        not count."""
        now = self.now
        plan = self.plan
        if not now.is_under_way or now.is_surveyed or now.is_dry:
            return None
        if now.memory is not self._seen:
            # Each generation has its own memory, so another memory is a new generation.
            self._seen = now.memory
            self.cache.begin_generation(self.count_steps())
        step, patch = now.micro_step
        has_all_patches = now.token_patch is None
        # DistriFusion's patches are computed at the same time, each by a rank.
        num_patches = plan.num_patches if plan.distrifusion == 1 else 1
        shares_streams = plan.tensor > 1 and plan.split_scheme == "sequence"
        interleaved = (shares_streams and num_patches > 1) or now.num_references > 0
        if now.batch_range is not None or (has_all_patches and (now.shares.warmup_split is not None or interleaved)):
            return None
        patches = range(num_patches) if patch is None else (patch,)

        def has_real_text() -> bool:
            # Where no ranks split the tokens there is no layout, and this rank has the text.
            tokens = now.layouts.get((now.branch, now.is_whole))
            return tokens is None or bool(tokens.get_own_part(now.token_patch).text)

        def locate_rows(patch: int) -> tuple[int, int, int]:
            """Return the first row of a patch, the row after its last one, and the number of rows of the image."""
            layout = now.tokens.layout
            # A single patch is the whole image. Patches of reference images are not in the latents, so with them each
            # patch counts as the whole.
            if num_patches == 1 or layout.owners:
                return 0, 1, 1
            return layout.cuts[patch], layout.cuts[patch + 1], layout.grid.rows

        return CallPosition(
            step=step,
            branch=now.branch,
            patches=patches,
            sizes=lambda: [now.tokens.get_own_part(patch).image_tokens for patch in patches],
            has_text=has_real_text,
            images=self.images(),
            # The next step reads all keys of a synchronous step.
            must_compute=has_all_patches and now.keeps_keys and not now.is_stale,
            row_spans=lambda: list(map(locate_rows, patches)),
        )

    def end_model_call(self, model: object) -> None:
        """Do nothing: the runner counts the calls."""

    def end_generation(self) -> None:
        """End the generation."""
        self._seen = None
        self.cache.end_generation()


@dataclass(frozen=True, slots=True)
class AgreementGroups:
    """CPU groups of the ranks that decide together.

    Attributes:
        by_batch: ranks of a stage, where branches of guidance share a batch.
        by_calls: the ranks among them that compute the same calls.
        stages: ranks along pipefusion, for decisions.
        starts: the same ranks, for the input of a probe that is longer than a stage.
    """

    by_batch: dist.ProcessGroup | None
    by_calls: dist.ProcessGroup | None
    stages: dist.ProcessGroup | None
    starts: dist.ProcessGroup | None

    @classmethod
    def create_groups(cls, plan: Plan, mesh: Mesh, device: torch.device) -> AgreementGroups:
        """Make the groups. This is collective: all ranks must call it, each with the device of its activations."""
        within = (*SEQUENCE, "tensor")
        # All ranks make the groups in this order.
        batch = make_subgroup("rows", ("cfg", *within), plan, mesh, backend="gloo")
        calls = make_subgroup("calls", within, plan, mesh, backend="gloo")
        stages = make_subgroup("decisions", ("pipefusion",), plan, mesh, backend="gloo")
        starts = make_subgroup("starts", ("pipefusion",), plan, mesh)
        if starts is not None:
            connect_group(starts, device, pairs=True)
        return cls(batch, calls, stages, starts)


class ImageAgreement(CallAgreement):
    """The agreement by which the ranks of an image decide together whether a model is called.

    Args:
        mesh: this rank's place.
        select: picks the rows of this rank's images.
    """

    def __init__(self, mesh: Mesh, select: Callable[[Tensor], Tensor]) -> None:
        self._mesh = mesh
        self._select = select

    def select_own_rows(self, batch: Tensor) -> Tensor:
        """Select the rows of this rank's images from a tensor `[rows, ...]`."""
        return self._select(batch)

    def take_first_number(self, number: Tensor) -> float:
        """Return the number measured by the first rank of the image."""
        numbers = gather_numbers(number.cpu().view(1), self._mesh.control, self._mesh.traffic, TRAFFIC_KIND)
        return float(numbers[0])


@dataclass(eq=False)
class StageAgreement(SkipAgreement):
    """One rank's part in the decisions during a runner's call.

    Attributes:
        groups: the ranks that decide together.
        now: the generation under way.
        by_calls: returns whether each group of guidance computes calls of its own.
        names: block -> its name, for all blocks that are known.
        stages: block -> its stage.
    """

    groups: AgreementGroups
    mesh: Mesh
    now: Generation
    by_calls: Callable[[], bool]
    names: Mapping[nn.Module, str]
    stages: Mapping[nn.Module, int]

    def __post_init__(self) -> None:
        groups = self.groups
        mesh = self.mesh
        if mesh.num_stages > 1:
            self.owned = {block for block, stage in self.stages.items() if stage == mesh.stage_index}
        self._start_channels: dict[int, PeerChannel] = {}
        self._step = -1
        self._previous_stage: PeerChannel | None = None
        self._next_stage: PeerChannel | None = None
        if groups.stages is not None and mesh.stage_index > 0:
            self._previous_stage = PeerChannel(groups.stages, mesh.stage_index - 1, TRAFFIC_KIND, mesh.traffic)
        if groups.stages is not None and mesh.stage_index + 1 < mesh.num_stages:
            self._next_stage = PeerChannel(groups.stages, mesh.stage_index + 1, TRAFFIC_KIND, mesh.traffic)

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Sum over all ranks that decide together. Every rank adds the same numbers in the same order."""
        # gloo sums on the CPU, so the sums go there first.
        return self._gather_from_ranks(sums.cpu().double()).sum(dim=0)

    def take_first_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of the first rank in the group: other ranks may have rounded theirs differently."""
        first, *_ = self._gather_from_ranks(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return list(first)

    def _gather_from_ranks(self, numbers: Tensor) -> Tensor:
        """Gather the numbers of all ranks that decide together: `[ranks, ...]`, in order."""
        group = self.groups.by_calls if self.by_calls() else self.groups.by_batch
        return gather_numbers(numbers, group, self.mesh.traffic, TRAFFIC_KIND)

    def send_skip_decision(self, skips: Sequence[bool]) -> None:
        """Send a decision to the next stage."""
        if self._next_stage is not None:
            self._next_stage.send_tensor(torch.tensor(list(skips), dtype=torch.uint8))

    def receive_skip_decision(self, count: int) -> Sequence[bool]:
        """Wait for a decision of the previous stage."""
        channel = self._previous_stage
        assert channel is not None
        channel.post_receive(None, (count,), torch.empty(0, dtype=torch.uint8))
        return list(map(bool, channel.receive_message(None)))

    def send_probe_input(self, tokens: Tensor, to: nn.Module) -> None:
        """Send the tokens that enter the first block to the stage that decides."""
        step = self.now.micro_step.step
        if step != self._step:
            # What was sent in the last step has arrived, or this step would not have begun.
            self._step = step
            for channel in self._start_channels.values():
                channel.release_old_sends()
        # A channel is made only where the probe is longer than a stage.
        self._get_start_channel(self.stages[to]).send_tensor(tokens)

    def receive_probe_input(self, like: Tensor, of: nn.Module) -> Tensor:
        """Wait for the tokens of `send_probe_input`, shaped like `like`, from the stage of the first block."""
        channel = self._get_start_channel(self.stages[of])
        channel.post_receive(None, like.shape, like)
        return channel.receive_message(None)

    def _get_start_channel(self, peer: int) -> PeerChannel:
        if peer not in self._start_channels:
            assert self.groups.starts is not None
            channel = PeerChannel(self.groups.starts, peer, PROBE_KIND, self.mesh.traffic, shared=True)
            self._start_channels[peer] = channel
        return self._start_channels[peer]

    def mark_blocks_skipped(self, blocks: Sequence[nn.Module], moment: CallPosition) -> None:
        """Tell the store of keys that every attention of these blocks keeps the keys of an earlier step."""
        names = [f"{self.names[block]}." for block in blocks if block in self.names]
        # DistriFusion keeps keys by rank and not by patch.
        patches = [None] if self.mesh["distrifusion"].num_ranks > 1 else moment.patches
        self.now.memory.reuse_stale_keys(moment.branch, names, moment.step, patches)

    def close_channels(self) -> None:
        """Send the remaining messages at the end of a call that went well."""
        for channel in (self._next_stage, self._previous_stage, *self._start_channels.values()):
            if channel is not None:
                channel.flush_sends()

"""PipeFusion: each rank owns a run of blocks, through which patches follow each other (arXiv 2405.14430, section 3.4).

A stage receives at its first own block, and sends when the forward reaches the first block of the next stage. So it
also computes what the forward does between the two stages' blocks. Attention reads keys and values of the previous step
until fresh ones arrive (attention/core.py). Activations go from stage to stage, denoised patches from the last stage to
the first in a separate group. Only the wait for a message blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.recording.tape import CURRENT, note_action
from ditile.distributed.transport import PeerChannel, start_gather
from ditile.model.hooks.block_policy import CallForm, TokenState
from ditile.model.hooks.generation import Generation, LayoutTokens
from ditile.model.hooks.protocols import TokenStreams
from ditile.model.hooks.token_arguments import take_runs, write_runs
from ditile.parallel.pipefusion.prefetch import MessageForm, MessageKey, ReceivePrefetcher
from ditile.parallel.pipefusion.shared_warmup import WarmupGroup
from ditile.plan.errors import ModelError, PlanError, StateError
from ditile.plan.layout import DUMMY_TEXT, Joint, Layout, TokenShard, merge_ranges
from ditile.plan.plan import Facts, Plan, suggest_whole_images
from ditile.plan.schedule import MicroStep, Op, OpKind, PatchSchedule


class PipeFusion:
    """One stage. A comment before each group of methods says who calls them.

    Args:
        mesh: the stage's place and groups, and the trace that records each op.
        owned: the places of this stage's blocks in the model.
        plan: gives the number of patches, and checks it against the rows of tokens.
        joint: where the text is in the sequence.
        streams: says which tokens this rank has between the Linears of a block.
        warmup_group: computes synchronous steps together; None if stages compute them one after the other.

    Attributes:
        is_last_stage: whether this stage makes the prediction and steps the scheduler.
        broken: whether a generation failed while messages may have been under way.
        row_parts: the number of parts into which patches or ranks cut the rows of tokens.
    """

    def __init__(
        self,
        mesh: Mesh,
        owned: range,
        plan: Plan,
        joint: Joint,
        streams: TokenStreams,
        warmup_group: WarmupGroup | None = None,
    ) -> None:
        self.stage = mesh.stage_index
        self.stages = mesh.num_stages
        self.owned = owned
        self.is_last_stage = self.stage == self.stages - 1
        self.plan = plan
        self.warmup_group = warmup_group
        self._joint = joint
        self._streams = streams
        self._patches = plan.num_patches
        self._mesh = mesh
        self._trace = mesh.traffic.trace
        self._sequence = mesh.sequence
        self._traffic = mesh.traffic
        # References may be whole frames, so rows do not matter for them.
        self.row_parts = 1
        if plan.references is None:
            self.row_parts = max(self._patches, plan.distrifusion)
        self._active_blocks = frozenset((0, *owned, owned.stop))
        self._widths: dict[int, tuple[int, int]] = {}  # branch -> channels of image and text tokens
        self._start_of_image = 0
        self._dummies: dict[tuple[int, int], Tensor] = {}  # (rows, channels) -> tokens in place of a text
        self._activations_in: ReceivePrefetcher | None = None
        self._activations_out: PeerChannel | None = None
        self._latents_in: ReceivePrefetcher | None = None
        self._latents_out: list[PeerChannel] = []  # by stage
        self.open_channels()

    def open_channels(self) -> None:
        """Open the channels to other stages, in the mesh's present groups."""
        mesh = self._mesh
        self._activations_in = None
        self._activations_out = None
        self._latents_in = None
        self._latents_out = []
        self.broken = False
        if mesh.latents is None:
            return
        if self.warmup_group is not None:
            self.warmup_group.open_channels()
        if self.stage > 0:
            group = mesh.select_downstream_group(self.stage - 1)
            self._activations_in = ReceivePrefetcher(
                PeerChannel(group, self.stage - 1, "activations", mesh.traffic),
                self._find_activation_form,
            )
            # A step without references has one patch fewer.
            fewest_patches = self._patches
            if self.plan.references not in (None, 1):
                fewest_patches -= 1
            self._activations_in.looks_ahead = fewest_patches >= self.stages
        if not self.is_last_stage:
            group = mesh.select_downstream_group(self.stage)
            self._activations_out = PeerChannel(
                group, self.stage + 1, "activations", mesh.traffic, before_send=self._post_before_send
            )
        if self.stage == 0:
            self._latents_in = self._make_latents_receiver(mesh.latents)
        if self.is_last_stage:
            self._add_latents_sender(mesh.latents)

    def _make_latents_receiver(self, group: dist.ProcessGroup) -> ReceivePrefetcher:
        return ReceivePrefetcher(
            PeerChannel(group, self.stages - 1, "latents", self._traffic),
            self._find_latent_form,
            self._can_post_latents,
        )

    def _add_latents_sender(self, group: dist.ProcessGroup) -> None:
        reader = len(self._latents_out)
        channel = PeerChannel(group, reader, "latents", self._traffic, before_send=self._post_before_send)
        self._latents_out.append(channel)

    def share_latents(self, device: torch.device) -> None:
        """Let every stage get the denoised patches from now on."""
        group = self._mesh.latents
        if group is None or self.stages < 3:
            return
        # NCCL opens a connection only when both its ends do, so all stages come here while no message is under way.
        # The last stage opens one to each further stage, in order.
        if self.is_last_stage:
            for reader in range(len(self._latents_out), self.stages - 1):
                self._add_latents_sender(group)
                self._latents_out[reader].open_connection(device, sends=True)
        elif self._latents_in is None:
            self._latents_in = self._make_latents_receiver(group)
            self._latents_in.channel.open_connection(device, sends=False)

    def connect_channels(self, device: torch.device) -> None:
        """Use every channel once, so that no connection is opened during a step."""
        # All stages use one order, or two of them would wait for each other: down the pipeline, then from the last
        # stage to the first.
        if self._activations_in is not None:
            self._activations_in.channel.open_connection(device, sends=False)
        if self._activations_out is not None:
            self._activations_out.open_connection(device, sends=True)
        for channel in self._latents_out:
            channel.open_connection(device, sends=True)
        if self._latents_in is not None:
            self._latents_in.channel.open_connection(device, sends=False)
        if self.warmup_group is not None:
            self.warmup_group.connect_channels(device)

    @property
    def reads_latents(self) -> bool:
        """Return whether this stage embeds the latents, at least in some steps."""
        if self.stage == 0 or self.warmup_group is not None:
            return True
        return self.generation.findings.reads_latents_everywhere

    def begin_generation(self, schedule: PatchSchedule, generation: Generation) -> None:
        """Reset the state for a new generation."""
        self.schedule = schedule
        self.generation = generation
        self._has_begun = False  # whether a message may have been sent
        self._last_expected_step = 0  # the last step of which activations are expected
        self._last_returned_step = -1  # the last step of which denoised patches are expected
        self._num_taken = 0  # denoised patches that were received
        self._num_sends_due = 0  # sends that this call has yet to make
        self._widths.clear()
        self._micro_batches: list[range] = []  # of this call
        self._ops: Iterator[Op] = iter(())
        self._start: Any = None  # when the computation of a call began, for the trace
        self._latents: Sequence[Tensor] = ()
        self._own_calls: Sequence[int] = ()
        self.takes_latents = False
        # Denoised patches that are not written yet: (step, patch) -> (number of a scheduler, its piece of the patch).
        self._taken: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}

    def _list_send_channels(self) -> list[PeerChannel]:
        channels = list(self._latents_out)
        if self._activations_out is not None:
            channels.insert(0, self._activations_out)
        if self.warmup_group is not None:
            channels += self.warmup_group.channels
        return channels

    def end_generation(self, *, clean: bool) -> None:
        """End a generation, and wait for sent messages unless it failed.

        After an error the channels are useless, unless it came before the first step: nothing was sent then, and a
        refusal happens on every rank.
        """
        clean = clean or not self._has_begun
        self.broken = not clean and self._mesh.world > 1
        for prefetcher in (self._activations_in, self._latents_in):
            if prefetcher is not None:
                prefetcher.clear_expectations()
        if clean:
            for channel in self._list_send_channels():
                channel.flush_sends()
        if self.warmup_group is not None:
            self.warmup_group.weight_stream.free_buffers()
        self._dummies.clear()
        # This object outlives the call, and would keep its keys and latents in memory.
        self._latents = ()
        self._taken.clear()
        del self.generation

    # The loop of the pipeline calls the methods below.

    def prepare_step(self, step: int, schedule: PatchSchedule) -> None:
        """Prepare for a step; `schedule` now says for certain whether another step follows."""
        # The messages of two steps ago have arrived, because the previous step depended on them.
        for channel in self._list_send_channels():
            channel.release_old_sends()
        self._has_begun = True
        self.schedule = replace(schedule, batch=self.generation.batch)
        # Post a receive only for a message that will certainly be sent: any other receive would never end.
        if step > 0 and self._activations_in is not None:
            # `_post_before_send` may already have expected the first message of the step.
            num_expected = int(self._last_expected_step == step)
            self._activations_in.expect_messages(islice(self._list_message_keys(step), num_expected, None))
            self._last_expected_step = step
        self.takes_latents = self.stage in schedule.latent_readers
        if self._latents_in is not None and self.takes_latents:
            self._latents_in.looks_ahead = schedule.takes_ahead
            # Nothing comes back after the last step.
            stop = min(step + 1, schedule.steps - 1)
            for next_step in range(self._last_returned_step + 1, stop):
                for patch in range(self._patches):
                    self._latents_in.expect_messages(self._list_latent_keys(next_step, patch))
                self._last_returned_step = next_step

    def bring_latents(self, latents: Sequence[Tensor], micro: MicroStep, *, writes: bool) -> None:
        """Update a stage's latents for a micro-step with the denoised patches.

        Args:
            latents: the latents of each scheduler that the pipeline steps.
            writes: whether patches are written into the latents, or only received.
        """
        self._latents = latents
        self._own_calls = self.generation.own_calls
        self._take_denoised_patches(micro, -1)
        if micro.step == 0:
            return
        for patch in self.schedule.list_patches(micro):
            for stream, piece in self._taken.pop((micro.step - 1, patch), ()):
                if writes:
                    self.generation.pieces[stream][patch].put(latents[stream], piece)

    def _take_denoised_patches(self, micro: MicroStep, turn: int) -> None:
        """Receive the denoised patches that are due before a call; `bring_latents` writes each in its turn."""
        assert self._latents_in is not None
        due = self.schedule.count_taken_patches(self.stage, micro, turn, len(self._own_calls))
        # The first patches are references, which are not denoised.
        num_references = self.schedule.num_references
        for number in range(self._num_taken, due):
            step, index = divmod(number, self._patches - num_references)
            patch = num_references + index
            pieces = []
            for key in self._list_latent_keys(step, patch):
                with self._trace.record_span("take", step, patch):
                    piece = self._latents_in.receive_message(key, self._latents[key.branch])
                pieces.append((key.branch, piece))
            self._taken[step, patch] = pieces
        self._num_taken = max(due, self._num_taken)

    def _list_latent_keys(self, step: int, patch: int) -> list[MessageKey]:
        """List the messages of a denoised patch.

        There is one for each scheduler that steps a part of the patch, with the scheduler's number as its branch.
        """
        keys = []
        for stream, pieces in enumerate(self.generation.pieces):
            if not pieces[patch].is_empty:
                keys.append(MessageKey(step, patch, stream))
        return keys

    def send_stepped_patches(self, patches: Sequence[tuple[int, Tensor]]) -> None:
        """Send denoised patches, each to a stage that reads latents."""
        self._num_sends_due = len(patches)
        for reader, patch in patches:
            self._latents_out[reader].send_tensor(patch)

    def _post_before_send(self) -> None:
        """Post what this stage receives next, if this is the last send of a call.

        After the call the pipeline launches its own work, which may wait for the send, and so for the next stage. If
        that stage in turn waited for a send whose receive is not posted here, both would hang.
        """
        now = self.generation
        self._num_sends_due -= 1
        # In the first micro-step only the last stage knows which call is the last.
        if self._num_sends_due or (now.calls is None and not self.is_last_stage):
            return
        # The next receive is for the next call of this micro-step, or after the last call for the next micro-step. The
        # last stage sends only after it has stepped, so its next receive is always for the next micro-step.
        micro: MicroStep | None = now.micro_step
        calls = now.own_calls
        turn = 0
        if not self.is_last_stage:
            turn = (calls.index(now.branch) + 1) % len(calls)
        if turn == 0:
            micro = self.schedule.find_following(now.micro_step)
        if micro is None:
            return
        if self._activations_in is not None:
            if micro.step > self._last_expected_step:
                self._activations_in.expect_messages(islice(self._list_message_keys(micro.step), 1))
                self._last_expected_step = micro.step
            self._activations_in.post_ahead(1)
        if self._latents_in is not None and self.takes_latents:
            references = self.schedule.num_references
            due = self.schedule.count_taken_patches(self.stage, micro, turn, len(calls))
            # The first patch that is not due: (step, number of the patch without references).
            end = divmod(due, self._patches - references)
            self._latents_in.post_due(lambda key: (key.step, key.patch - references) < end)

    # The block hooks call the methods below.

    def begin_branch(self, form: CallForm) -> None:
        """Cut the tokens of a call into patches, unless tokens of this form are already cut."""
        now = self.generation
        if form.returns_text:
            self._check_second_stream(form)
        key = (now.branch, now.is_whole)
        if key in now.layouts:
            now.tokens = now.layouts[key]
            layout = now.tokens.layout
            if (layout.grid, layout.text) == (form.grid, form.text):
                return
            if now.pieces or now.is_stale:
                raise StateError(
                    f"a call has {form.grid.num_tokens} image and {form.text} text tokens and had "
                    f"{layout.image_tokens} and {layout.text} before; patches and stale keys belong to one size, so "
                    f"use {suggest_whole_images(stale_keys=True)}"
                )
            now.layouts.pop(key)
            now.memory.forget_branch_keys(now.branch)
        self.plan.check(Facts(rows=form.grid.rows))
        # With two stages both have the latents: the first one embeds them, and the last one steps them. With more
        # stages, `list_fed_blocks` is worth its wait for the device.
        fed_blocks = form.list_fed_blocks() if self.stages > 2 else []
        if fed_blocks:
            if now.dry.patch is None and not now.findings.reads_latents_everywhere:
                raise ModelError(
                    f"pipefusion={self.stages}: {fed_blocks[0]} is given what the forward makes of the latents, and "
                    "was not before; only the first and the last stage have them; use pipefusion=2"
                )
            now.findings.reads_latents_everywhere = True
        # A whole call is cut only for its messages.
        if now.is_whole:
            layout = Layout.cut_into_patches(form.grid, self._patches, form.text, self._joint)
        elif now.branch and (0, False) in now.layouts:
            # Every branch of guidance is cut like the first one, whatever the length of its text, because a patch of
            # the prediction is made from the same patch of each branch.
            first_layout = now.layouts[0, False].layout
            layout = first_layout.cut_alike(form.grid, form.text, form.start - self._start_of_image)
        else:
            layout = self._cut_first_branch(form)
        now.tokens = LayoutTokens(layout, now.shares, is_whole=now.is_whole)
        now.layouts[key] = now.tokens

    def _check_second_stream(self, form: CallForm) -> None:
        """Check that the plan can compute a result of two streams, like a video and its sound."""
        shares = self.generation.shares
        if shares.warmup_split is not None:
            if self.warmup_group is None or not self.warmup_group.may_rest:
                raise PlanError(
                    f"warmup_mode={self.plan.warmup_mode}: the model makes a result of two streams, as of a video "
                    "and its sound, and ranks that split synchronous steps send one; use serial or pipelined"
                )
            # This is the rehearsal, after which the loop goes on with a schedule without the group.
            shares.warmup_split = None
        if form.text < self._sequence.num_ranks:
            raise PlanError(
                f"the second stream, as a sound, has {form.text} tokens, which cannot be split over "
                f"{self._sequence.num_ranks} ranks; use a lower ring, gather or ulysses degree, or a longer video"
            )

    def _cut_first_branch(self, form: CallForm) -> Layout:
        """Cut the tokens of the first call, around the tokens of references once these are known."""
        now = self.generation
        self._start_of_image = form.start
        now.dry.padding_rows = form.padding
        if form.latents is None:
            now.dry.latent_rows = range(form.grid.rows)
        elif form.grid.rows == form.grid.num_tokens:
            now.dry.latent_rows = form.latents
        else:
            # References are counted in tokens, so they have no rows.
            now.dry.latent_rows = range(0)
        if not now.findings.reference_rows:
            return Layout.cut_into_patches(form.grid, self._patches, form.text, self._joint)
        # Under DistriFusion the references are one more patch, which all ranks split.
        patches = self._patches + (self.plan.distrifusion > 1)
        return Layout.cut_around_references(
            form.grid, patches, form.text, self._joint, now.findings.reference_rows, even=self.plan.references == 1
        )

    def begin_survey(self) -> None:
        """Begin the survey of a call with a new form."""
        now = self.generation
        # With one stage no message comes before the blocks of the first call: an error in its survey breaks nothing.
        is_first_call = now.branch == 0 and now.calls is None
        if self.stages == 1 and is_first_call and now.micro_step.step == 0:
            self._has_begun = False

    def begin_transformer_call(self, batch_size: int) -> list[range]:
        """Start the ops of a call of the transformer on a batch.

        Returns:
            The rows of each micro-batch, which are computed one after the other.
        """
        now = self.generation
        if now.calls is None and now.branch == 0:
            now.batch = batch_size
            self.schedule = replace(self.schedule, batch=batch_size)
        # Both ends of a message know its size from the first step.
        if batch_size != now.batch and self.stages > 1:
            raise StateError(
                f"the batch changed from {now.batch} to {batch_size} rows during the run, and messages between stages "
                f"have as many as in the first step; keep guidance on for the whole run, or use "
                f"{suggest_whole_images()}"
            )
        if self._own_calls and now.calls is not None:
            if now.branch >= now.calls:
                raise now.make_calls_error(now.branch + 1)
            self._take_denoised_patches(now.micro_step, self._own_calls.index(now.branch))
        self._micro_batches = self.schedule.split_micro_batches(now.micro_step)
        self.restart_transformer_call()
        return self._micro_batches

    def restart_transformer_call(self) -> None:
        """Start the ops of this call again from the first one."""
        now = self.generation
        self._ops = self.schedule.iter_call_ops(self.stage, now.micro_step, now.branch)
        self._num_sends_due = len(self._micro_batches) * len(self.schedule.list_patches(now.micro_step))

    def begin_micro_batch(self, micro_batch: int) -> None:
        """Start the ops of a call's next micro-batch."""
        now = self.generation
        now.micro_batch = micro_batch
        now.batch_range = self._micro_batches[micro_batch]
        self._ops = self.schedule.iter_call_ops(self.stage, now.micro_step, now.branch, micro_batch)

    def select_active_blocks(self, blocks: range) -> Collection[int]:
        """Return the blocks whose hooks do something on this stage.

        These are the first block, the stage's blocks and the block after them; all blocks if a warmup group computes.
        """
        # This runs in every call, so the group is looked up only if there is one.
        if self.warmup_group is None or self._active_warmup_group is None:
            return self._active_blocks
        return blocks

    def run_block(self, index: int, block: Callable[[TokenState], TokenState], state: TokenState) -> TokenState:
        """Run a block if it is this stage's; receive at the first own block, and send after the last."""
        self._has_begun = True
        group = self.warmup_group
        if group is not None and self._active_warmup_group is not None:
            group.weight_stream.receive_block(index)
            return block(state)
        if index == self.owned.start:
            state = self._receive_activations(state)
        elif index == self.owned.stop:
            self._send_activations(state)
        if index in self.owned:
            return block(state)
        return state

    def leave_blocks(self, state: TokenState) -> TokenState | None:
        """Return all tokens: this patch's are fresh, and each other patch's are as they were last computed.

        Returns None if nobody reads the tokens.
        """
        now = self.generation
        group = self.warmup_group and self._active_warmup_group
        if group is not None:
            tokens = group.gather_image_tokens(state.image, now, self._ops)
            self._record_compute()
            if self.is_last_stage:
                return TokenState(tokens, None)
        if not self.is_last_stage:
            return None
        part = now.tokens.get_own_part(now.token_patch)
        image = self._streams.gather_stream(state.image, part.image_tokens)
        text = None
        if state.text is not None and now.form.returns_text:
            text = self._streams.gather_stream(state.text, len(part.text) or DUMMY_TEXT)
        note_action(self._record_compute)
        if now.has_all_image_tokens and not now.keeps_keys:
            return TokenState(image, text)
        layout = now.tokens.layout
        parts = now.tokens.list_rank_parts(now.token_patch)
        all_image = self._gather_tokens("image", image, layout.image_tokens, [part.image for part in parts])
        all_text = None
        if text is not None:
            own_text = text[:, : len(part.text)]
            all_text = self._gather_tokens("text", own_text, layout.text, [(part.text,) for part in parts])
        # A whole step gathers only to keep all tokens: a patch of the next step returns them along with its own.
        if now.has_all_image_tokens:
            return TokenState(image, text)
        return TokenState(all_image, all_text)

    def _gather_tokens(self, stream: str, own: Tensor, length: int, runs: Sequence[Sequence[range]]) -> Tensor:
        """Gather all tokens of a stream; the ranks' tokens are written to their `runs`."""
        now = self.generation
        rows, _, width = own.shape
        batch_range = now.batch_range
        if batch_range is None:
            all_tokens = now.memory.get_persistent_buffer((stream, now.branch), (rows, length, width), own)
        else:
            all_tokens = now.memory.get_persistent_buffer((stream, now.branch), (now.batch, length, width), own)
            all_tokens = all_tokens[batch_range.start : batch_range.stop]
        lengths = [sum(map(len, rank_runs)) for rank_runs in runs]
        if any(lengths):
            shapes = [(rows, count, width) for count in lengths]
            gathered = start_gather(own, shapes, self._sequence.group, self._traffic, "prediction").wait_for_tensors()
            for rank_runs, rank_tokens in zip(runs, gathered, strict=True):
                write_runs(all_tokens, rank_tokens, rank_runs, 1)
        return all_tokens

    def end_transformer_call(self) -> None:
        """Count a call when the transformer returns."""
        self.generation.advance_branch()

    def enter_blocks(self, state: TokenState) -> TokenState:
        """Return the tokens of the patch; two dummy tokens stand for a text outside of it."""
        now = self.generation
        text_width = 0
        if state.text is not None:
            text_width = state.text.shape[2]
        if not self._widths:
            self._like = state.image.new_empty(0)
        self._widths[now.branch] = (state.image.shape[2], text_width)
        group = self.warmup_group and self._active_warmup_group
        if group is not None:
            self._start = self._trace.mark_point()
            group.weight_stream.start_streaming(state.image.device)
            return state if now.has_all_image_tokens else self.cut_tokens(state)
        if self.stage == 0:
            return self.cut_tokens(state)
        # In the first step the number of calls is not known yet: only the messages of this call are certain.
        if now.micro_step.step == 0:
            assert self._activations_in is not None
            patches = self.schedule.list_patches(now.micro_step)
            self._activations_in.expect_messages(
                [MessageKey(0, patch, now.branch, now.micro_batch) for patch in patches]
            )
        # The forward's own tokens are not read: only their number must match the received tokens.
        part = now.tokens.get_own_part(now.token_patch)
        own = self._streams.locate_own_share(part.image_tokens)
        return TokenState(state.image[:, : own.stop - own.start], self._cut_text(state, part))

    def cut_tokens(self, state: TokenState) -> TokenState:
        """Cut the tokens of this rank's part of the patch from all tokens."""
        part = self.generation.tokens.get_own_part(self.generation.token_patch)
        text = self._cut_text(state, part)
        own = self._streams.locate_own_share(part.image_tokens)
        runs = [state.image[:, run.start : run.stop] for run in part.image]
        image = runs[0] if len(runs) == 1 else torch.cat(runs, dim=1)
        return TokenState(_arrange_like(image[:, own], state.image), text)

    def _cut_text(self, state: TokenState, part: TokenShard) -> Tensor | None:
        if state.text is None:
            self._streams.set_stream_lengths(part.image_tokens, 0)
            return None
        if part.text:
            text = state.text[:, part.text.start : part.text.stop]
        else:
            rows = state.image.shape[0]
            width = state.text.shape[2]
            if (rows, width) not in self._dummies:
                self._dummies[rows, width] = state.text.new_zeros((rows, DUMMY_TEXT, width))
            text = self._dummies[rows, width]
        num_tokens = text.shape[1]
        self._streams.set_stream_lengths(part.image_tokens, num_tokens)
        return text[:, self._streams.locate_own_share(num_tokens)]

    @property
    def _active_warmup_group(self) -> WarmupGroup | None:
        """Return the warmup group if it computes this micro-step."""
        now = self.generation
        if now.micro_step.patch is not None or now.shares.warmup_split is None:
            return None
        return self.warmup_group

    def _take_receive_ops(self) -> list[Op]:
        """Take the ops of the call that come before its first block."""
        ops: list[Op] = []
        for op in self._ops:
            # The ops after the computation are sends, which `_send_activations` takes from the same iterator.
            if op.kind is OpKind.COMPUTE:
                break
            ops.append(op)
        return ops

    def _receive_messages(self) -> list[Tensor]:
        """Receive the messages that a call needs before its first block."""
        messages: list[Tensor] = []
        for op in self._take_receive_ops():
            assert self._activations_in is not None and op.patch is not None
            with self._trace.record_span("receive", op.step, op.patch, op.branch):
                key = MessageKey(op.step, op.patch, op.branch, op.micro_batch)
                messages.append(self._activations_in.receive_message(key, self._like))
        self._start = self._trace.mark_point()
        return messages

    def _receive_activations(self, state: TokenState) -> TokenState:
        recording = CURRENT.recording
        # The first stage receives nothing, and so ends no segment of a recorded call.
        if recording is None:
            messages = self._receive_messages()
        elif self._activations_in is None:
            messages = []
            recording.note(self._receive_messages)
        else:
            messages = recording.receive_tensors(self._receive_messages, self._take_receive_ops)
        flat_messages = [message.flatten(1) for message in messages]
        if not flat_messages:
            return state
        now = self.generation
        tokens = now.tokens
        part = tokens.get_own_part(now.token_patch)
        width, text_width = self._widths[now.branch]
        text = state.text
        if part.text:
            own_text = self._streams.locate_own_share(len(part.text))
            num_text_values = (own_text.stop - own_text.start) * text_width
            # The message of the first patch of the image begins with the text.
            first_patch = 0
            if len(flat_messages) > 1:
                first_patch = tokens.layout.num_references
            message = flat_messages[first_patch]
            text = message[:, :num_text_values].unflatten(1, (-1, text_width)).contiguous()
            flat_messages[first_patch] = message[:, num_text_values:]
        images = [x.unflatten(1, (-1, width)) for x in flat_messages]
        image = images[0]
        if len(images) > 1:
            # The patches' messages are joined into the tokens of a whole step.
            patch_tokens = []
            runs: list[range] = []
            for patch, x in enumerate(images):
                patch_part = tokens.get_own_part(patch)
                patch_tokens.append(self._streams.gather_stream(x, patch_part.image_tokens))
                runs += patch_part.image
            joined = torch.cat(patch_tokens, dim=1)
            merged = merge_ranges(runs)
            # A rank with all tokens of the image needs them in the model's order, which is not that of the patches.
            if now.has_all_image_tokens and len(merged) > 1:
                placed = torch.empty_like(joined)
                write_runs(placed, joined, merged, 1)
                joined = placed
            image = joined[:, self._streams.locate_own_share(part.image_tokens)]
        return TokenState(_arrange_like(image, state.image), text)

    def _send_activations(self, state: TokenState) -> None:
        # This runs in every micro-step, and without a recording `note` would be one Python call more.
        if CURRENT.recording is None:
            self._record_compute()
        else:
            CURRENT.recording.note(self._record_compute)
        now = self.generation
        streams = self._streams
        image = state.image
        start = 0
        is_whole_step = now.micro_step.patch is None and self._patches > 1
        if is_whole_step:
            image = streams.gather_stream(image, now.tokens.get_own_part(None).image_tokens)
        widths = self._widths[now.branch]
        for op in self._ops:
            assert self._activations_out is not None and op.patch is not None
            part = now.tokens.get_own_part(op.patch)
            message = image
            if is_whole_step:
                # A rank with all tokens has them in the model's order; other ranks have them patch by patch.
                runs: Sequence[range] = (range(start, start + part.image_tokens),)
                if now.has_all_image_tokens:
                    runs = part.image
                message = take_runs(image, runs, 1)[:, streams.locate_own_share(part.image_tokens)]
                start += part.image_tokens
            message = message.flatten(1)
            if part.text:
                assert state.text is not None
                message = torch.cat([state.text.flatten(1), message], dim=1)
            if message.dtype != self._like.dtype:
                raise StateError(
                    f"blocks returned {message.dtype}, and the next stage expects {self._like.dtype}, as their inputs "
                    "are; give the pipeline one dtype, without torch.autocast, or use pipefusion=1"
                )
            # The reason for this shape is explained in `_find_activation_form`.
            message = message.unflatten(1, (-1, math.gcd(*widths)))
            self._activations_out.send_tensor(message, now.find_bases("sent", op.patch, message.shape))

    def _record_compute(self) -> None:
        micro = self.generation.micro_step
        self._trace.record_op("compute", micro.step, micro.patch, self.generation.branch, self._start)

    # The methods below describe messages that are to come.

    def _list_message_keys(self, step: int) -> Iterator[MessageKey]:
        # In the first step only the last stage comes here, after its last call: `branch` is then the number of calls.
        calls = self.generation.calls or self.generation.branch
        branches = self.generation.branches(step, calls)
        for op in self.schedule.iter_step_ops(self.stage, step, calls, branches):
            if op.kind is OpKind.RECEIVE and op.patch is not None:
                yield MessageKey(op.step, op.patch, op.branch, op.micro_batch)

    def _can_post_latents(self, key: MessageKey) -> bool:
        """Return whether this stage has launched its work on the patch whose new latents are to come."""
        now = self.generation.micro_step
        return (key.step, key.patch) < (now.step, now.patch or 0)

    def _find_activation_form(self, key: MessageKey) -> MessageForm | None:
        now = self.generation
        if key.branch not in self._widths:
            return None
        micro = self.schedule.find_micro_step(key.step, key.patch)
        rows = self.schedule.split_micro_batches(micro)[key.micro_batch]
        part = now.layouts[key.branch, key.step in now.findings.whole_steps].get_own_part(key.patch)
        image = self._streams.locate_own_share(part.image_tokens)
        text = self._streams.locate_own_share(len(part.text))
        width, text_width = self._widths[key.branch]
        image_values = (image.stop - image.start) * width
        text_values = (text.stop - text.start) * text_width
        # Text and image tokens may differ in channels, so a message is a list of vectors whose length divides both:
        # transport packs and counts vectors.
        vector = math.gcd(width, text_width)
        shape = (len(rows), (image_values + text_values) // vector, vector)
        bases = None
        # The message may be of the next step, so the schedule is asked and not the generation.
        if not self.schedule.sends_in_full(key.step):
            bases = now.memory.bases.setdefault(("received", key[1:], shape), {})
        return MessageForm(shape, self._like, bases)

    def _find_latent_form(self, key: MessageKey) -> MessageForm | None:
        if not self._latents:
            return None
        # In these keys `branch` is the number of the scheduler.
        latents = self._latents[key.branch]
        piece = self.generation.pieces[key.branch][key.patch]
        return MessageForm(piece.shape(latents), latents)


def _arrange_like(x: Tensor, like: Tensor) -> Tensor:
    """Arrange tokens `[B, n, C]` like the model: token after token or channel after channel."""
    # A sum over channels rounds differently in the other layout.
    if like.stride(1) >= like.stride(2):
        return x.contiguous()
    return x.transpose(1, 2).contiguous().transpose(1, 2)

"""PipeFusion: each rank owns a run of blocks, patches follow each other through them (arXiv 2405.14430, section 3.4).

A stage receives at its first own block and sends at the entry of the first block behind its run, never at the exit of
its last: what the model's forward does between two blocks belongs to the stage before. Attention reads keys and values
one step old where fresh ones are still to come (attention/core.py). Activations go stage to stage, stepped patches from
the last stage to the first on a group of their own, and nothing blocks but the wait for a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import PeerChannel, start_gather
from ditile.model.hooks.block_calls import write_tokens
from ditile.model.hooks.block_policy import CallForm, TokenState
from ditile.model.hooks.generation import Generation, LayoutTokens
from ditile.model.hooks.protocols import TokenStreams
from ditile.model.hooks.token_arguments import take_runs
from ditile.parallel.pipefusion.prefetch import MessageKey, ReceivePrefetcher
from ditile.parallel.pipefusion.shared_warmup import WarmupGroup
from ditile.plan.errors import ModelError, PlanError, StateError
from ditile.plan.layout import DUMMY_TEXT, Joint, Layout, merge_ranges
from ditile.plan.plan import Facts, Plan
from ditile.plan.schedule import MicroStep, Op, OpKind, Schedule


class PipeFusion:
    """One stage. The loop calls the methods `begin_generation` to `send_stepped_patch`, the block hooks the others.

    Args:
        mesh: the stage's place and groups.
        owned: the blocks of this stage.
        plan: the patches and their check.
        joint: where the text lies in the sequence.
        trace: records each op.
        streams: what this rank has of its tokens between the Linears.
        warmup_group: computes the synchronous steps, where they are not computed stage after stage.

    Attributes:
        is_last_stage: whether this stage makes the prediction and steps the scheduler.
        broken: whether a generation failed when messages may have been under way.
    """

    def __init__(
        self,
        mesh: Mesh,
        owned: range,
        plan: Plan,
        joint: Joint,
        trace: GenerationTrace,
        streams: TokenStreams,
        warmup_group: WarmupGroup | None = None,
    ) -> None:
        self.stage, self.stages, self.owned = mesh.stage_index, mesh.num_stages, owned
        self.is_last_stage = self.stage == self.stages - 1
        self._active_blocks = frozenset((0, *owned, owned.stop))
        self.plan, self._joint, self._trace, self.warmup_group = plan, joint, trace, warmup_group
        self._patches, self._streams = plan.num_patches, streams
        self._sequence, self._traffic, self._world = mesh.sequence, mesh.traffic, mesh.world
        self._widths: dict[int, tuple[int, int]] = {}  # of image and text tokens, by branch
        self._start_of_image = 0
        self._dummies: dict[tuple[int, int], Tensor] = {}
        self._activations_in: ReceivePrefetcher | None = None
        self._activations_out: PeerChannel | None = None
        self._latents_in: ReceivePrefetcher | None = None
        self._latents_out: list[PeerChannel] = []  # by stage
        self.open_channels(mesh)

    def open_channels(self, mesh: Mesh) -> None:
        """Makes the channels to other stages, in the groups that the mesh has now."""
        self._activations_in = self._activations_out = self._latents_in = None
        self._latents_out = []
        self.broken = False
        self._latents_group = latents = mesh.latents
        if latents is None:
            return
        if self.warmup_group is not None:
            self.warmup_group.open_channels(mesh)
        last = self.stages - 1
        if self.stage > 0:
            group = mesh.select_downstream_group(self.stage - 1)
            self._activations_in = ReceivePrefetcher(
                PeerChannel(group, self.stage - 1, "activations", mesh.traffic),
                self._compute_activation_shape,
                self._can_post_activation,
            )
            # Where references are left out, they are one patch.
            fewest = self._patches - (self.plan.references not in (None, 1))
            self._activations_in.looks_ahead = fewest >= self.stages
        if self.stage < last:
            group = mesh.select_downstream_group(self.stage)
            self._activations_out = PeerChannel(group, self.stage + 1, "activations", mesh.traffic)
        if self.stage == 0:
            self._latents_in = self._make_latents_receiver(latents)
        if self.stage == last:
            self._latents_out = [PeerChannel(latents, 0, "latents", mesh.traffic)]

    def _make_latents_receiver(self, group: dist.ProcessGroup) -> ReceivePrefetcher:
        return ReceivePrefetcher(
            PeerChannel(group, self.stages - 1, "latents", self._traffic),
            self._compute_latent_shape,
            self._can_post_latents,
        )

    def share_latents(self, device: torch.device) -> None:
        """From now on every stage may get the stepped patches; all stages call it, and no message is under way."""
        group, last = self._latents_group, self.stages - 1
        if group is None or self.stages < 3:
            return
        if self.stage == last:
            for reader in range(len(self._latents_out), last):
                self._latents_out.append(PeerChannel(group, reader, "latents", self._traffic))
                self._latents_out[-1].open_connection(device, sends=True)
        elif self._latents_in is None:
            self._latents_in = self._make_latents_receiver(group)
            self._latents_in.channel.open_connection(device, sends=False)

    def connect_channels(self, device: torch.device) -> None:
        """Uses every channel once, in one order for all stages: down the pipeline, then from the last to the first."""
        for endpoint in (self._activations_in, self._activations_out, *self._latents_out, self._latents_in):
            if isinstance(endpoint, ReceivePrefetcher):
                endpoint.channel.open_connection(device, sends=False)
            elif endpoint is not None:
                endpoint.open_connection(device, sends=True)
        if self.warmup_group is not None:
            self.warmup_group.connect_channels(device)

    @property
    def reads_latents(self) -> bool:
        """Whether this stage embeds the latents, in some steps at least."""
        is_member = self.warmup_group is not None and self.warmup_group.is_member
        return self.stage == 0 or is_member or self.generation.findings.reads_latents_everywhere

    def begin_generation(self, schedule: Schedule, generation: Generation) -> None:
        """A generation begins."""
        self.schedule, self.generation = schedule, generation
        self._has_begun = False
        self._cleared, self._returned, self._num_taken = 0, -1, 0
        self._widths.clear()
        self._ops: Iterator[Op] = iter(())
        self._start: Any = None
        self._latents: Sequence[Tensor] = ()
        self._own_calls: Sequence[int] = ()
        self.takes_latents = False
        self._taken: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}  # with the number of the scheduler

    def end_generation(self, *, clean: bool) -> None:
        """Ends a generation: waits for what was sent, unless it ended by an error: then the channels are useless.

        Before the first step nothing was sent, and what is refused there is refused on every rank.
        """
        clean = clean or not self._has_begun
        self.broken = not clean and self._world > 1
        for prefetcher in filter(None, (self._activations_in, self._latents_in)):
            prefetcher.clear_expectations()
        for channel in filter(None, (self._activations_out, *self._latents_out)) if clean else ():
            channel.flush_sends()
        if self.warmup_group is not None:
            self.warmup_group.end_generation(clean=clean)
        self._dummies.clear()
        # This object outlives the picture: without this its keys and latents would stay in memory.
        self._latents = ()
        self._taken.clear()
        del self.generation

    # The loop

    def prepare_step(self, step: int, schedule: Schedule) -> None:
        """A step begins, and `schedule` now says for certain whether one more follows it.

        What was sent two steps ago has arrived, because the last step began with the results of it.
        """
        for channel in filter(None, (self._activations_out, *self._latents_out)):
            channel.release_old_sends()
        if self.warmup_group is not None:
            self.warmup_group.settle_channels()
        self._has_begun = True
        self.schedule = replace(schedule, batch=self.generation.batch)
        certain = 0 if step == 0 else schedule.find_last_certain_step(step, self.generation.calls or 1)
        for sure in range(self._cleared + 1, min(certain + 1, schedule.steps)):
            if self._activations_in is not None:
                self._activations_in.expect_messages(self._list_message_keys(sure))
            self._cleared = sure
        self.takes_latents = self.stage in schedule.latent_readers
        if self._latents_in is not None and self.takes_latents:
            self._latents_in.looks_ahead = schedule.takes_ahead
            for sure in range(self._returned + 1, min(step + 1, schedule.steps - 1)):
                self._latents_in.expect_messages(
                    key for patch in range(self._patches) for key in self._list_latent_keys(sure, patch)
                )
                self._returned = sure

    def bring_latents(self, latents: Sequence[Tensor], micro: MicroStep, *, is_news: bool) -> None:
        """Brings a stage's latents up to date for a micro-step, with the stepped patches that it computes.

        Args:
            latents: of each scheduler that the pipeline steps.
            micro: the micro-step.
            is_news: whether patches are written into them, or only received.
        """
        self._latents, self._own_calls = latents, self.generation.own_calls
        self._take_stepped_patches(micro, -1)
        for patch in self.schedule.list_patches(micro) if micro.step else ():
            for index, taken in self._taken.pop((micro.step - 1, patch), ()):
                if is_news:
                    self.generation.pieces[index][patch].put(latents[index], taken)

    def _take_stepped_patches(self, micro: MicroStep, turn: int) -> None:
        """Receives the stepped patches that may be back before a call; they are written when it is their turn."""
        assert self._latents_in is not None
        due = self.schedule.count_taken_patches(self.stage, micro, turn, len(self._own_calls))
        for number in range(self._num_taken, due):
            step, patch = divmod(number, self._patches - self.schedule.num_references)
            patch += self.schedule.num_references
            self._taken[step, patch] = taken = []
            for key in self._list_latent_keys(step, patch):
                with self._trace.record_span("take", step, patch):
                    message = self._latents_in.receive_message(key, self._latents[key.branch])
                taken.append((key.branch, message))
        self._num_taken = max(due, self._num_taken)

    def _list_latent_keys(self, step: int, patch: int) -> list[MessageKey]:
        """The messages of a stepped patch: one for each scheduler that steps some of it, in place of the branch."""
        pieces = enumerate(self.generation.pieces)
        return [MessageKey(step, patch, index) for index, each in pieces if not each[patch].is_empty]

    def send_stepped_patch(self, patch: Tensor, reader: int) -> None:
        """Sends a stepped patch to a stage that reads latents."""
        self._latents_out[reader].send_tensor(patch)

    # The block hooks

    @property
    def row_parts(self) -> int:
        """In how many parts rows of tokens are cut, by patches or by ranks."""
        if self.plan.references is not None:  # which may be whole frames: any run of tokens
            return 1
        return max(self._patches, self.plan.distrifusion)

    @property
    def divides_tokens(self) -> bool:
        """Whether a call of the transformer computes part of its tokens or blocks here."""
        return self._patches > 1 or self.stages > 1 or self._sequence.num_ranks > 1

    def begin_branch(self, form: CallForm) -> None:
        """A call of this form is about to be made: cuts its tokens into patches, where that was not done yet.

        Every branch of guidance is cut where the first one is, whatever the length of its text: a patch of the
        prediction is made of the same patch of each.
        """
        now = self.generation
        if form.returns_text and now.shares.warmup_split is not None:
            if self.warmup_group is None or not self.warmup_group.may_rest:
                raise PlanError(
                    f"warmup_mode={self.plan.warmup_mode}: the model makes a result of two streams, as of a video and "
                    "its sound, and ranks that share out synchronous steps send one; use serial or pipelined"
                )
            # In the rehearsal, behind which the loop goes on with a schedule without the group.
            now.shares.warmup_split = None
        if form.returns_text and form.text < self._sequence.num_ranks:
            raise PlanError(
                f"the second stream, as a sound, has {form.text} tokens, and {self._sequence.num_ranks} ranks share "
                "them out; use a lower ring or ulysses degree, or a longer video"
            )
        layout_key = (now.branch, now.is_whole)
        if layout_key in now.layouts:
            now.tokens = now.layouts[layout_key]
            known = now.tokens.layout
            if (known.grid, known.text) == (form.grid, form.text):
                return
            if now.pieces or now.is_stale:
                raise StateError(
                    f"a call has {form.grid.num_tokens} image and {form.text} text tokens and had "
                    f"{known.image_tokens} and {known.text} before; patches and stale keys belong to one size, so use "
                    "a plan without pipefusion, patches and distrifusion"
                )
            now.layouts.pop(layout_key)
            now.memory.forget_branch_keys(now.branch)
        self.plan.check(Facts(rows=form.grid.rows))
        # The last stage steps the latents, so it has what the first one gets.
        if self.stages > 2 and (fed := form.list_fed_blocks()):
            if now.dry.patch is None and not now.findings.reads_latents_everywhere:
                raise ModelError(
                    f"pipefusion={self.stages}: {fed[0]} is given what the forward makes of the latents, and was not "
                    "before; only the first and the last stage have them; use pipefusion=2"
                )
            now.findings.reads_latents_everywhere = True
        if now.is_whole:  # its patches are but parts of messages
            layout = Layout.cut_into_patches(form.grid, self._patches, form.text, self._joint)
        elif now.branch and (0, False) in now.layouts:
            layout = now.layouts[0, False].layout.cut_alike(form.grid, form.text, form.start - self._start_of_image)
        else:
            layout = self._cut_first_branch(form)
        now.tokens = now.layouts[layout_key] = LayoutTokens(layout, now.shares, is_whole=now.is_whole)

    def _cut_first_branch(self, form: CallForm) -> Layout:
        """Cuts the tokens of the first call: around those of references, once these are known."""
        now, self._start_of_image = self.generation, form.start
        now.dry.latent_rows = range(form.grid.rows) if form.latents is None else form.latents
        now.dry.padding_rows = form.padding
        if form.latents is not None and form.grid.rows != form.grid.num_tokens:
            now.dry.latent_rows = range(0)  # counted in tokens, and not in rows
        if not now.findings.reference_rows:
            return Layout.cut_into_patches(form.grid, self._patches, form.text, self._joint)
        # Ranks of DistriFusion share out the references, as one patch, and the image.
        cut = form.grid, self._patches + (self.plan.distrifusion > 1), form.text, self._joint
        return Layout.cut_around_references(*cut, now.findings.reference_rows, even=self.plan.references == 1)

    def begin_survey(self) -> None:
        """A call of a new form is looked at. With one stage no message comes before the blocks of the first call."""
        now = self.generation
        if self.stages == 1 and not now.branch and now.calls is None and now.micro_step.step == 0:
            self._has_begun = False

    def begin_transformer_call(self, batch_size: int) -> list[range]:
        """The transformer is called on a batch: the ops of this call are due.

        Returns:
            The rows of each micro-batch, which are computed one after the other.

        Raises:
            StateError: if the batch had another size before: stages send each other as many rows as in the first step.
        """
        now = self.generation
        if now.calls is None and now.branch == 0:
            now.batch = batch_size
            self.schedule = replace(self.schedule, batch=batch_size)
        micro_batches = self.schedule.split_micro_batches(now.micro_step)
        if batch_size != now.batch and self.stages > 1:
            raise StateError(
                f"the batch changed from {now.batch} to {batch_size} rows in mid-run, and what stages send each other "
                "has those of the first step; keep guidance on for the whole run, or use a plan without pipefusion and "
                "patches, such as ulysses"
            )
        if self._own_calls and now.calls is not None:
            if now.branch >= now.calls:
                raise now.make_calls_error(now.branch + 1)
            self._take_stepped_patches(now.micro_step, self._own_calls.index(now.branch))
        self._ops = self.schedule.iter_call_ops(self.stage, now.micro_step, now.branch)
        return micro_batches

    def begin_micro_batch(self, micro_batch: int) -> None:
        """The next micro-batch of a call: its ops are due."""
        now = self.generation
        now.micro_batch, now.batch_range = micro_batch, self.schedule.split_micro_batches(now.micro_step)[micro_batch]
        self._ops = self.schedule.iter_call_ops(self.stage, now.micro_step, now.branch, micro_batch)

    def select_active_blocks(self, blocks: range) -> Collection[int]:
        """In a step of the stages: the first block, own blocks, and the first one behind these."""
        return blocks if self._active_warmup_group else self._active_blocks

    def run_block(self, index: int, block: Callable[[TokenState], TokenState], state: TokenState) -> TokenState:
        """Receives at the first own block, and sends behind the last own block."""
        self._has_begun = True
        if self.warmup_group is not None and (group := self._active_warmup_group):
            return group.run_block(index, block, state, self.generation)
        if index == self.owned.start:
            state = self._receive_activations(state)
        elif index == self.owned.stop:
            self._send_activations(state)
        return block(state) if index in self.owned else state

    def leave_blocks(self, state: TokenState) -> TokenState | None:
        """All tokens: those of this patch fresh, the others as they were last. None where nobody reads them."""
        now = self.generation
        if group := self._active_warmup_group:
            tokens = group.gather_image_tokens(state.image, now, self._ops)
            self._record_compute()
            return TokenState(tokens, None) if self.is_last_stage else None
        if not self.is_last_stage:
            return None
        part = now.tokens.get_own_part(now.token_patch)
        image = self._streams.gather_stream(state.image, part.image_tokens)
        text = state.text if now.form.returns_text else None
        if text is not None:
            text = self._streams.gather_stream(text, len(part.text) or DUMMY_TEXT)
        self._record_compute()
        if now.has_all_image_tokens and not now.keeps_keys:
            return TokenState(image, text)
        parts = now.tokens.list_rank_parts(now.token_patch)
        every = self._gather_tokens("image", image, now.tokens.layout.image_tokens, [part.image for part in parts])
        every_text = None
        if text is not None:
            text_runs = [(part.text,) for part in parts]
            own_text = text if part.text else text[:, :0]
            every_text = self._gather_tokens("text", own_text, now.tokens.layout.text, text_runs)
        # Those of a whole step are kept for the next one: the pipeline may look at all of a prediction.
        return TokenState(image, text) if now.has_all_image_tokens else TokenState(every, every_text)

    def _gather_tokens(self, stream: str, own: Tensor, length: int, runs: Sequence[Sequence[range]]) -> Tensor:
        """All tokens of a stream, in which those of the ranks are written where `runs` says."""
        now, (rows, _, width) = self.generation, own.shape
        batch, part = (rows, range(rows)) if now.batch_range is None else (now.batch, now.batch_range)
        whole = now.memory.get_persistent_buffer((stream, now.branch), (batch, length, width), own)
        whole = whole[part.start : part.stop]
        lengths = [sum(map(len, each)) for each in runs]
        if any(lengths):
            shapes = [(rows, count, width) for count in lengths]
            gathered = start_gather(own, shapes, self._sequence.group, self._traffic, "prediction").wait_for_tensors()
            for each, rank_tokens in zip(runs, gathered, strict=True):
                write_tokens(whole, rank_tokens, each)
        return whole

    def end_transformer_call(self) -> None:
        """The transformer returns."""
        self.generation.advance_branch()

    def enter_blocks(self, state: TokenState) -> TokenState:
        """The tokens of the patch; two dummy tokens stand for a text that does not belong to it."""
        now = self.generation
        text_width = 0 if state.text is None else state.text.shape[2]
        self._widths[now.branch], self._dtype = (state.image.shape[2], text_width), state.image.dtype
        if group := self._active_warmup_group:
            self._start = self._trace.mark_point()
            return group.enter_blocks(state, now, self._get_dummy_text(state))
        if self.stage > 0 and now.micro_step.step == 0:
            self._expect_call_messages()
        if self.stage == 0:
            return self.cut_tokens(state)
        # Here the forward's own tokens are never read: they only have the length of those that will be received.
        part = now.tokens.get_own_part(now.token_patch)
        own = self._streams.locate_own_share(part.image_tokens)
        text = self._cut_text(state)
        return TokenState(state.image[:, : own.stop - own.start], text)

    def cut_tokens(self, state: TokenState) -> TokenState:
        """Of all tokens those of the patch that this rank computes."""
        text, part = self._cut_text(state), self.generation.tokens.get_own_part(self.generation.token_patch)
        own = self._streams.locate_own_share(part.image_tokens)
        runs = [state.image[:, run.start : run.stop] for run in part.image]
        image = runs[0] if len(runs) == 1 else torch.cat(runs, dim=1)
        return TokenState(_arrange_like(image[:, own], state.image), text)

    def _cut_text(self, state: TokenState) -> Tensor | None:
        part = self.generation.tokens.get_own_part(self.generation.token_patch)
        text = None if state.text is None else state.text[:, part.text.start : part.text.stop]
        if not part.text:
            text = self._get_dummy_text(state)
        self._streams.set_stream_lengths(part.image_tokens, 0 if text is None else text.shape[1])
        return None if text is None else text[:, self._streams.locate_own_share(text.shape[1])]

    @property
    def _active_warmup_group(self) -> WarmupGroup | None:
        """The warmup group, if it computes the micro-step at hand."""
        now = self.generation
        return self.warmup_group if now.micro_step.patch is None and now.shares.warmup_split is not None else None

    def _expect_call_messages(self) -> None:
        """In the first step the number of calls is not known yet: only the messages of this call are certain."""
        assert self._activations_in is not None
        now = self.generation
        patches = self.schedule.list_patches(now.micro_step)
        self._activations_in.expect_messages(
            [MessageKey(now.micro_step.step, patch, now.branch, now.micro_batch) for patch in patches]
        )

    def _receive_activations(self, state: TokenState) -> TokenState:
        parts: list[Tensor] = []
        for op in self._ops:
            if op.kind is OpKind.COMPUTE:
                break
            assert self._activations_in is not None and op.patch is not None
            with self._trace.record_span("receive", op.step, op.patch, op.branch):
                key = MessageKey(op.step, op.patch, op.branch, op.micro_batch)
                parts.append(self._activations_in.receive_message(key, state.image).flatten(1))
        self._start = self._trace.mark_point()
        if not parts:
            return state
        now, streams = self.generation, self._streams
        part = now.tokens.get_own_part(now.token_patch)
        width, text_width = self._widths[now.branch]
        text = state.text
        if part.text:
            own = streams.locate_own_share(len(part.text))
            numbers = (own.stop - own.start) * text_width
            with_text = now.tokens.layout.num_references if len(parts) > 1 else 0
            message = parts[with_text]
            text = message[:, :numbers].unflatten(1, (-1, text_width)).contiguous()
            parts[with_text] = message[:, numbers:]
        parts = [x.unflatten(1, (-1, width)) for x in parts]
        if len(parts) > 1:
            patches = [now.tokens.get_own_part(patch) for patch in range(len(parts))]
            whole = [streams.gather_stream(x, patch.image_tokens) for patch, x in zip(patches, parts, strict=True)]
            tokens = torch.cat(whole, dim=1)
            runs = merge_ranges(run for patch in patches for run in patch.image)
            if now.has_all_image_tokens and len(runs) > 1:
                tokens = _place_tokens(tokens, runs)
            parts = [tokens[:, streams.locate_own_share(part.image_tokens)]]
        return TokenState(_arrange_like(parts[0], state.image), text)

    def _send_activations(self, state: TokenState) -> None:
        self._record_compute()
        now, streams, image, at = self.generation, self._streams, state.image, 0
        whole_step = now.micro_step.patch is None and self._patches > 1
        if whole_step:
            image = streams.gather_stream(image, now.tokens.get_own_part(None).image_tokens)
        for op in self._ops:
            assert self._activations_out is not None and op.patch is not None
            part, message = now.tokens.get_own_part(op.patch), image
            if whole_step:
                # In the order of the model, or patch after patch.
                runs = part.image if now.has_all_image_tokens else (range(at, at + part.image_tokens),)
                message = take_runs(image, runs, 1)[:, streams.locate_own_share(part.image_tokens)]
                at += part.image_tokens
            message = message.flatten(1)
            if part.text:
                assert state.text is not None
                message = torch.cat([state.text.flatten(1), message], dim=1)
            if message.dtype != self._dtype:
                raise StateError(
                    f"blocks made {message.dtype} of {self._dtype}, which the next stage waits for, as under "
                    "torch.autocast they may; give the pipeline one dtype instead, or use pipefusion=1"
                )
            vector = math.gcd(*self._widths[now.branch])
            self._activations_out.send_tensor(message.view(len(message), message.shape[1] // vector, vector))

    def _record_compute(self) -> None:
        micro = self.generation.micro_step
        self._trace.record_op("compute", micro.step, micro.patch, self.generation.branch, self._start)

    def _get_dummy_text(self, state: TokenState) -> Tensor | None:
        if state.text is None:
            return None
        key = (state.image.shape[0], state.text.shape[2])
        if key not in self._dummies:
            self._dummies[key] = state.text.new_zeros((key[0], DUMMY_TEXT, key[1]))
        return self._dummies[key]

    # Messages to come

    def _list_message_keys(self, step: int) -> Iterator[MessageKey]:
        calls = self.generation.calls
        assert calls is not None
        for op in self.schedule.iter_step_ops(self.stage, step, calls, self.generation.branches(step, calls)):
            if op.kind is OpKind.RECEIVE and op.patch is not None:
                yield MessageKey(op.step, op.patch, op.branch, op.micro_batch)

    def _can_post_activation(self, key: MessageKey) -> bool:
        """Whether this stage has launched all work that an activation depends on, by way of the first stage."""
        schedule = self.schedule
        # A synchronous step begins with all patches of the one before; a later adaptive step may become one.
        whole = schedule.is_synchronous(key.step)
        whole = whole or (schedule.adaptive and key.step > self.generation.micro_step.step)
        return self._has_launched_patch(key.step - 1, self._patches - 1 if whole else key.patch)

    def _can_post_latents(self, key: MessageKey) -> bool:
        """Whether this stage, the first one, has launched its work on the patch whose new latents are to come."""
        return self._has_launched_patch(key.step, key.patch)

    def _has_launched_patch(self, step: int, patch: int) -> bool:
        """Whether this stage has launched its work on a patch of a step; micro-steps come in this order."""
        now = self.generation.micro_step
        return (step, patch) < (now.step, now.patch or 0)

    def _compute_activation_shape(self, key: MessageKey) -> tuple[int, ...] | None:
        if key.branch not in self._widths:
            return None
        rows = self.schedule.split_micro_batches(self.schedule.find_micro_step(key.step, key.patch))[key.micro_batch]
        now = self.generation
        part = now.layouts[key.branch, key.step in now.findings.whole_steps].get_own_part(key.patch)
        owns = [self._streams.locate_own_share(length) for length in (part.image_tokens, len(part.text))]
        pairs, vector = zip(owns, self._widths[key.branch], strict=True), math.gcd(*self._widths[key.branch])
        # A text may have other channels than the image: a message is vectors that are a part of a token of both.
        return (len(rows), sum((own.stop - own.start) * width for own, width in pairs) // vector, vector)

    def _compute_latent_shape(self, key: MessageKey) -> tuple[int, ...] | None:
        if not self._latents:
            return None
        return self.generation.pieces[key.branch][key.patch].shape(self._latents[key.branch])


def _place_tokens(tokens: Tensor, runs: Sequence[range]) -> Tensor:
    """All tokens in the order of the sequence, of which these are `runs`, one after the other."""
    placed = torch.empty_like(tokens)
    write_tokens(placed, tokens, runs)
    return placed


def _arrange_like(x: Tensor, like: Tensor) -> Tensor:
    """Tokens `[B, n, C]` in memory as the model has them, token after token or channel after channel.

    A sum over channels rounds otherwise in the other order.
    """
    if like.stride(1) >= like.stride(2):
        return x.contiguous()
    return x.transpose(1, 2).contiguous().transpose(1, 2)

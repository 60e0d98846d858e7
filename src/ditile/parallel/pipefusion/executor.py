"""PipeFusion: each rank owns a run of blocks, patches follow each other through them (arXiv 2405.14430, section 3.4).

A stage receives at its first own block and hands over at the entry of the first block behind its run, never at the
exit of its last: what the model's forward does between two blocks belongs to the stage before. Attention reads keys
and values one step old where fresh ones are still to come (`attend.core`). Activations go stage to stage, stepped
patches from the last stage to the first on a group of their own, and nothing blocks but the wait for a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.trace import Trace
from ditile.distributed.transport import Wire, start_gather
from ditile.errors import StateError
from ditile.hooks.block_hooks import State
from ditile.hooks.generation import Generation
from ditile.hooks.protocols import Streams
from ditile.parallel.pipefusion.prefetch import Inbox, Key
from ditile.parallel.pipefusion.shared_warmup import Crew
from ditile.plan.layout import DUMMY_TEXT, Grid, Joint, Layout
from ditile.plan.plan import Facts, Plan
from ditile.plan.schedule import Kind, Op, Schedule


class PipeFusion:
    """One stage. The loop drives `begin`, `clear_step`, `take` and `give_back`; the seats drive the rest.

    Args:
        mesh: the stage's place and groups.
        owned: the blocks of this stage.
        plan: the patches and their check.
        joint: where the text lies in the sequence.
        trace: records each op.
        streams: what this rank has of its tokens between the Linears.
        crew: computes the synchronous steps, where they are not computed stage after stage.

    Attributes:
        broken: whether messages of a generation that failed are still under way.
    """

    def __init__(
        self, mesh: Mesh, owned: range, plan: Plan, joint: Joint, trace: Trace, streams: Streams,
        crew: Crew | None = None,
    ) -> None:  # fmt: skip
        self.stage, self.stages, self.owned = mesh.stage, mesh.stages, owned
        self._plan, self._joint, self._trace, self.crew = plan, joint, trace, crew
        self._patches, self._streams = plan.num_patches, streams
        self._sequence, self._traffic, self._world = mesh.sequence, mesh.traffic, mesh.world
        self._widths: dict[int, int] = {}
        self._dummies: dict[tuple[int, int], Tensor] = {}
        self._inbox = self._outbox = self._returns = self._giver = None
        self.broken = False
        if mesh.latents is not None:
            last = self.stages - 1
            if self.stage > 0:
                wire = Wire(mesh.down(self.stage - 1), self.stage - 1, "activations", mesh.traffic)
                ahead = self._patches >= self.stages
                self._inbox = Inbox(wire, self._activation_shape, self._is_free, looks_ahead=ahead)
            if self.stage < last:
                self._outbox = Wire(mesh.down(self.stage), self.stage + 1, "activations", mesh.traffic)
            if self.stage == 0:
                wire = Wire(mesh.latents, last, "latents", mesh.traffic)
                ahead = self._patches > self.stages
                self._returns = Inbox(wire, self._latent_shape, self._is_own, looks_ahead=ahead)
            if self.stage == last:
                self._giver = Wire(mesh.latents, 0, "latents", mesh.traffic)

    def connect(self, device: torch.device) -> None:
        """Uses every wire once, in one order for all stages: down the pipeline, then from the last to the first."""
        for box in (self._inbox, self._outbox, self._giver, self._returns):
            if isinstance(box, Inbox):
                box.wire.touch(device, sends=False)
            elif box is not None:
                box.touch(device, sends=True)
        if self.crew is not None:
            self.crew.connect(device)

    @property
    def is_last(self) -> bool:
        """Whether this stage makes the prediction and steps the scheduler."""
        return self.stage == self.stages - 1

    @property
    def reads_latents(self) -> bool:
        """Whether this stage embeds the latents, in some steps at least."""
        return self.stage == 0 or (self.crew is not None and self.crew.is_member)

    def begin(self, schedule: Schedule, generation: Generation) -> None:
        """A generation begins."""
        self.schedule, self.generation = schedule, generation
        self._cleared, self._returned = 0, -1
        self._widths.clear()
        self._ops: Iterator[Op] = iter(())
        self._start: Any = None
        self._latents: tuple[tuple[int, ...], int] | None = None

    def end(self, *, clean: bool) -> None:
        """The generation is over: what was sent is gone, or, after an error, abandoned in the wires for good."""
        self.broken = not clean and self._world > 1
        for box in (self._inbox, self._returns):
            if box is not None:
                box.clear()
                if not clean:
                    box.wire.abandon()
        for wire in (self._outbox, self._giver):
            if wire is not None:
                if clean:
                    wire.flush()
                else:
                    wire.abandon()
        if self.crew is not None:
            self.crew.end(clean=clean)
        self._dummies.clear()
        del self.generation  # with its keys: this object outlives the picture

    # The loop

    def clear_step(self, step: int, schedule: Schedule) -> None:
        """A step begins, and `schedule` now says for certain whether one more follows it.

        What was sent two steps ago has arrived: the last step began with what came of it.
        """
        for wire in (self._outbox, self._giver):
            if wire is not None:
                wire.settle()
        if self.crew is not None:
            self.crew.settle()
        self.schedule = replace(schedule, rows=self.generation.batch)
        certain = 0 if step == 0 else schedule.certain(step, self.generation.calls or 1)
        for sure in range(self._cleared + 1, min(certain + 1, schedule.steps)):
            if self._inbox is not None:
                self._inbox.expect(self._keys(sure))
            self._cleared = sure
        if self._returns is not None:
            for sure in range(self._returned + 1, min(step + 1, schedule.steps - 1)):
                self._returns.expect([Key(sure, patch) for patch in range(self._patches)])
                self._returned = sure

    def take(self, latents: Tensor, latent_dim: int, ops: list[Op], *, write: bool) -> None:
        """Writes the stepped patches that `ops` take into the first stage's latents, or only drains them."""
        self._latents = (tuple(latents.shape), latent_dim)
        for op in ops:
            assert self._returns is not None and op.patch is not None
            with self._trace.span("take", op.step, op.patch):
                patch = self._returns.take(Key(op.step, op.patch), latents)
            span = self.generation.layouts[0].latents(op.patch)
            if write:
                latents.narrow(latent_dim, span.start, span.stop - span.start).copy_(patch)

    def give_back(self, patch: Tensor) -> None:
        """Sends a stepped patch to the first stage."""
        assert self._giver is not None
        self._giver.send(patch)

    # The seats

    def begin_call(self, grid: Grid, rows: int) -> list[range]:
        """The transformer is called on `rows` rows: the ops of this call are due.

        Returns:
            The runs of rows that are computed one after the other.

        Raises:
            StateError: if there were other rows before: what stages send each other has those of the first step.
        """
        now = self.generation
        if now.calls is None and now.branch == 0:
            now.batch = rows
            self.schedule = replace(self.schedule, rows=rows)
        pieces = self.schedule.pieces(now.micro)
        if rows != now.batch and self.stages > 1:
            raise StateError(
                f"the batch changed from {now.batch} to {rows} rows in mid-run, and what stages send each other has "
                "those of the first step; keep guidance on for the whole run, or use pipefusion=1"
            )
        self._grid = grid
        self._ops = self.schedule.call(self.stage, now.micro, now.branch)
        return pieces

    def begin_piece(self, piece: int) -> None:
        """The next run of rows of a call: its ops are due."""
        now = self.generation
        now.piece, now.rows = piece, self.schedule.pieces(now.micro)[piece]
        self._ops = self.schedule.call(self.stage, now.micro, now.branch, piece)

    def run(self, index: int, block: Callable[[State], State], state: State) -> State:
        """Slices before the first block, receives at the first own one, hands over behind the last own one."""
        if index == 0:
            state = self._enter(state)
        if self._is_crews():
            assert self.crew is not None
            return self.crew.run(index, block, state, self.generation)
        if index == self.owned.start:
            state = self._receive(state)
        elif index == self.owned.stop:
            self._hand_over(state)
        return block(state) if index in self.owned else state

    def output(self, head: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """The prediction, full-size: this patch fresh, the others as they were last. Zeros where nobody reads it."""
        now, layout = self.generation, self.generation.layout
        shape = (x.shape[0], layout.image, width)
        if self._is_crews():
            assert self.crew is not None
            found = self.crew.output(head, x, width, now, self._ops)
            self._computed()
            return found
        if not self.is_last:
            return now.memory.buffer(("prediction", now.branch, now.piece), shape, x)
        fresh = self._streams.gather(head(x), now.part(now.micro.patch).image_tokens)
        self._computed()
        if now.is_whole:
            return fresh
        whole = now.memory.buffer(("prediction", now.branch, now.piece), shape, fresh)
        for part, piece in zip(now.parts(now.micro.patch), self._gathered(fresh), strict=True):
            at = 0
            for run in part.image:
                whole[:, run.start : run.stop] = piece[:, at : at + len(run)]
                at += len(run)
        return whole

    def _gathered(self, fresh: Tensor) -> list[Tensor]:
        """The predictions of all ranks that share out the tokens."""
        group = self._sequence.group
        if group is None:
            return [fresh]
        parts = self.generation.parts(self.generation.micro.patch)
        shapes = [(fresh.shape[0], part.image_tokens, fresh.shape[2]) for part in parts]
        return start_gather(fresh, shapes, group, self._traffic, "prediction").wait()

    def end_call(self) -> None:
        """The transformer returns."""
        self.generation.end_call()

    def _enter(self, state: State) -> State:
        """All that follows is patch-sized; without the text, two dummy tokens stand for it."""
        now = self.generation
        if now.branch not in now.layouts:
            length = 0 if state.text is None else state.text.shape[1]
            self._plan.check(Facts(rows=self._grid.rows))
            now.layouts[now.branch] = Layout.of(self._grid, self._patches, length, self._joint)
        self._widths[now.branch], self._dtype = state.image.shape[2], state.image.dtype
        if self._is_crews():
            assert self.crew is not None
            self._start = self._trace.now()
            return self.crew.enter(state, now, self._dummy(state))
        if self.stage > 0 and now.micro.step == 0:
            self._expect_call()
        part = now.part(now.micro.patch)
        text = None if state.text is None else state.text[:, part.text.start : part.text.stop]
        if not part.text:
            text = self._dummy(state)
        self._streams.begin(part.image_tokens, 0 if text is None else text.shape[1])
        text = None if text is None else text[:, self._streams.own(text.shape[1])]
        own = self._streams.own(part.image_tokens)
        if self.stage > 0:  # what arrives here is not read, only as long as what will be received
            return State(state.image[:, : own.stop - own.start], text)
        runs = [state.image[:, run.start : run.stop] for run in part.image]
        image = runs[0] if len(runs) == 1 else torch.cat(runs, dim=1)
        return State(image[:, own].contiguous(), text)

    def _is_crews(self) -> bool:
        """Whether a crew computes the micro-step at hand."""
        return self.crew is not None and self.generation.micro.patch is None

    def _expect_call(self) -> None:
        """In the first step the number of calls is not known yet: only the messages of this call are certain."""
        assert self._inbox is not None
        now = self.generation
        patches = self.schedule.patches_of(now.micro)
        self._inbox.expect([Key(now.micro.step, patch, now.branch, now.piece) for patch in patches])

    def _receive(self, state: State) -> State:
        parts = []
        for op in self._ops:
            if op.kind is Kind.COMPUTE:
                break
            assert self._inbox is not None and op.patch is not None
            with self._trace.span("receive", op.step, op.patch, op.branch):
                parts.append(self._inbox.take(Key(op.step, op.patch, op.branch, op.piece), state.image))
        self._start = self._trace.now()
        if not parts:
            return state
        now, streams = self.generation, self._streams
        part = now.part(now.micro.patch)
        own = streams.own(len(part.text))
        length = own.stop - own.start
        text = parts[0][:, :length].contiguous() if part.text else state.text
        parts[0] = parts[0][:, length:]
        if len(parts) > 1:
            whole = [streams.gather(x, now.part(patch).image_tokens) for patch, x in enumerate(parts)]
            parts = [torch.cat(whole, dim=1)[:, streams.own(part.image_tokens)]]
        return State(parts[0].contiguous(), text)

    def _hand_over(self, state: State) -> None:
        self._computed()
        now, streams, image, at = self.generation, self._streams, state.image, 0
        whole_step = now.micro.patch is None and self._patches > 1
        if whole_step:
            image = streams.gather(image, now.part(None).image_tokens)
        for op in self._ops:
            assert self._outbox is not None and op.patch is not None
            part, message = now.part(op.patch), image
            if whole_step:  # patch after patch
                message = image[:, at : at + part.image_tokens][:, streams.own(part.image_tokens)]
                at += part.image_tokens
            if part.text:
                assert state.text is not None
                message = torch.cat([state.text, message], dim=1)
            if message.dtype != self._dtype:
                raise StateError(
                    f"blocks made {message.dtype} of {self._dtype}, which the next stage waits for, as under "
                    "torch.autocast they may; give the pipeline one dtype instead, or use pipefusion=1"
                )
            self._outbox.send(message)

    def _computed(self) -> None:
        micro = self.generation.micro
        self._trace.add("compute", micro.step, micro.patch, self.generation.branch, self._start)

    def _dummy(self, state: State) -> Tensor | None:
        if state.text is None:
            return None
        key = (state.image.shape[0], state.text.shape[2])
        if key not in self._dummies:
            self._dummies[key] = state.text.new_zeros((key[0], DUMMY_TEXT, key[1]))
        return self._dummies[key]

    # Messages to come

    def _keys(self, step: int) -> Iterator[Key]:
        calls = self.generation.calls
        assert calls is not None
        for op in self.schedule.step_ops(self.stage, step, calls, self.generation.branches(step, calls)):
            if op.kind is Kind.RECEIVE and op.patch is not None:
                yield Key(op.step, op.patch, op.branch, op.piece)

    def _is_free(self, key: Key) -> bool:
        """Whether what the first stage needs for an activation does not wait for work that is not launched here yet."""
        schedule = self.schedule
        whole = schedule.synchronous(key.step)  # such a step begins with all patches of the one before
        whole = whole or (schedule.adaptive and key.step > self.generation.micro.step)  # it may yet become one
        return self._is_launched(key.step - 1, self._patches - 1 if whole else key.patch)

    def _is_own(self, key: Key) -> bool:
        """Whether this stage, the first one, has done with the patch whose new latents are to come."""
        return self._is_launched(key.step, key.patch)

    def _is_launched(self, step: int, patch: int) -> bool:
        """Whether this stage has done with a patch of a step: micro-steps follow each other in that order."""
        now = self.generation.micro
        return (step, patch) < (now.step, now.patch or 0)

    def _activation_shape(self, key: Key) -> tuple[int, ...] | None:
        if key.branch not in self._widths:
            return None
        rows = self.schedule.pieces(self.schedule.micro_of(key.step, key.patch))[key.piece]
        part = self.generation.part(key.patch, key.branch)
        owns = [self._streams.own(length) for length in (len(part.text), part.image_tokens)]
        return (len(rows), sum(own.stop - own.start for own in owns), self._widths[key.branch])

    def _latent_shape(self, key: Key) -> tuple[int, ...] | None:
        assert self._latents is not None
        shape, dim = self._latents
        span = self.generation.layouts[0].latents(key.patch)
        return (*shape[:dim], span.stop - span.start, *shape[dim + 1 :])

"""The crew: the first stages, which compute a synchronous step together instead of one after the other.

Each has a share of the tokens and computes all blocks on it, gathering keys and values layer by layer. In `sequence`
warmup all stages are the crew, and blocks are lent (`blocks.lending`); in `separate` warmup a few stages hold all of
them. Predictions go to the last stage, which steps the scheduler as ever; keys and values go to the stages that own
their layers, so that an asynchronous step finds what a serial step would have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import Wire, start_exchange, start_gather
from ditile.hooks.block_hooks import Seats, State
from ditile.hooks.generation import Generation, Tokens
from ditile.hooks.key_padding import Extra, refuse_masks
from ditile.hooks.protocols import Kernel, Keys
from ditile.parallel.pipefusion.weight_streaming import Lender
from ditile.plan.layout import joined
from ditile.plan.schedule import Kind, Op

KEYS, PREDICTION, LATENTS = "keys", "prediction", "latents"


class Crew:
    """One stage's part in the steps that a crew computes.

    Args:
        mesh: the stage's place and groups.
        seats: the blocks.
        stages: which stage owns which.
        size: R: stages 0 to R - 1 are the crew.
        lender: brings the weights of other stages; None where the crew holds them.
    """

    def __init__(self, mesh: Mesh, seats: Seats, stages: Sequence[range], size: int, lender: Lender | None) -> None:
        group = mesh["pipefusion"].group
        assert group is not None and mesh.latents is not None
        self.size, self.stage, self.is_member, self.lender = size, mesh.stage, mesh.stage < size, lender
        self._group, self._traffic, self._seats, self._owned = group, mesh.traffic, seats, stages[mesh.stage]
        self._owners = {
            seat.name: owner for owner, blocks in enumerate(stages) for seat in seats.chain[blocks.start : blocks.stop]
        }
        self.last = last = len(stages) - 1
        self._order = [(member, last, PREDICTION) for member in range(size) if member != last]
        self._order += [(last, member, LATENTS) for member in range(1, size) if member != last]
        self._order += [(0, owner, KEYS) for owner in range(size, last + 1)]
        self._wires = {
            (sender, receiver, kind): Wire(
                mesh.latents if kind == LATENTS else mesh.down(sender),
                receiver if sender == mesh.stage else sender, kind, mesh.traffic,
            )
            for sender, receiver, kind in self._order
            if mesh.stage in (sender, receiver)
        }  # fmt: skip

    def connect(self, device: torch.device) -> None:
        """Uses every wire once, in one order for all stages."""
        for way in self._order:
            if way in self._wires:
                self._wires[way].touch(device, sends=way[0] == self.stage)

    def end(self, *, clean: bool) -> None:
        """The generation is over: what was sent is gone, or, after an error, abandoned."""
        for wire in self._wires.values():
            if clean:
                wire.flush()
            else:
                wire.abandon()
        if self.lender is not None:
            self.lender.forget()

    def settle(self) -> None:
        """Lets go of what has arrived: what was sent before the last step began."""
        for wire in self._wires.values():
            wire.settle()

    # Latents

    def share(self, latents: Tensor, op: Op) -> None:
        """The last stage sends the whole latents to a member."""
        assert op.peer is not None
        self._wires[self.stage, op.peer, LATENTS].send(latents)

    def adopt(self, latents: Tensor) -> Tensor:
        """A member receives them; `latents` are its own, of the same shape."""
        return self._received((self.last, self.stage, LATENTS), latents.shape, latents)

    # A call of the transformer

    def enter(self, state: State, now: Generation, dummies: Tensor | None) -> State:
        """A member's share of the tokens, at the first block."""
        if not self.is_member:
            return state
        if self.lender is not None:
            self.lender.begin_call(state.image.device)
        if now.is_whole:
            return state
        part = now.part(None)
        image = torch.cat([state.image[:, run.start : run.stop] for run in part.image], dim=1)
        if state.text is None:
            return State(image, None)
        return State(image, state.text[:, part.text.start : part.text.stop] if part.text else dummies)

    def run(self, index: int, block: Callable[[State], State], state: State, now: Generation) -> State:
        """A member computes every block; the others receive the keys of their own."""
        if self.is_member:
            if self.lender is not None:
                self.lender.begin_block(index)
            return block(state)
        if index in self._owned and now.keeps_keys(now.micro.step):
            self._receive_keys(index, state, now)
        return state

    def output(
        self, head: Callable[[Tensor], Tensor], x: Tensor, width: int, now: Generation, ops: Iterator[Op]
    ) -> Tensor:
        """The prediction, whole on the last stage; zeros where nobody reads it."""
        fresh = head(x) if self.is_member else None
        if self.lender is not None:
            self.lender.end_call()
        if fresh is not None and self.stage == self.last and self.size == 1:
            return fresh
        whole = now.memory.buffer(("prediction", now.branch), (x.shape[0], now.layout.image, width), x)
        parts = now.parts(None)
        if fresh is not None and self.stage == self.last:
            _place(whole, fresh, parts[self.stage].image)
        for op in ops:
            if op.kind is Kind.PREDICT:
                assert fresh is not None
                self._wires[self.stage, self.last, PREDICTION].send(fresh)
            elif op.kind is Kind.COLLECT:
                assert op.peer is not None
                shape = (x.shape[0], parts[op.peer].image_tokens, width)
                _place(whole, self._received((op.peer, self.last, PREDICTION), shape, x), parts[op.peer].image)
        return whole

    # Keys and values

    def gather(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Those of all members, in their order."""
        if self.size == 1:
            return k, v
        own = torch.stack([k, v])
        shapes = [(*own.shape[:2], length, *own.shape[3:]) for length in tokens.lengths]
        if self.size == self.last + 1:
            parts = start_gather(own, shapes, self._group, self._traffic, KEYS).wait()
        else:
            others = [(member, shape) for member, shape in enumerate(shapes) if member != self.stage]
            sends = [(member, own) for member, _ in others]
            parts = start_exchange(sends, others, own, self._group, self._traffic, KEYS).wait()
            parts.insert(self.stage, own)
        k, v = torch.cat(parts, dim=2)
        return k, v

    def keep(self, layer: str, k: Tensor, v: Tensor, tokens: Tokens, now: Generation) -> None:
        """Writes keys of the whole image into an own store, or sends them to the stage that owns the layer."""
        owner = self._owner_of(layer)
        if owner == self.stage:
            _write(layer, k, v, tokens, now)
        elif owner >= self.size and self.stage == 0:
            self._wires[0, owner, KEYS].send(torch.stack([k, v]))

    def _owner_of(self, layer: str) -> int:
        """The stage whose block a layer is in; blocks that were never read here have none to look for it in."""
        while layer not in self._owners:
            layer, _, _ = layer.rpartition(".")
        return self._owners[layer]

    def _receive_keys(self, index: int, state: State, now: Generation) -> None:
        seat = self._seats.chain[index]
        for name, attention in seat.attentions():
            tokens = now.tokens(joint=name in seat.io.attn)
            size = attention.to_k.out_features // attention.heads
            shape = (2, state.image.shape[0], tokens.length, attention.heads, size)
            k, v = self._received((0, self.stage, KEYS), shape, state.image)
            _write(f"{seat.name}.{name}", k, v, tokens, now)

    def _received(self, way: tuple[int, int, str], shape: Sequence[int], like: Tensor) -> Tensor:
        wire = self._wires[way]
        wire.post(way, shape, like)
        return wire.take(way)


class CrewKeys:
    """Whose keys a layer attends to: in a crew's step those of its members, in any other as without a crew.

    Args:
        current: the generation under way.
        layer: the layer's name in the model.
        crew: gathers and keeps.
        kernel: attends.
        others: attends in steps that no crew computes.
    """

    def __init__(self, current: Callable[[], Generation], layer: str, crew: Crew, kernel: Kernel, others: Keys) -> None:
        self._current, self._layer, self._crew, self._kernel, self._others = current, layer, crew, kernel, others

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, extra: Extra) -> Tensor:
        """Attends."""
        now = self._current()
        if now.micro.patch is not None:
            return self._others.attend(q, k, v, tokens, extra)
        refuse_masks(extra, self._layer)
        k, v = self._crew.gather(k, v, tokens)
        if now.keeps_keys(now.micro.step):
            self._crew.keep(self._layer, k, v, tokens, now)
        return self._kernel(q, k, v, scale=extra.scale)


def _write(layer: str, k: Tensor, v: Tensor, tokens: Tokens, now: Generation) -> None:
    store = now.memory.store(now.branch, layer, tokens.length, now.layout.patches)
    store.write(k, v, joined(run for runs in tokens.runs for run in runs))
    store.stamp(now.micro.step)


def _place(whole: Tensor, piece: Tensor, runs: Sequence[range]) -> None:
    """Writes tokens where they belong."""
    at = 0
    for run in runs:
        whole[:, run.start : run.stop] = piece[:, at : at + len(run)]
        at += len(run)

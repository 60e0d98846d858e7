"""Lending: the weights of a block travel from the stage that owns it to all others, just before they compute it.

In `sequence` warmup every rank computes all blocks on its share of the tokens. Block by block, `AHEAD` of the one that
is computed, the owner broadcasts its weights into buffers that are used again and again: no rank ever holds more than
its own blocks and `AHEAD + 1` others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import Pending, gather_json, start_broadcast
from ditile.errors import ModelError
from ditile.hooks.block_hooks import Seats
from ditile.hooks.overrides import HOOKED
from ditile.hooks.placeholders import twin
from ditile.hooks.quantized import quantized
from ditile.plan.cost import ALIGNED

AHEAD = 2


class Entry(NamedTuple):
    """A parameter or buffer of a block, and its place in a flat buffer of bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in a buffer."""
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)


class StandIn:
    """Stands for a block of another stage: its structure on the meta device, and whatever weights are lent to it."""

    def __init__(self, block: nn.Module, weights: Callable[[], dict[str, Tensor]]) -> None:
        self.block, self._weights = block, weights

    def __call__(self, **call: Any) -> Any:
        """The block's forward."""
        return functional_call(self.block, self._weights(), (), call)


class Lender:
    """Lends and borrows the weights of blocks along a line of stages.

    Args:
        seats: the blocks of the model; at least those of this stage have their weights.
        stages: which stage owns which.
        mesh: this stage's place and groups; all ranks must come here.

    Attributes:
        stand_ins: by block, for all that this stage does not own.

    Raises:
        ModelError: if the model is quantized, or a block is not what its config says, and was not loaded here.
    """

    def __init__(self, seats: Seats, stages: Sequence[range], mesh: Mesh) -> None:
        group = mesh["pipefusion"].group
        assert group is not None  # a plan with one stage has no crew
        self._stage, self._group, self._traffic = mesh.stage, group, mesh.traffic
        self._blocks = [seat.block for seat in seats.chain]
        self._names = [seat.name for seat in seats.chain]
        self._owners = [owner for owner, blocks in enumerate(stages) for _ in blocks]
        if any(gather_json(bool(quantized(seats.transformer)), mesh.everyone)):
            raise ModelError(
                "warmup_mode=sequence lends plain weights, and this model is quantized; use another warmup_mode"
            )
        self._entries = _agreed([_entries(self._blocks[index]) for index in stages[mesh.stage]], stages, mesh)
        made = Seats(twin(seats.transformer), seats.spec).chain if seats.is_cut() else seats.chain
        self._buffers: list[Tensor] = []
        self._coming: dict[int, Pending] = {}
        self._lent: dict[int, dict[str, Tensor]] = {}
        self.stand_ins = {
            seat.index: StandIn(_hollow_copy(seat.block), functools.partial(self._lent_to, seat.index))
            for seat in made
            if self._owners[seat.index] != mesh.stage
        }
        for index, stand_in in self.stand_ins.items():
            if _structure(_entries(stand_in.block)) != _structure(self._entries[index]):
                raise ModelError(
                    f"{self._names[index]} has other weights on the stage that owns it than here or in the model's "
                    "config, so warmup_mode=sequence cannot lend them; use another warmup_mode"
                )

    def refuse(self) -> str | None:
        """Why a block of this stage cannot be lent, or None: LoRA layers, hooks, or other weights than at first."""
        for index, block in enumerate(self._blocks):
            if self._owners[index] != self._stage:
                continue
            name = self._names[index]
            if any(hasattr(module, "merged_adapters") for module in block.modules()):
                return (
                    f"{name} has LoRA layers, and warmup_mode=sequence lends plain weights to the others; fuse them "
                    "and unload them (pipe.fuse_lora(), pipe.unload_lora_weights()), or use another warmup_mode"
                )
            if any(_hooked(module) for module in block.modules()):
                return (
                    f"{name} has hooks around forwards, such as those of enable_layerwise_casting, and "
                    "warmup_mode=sequence lends plain weights to the others; remove them, or use another warmup_mode"
                )
            if quantized(block) or _entries(block) != self._entries[index]:
                return (
                    f"the weights of {name} have other names, shapes or types than when the pipeline was divided, and "
                    "warmup_mode=sequence lends them as they were; divide the pipeline anew, or use another warmup_mode"
                )
        return None

    def begin_call(self, device: torch.device) -> None:
        """A call of the transformer begins: the first blocks start to travel."""
        if not self._buffers or self._buffers[0].device != device:
            size = max(entries[-1].stop for entries in self._entries)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(AHEAD + 1)]
        for index in range(min(AHEAD, len(self._blocks))):
            self._start(index)

    def begin_block(self, index: int) -> None:
        """A block is next: its weights are here, and another block's start to travel."""
        if index + AHEAD < len(self._blocks):
            self._start(index + AHEAD)
        (flat,) = self._coming.pop(index).wait()
        self._lent = {index: {entry.name: entry.view(flat) for entry in self._entries[index]}}

    def end_call(self) -> None:
        """The call is over."""
        self._lent.clear()

    def forget(self) -> None:
        """Gives the buffers back."""
        self._buffers, self._coming, self._lent = [], {}, {}

    def _lent_to(self, index: int) -> dict[str, Tensor]:
        return self._lent[index]

    def _start(self, index: int) -> None:
        entries, owner = self._entries[index], self._owners[index]
        flat = self._buffers[index % len(self._buffers)][: entries[-1].stop]
        if owner == self._stage:
            tensors = _tensors(self._blocks[index])
            for entry in entries:
                entry.view(flat).copy_(tensors[entry.name])
        self._coming[index] = start_broadcast(flat, owner, self._group, self._traffic, "weights")


def _hooked(module: nn.Module) -> bool:
    """Whether diffusers or accelerate changes weights around a forward, as they do to cast and to offload them."""
    registry = vars(module).get("_diffusers_hook")
    return HOOKED in vars(module) or (registry is not None and bool(registry.hooks))


def _agreed(own: Sequence[list[Entry]], stages: Sequence[range], mesh: Mesh) -> list[list[Entry]]:
    """The entries of every block, from the stages that own them."""
    mine = [[(*entry[:2], str(entry.dtype).removeprefix("torch."), *entry[3:]) for entry in block] for block in own]
    everyone = dict(gather_json([mesh.stage, mine], mesh.everyone))
    found = [block for stage in range(len(stages)) for block in everyone[stage]]
    return [
        [Entry(name, tuple(shape), getattr(torch, dtype), start, stop) for name, shape, dtype, start, stop in block]
        for block in found
    ]


def _structure(entries: Sequence[Entry]) -> list[tuple[str, tuple[int, ...]]]:
    return [(entry.name, entry.shape) for entry in entries]


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in (*block.named_parameters(), *block.named_buffers())}


def _entries(block: nn.Module) -> list[Entry]:
    found, start = [], 0
    for name, x in _tensors(block).items():
        stop = start + x.numel() * x.element_size()
        found.append(Entry(name, tuple(x.shape), x.dtype, start, stop))
        start = -(-stop // ALIGNED) * ALIGNED
    return found


def _hollow_copy(block: nn.Module) -> nn.Module:
    """A copy of a block on the meta device; the weights are never copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in block.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in block.buffers()}
    return copy.deepcopy(block, memo).eval()

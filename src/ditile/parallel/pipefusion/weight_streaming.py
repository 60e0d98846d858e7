"""Weight streaming: the weights of a block go from the stage that owns it to all others, just before they compute it.

With warmup_mode=sequence every rank computes all blocks on its share of the tokens. The owner broadcasts each block,
`BLOCKS_AHEAD` blocks before it is computed, into buffers that are used again and again: no rank ever holds more than
its own blocks and `BLOCKS_AHEAD + 1` others.
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
from ditile.distributed.transport import PendingMessages, gather_json, start_broadcast
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.overrides import ACCELERATE_FORWARD
from ditile.model.hooks.placeholders import list_quantized_parameters
from ditile.plan.cost import ALIGNMENT
from ditile.plan.errors import ModelError

BLOCKS_AHEAD = 2


class FlatTensorSpec(NamedTuple):
    """A parameter or buffer of a block, and its place in a flat buffer of bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def view_tensor(self, flat: Tensor) -> Tensor:
        """The tensor in a buffer."""
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)


class StreamedBlock:
    """A block of another stage: its structure on the meta device, and the weights that have just arrived."""

    def __init__(self, block: nn.Module, weights: Callable[[], dict[str, Tensor]]) -> None:
        self.block, self._weights = block, weights

    def __call__(self, **call: Any) -> Any:
        """The block's forward."""
        return functional_call(self.block, self._weights(), (), call)


class WeightStream:
    """Sends and receives the weights of blocks along the stages of a pipeline.

    Args:
        hooks: the blocks of the model; at least those of this stage have their weights.
        stages: which stage owns which.
        mesh: this stage's place and groups; all ranks must make it together.

    Attributes:
        streamed_blocks: index of a block that this stage does not own -> what runs in place of it.

    Raises:
        ModelError: if the model is quantized, or a block is not what its config says, and was not loaded here.
    """

    def __init__(self, hooks: TransformerHooks, stages: Sequence[range], mesh: Mesh) -> None:
        self._stage, self._axis, self._traffic = mesh.stage_index, mesh["pipefusion"], mesh.traffic
        self._blocks = [hook.block for hook in hooks.chain]
        self._names = [hook.name for hook in hooks.chain]
        self._owners = [owner for owner, blocks in enumerate(stages) for _ in blocks]
        if any(gather_json(bool(list_quantized_parameters(hooks.transformer)), mesh.everyone)):
            raise ModelError(
                "warmup_mode=sequence sends plain weights, and this model is quantized; use another warmup_mode"
            )
        own = [_lay_out_tensors(self._blocks[index]) for index in stages[mesh.stage_index]]
        self._entries = _gather_block_specs(own, stages, mesh)
        if hooks.has_placeholders():
            hooks = hooks.copy_to_meta()
        self._buffers: list[Tensor] = []
        self._pending_broadcasts: dict[int, PendingMessages] = {}
        self._current_weights: dict[int, dict[str, Tensor]] = {}
        self.streamed_blocks = {
            hook.index: StreamedBlock(_copy_to_meta(hook.block), functools.partial(self._get_block_weights, hook.index))
            for hook in hooks.chain
            if self._owners[hook.index] != mesh.stage_index
        }
        for index, streamed_block in self.streamed_blocks.items():
            own_entries = _lay_out_tensors(streamed_block.block)
            if [entry[:2] for entry in own_entries] != [entry[:2] for entry in self._entries[index]]:
                raise ModelError(
                    f"{self._names[index]} has other weights on the stage that owns it than here or in the model's "
                    "config, so warmup_mode=sequence cannot send them; use another warmup_mode"
                )

    def explain_refusal(self) -> str | None:
        """Why a block of this stage cannot be sent, or None: LoRA layers, hooks, or other weights than at first."""
        for index, block in enumerate(self._blocks):
            if self._owners[index] != self._stage:
                continue
            name = self._names[index]
            if any(hasattr(module, "merged_adapters") for module in block.modules()):
                return (
                    f"{name} has LoRA layers, and warmup_mode=sequence sends plain weights to the others; fuse them "
                    "and unload them (pipe.fuse_lora(), pipe.unload_lora_weights()), or use another warmup_mode"
                )
            if any(has_weight_hooks(module) for module in block.modules()):
                return (
                    f"{name} has hooks around forwards, such as those of enable_layerwise_casting, and "
                    "warmup_mode=sequence sends plain weights to the others; remove them, or use another warmup_mode"
                )
            if list_quantized_parameters(block) or _lay_out_tensors(block) != self._entries[index]:
                return (
                    f"the weights of {name} have other names, shapes or types than when the pipeline was divided, and "
                    "warmup_mode=sequence sends them as they were; divide the pipeline anew, or use another warmup_mode"
                )
        return None

    def start_streaming(self, device: torch.device) -> None:
        """A call of the transformer begins: the first blocks start to travel."""
        if not self._buffers or self._buffers[0].device != device:
            size = max(entries[-1].stop for entries in self._entries)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BLOCKS_AHEAD + 1)]
        for index in range(min(BLOCKS_AHEAD, len(self._blocks))):
            self._start_block_broadcast(index)

    def receive_block(self, index: int) -> None:
        """A block is next: its weights are here, and another block's start to travel."""
        # Into the buffer of the block before this one, which has been computed.
        if index + BLOCKS_AHEAD < len(self._blocks):
            self._start_block_broadcast(index + BLOCKS_AHEAD)
        (flat,) = self._pending_broadcasts.pop(index).wait_for_tensors()
        self._current_weights = {index: {entry.name: entry.view_tensor(flat) for entry in self._entries[index]}}

    def release_weights(self) -> None:
        """The call is over."""
        self._current_weights.clear()

    def free_buffers(self) -> None:
        """Gives the buffers back."""
        self._buffers, self._pending_broadcasts, self._current_weights = [], {}, {}

    def _get_block_weights(self, index: int) -> dict[str, Tensor]:
        return self._current_weights[index]

    def _start_block_broadcast(self, index: int) -> None:
        entries, owner = self._entries[index], self._owners[index]
        flat = self._buffers[index % len(self._buffers)][: entries[-1].stop]
        if owner == self._stage:
            tensors = _list_block_tensors(self._blocks[index])
            for entry in entries:
                entry.view_tensor(flat).copy_(tensors[entry.name])
        # A plan with one stage has no warmup group.
        assert self._axis.group is not None
        self._pending_broadcasts[index] = start_broadcast(flat, owner, self._axis.group, self._traffic, "weights")


def has_weight_hooks(module: nn.Module) -> bool:
    """Whether diffusers or accelerate changes weights around a forward, as they do to cast and to offload them."""
    registry = vars(module).get("_diffusers_hook")
    return ACCELERATE_FORWARD in vars(module) or (registry is not None and bool(registry.hooks))


def _gather_block_specs(
    own: Sequence[list[FlatTensorSpec]], stages: Sequence[range], mesh: Mesh
) -> list[list[FlatTensorSpec]]:
    """The entries of every block, from the stages that own them."""
    mine = [[(*entry[:2], str(entry.dtype).removeprefix("torch."), *entry[3:]) for entry in block] for block in own]
    everyone = dict(gather_json([mesh.stage_index, mine], mesh.everyone))
    return [
        [FlatTensorSpec(name, tuple(shape), getattr(torch, dtype), *span) for name, shape, dtype, *span in block]
        for stage in range(len(stages))
        for block in everyone[stage]
    ]


def _list_block_tensors(block: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in (*block.named_parameters(), *block.named_buffers())}


def _lay_out_tensors(block: nn.Module) -> list[FlatTensorSpec]:
    entries, start = [], 0
    for name, x in _list_block_tensors(block).items():
        stop = start + x.numel() * x.element_size()
        entries.append(FlatTensorSpec(name, tuple(x.shape), x.dtype, start, stop))
        start = -(-stop // ALIGNMENT) * ALIGNMENT
    return entries


def _copy_to_meta(block: nn.Module) -> nn.Module:
    """A copy of a block on the meta device; the weights are never copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in block.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in block.buffers()}
    return copy.deepcopy(block, memo).eval()

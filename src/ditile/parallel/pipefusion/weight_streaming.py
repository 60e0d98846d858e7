"""Weight streaming: the weights of a block go from its stage to all others, just before they compute it.

With warmup_mode=sequence every rank computes all blocks on its share of the tokens. The owner broadcasts each block,
`BLOCKS_AHEAD` blocks before it is computed, into buffers that are reused in turn: no rank ever holds more than its own
blocks and `BLOCKS_AHEAD + 1` others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import PendingMessages, describe_dtype, gather_json, start_broadcast
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.overrides import ACCELERATE_FORWARD
from ditile.model.hooks.placeholders import list_quantized_parameters
from ditile.plan.cost import ALIGNMENT
from ditile.plan.errors import ModelError

BLOCKS_AHEAD = 2
"""How many blocks' weights may be under way while one is computed."""


class FlatTensorSpec(NamedTuple):
    """A parameter or buffer of a block, and its place in flat bytes. `dtype` is a name, because JSON has no dtypes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    def view_tensor(self, flat: Tensor) -> Tensor:
        """Return the tensor as a view of a buffer."""
        return flat[self.start : self.stop].view(getattr(torch, self.dtype)).view(self.shape)


class StreamedBlock:
    """A block of another stage: its structure on the meta device, and its weights while this rank has them."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.weights: dict[str, Tensor] = {}

    def __call__(self, **call: Any) -> Any:
        """Run the block's forward."""
        return functional_call(self.block, self.weights, (), call)


class WeightStream:
    """The exchange of block weights along the stages of a pipeline.

    Args:
        hooks: the blocks of the model; at least those of this stage have their weights.
        stages: the blocks that each stage owns.
        mesh: this stage's place and groups. All ranks must make this object together.

    Attributes:
        streamed_blocks: index of a block that this stage does not own -> the block that runs in its place.

    Raises:
        ModelError: if the model is quantized, or a block differs from the model's config and was not loaded here.
    """

    def __init__(self, hooks: TransformerHooks, stages: Sequence[range], mesh: Mesh) -> None:
        self._axis = mesh["pipefusion"]
        self._traffic = mesh.traffic
        self._blocks = [hook.block for hook in hooks.chain]
        self._names = [hook.name for hook in hooks.chain]
        self._owned = stages[mesh.stage_index]
        self._owners: list[int] = []
        for owner, blocks in enumerate(stages):
            self._owners += [owner] * len(blocks)
        # Ranks agree before the next gather, because either all of them take part in it or none.
        if any(gather_json(bool(list_quantized_parameters(hooks.transformer)), mesh.everyone)):
            raise ModelError(
                "warmup_mode=sequence sends plain weights, and this model is quantized; use another warmup_mode"
            )
        own_specs = [_lay_out_tensors(self._blocks[index]) for index in self._owned]
        specs_by_stage = dict(gather_json([mesh.stage_index, own_specs], mesh.everyone))
        self._specs: list[list[FlatTensorSpec]] = []
        for stage in range(len(stages)):
            for block_specs in specs_by_stage[stage]:
                self._specs.append([FlatTensorSpec(name, tuple(shape), *rest) for name, shape, *rest in block_specs])
        if hooks.has_placeholders():
            hooks = hooks.copy_to_meta()
        self._buffers: list[Tensor] = []
        self._pending_broadcasts: dict[int, PendingMessages] = {}
        self.streamed_blocks: dict[int, StreamedBlock] = {}
        for hook in hooks.chain:
            if hook.index in self._owned:
                continue
            block = _copy_to_meta(hook.block)
            # Names and shapes must be equal; types may differ for weights that were not loaded.
            expected = [spec[:2] for spec in self._specs[hook.index]]
            if expected != [spec[:2] for spec in _lay_out_tensors(block)]:
                raise ModelError(
                    f"{hook.name} has other weights on the stage that owns it than here or in the model's "
                    "config, so warmup_mode=sequence cannot send them; use another warmup_mode"
                )
            self.streamed_blocks[hook.index] = StreamedBlock(block)

    def explain_refusal(self) -> str | None:
        """Return why a block of this stage cannot be sent, or None.

        Reasons are LoRA layers, hooks, or other weights than at first.
        """
        for index in self._owned:
            block = self._blocks[index]
            name = self._names[index]
            for module in block.modules():
                if hasattr(module, "merged_adapters") or has_weight_hooks(module):
                    return (
                        f"{name} has LoRA layers, or hooks around forwards such as those of enable_layerwise_casting, "
                        "and warmup_mode=sequence sends plain weights to the others; fuse and unload the LoRA, or use "
                        "another warmup_mode"
                    )
            if list_quantized_parameters(block) or _lay_out_tensors(block) != self._specs[index]:
                return (
                    f"the weights of {name} have other names, shapes or types than when the pipeline was divided, and "
                    "warmup_mode=sequence sends them as they were; divide the pipeline again, or use another "
                    "warmup_mode"
                )
        return None

    def start_streaming(self, device: torch.device) -> None:
        """Start to send the first blocks, at the beginning of a call of the transformer."""
        if not self._buffers or self._buffers[0].device != device:
            size = max(specs[-1].stop for specs in self._specs)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BLOCKS_AHEAD + 1)]
        for index in range(min(BLOCKS_AHEAD, len(self._blocks))):
            self._start_block_broadcast(index)

    def receive_block(self, index: int) -> None:
        """Wait for the weights of a block, and start to send a later block."""
        self.release_weights()
        # The later block goes into the buffer of the block before this one, which has been computed.
        if index + BLOCKS_AHEAD < len(self._blocks):
            self._start_block_broadcast(index + BLOCKS_AHEAD)
        (flat,) = self._pending_broadcasts.pop(index).wait_for_tensors()
        streamed = self.streamed_blocks.get(index)
        if streamed is not None:
            streamed.weights = {spec.name: spec.view_tensor(flat) for spec in self._specs[index]}

    def release_weights(self) -> None:
        """Release the weights when the call is over, or when it is the next block's turn."""
        for streamed in self.streamed_blocks.values():
            streamed.weights = {}

    def free_buffers(self) -> None:
        """Free the buffers."""
        self._buffers = []
        self._pending_broadcasts = {}
        self.release_weights()

    def _start_block_broadcast(self, index: int) -> None:
        specs = self._specs[index]
        # All ranks broadcast all blocks in the same order, which NCCL requires of collectives.
        flat = self._buffers[index % len(self._buffers)][: specs[-1].stop]
        if index in self._owned:
            tensors = _list_block_tensors(self._blocks[index])
            for spec in specs:
                spec.view_tensor(flat).copy_(tensors[spec.name])
        # A plan with one stage has no warmup group.
        assert self._axis.group is not None
        pending = start_broadcast(flat, self._owners[index], self._axis.group, self._traffic, "weights")
        self._pending_broadcasts[index] = pending


def has_weight_hooks(module: nn.Module) -> bool:
    """Return whether diffusers or accelerate changes weights around a forward, to cast or to offload them."""
    registry = vars(module).get("_diffusers_hook")
    return ACCELERATE_FORWARD in vars(module) or (registry is not None and bool(registry.hooks))


def _list_block_tensors(block: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in (*block.named_parameters(), *block.named_buffers())}


def _lay_out_tensors(block: nn.Module) -> list[FlatTensorSpec]:
    specs = []
    start = 0
    for name, x in _list_block_tensors(block).items():
        stop = start + x.nbytes
        specs.append(FlatTensorSpec(name, tuple(x.shape), describe_dtype(x), start, stop))
        start = -(-stop // ALIGNMENT) * ALIGNMENT
    return specs


def _copy_to_meta(block: nn.Module) -> nn.Module:
    """Copy a block to the meta device; the weights are never copied."""
    # Whatever is in the memo counts as copied already.
    memo: dict[int, Any] = {}
    for parameter in block.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in block.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(block, memo).eval()

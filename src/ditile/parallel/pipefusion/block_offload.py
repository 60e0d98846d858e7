"""Blocks whose weights stay in the host's memory, and come to the device one ahead of their use (weight offloading).

The device has two buffers, each as large as the largest block. While a block computes in one of them, the weights of
the block that ran next the last time are copied to the other, on a stream of their own. The host waits for nothing: a
block's kernels wait for its copy, and a copy waits for the kernels of the block that was there before. So the peak is
two blocks in place of all, whatever runs ahead of what.

diffusers' group offloading is not used: with a stream the host waits for a copy or the whole device at every block,
messages of other ranks included; if it does not wait for the device, what runs ahead keeps more than two blocks there;
and the weights outside of blocks, which every patch needs, would travel too.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook
from ditile.model.hooks.compile import ForwardCall
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.placeholders import restore_contents, turn_into_placeholder
from ditile.parallel.pipefusion.weight_streaming import has_weight_hooks
from ditile.plan.cost import ALIGNMENT, count_flat_bytes

NUM_BUFFERS = 2
"""Blocks on the device: the one that computes, and the next."""


class HostCopies:
    """Copies of weights from the host to a device: on a stream of their own on a GPU, and at once on a CPU.

    Args:
        device: where the blocks run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate_host_memory(self, size: int) -> Tensor:
        """So many bytes that a copy can be started from; torch rounds pinned memory up to a power of two."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def start_copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Starts a copy behind an event of the device, or None; returns what `wait_for_copy` takes."""
        if self._stream is None:
            target.copy_(source)
            return None
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait_for_copy(self, copied: Any) -> None:
        """What the device is given from now on runs behind a copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def mark_computed(self) -> Any:
        """An event behind all that the device was given so far."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()


class _HostTensor(NamedTuple):
    """A parameter or buffer of a block in the host's memory, and the container that has it under a name."""

    container: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    address: int


class _HostBlock:
    """The weights of a block, side by side in the host's memory.

    Attributes:
        tensors: what the block has between its forwards.
        flat: their bytes.
    """

    def __init__(self, block: nn.Module, copies: HostCopies) -> None:
        self._block = block
        self._copies = copies
        self.tensors: list[_HostTensor] = []
        self.flat = torch.empty(0, dtype=torch.uint8)
        self._on_device: dict[int, list[Tensor]] = {}

    def pack_weights(self) -> bool:
        """Moves the weights side by side, unless they are; returns whether they were moved."""
        here = [
            _HostTensor(container, name, x, _find_address(x))
            for module in self._block.modules()
            for container in (module._parameters, module._buffers)
            for name, x in container.items()
            if x is not None
        ]
        if len(here) == len(self.tensors) and all(
            now.tensor is before.tensor and now.address == before.address
            for now, before in zip(here, self.tensors, strict=True)
        ):
            return False
        sizes = [part.numel() * part.element_size() for each in here for part in _list_plain_tensors(each.tensor)]
        self.flat = self._copies.allocate_host_memory(count_flat_bytes(sizes))
        self.tensors = []
        self._on_device = {}
        for each, placed in zip(here, self._place_tensors(here, self.flat, copied=True), strict=True):
            if is_traceable_wrapper_subclass(each.tensor):
                each.container[each.name] = _make_alike(each.tensor, placed)
            else:
                each.tensor.data = placed
            x = each.container[each.name]
            self.tensors.append(each._replace(tensor=x, address=_find_address(x)))
        return True

    @contextmanager
    def use_buffer(self, index: int, buffer: Tensor) -> Iterator[None]:
        """The block computes with the weights in a buffer, within the context."""
        if index not in self._on_device:
            placed = self._place_tensors(self.tensors, buffer, copied=False)
            self._on_device[index] = [_make_alike(each.tensor, x) for each, x in zip(self.tensors, placed, strict=True)]
        for (container, name, _, _), x in zip(self.tensors, self._on_device[index], strict=True):
            container[name] = x
        try:
            yield
        finally:
            for container, name, x, _ in self.tensors:
                container[name] = x

    def forget_buffers(self) -> None:
        """The buffers are others from now on."""
        self._on_device.clear()

    @staticmethod
    def _place_tensors(tensors: Sequence[_HostTensor], flat: Tensor, *, copied: bool) -> list[Tensor]:
        """The same tensors in other memory, into which their values are copied or not."""
        start = 0

        def place_part(_: str, part: Tensor) -> Tensor:
            nonlocal start
            if is_traceable_wrapper_subclass(part):
                return transform_subclass(part, place_part)
            start = -(-start // ALIGNMENT) * ALIGNMENT
            stop = start + part.numel() * part.element_size()
            view = flat[start:stop].view(part.dtype).view(part.shape)
            start = stop
            return view.copy_(part) if copied else view

        with torch.no_grad():
            return [place_part("", each.tensor.detach()) for each in tensors]


class _DeviceBuffer:
    """Memory of the device for one block.

    Attributes:
        block: whose weights are there or on their way; None at first.
        copied, computed: the events behind the copy of its weights, and behind its last forward.
    """

    def __init__(self, size: int, device: torch.device, ready: Any) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.block: _HostBlock | None = None
        self.copied: Any = None
        self.computed = ready


class BlockOffload:
    """Streams the weights of a rank's blocks from the host's memory.

    Args:
        models: the hooks of every model that the pipeline calls.
        owned: the blocks of each that this rank has.
        copies: what copies to the device.

    Attributes:
        num_copies: blocks that were copied to the device so far.
    """

    def __init__(self, models: Sequence[TransformerHooks], owned: range, copies: HostCopies) -> None:
        self._modules = [model.chain[k].block for model in models for k in owned]
        self._copies = copies
        self.num_copies = 0
        self._blocks = {module: _HostBlock(module, copies) for module in self._modules}
        self._buffers: list[_DeviceBuffer] = []
        self._previous: _HostBlock | None = None
        self._current = 0
        runs = [[self._blocks[model.chain[k].block] for k in owned] for model in models]
        # The block behind each: at first by their order, and then as they ran last.
        self._next = {block: run[(k + 1) % len(run)] for run in runs for k, block in enumerate(run)}

    @contextmanager
    def hold_blocks_back(self) -> Iterator[None]:
        """Within the context the models have no weights in these blocks, and so nobody moves them."""
        contents = [turn_into_placeholder(module) for module in self._modules]
        try:
            yield
        finally:
            for module, parts in zip(self._modules, contents, strict=True):
                restore_contents(module, parts)

    def pack_weights(self) -> None:
        """Moves weights to memory from which copies can be started, those that changed since the last time."""
        for block in self._blocks.values():
            block.pack_weights()

    @contextmanager
    def install_for_call(self) -> Iterator[None]:
        """The device has buffers within the context."""
        self.pack_weights()
        size = max(block.flat.numel() for block in self._blocks.values())
        number = min(NUM_BUFFERS, len(self._blocks))
        ready = self._copies.mark_computed()
        self._buffers = [_DeviceBuffer(size, self._copies.device, ready) for _ in range(number)]
        try:
            yield
        finally:
            for buffer in self._buffers:
                # A copy that no block waited for may be under way to memory that is given back here.
                if buffer.copied is not None:
                    self._copies.wait_for_copy(buffer.copied)
            self._buffers = []
            self._current = 0
            self._previous = None
            for block in self._blocks.values():
                block.forget_buffers()

    def wrap_forward(self, now: Generation, hook: BlockHook, is_last: bool, forward: ForwardCall) -> ForwardCall:
        """A block's forward with its weights on the device; see `BlockGraphs.wrap_forward`."""
        block = self._blocks[hook.block]

        def forward_streamed(*args: Any, **call: Any) -> Any:
            index = self._bring_block(block)
            buffer = self._buffers[index]
            self._copies.wait_for_copy(buffer.copied)
            with block.use_buffer(index, buffer.flat):
                out = forward(*args, **call)
            buffer.computed = self._copies.mark_computed()
            return out

        return forward_streamed

    def _bring_block(self, block: _HostBlock) -> int:
        """The buffer of a block that runs now; the next one's copy is started."""
        if self._previous is not None:
            self._next[self._previous] = block
        self._previous = block
        index = self._find_buffer(block)
        if index is None:  # another block was expected
            index = len(self._buffers) - 1 - self._current
            self._start_copy(index, block)
        if self._find_buffer(self._next[block]) is None:
            self._start_copy(1 - index, self._next[block])
        self._current = index
        return index

    def _find_buffer(self, block: _HostBlock) -> int | None:
        return next((k for k, buffer in enumerate(self._buffers) if buffer.block is block), None)

    def _start_copy(self, index: int, block: _HostBlock) -> None:
        buffer = self._buffers[index]
        buffer.block = block
        buffer.copied = self._copies.start_copy(buffer.flat[: block.flat.numel()], block.flat, buffer.computed)
        self.num_copies += 1


def explain_offload_refusal(models: Sequence[TransformerHooks]) -> str | None:
    """Why the weights of the blocks of some models cannot be streamed as they are now, or None."""
    for model in models:
        name = type(model.transformer).__name__
        outside = model.anatomy.outside
        if not model.chain:
            return f"offload=blocks: nothing is known of the blocks of {name}; leave it out"
        if outside:
            return f"offload=blocks: {name} computes with {outside[0]} outside of its block as well; leave it out"
        for hook in model.chain:
            for path, x in hook.block.named_parameters():
                if type(x) is not nn.Parameter and issubclass(type(x), nn.Parameter):
                    return (
                        f"offload=blocks: {hook.name}.{path} is a {type(x).__name__}, which keeps more than its "
                        "numbers; quantize with float8_weight_only or int8_weight_only, or leave offload out"
                    )
            if any(map(has_weight_hooks, hook.block.modules())):
                return (
                    f"offload=blocks: {hook.name} has hooks of diffusers or accelerate around forwards, such as those "
                    "of enable_group_offload or enable_layerwise_casting; remove them, or leave offload out"
                )
    return None


def _make_alike(before: Tensor, x: Tensor) -> Tensor:
    """A parameter for one, and a tensor for a buffer."""
    return nn.Parameter(x, requires_grad=before.requires_grad) if isinstance(before, nn.Parameter) else x


def _list_plain_tensors(x: Any) -> list[Tensor]:
    """The tensors that a tensor is made of: a quantized one has numbers and scales."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    return [part for name in x.__tensor_flatten__()[0] for part in _list_plain_tensors(getattr(x, name))]


def _find_address(x: Tensor) -> int:
    return _list_plain_tensors(x)[0].data_ptr()

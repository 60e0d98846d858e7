"""Blocks whose weights stay in the host's memory, and come to the device one block ahead (weight offloading).

The device has two buffers, each as large as the largest block. While a block computes in one of them, the weights of
the block that followed it the last time are copied to the other, on a separate stream. The host waits for nothing: a
block's kernels wait for its copy, and a copy waits for the kernels of the block that was in its buffer before. So the
device never holds more than two blocks, however far the host runs ahead.

diffusers' group offloading is not used. With a stream the host waits at every block, for a copy or for the whole device
with other ranks' messages. With `record_stream` it runs ahead, and the device holds more than two blocks. And the
weights outside of blocks, which every patch needs, would be copied each time too.
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
from ditile.parallel.block_formats import find_row_blocks, make_parameter_like
from ditile.parallel.pipefusion.weight_streaming import has_weight_hooks
from ditile.plan.cost import ALIGNMENT, count_flat_bytes

NUM_BUFFERS = 2
"""The number of blocks on the device: the one that computes, and the next."""


class HostCopies:
    """Copies of weights from the host to a device: on a separate stream on a GPU, immediate on a CPU.

    Args:
        device: where the blocks run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate_host_memory(self, size: int) -> Tensor:
        """Allocate memory of the host, pinned for copies to a GPU. torch rounds pinned memory up to a power of two."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def count_allocated_bytes(self, size: int) -> int:
        """Return how many bytes of the host's memory an allocation of `size` bytes takes."""
        if self._stream is None:
            return size
        return 1 << max(size - 1, 0).bit_length()

    def start_copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Start a copy, after an event of the device unless `after` is None; return what `wait_for_copy` takes."""
        if self._stream is None:
            target.copy_(source)
            return None
        # The kernels that still read the buffer must end before it is written.
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait_for_copy(self, copied: Any) -> None:
        """Make kernels that are launched from now on run after a copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def mark_computed(self) -> Any:
        """Return an event after all kernels launched so far."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()


class _HostTensor(NamedTuple):
    """A parameter or buffer of a block in the host's memory, and the container that has it under a name."""

    container: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    address: int


class _HostBlock:
    """The weights of a block, contiguous in the host's memory.

    Attributes:
        tensors: the block's tensors in the host's memory, which it has whenever it does not compute.
        flat: the bytes of these tensors.
        on_device: number of a buffer on the device -> the same tensors as views of the buffer.
    """

    def __init__(self, block: nn.Module, copies: HostCopies) -> None:
        self._block = block
        self._copies = copies
        self.tensors: list[_HostTensor] = []
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.on_device: dict[int, list[Tensor]] = {}

    def pack_weights(self) -> None:
        """Move the weights into one piece of memory, unless they are already there."""
        tensors = self._list_tensors()
        # Tensors are compared by identity, and by address because `.data` may have been replaced.
        places = [(id(entry.tensor), entry.address) for entry in tensors]
        if places == [(id(entry.tensor), entry.address) for entry in self.tensors]:
            return
        self.flat = self._copies.allocate_host_memory(self.count_bytes())
        self.tensors = []
        self.on_device = {}
        for entry, packed in zip(tensors, self._place_tensors(tensors, self.flat, copied=True), strict=True):
            # `.data` keeps the parameter that others may hold; a tensor subclass cannot be replaced that way.
            if is_traceable_wrapper_subclass(entry.tensor):
                entry.container[entry.name] = _make_like(entry.tensor, packed)
            else:
                entry.tensor.data = packed
            x = entry.container[entry.name]
            self.tensors.append(entry._replace(tensor=x, address=_find_address(x)))

    def count_bytes(self) -> int:
        """Count the bytes of the weights in one piece of memory."""
        parts: list[Tensor] = []
        for entry in self._list_tensors():
            parts += _list_plain_tensors(entry.tensor)
        return count_flat_bytes(part.nbytes for part in parts)

    def _list_tensors(self) -> list[_HostTensor]:
        """List the block's parameters and buffers in their present places."""
        tensors = []
        for module in self._block.modules():
            for container in (module._parameters, module._buffers):
                for name, x in container.items():
                    if x is not None:
                        tensors.append(_HostTensor(container, name, x, _find_address(x)))
        return tensors

    @contextmanager
    def use_buffer(self, index: int, buffer: Tensor) -> Iterator[None]:
        """Let the block compute with the weights in a buffer, within the context."""
        if index not in self.on_device:
            views = self._place_tensors(self.tensors, buffer, copied=False)
            on_device = [_make_like(entry.tensor, x) for entry, x in zip(self.tensors, views, strict=True)]
            self.on_device[index] = on_device
        for entry, x in zip(self.tensors, self.on_device[index], strict=True):
            entry.container[entry.name] = x
        try:
            yield
        finally:
            for entry in self.tensors:
                entry.container[entry.name] = entry.tensor

    @staticmethod
    def _place_tensors(tensors: Sequence[_HostTensor], flat: Tensor, *, copied: bool) -> list[Tensor]:
        """Return views of `flat` with the shapes of the tensors, one after the other, with their values if `copied`."""
        start = 0

        def place_part(_: str, part: Tensor) -> Tensor:
            nonlocal start
            if is_traceable_wrapper_subclass(part):
                return transform_subclass(part, place_part)
            start = -(-start // ALIGNMENT) * ALIGNMENT
            stop = start + part.nbytes
            view = flat[start:stop].view(part.dtype).view(part.shape)
            start = stop
            return view.copy_(part) if copied else view

        with torch.no_grad():
            return [place_part("", entry.tensor.detach()) for entry in tensors]


class _DeviceBuffer:
    """Memory of the device for one block.

    Attributes:
        block: the block whose weights are there or on their way; None at first.
        copied, computed: the events after the copy of its weights, and after its last forward.
    """

    def __init__(self, size: int, device: torch.device, ready: Any) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.block: _HostBlock | None = None
        self.copied: Any = None
        self.computed = ready


class BlockOffload:
    """The streaming of a rank's block weights from the host's memory.

    Args:
        models: the hooks of every model that the pipeline calls.
        owned: this rank's blocks of each model.
        copies: copies to the device.
    """

    def __init__(self, models: Sequence[TransformerHooks], owned: range, copies: HostCopies) -> None:
        self._copies = copies
        self._blocks: dict[nn.Module, _HostBlock] = {}
        # Block -> the block after it: at first in the order of the model, later in the order of the last run.
        self._next: dict[_HostBlock, _HostBlock] = {}
        for model in models:
            run = []
            for index in owned:
                module = model.chain[index].block
                run.append(self._blocks.setdefault(module, _HostBlock(module, copies)))
            # The first block of the next call follows the last one.
            for place, block in enumerate(run):
                self._next[run[place - 1]] = block
        self._buffers: list[_DeviceBuffer] = []
        self._previous: _HostBlock | None = None
        self._current = 0

    @contextmanager
    def hold_blocks_back(self) -> Iterator[None]:
        """Keep the blocks' weights out of the models within the context, so that `.to(device)` does not move them."""
        contents = {module: turn_into_placeholder(module) for module in self._blocks}
        try:
            yield
        finally:
            for module, parts in contents.items():
                restore_contents(module, parts)

    def count_host_bytes(self) -> int:
        """Count the bytes of host memory that the weights take."""
        return sum(self._copies.count_allocated_bytes(block.count_bytes()) for block in self._blocks.values())

    def pack_weights(self) -> None:
        """Pack the weights of each block whose tensors were replaced since the last time."""
        for block in self._blocks.values():
            block.pack_weights()

    @contextmanager
    def install_for_call(self) -> Iterator[None]:
        """Give the device its buffers within the context."""
        self.pack_weights()
        size = max(block.flat.numel() for block in self._blocks.values())
        num_buffers = min(NUM_BUFFERS, len(self._blocks))
        ready = self._copies.mark_computed()
        self._buffers = [_DeviceBuffer(size, self._copies.device, ready) for _ in range(num_buffers)]
        try:
            yield
        finally:
            for buffer in self._buffers:
                # A copy that no block waited for may still be writing into memory that is freed here.
                if buffer.copied is not None:
                    self._copies.wait_for_copy(buffer.copied)
            self._buffers = []
            self._current = 0
            self._previous = None
            for block in self._blocks.values():
                # These views would keep the memory of the buffers.
                block.on_device.clear()

    def wrap_forward(self, now: Generation, hook: BlockHook, is_last: bool, forward: ForwardCall) -> ForwardCall:
        """Wrap a block's forward so that its weights are on the device; a `WrapForward`."""
        block = self._blocks[hook.block]

        def forward_streamed(*args: Any, **call: Any) -> Any:
            # The next run is expected to have the order of this one.
            if self._previous is not None:
                self._next[self._previous] = block
            self._previous = block
            index = self._find_buffer(block)
            # Another block was expected, so this one's copy starts only now.
            if index is None:
                index = len(self._buffers) - 1 - self._current  # the other buffer, if there are two
                self._start_copy(index, block)
            following = self._next[block]
            if self._find_buffer(following) is None:  # never with one buffer: its block follows itself
                self._start_copy(1 - index, following)
            self._current = index
            buffer = self._buffers[index]
            self._copies.wait_for_copy(buffer.copied)
            with block.use_buffer(index, buffer.flat):
                out = forward(*args, **call)
            # The next copy into this buffer waits for this event.
            buffer.computed = self._copies.mark_computed()
            return out

        return forward_streamed

    def _find_buffer(self, block: _HostBlock) -> int | None:
        for index, buffer in enumerate(self._buffers):
            if buffer.block is block:
                return index
        return None

    def _start_copy(self, index: int, block: _HostBlock) -> None:
        buffer = self._buffers[index]
        buffer.block = block
        buffer.copied = self._copies.start_copy(buffer.flat[: block.flat.numel()], block.flat, buffer.computed)


def explain_offload_refusal(models: Sequence[TransformerHooks]) -> str | None:
    """Return why the weights of the models' blocks cannot be streamed at present, or None."""
    for model in models:
        name = type(model.transformer).__name__
        outside = model.anatomy.outside
        if not model.chain:
            return f"offload=blocks: nothing is known of the blocks of {name}; leave it out"
        if outside:
            return f"offload=blocks: {name} computes with {outside[0]} outside of its block as well; leave it out"
        for hook in model.chain:
            for path, x in hook.block.named_parameters():
                # torchao's are no subclasses of it, and are copied part by part.
                is_subclass = type(x) is not nn.Parameter and issubclass(type(x), nn.Parameter)
                if is_subclass and find_row_blocks(x) is None:
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


def _make_like(original: Tensor, x: Tensor) -> Tensor:
    """Make a parameter if the original is one, and a tensor if it is a buffer."""
    if isinstance(original, nn.Parameter):
        return make_parameter_like(original, x)
    return x


def _list_plain_tensors(x: Any) -> list[Tensor]:
    """List the tensors inside a tensor: a quantized one has numbers and scales."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    parts = []
    for name in names:
        parts += _list_plain_tensors(getattr(x, name))
    return parts


def _find_address(x: Tensor) -> int:
    return _list_plain_tensors(x)[0].data_ptr()

"""CUDA graphs of blocks: what a block does to a patch is recorded in an asynchronous step, and replayed in later ones.

A block of a patch is some fifty small kernels, and launching them one by one can take the host longer than they take
the GPU: 1.1 to 1.5 ms a block on the machines of docs/gpu.md. A replay launches all of them at once.

In asynchronous steps a block gets tensors of the same shapes each time, and reads and writes its keys in the same
memory. Its inputs are copied to static memory, unless they are there already. Its streams end in the memory where they
began, which the next block shares, so the cost is one copy a block. Messages, ages of keys and schedulers come between
blocks and are never recorded.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.hooks.block_policy import BlockHook
from ditile.model.hooks.compile import ForwardCall
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import KeyStore

LOG = logging.getLogger(__name__)

_READ_ADDRESS = operator.methodcaller("data_ptr")
_PLAIN_LEAVES = (Tensor, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
"""Arguments whose value says everything that a block can make of them."""
_ADAPTERS = "peft."
"""Modules of this package compute what their settings say, which may change between calls."""


class Recorder(Protocol):
    """Records what a function launches on the device, without running it; returns what replays it."""

    def __call__(self, fn: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
        """`written` are the tensors that the function writes in place."""


class CudaGraphRecorder:
    """Records CUDA graphs, which share the memory of what lives only within one of them.

    Attributes:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, fn: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
        """Records a function. Waits for nothing: messages may be under way."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Threads of the process group query events meanwhile, which any stricter mode would forbid.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                fn()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


class _StaticInput:
    """Memory that stays as long as a recording needs it, and the tensor that was last copied to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._source: Tensor | None = None
        self._state: tuple[Any, ...] = ()

    def fill(self, source: Tensor, *, always: bool) -> None:
        """Copies a tensor, unless it is the last one, unchanged, and not copied `always`."""
        if source is self.tensor:
            return
        # Inference tensors have no version, so their changes are not seen.
        if always or source.is_inference():
            self._source = None
            self._state = ()
            self.tensor.copy_(source)
            return
        state = (source.data_ptr(), source._version, source.shape, source.stride())
        if state != self._state:
            self.tensor.copy_(source)
        # Referenced here, so that no other tensor gets its memory and looks like it.
        self._source = source
        self._state = state


@dataclass(slots=True)
class _Recording:
    """A block of a patch, recorded.

    Attributes:
        form: of its arguments.
        fails: whether recording it failed.
        is_plain: whether it can be recorded as it is now.
        replay: runs it; None until it was recorded.
        out: its result.
        addresses: of its weights, its keys and their masks.
        epoch: when the addresses were last compared, see `GenerationMemory`.
        statics: the memory that it reads, which must live as long.
        segments: the segments of keys that it writes, for each layer.
    """

    form: Any
    fails: bool = False
    is_plain: bool = True
    replay: Callable[[], None] | None = None
    out: Any = None
    addresses: tuple[int, ...] = ()
    epoch: object = None
    statics: list[_StaticInput] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)

    def note_written_segments(self, stores: Sequence[KeyStore], step: int) -> None:
        """Notes the segments that were written in this step, possibly by other ranks' messages too."""
        self.segments = []
        for store in stores:
            self.segments.append([segment for segment, written in enumerate(store.written) if written == step])

    def mark_written(self, stores: Sequence[KeyStore], step: int) -> None:
        """Marks what a replay has written."""
        for store, segments in zip(stores, self.segments, strict=True):
            for segment in segments:
                store.mark_written(step, segment)


class BlockGraphs:
    """The recorded blocks of a runner, which outlive its calls.

    Args:
        record: makes a graph.
        device: of all that is recorded.

    Attributes:
        kept_buffers: keys and values, which stay where they are from call to call.
        recorded, replayed: how many blocks of patches were recorded, and replayed.
    """

    def __init__(self, record: Recorder, device: torch.device) -> None:
        self._record = record
        self._device = device
        self.kept_buffers: dict[Hashable, Tensor] = {}
        # Recordings reference the memory they read, so memory that no recording reads is freed.
        self._inputs: WeakValueDictionary[Hashable, _StaticInput] = WeakValueDictionary()
        self._recordings: dict[Hashable, _Recording] = {}
        self._warned: set[str] = set()
        self.recorded = 0
        self.replayed = 0

    def wrap_forward(self, now: Generation, hook: BlockHook, is_last: bool, forward: ForwardCall) -> ForwardCall:
        """The forward of a block for the tokens of a patch, called with all arguments by name.

        Args:
            now: the generation under way.
            hook: the block.
            is_last: whether anything but the next block reads what it returns.
            forward: what it computes.
        """
        streams = {"image": hook.anatomy.image, "text": hook.anatomy.text}
        settings = _describe_attention(hook.block)

        def forward_recorded(*args: Any, **call: Any) -> Any:
            patch = now.micro_step.patch
            if args or patch is None or now.is_surveyed:
                return forward(*args, **call)
            leaves, spec = pytree.tree_flatten(call)
            form = (spec, tuple(map(_describe_leaf, leaves)), now.tokens.layout, now.may_round, settings)
            key = (hook.name, now.branch, patch)
            recording = self._recordings.get(key)
            if recording is None or recording.form != form:
                # Not recorded the first time: loading a kernel is not allowed in a recording.
                self._recordings[key] = _Recording(form)
                return forward(**call)
            # Without warmup there are no stores before the first run.
            stores = now.memory.list_key_stores(now.branch, hook.name)
            if stores and recording.epoch is not now.memory.epoch:
                self._compare_addresses(recording, now, hook, stores)
            if recording.fails or not recording.is_plain or not stores or not self._can_record(leaves):
                return forward(**call)
            # Blocks of one list share their static inputs, so a stream is copied once and then stays in place.
            run = (hook.list_name, now.branch, patch)
            statics = self._fill_inputs(recording, run, call, set(streams.values()))
            if recording.replay is None:
                returns = [streams[name] for name in hook.anatomy.returns]
                try:
                    with now.memory.hide_remembered():
                        self._record_block(recording, forward, statics, returns)
                    recording.note_written_segments(stores, now.micro_step.step)
                except RuntimeError as error:
                    recording.fails = True
                    self._warn(hook, error)
                    return forward(**call)
            assert recording.replay is not None
            recording.replay()
            recording.mark_written(stores, now.micro_step.step)
            self.replayed += 1
            # The next replay overwrites the result.
            if is_last:
                return pytree.tree_map_only(Tensor, torch.clone, recording.out)
            return recording.out

        return forward_recorded

    def _warn(self, hook: BlockHook, error: RuntimeError) -> None:
        """Warns once for each list of blocks."""
        if hook.list_name not in self._warned:
            self._warned.add(hook.list_name)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            LOG.warning("%s is not recorded as a CUDA graph, and runs without one: %s", hook.name, reason)

    def _can_record(self, leaves: Sequence[Any]) -> bool:
        """Whether no argument may change unseen, or is on another device."""
        for leaf in leaves:
            if not isinstance(leaf, _PLAIN_LEAVES):
                return False
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                return False
        return True

    def _compare_addresses(
        self, recording: _Recording, now: Generation, hook: BlockHook, stores: Sequence[KeyStore]
    ) -> None:
        """Forgets a recording if something that it reads or writes has moved, and looks at the block again."""
        recording.epoch = now.memory.epoch
        recording.is_plain = _is_plain(hook.block)
        tensors = [*hook.block.parameters(), *hook.block.buffers()]
        for store in stores:
            tensors += store.list_tensors()
        addresses = tuple(map(_READ_ADDRESS, tensors))
        if addresses != recording.addresses:
            recording.replay = None
        recording.addresses = addresses

    def _fill_inputs(
        self, recording: _Recording, run: Hashable, call: Mapping[str, Any], streams: set[str | None]
    ) -> dict[str, Any]:
        """The call with tensors in static memory."""
        statics: dict[str, Any] = {}
        used: list[_StaticInput] = []
        for name, value in call.items():
            leaves, spec = pytree.tree_flatten(value)
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    continue
                key = (run, name, index, leaf.shape, leaf.dtype)
                static = self._inputs.get(key)
                if static is None:
                    static = _StaticInput(torch.empty_like(leaf))
                    self._inputs[key] = static
                static.fill(leaf, always=name in streams)
                used.append(static)
                leaves[index] = static.tensor
            statics[name] = pytree.tree_unflatten(leaves, spec)
        # Replaced only now: until then the last ones keep the memory that a replay reads.
        recording.statics = used
        return statics

    def _record_block(
        self, recording: _Recording, forward: ForwardCall, statics: dict[str, Any], returns: Sequence[str | None]
    ) -> None:
        """Records a block that writes its streams over its inputs."""
        inputs = [statics.get(name or "") for name in returns]
        result: Any = None

        def run() -> None:
            nonlocal result
            result = forward(**statics)
            parts = list(result) if isinstance(result, tuple) else [result]
            for index, (part, stream) in enumerate(zip(parts, inputs, strict=True)):
                if not isinstance(part, Tensor) or not isinstance(stream, Tensor) or part is stream:
                    continue
                if stream.shape == part.shape:
                    parts[index] = stream.copy_(part)
            result = tuple(parts) if isinstance(result, tuple) else parts[0]

        recording.replay = self._record(run, [stream for stream in inputs if isinstance(stream, Tensor)])
        recording.out = result
        self.recorded += 1


def _is_plain(block: nn.Module) -> bool:
    """Whether a block always computes the same of the same inputs: it has no adapters and no hooks."""
    for weight in (*block.parameters(), *block.buffers()):
        # Subclasses, such as quantized weights, do not tell the addresses of their numbers.
        if type(weight) not in (nn.Parameter, Tensor):
            return False
    for module in block.modules():
        if type(module).__module__.startswith(_ADAPTERS) or module._forward_hooks or module._forward_pre_hooks:
            return False
        if "_hf_hook" in vars(module) or "_diffusers_hook" in vars(module):
            return False
    return True


def _describe_attention(block: nn.Module) -> list[tuple[type, Any]]:
    """The processors of a block, and the kernels that they name."""
    processors: list[Any] = [module.processor for module in block.modules() if hasattr(module, "processor")]
    return [(type(processor), getattr(processor, "_attention_backend", None)) for processor in processors]


def _describe_leaf(leaf: Any) -> Any:
    """Equal for arguments that give the same graph."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    if isinstance(leaf, int | float | str | None):
        return leaf
    return id(leaf)

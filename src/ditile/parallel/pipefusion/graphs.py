"""CUDA graphs of blocks: what a block does to a patch is recorded in an asynchronous step, and replayed in later ones.

A block of a patch is some fifty small kernels, and starting them one by one can take the host longer than they take
the GPU: 1.1 to 1.5 ms a block on the machines of docs/gpu.md. A replay starts all of them at once.

In asynchronous steps a block gets tensors of the same shapes each time, and reads and writes its keys in the same
memory. What it is given is copied to memory that stays, unless it is there already. Its streams end in the memory
where they began, which is that of the next block too, so one copy a block is all that is added. Messages, ages of keys
and schedulers are between blocks and are never recorded.
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
"""Arguments whose value says all that a block can make of them."""
_ADAPTERS = "peft."
"""Modules of this package compute what their settings say, which may change between calls."""


class Recorder(Protocol):
    """Records what a function starts on the device, and does not run it; returns what runs it."""

    def __call__(self, fn: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
        """`written` are the tensors that the function writes in place."""


class CudaGraphRecorder:
    """Records CUDA graphs, which share the memory for what is alive only within one of them.

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
            # Threads of the process group ask for events meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                fn()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


class _StaticInput:
    """Memory that stays as long as a recording needs it, and what was last copied to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.source: Tensor | None = None
        self.state: tuple[Any, ...] = ()

    def fill(self, source: Tensor, *, always: bool) -> None:
        if source is self.tensor:
            return
        state: tuple[Any, ...] = ()
        if not always and not source.is_inference():
            state = (source.data_ptr(), source._version, source.shape, source.stride())
        if not state or self.source is None or state != self.state:
            self.tensor.copy_(source)
        # Held, so that nothing else gets its memory.
        self.source, self.state = (source, state) if state else (None, ())


@dataclass(slots=True)
class _Recording:
    """A block of a patch, recorded.

    Attributes:
        form: of what it was given.
        fails: whether recording it failed.
        is_plain: whether it can be recorded as it is now.
        replay: runs it; None until it was called once.
        out: what it returns.
        addresses: of its weights, its keys and their masks.
        epoch: when the addresses were last compared, see `GenerationMemory`.
        statics: the memory that it reads.
        segments: of its keys, those of each layer that it writes.
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
        """Notes what a run in this step has written; what others wrote in it may be among that."""
        self.segments = [[k for k, at in enumerate(store.written) if at == step] for store in stores]

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
        # Recordings hold what they read, so what no recording reads any more goes.
        self._inputs: WeakValueDictionary[Hashable, _StaticInput] = WeakValueDictionary()
        self._recordings: dict[Hashable, _Recording] = {}
        self._warned: set[str] = set()
        self.recorded = self.replayed = 0

    def wrap_forward(self, now: Generation, hook: BlockHook, is_last: bool, forward: ForwardCall) -> ForwardCall:
        """The forward of a block for the tokens of a patch, called with all arguments by name.

        Args:
            now: the generation under way.
            hook: the block.
            is_last: whether others than the next block read what it returns.
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
                # The first time all is as ever: kernels are loaded.
                self._recordings[key] = _Recording(form)
                return forward(**call)
            # Without warmup keys get their memory from a first run as ever.
            stores = now.memory.list_key_stores(now.branch, hook.name)
            if stores and recording.epoch is not now.memory.epoch:
                self._compare_addresses(recording, now, hook, stores)
            if recording.fails or not recording.is_plain or not stores or not self._can_record(leaves):
                return forward(**call)
            statics = self._fill_inputs(recording, (hook.list_name, now.branch, patch), call, set(streams.values()))
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
            return pytree.tree_map_only(Tensor, torch.clone, recording.out) if is_last else recording.out

        return forward_recorded

    def _warn(self, hook: BlockHook, error: RuntimeError) -> None:
        """Says once for each list of blocks what failed."""
        if hook.list_name not in self._warned:
            self._warned.add(hook.list_name)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            LOG.warning("%s is not recorded as a CUDA graph, and runs as ever: %s", hook.name, reason)

    def _can_record(self, leaves: Sequence[Any]) -> bool:
        """Whether a block is given nothing that may change without being seen, and nothing on another device."""
        return all(
            isinstance(leaf, _PLAIN_LEAVES) and (not isinstance(leaf, Tensor) or leaf.device == self._device)
            for leaf in leaves
        )

    def _compare_addresses(
        self, recording: _Recording, now: Generation, hook: BlockHook, stores: Sequence[KeyStore]
    ) -> None:
        """Forgets what was recorded if something that it reads or writes is elsewhere now; looks at the block again."""
        recording.epoch, recording.is_plain = now.memory.epoch, _is_plain(hook.block)
        keys = (x for store in stores for x in store.list_tensors())
        addresses = tuple(map(_READ_ADDRESS, (*hook.block.parameters(), *hook.block.buffers(), *keys)))
        if addresses != recording.addresses:
            recording.replay = None
        recording.addresses = addresses

    def _fill_inputs(
        self, recording: _Recording, run: Hashable, call: Mapping[str, Any], streams: set[str | None]
    ) -> dict[str, Any]:
        """The call with tensors in memory that stays."""
        statics: dict[str, Any] = {}
        held: list[_StaticInput] = []
        for name, value in call.items():
            leaves, spec = pytree.tree_flatten(value)
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    continue
                key = (run, name, index, leaf.shape, leaf.dtype)
                static = self._inputs.get(key)
                if static is None:
                    static = self._inputs[key] = _StaticInput(torch.empty_like(leaf))
                static.fill(leaf, always=name in streams)
                held.append(static)
                leaves[index] = static.tensor
            statics[name] = pytree.tree_unflatten(leaves, spec)
        recording.statics = held
        return statics

    def _record_block(
        self, recording: _Recording, forward: ForwardCall, statics: dict[str, Any], returns: Sequence[str | None]
    ) -> None:
        """Records a block that writes its streams over those that it is given."""
        found: list[Any] = []

        def run() -> None:
            out = forward(**statics)
            parts = list(out) if isinstance(out, tuple) else [out]
            for index, (part, name) in enumerate(zip(parts, returns, strict=True)):
                given = statics.get(name or "")
                if not isinstance(part, Tensor) or not isinstance(given, Tensor) or part is given:
                    continue
                if given.shape == part.shape:
                    parts[index] = given.copy_(part)
            found.append(tuple(parts) if isinstance(out, tuple) else parts[0])

        written = [x for name in returns if isinstance(x := statics.get(name or ""), Tensor)]
        recording.replay = self._record(run, written)
        recording.out = found[-1]
        self.recorded += 1


def _is_plain(block: nn.Module) -> bool:
    """Whether a block computes the same whenever it is given the same: no adapters, and nothing hooked on.

    Weights of classes of their own, as quantized ones, do not say where they are.
    """
    if any(type(weight) not in (nn.Parameter, Tensor) for weight in (*block.parameters(), *block.buffers())):
        return False
    return not any(
        type(module).__module__.startswith(_ADAPTERS)
        or module._forward_hooks
        or module._forward_pre_hooks
        or "_hf_hook" in vars(module)
        or "_diffusers_hook" in vars(module)
        for module in block.modules()
    )


def _describe_attention(block: nn.Module) -> list[tuple[type, Any]]:
    """The processors of a block, and the kernels that they name."""
    processors = [module.processor for module in block.modules() if hasattr(module, "processor")]
    return [(type(each), getattr(each, "_attention_backend", None)) for each in processors]


def _describe_leaf(leaf: Any) -> Any:
    """Equal for what gives the same graph."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | None) else id(leaf)

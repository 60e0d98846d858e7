"""The operators of a simulated GPU: on which device they run, what they cost, and what they do to messages."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import ditile
from tests.simulated_gpu.tensors import GpuMemory, SimulatedTensor, list_leaves, replace_leaves

SETUP, CALL, REHEARSAL, AFTER = "setup", "call", "rehearsal", "after"
"""Places outside of micro-steps: while ranks connect, before the loop, in its rehearsal, and behind it."""
_CPU = torch.device("cpu")
_HERE = str(Path(__file__).parent)
_ROOTS = {str(Path(module.__file__ or "").parent): module.__name__ for module in (ditile, diffusers)}

SYNCHRONISING = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor",
    "aten::equal", "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip
"""Operators of whose results a GPU must tell the host something."""
EMPTY = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::detach",
    "aten::alias", "aten::lift_fresh", "aten::new_empty_strided", "aten::set_.source_Storage",
}  # fmt: skip
"""Operators that launch nothing."""
INDEXED = ("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class SimulationError(RuntimeError):
    """What a GPU would refuse."""


class CaptureError(RuntimeError):
    """What CUDA does not permit while a graph is captured, which ends that capture."""


class Finding(NamedTuple):
    """Something that must not happen: its kind, what exactly, and where in ditile or diffusers."""

    kind: str
    what: str
    site: str


class HostSync(NamedTuple):
    """A wait of the host for the device: in which place of the call, of what kind, and where in the code."""

    place: str
    kind: str
    site: str


@dataclass(slots=True)
class PlaceCounts:
    """What happened in a place of a call, such as a micro-step.

    Attributes:
        kernels: kernels and copies that were launched.
        peak_bytes: the most that was alive at once.
        pinned: allocations of page-locked memory.
    """

    kernels: int = 0
    peak_bytes: int = 0
    pinned: int = 0


@dataclass(slots=True)
class SimulationRecord:
    """What was seen on a simulated GPU.

    Attributes:
        place: where the call is now.
        places: counts of each place, in order.
        findings, syncs: how often each was seen.
        live_bytes: alive now.
    """

    place: str = SETUP
    places: dict[str, PlaceCounts] = field(default_factory=lambda: defaultdict(PlaceCounts))
    findings: Counter[Finding] = field(default_factory=Counter)
    syncs: Counter[HostSync] = field(default_factory=Counter)
    live_bytes: int = 0

    @property
    def here(self) -> PlaceCounts:
        """The counts of the place at hand."""
        return self.places[self.place]

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once, from the first call on."""
        return max((counts.peak_bytes for place, counts in self.places.items() if place != SETUP), default=0)

    def enter_place(self, place: str) -> None:
        """What comes belongs to another place."""
        self.place = place
        self.here.peak_bytes = max(self.here.peak_bytes, self.live_bytes)

    def note_sync(self, kind: str) -> None:
        """The host waits for the device."""
        self.syncs[HostSync(self.place, kind, find_site())] += 1

    def note_finding(self, kind: str, what: str) -> None:
        """Something happened that must not."""
        self.findings[Finding(kind, what, find_site())] += 1


def find_site() -> str:
    """The innermost lines of ditile and diffusers that run now, and their functions."""
    lines, frame = list[str](), sys._getframe(1)
    while frame is not None and len(lines) < 4:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE):
            for root, package in _ROOTS.items():
                if name.startswith(root):
                    lines.append(f"{package}{name.removeprefix(root)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


class Operator(NamedTuple):
    """What is known of an operator: its name, whether it makes a view, and (place, name) of what it writes."""

    name: str
    is_view: bool
    written: tuple[tuple[int, str], ...]
    returns_written: bool


def _locate_tensor(tensor: Tensor) -> torch.device:
    """Where a tensor is; one that a model keeps on the meta device is on the CPU, and has no numbers."""
    return _CPU if tensor.device.type == "meta" else tensor.device


@cache
def describe_operator(func: Any) -> Operator:
    """What the schema of an operator says."""
    schema = func._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    first = schema.returns[0].alias_info if schema.returns else None
    is_written = [arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments]
    written = tuple((k, arg.name) for k, arg in enumerate(schema.arguments) if is_written[k])
    is_view = first is not None and not first.is_write
    return Operator(name, is_view, written, first is not None and first.is_write)


class SimulatedGpu(TorchDispatchMode):
    """Runs the operators of tensors on one GPU. A mode: what is made within it may be on the GPU.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", index)
        self.record = SimulationRecord()
        self._memories: dict[int, weakref.ref[GpuMemory]] = {}  # by the storage of what is inside
        self.side_stream: Any = None  # of what is copied now, if not the stream that computes
        self.graph: SimulatedGraph | None = None  # that is being captured
        self.lost_pools = 0  # that captures which CUDA ended have left behind, see `SimulatedGraph`
        self._freed: list[tuple[Any, int]] = []  # messages whose memory was freed, until somebody waits for them

    # Memory

    def allocate_memory(self, memory: GpuMemory) -> None:
        """Counts it."""
        record, here = self.record, self.record.here
        record.live_bytes += memory.size
        here.peak_bytes = max(here.peak_bytes, record.live_bytes)

    def free_memory(self, memory: GpuMemory) -> None:
        """Its last tensor is gone."""
        self.record.live_bytes -= memory.size
        self._memories.pop(memory.held._cdata, None)
        self._freed += [(work, memory.size) for work in memory.readers | memory.writers if not work.is_over]

    def wrap_tensor(self, inner: Tensor, device: torch.device) -> Tensor:
        """A tensor on a device, of what it is on the CPU."""
        if device.type == "cpu":
            return inner
        return SimulatedTensor(inner, self, device, self._find_memory(inner))

    def _find_memory(self, inner: Tensor) -> GpuMemory:
        storage = inner.untyped_storage()
        found = self._memories.get(storage._cdata)
        memory = None if found is None else found()
        if memory is None:
            memory = GpuMemory(self, storage)
            self._memories[storage._cdata] = weakref.ref(memory)
        return memory

    # What is found

    def refuse_in_capture(self, what: str) -> None:
        """Raises `CaptureError` while a graph is captured, which is of no use from then on."""
        if self.graph is not None:
            self.graph.is_valid = False
            raise CaptureError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def release_pool(self, index: int, pool: Any) -> None:
        """A graph needs its pool no more. Raises `RuntimeError` where none has been left so."""
        if not self.lost_pools:
            raise RuntimeError("INTERNAL ASSERT FAILED: the pool is used by nothing")
        self.lost_pools -= 1

    def wait_for_device(self, kind: str) -> None:
        """The host waits for the device."""
        self.refuse_in_capture(kind)
        self.record.note_sync(kind)

    def read_numbers(self, tensor: SimulatedTensor, kind: str) -> Tensor:
        """The numbers of a tensor, for the host."""
        if tensor.device.type == "cuda":
            self.wait_for_device(kind)
        return tensor.content

    def touch_memory(self, name: str, tensors: Sequence[Any], written: Sequence[Any]) -> None:
        """The stream reads tensors and writes some of them: a message that is under way must not mind."""
        if self.graph is not None:
            self.graph.save_memory(written)
        if self._freed:
            for work, size in self._freed:
                if not work.is_over:
                    what = f"{size} bytes are freed while {work} is under way"
                    self.record.note_finding("freed in flight", what)
            self._freed.clear()
        for tensor in tensors:
            memory = tensor.memory if isinstance(tensor, SimulatedTensor) else None
            if memory is None or not (memory.writers or memory.readers):
                continue
            for work in [work for work in memory.writers if not work.is_over]:
                self.record.note_finding("race", f"{name} uses what {work} still writes")
            if any(tensor is each for each in written):
                for work in [work for work in memory.readers if not work.is_over]:
                    self.record.note_finding("race", f"{name} writes over what {work} still reads")

    def _find_device(self, name: str, tensors: Sequence[Tensor], device: torch.device | None) -> torch.device:
        """Where an operator runs. Raises `SimulationError` for tensors on several devices."""
        found = {_locate_tensor(tensor) for tensor in tensors if tensor.ndim}
        if not found:
            found = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if len(found) > 1 and name.startswith(INDEXED):
            self.wait_for_device(f"{name} with indices on the CPU")
            found = {each for each in found if each.type == "cuda"}
        scalars = {tensor.device for tensor in tensors if not tensor.ndim and tensor.device.type == "cuda"}
        if len(found | scalars) > 1:
            what = f"{name} of {sorted(map(str, found | scalars))}"
            self.record.note_finding("several devices", what)
            raise SimulationError(f"{what} at {find_site()}")
        return device or next(iter(found), _CPU)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run_operator(func, args, kwargs or {})

    def run_operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator. Raises `SimulationError` for what a GPU would refuse."""
        result = self._run_operator(func, args, kwargs)
        if self.graph is not None:
            self.graph.note_call(self._run_operator, (func, args, kwargs), result)
        return result

    def _run_operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in list_leaves((args, kwargs)) if isinstance(each, Tensor)]
        mine = [each for each in tensors if isinstance(each, SimulatedTensor)]
        device = self._resolve_device(kwargs.get("device"))
        if kwargs.get("pin_memory"):
            self.refuse_in_capture("allocation of page-locked memory")
            kwargs = kwargs | {"pin_memory": None}
            self.record.here.pinned += 1
        if not mine and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        if self.graph is not None and not self.graph.is_valid:
            raise CaptureError("CUDA error: operation failed due to a previous error during capture")
        about = describe_operator(func)
        if about.name == "aten::_local_scalar_dense":
            return func(self.read_numbers(args[0], "item"))
        if about.name == "aten::_to_copy":
            return self._copy_tensor(args[0], kwargs, device)
        if about.name == "aten::copy_":
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            return self._write_tensor(args[0], args[1], non_blocking=non_blocking)
        if about.name in ("aten::is_pinned", "aten::_pin_memory"):
            return False if about.name == "aten::is_pinned" else args[0]
        if about.name in _FUSED_ATTENTION:
            return self._attend_with_lse(func, args, kwargs)
        where = self._find_device(about.name, tensors, device)
        on_gpu = where.type == "cuda"
        if on_gpu:
            self._check_waits(about.name, args)
            if not about.is_view and about.name not in EMPTY:
                self.record.here.kernels += 1
        written = _pick_written(about, args, kwargs)
        if not about.is_view:
            self.touch_memory(about.name, mine, written)
        result = self._compute(func, args, kwargs)
        if about.returns_written and not isinstance(result, tuple | list):
            return written[0]
        owners = {id(each.content): each for each in mine}
        return replace_leaves(result, lambda x: self._wrap_result(x, where, owners))

    def _resolve_device(self, device: Any) -> torch.device | None:
        found = None if device is None else torch.device(device)
        return self.device if found is not None and found.type == "cuda" and found.index is None else found

    def _wrap_result(self, value: Any, device: torch.device, owners: dict[int, SimulatedTensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        return owners.get(id(value)) or self.wrap_tensor(value, device)

    def _check_waits(self, name: str, args: Any) -> None:
        """Notes operators whose results have sizes that the host must be told."""
        is_masked = name.startswith(INDEXED) and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in list_leaves(args[1])
        )
        if is_masked or name in SYNCHRONISING:
            self.wait_for_device(name)

    @staticmethod
    def _compute(func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator makes of what is inside of tensors."""
        named = _unwrap_arguments(kwargs)
        if "device" in named:
            named["device"] = _CPU
        return func(*_unwrap_arguments(args), **named)

    def _copy_tensor(self, source: Tensor, kwargs: Any, device: torch.device | None) -> Tensor:
        """A copy, perhaps on another device or in another type."""
        there = device or _locate_tensor(source)
        self._note_copy(source, there, non_blocking=kwargs.get("non_blocking", False))
        self.touch_memory("aten::_to_copy", [source], [])
        inner = source.content if isinstance(source, SimulatedTensor) else source
        named = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format", "layout")}
        return self.wrap_tensor(torch.ops.aten._to_copy.default(inner, **named), there)

    def _write_tensor(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        """Copies numbers into a tensor."""
        # The number of a kernel's argument is not a copy.
        if not (source.device.type == "cpu" and source.ndim == 0):
            self._note_copy(source, target.device, non_blocking=non_blocking)
        if self.side_stream is None or self.graph is not None:
            self.touch_memory("aten::copy_", [target, source], [target])
        elif isinstance(target, SimulatedTensor) and target.memory is not None:
            target.memory.writers.add(self.side_stream.start_copy())
        inner = source.content if isinstance(source, SimulatedTensor) else source
        (target.content if isinstance(target, SimulatedTensor) else target).copy_(inner)
        return target

    def _note_copy(self, source: Tensor, there: torch.device, *, non_blocking: bool) -> None:
        here = _locate_tensor(source)
        if here.type != there.type and not non_blocking:
            self.wait_for_device(f"copy {here.type} to {there.type}")
        elif here != there and there.type == here.type == "cuda":
            self.record.note_finding("several devices", f"a copy from {here} to {there}")
        if "cuda" in (here.type, there.type):
            self.record.here.kernels += 1

    # Attention

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """`scaled_dot_product_attention` as one kernel."""
        result = self._attend(*args, **kwargs)
        if self.graph is not None:
            self.graph.note_call(functools.partial(self._attend, **kwargs), args, result)
        return result

    def _attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Tensor:
        inner = self._enter_attention([query, key, value, attn_mask])
        run: Any = functional.scaled_dot_product_attention
        out = run(*inner[:3], attn_mask=inner[3], is_causal=is_causal, **named)
        return self.wrap_tensor(out, query.device)

    def _attend_with_lse(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """A fused kernel that gives the log-sum-exp too."""
        mask = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
        inner, query = self._enter_attention([*args[:3], mask]), args[0]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(*inner[:3], attn_mask=inner[3], scale=kwargs.get("scale"))
        rest = [torch.empty(0) if "Tensor" in str(each.type) else 0 for each in func._schema.returns[2:]]
        return self.wrap_tensor(out, query.device), self.wrap_tensor(lse, query.device), *rest

    def _enter_attention(self, given: Sequence[Any]) -> list[Any]:
        tensors = [each for each in given if each is not None]
        self._find_device("attention", tensors, None)
        if len({each.dtype for each in tensors[:3]}) > 1:
            raise SimulationError(f"attention of {[str(each.dtype) for each in tensors[:3]]} at {find_site()}")
        self.touch_memory("attention", tensors, [])
        self.record.here.kernels += 1
        return [each.content if isinstance(each, SimulatedTensor) else each for each in given]


class SimulatedGraph:
    """A CUDA graph: the operators that were called while it was captured, which are called again on the same memory.

    Args:
        gpu: of which GPU.

    Attributes:
        is_valid: whether nothing was asked of CUDA yet that ends a capture.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.is_valid = True
        self._calls: list[tuple[Callable[..., Any], Any, Any]] = []
        self._saved: dict[int, tuple[Any, Any]] = {}

    def capture_begin(self, **_: Any) -> None:
        """Calls are noted from now on."""
        self._gpu.refuse_in_capture("cudaStreamBeginCapture")
        self._gpu.graph = self

    def capture_end(self) -> None:
        """What was written is undone: while a graph is captured, nothing runs."""
        self._gpu.graph = None
        for storage, before in self._saved.values():
            storage.copy_(before)
        self._saved.clear()
        if not self.is_valid:
            # torch 2.13.0 raises before it has told its allocator that the graph needs its pool no more.
            self._gpu.lost_pools += 1
            raise CaptureError("CUDA error: operation failed due to a previous error during capture")

    def save_memory(self, tensors: Sequence[Any]) -> None:
        """Keeps what is in tensors before they are written for the first time."""
        for tensor in tensors:
            if isinstance(tensor, SimulatedTensor):
                storage = tensor.content.untyped_storage()
                self._saved.setdefault(storage._cdata, (storage, storage.clone()))

    def note_call(self, run: Callable[..., Any], args: Any, result: Any) -> None:
        """A call, with its arguments and its result."""
        self._calls.append((run, args, result))

    def replay(self) -> None:
        """Makes the calls again; what was new is written where it was then."""
        for run, args, recorded in self._calls:
            for then, now in zip(list_leaves(recorded), list_leaves(run(*args)), strict=True):
                if isinstance(then, SimulatedTensor) and then.content.data_ptr() != now.content.data_ptr():
                    then.content.copy_(now.content)


_FUSED_ATTENTION = {f"aten::_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")}


def _unwrap_arguments(value: Any) -> Any:
    return replace_leaves(value, lambda leaf: leaf.content if isinstance(leaf, SimulatedTensor) else leaf)


def _pick_written(about: Operator, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operator writes."""
    given = [args[k] if k < len(args) else kwargs.get(name) for k, name in about.written]
    return [each for each in list_leaves(given) if isinstance(each, Tensor)]

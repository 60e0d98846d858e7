"""What stands for torch.cuda and torch.distributed while a rank is simulated: NCCL's promises, without NCCL.

A message is over when somebody waits for it, and not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

from ditile.model.hooks.generation import Generation
from ditile.parallel.pipefusion.dry_iterations import DryIterations
from ditile.parallel.tensor import collectives
from ditile.plan.schedule import MicroStep
from ditile_lab.machine.messages import NCCL, LonePeerMessage
from tests.simulated_gpu.gpu import AFTER, CALL, REHEARSAL, SETUP, SimulatedGpu, SimulatedGraph
from tests.simulated_gpu.tensors import SimulatedTensor, install_device_guard, replace_leaves

GPUS_PER_HOST = 8


class SimulatedWork:
    """A message or collective under way.

    Args:
        gpu: on which it is.
        what: for findings.
        reads, writes: the tensors that it uses until it is over.
        finish: called by the wait.
    """

    def __init__(
        self, gpu: SimulatedGpu, what: str, reads: Sequence[Any], writes: Sequence[Any], finish: Callable[[], None]
    ) -> None:
        self._gpu, self._what, self._finish, self.is_over = gpu, what, finish, False
        for tensors, name in ((reads, "readers"), (writes, "writers")):
            for tensor in tensors:
                if isinstance(tensor, SimulatedTensor) and tensor.memory is not None:
                    getattr(tensor.memory, name).add(self)

    def __str__(self) -> str:
        return self._what

    def wait(self, timeout: Any = None) -> bool:
        """Ends it."""
        self._gpu.refuse_in_capture(f"the wait for {self}")
        if not self.is_over:
            self.is_over = True
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for it: the worst case is that it takes that long."""
        self._gpu.refuse_in_capture(f"cudaEventQuery of {self}")
        return self.is_over


class SimulatedMessages:
    """Functions of torch.distributed, under their own names: what arrives is NaN until it is waited for.

    They call those that they replace, of ranks or of `LoneMessages`, with what is in the tensors.

    Args:
        gpu: whose tensors they are.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        names = [name for name in dir(type(self)) if not name.startswith("_") and hasattr(dist, name)]
        self._real = {name: getattr(dist, name) for name in (*names, "P2POp")}
        self.replacements = {name: getattr(self, name) for name in names} | {"P2POp": LonePeerMessage}

    def _start(
        self, kind: str, group: Any, reads: Sequence[Any], writes: Sequence[Any], carry: Callable[[Any], Any]
    ) -> SimulatedWork:
        """Starts a message; `carry` is called with a function from each tensor to what is sent of it or received."""
        self._gpu.refuse_in_capture(f"{kind}, which would be part of the graph")
        record, everything = self._gpu.record, [*reads, *writes]
        backend = self.get_backend_config(group)
        for tensor in everything:
            if everything[0].device.type == "cuda" and "nccl" not in backend:
                record.note_finding("wrong backend", f"{kind} of a tensor on a GPU over {backend}")
            if not tensor.is_contiguous():
                record.note_finding("not contiguous", f"{kind} of {list(tensor.shape)}")
        self._gpu.touch_memory(kind, everything, writes)
        hidden: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor in writes:
            if isinstance(tensor, SimulatedTensor):
                hidden[id(tensor)] = tensor.content, tensor.content.clone()
                if tensor.is_floating_point():
                    tensor.content.fill_(float("nan"))

        def find_content(tensor: Any) -> Any:
            if id(tensor) in hidden:
                return hidden[id(tensor)][1]
            return tensor.content if isinstance(tensor, SimulatedTensor) else tensor

        works = carry(find_content)

        def finish() -> None:
            for work in works if isinstance(works, list) else [works]:
                work.wait()
            for content, arrived in hidden.values():
                content.copy_(arrived)

        what = f"{kind} of {list(everything[0].shape)} of {record.place}"
        return SimulatedWork(self._gpu, what, reads, writes, finish)

    def _call(
        self, kind: str, reads: Sequence[Any], writes: Sequence[Any], later: bool, *args: Any, group: Any, **named: Any
    ) -> Any:
        def carry(find: Any) -> Any:
            return self._real[kind](*replace_leaves(args, find), group=group, **named)

        work = self._start(kind, group, reads, writes, carry)
        return work if later else work.wait() and None

    # The functions of torch.distributed

    def get_backend_config(self, group: Any = None) -> str:
        # Ranks have none but gloo, which stands for both.
        return str(getattr(group, "backend", NCCL))

    def isend(self, tensor: Tensor, group: Any = None, group_dst: int = 0) -> Any:
        return self._call("isend", [tensor], [], True, tensor, group=group, group_dst=group_dst)

    def irecv(self, tensor: Tensor, group: Any = None, group_src: int = 0) -> Any:
        return self._call("irecv", [], [tensor], True, tensor, group=group, group_src=group_src)

    def batch_isend_irecv(self, ops: Sequence[LonePeerMessage]) -> list[Any]:
        reads = [op.tensor for op in ops if op.op == self.isend]
        writes = [op.tensor for op in ops if op.op == self.irecv]

        def carry(find: Any) -> Any:
            started = []
            for op in ops:
                function = self._real["isend" if op.op == self.isend else "irecv"]
                started.append(self._real["P2POp"](function, find(op.tensor), group=op.group, group_peer=op.group_peer))
            return self._real["batch_isend_irecv"](started)

        return [self._start("batch_isend_irecv", ops[0].group, reads, writes, carry)]

    def all_gather(self, parts: Sequence[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self._call("all_gather", [x], parts, async_op, parts, x, group=group, async_op=True)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self._call("all_gather_into_tensor", [x], [out], async_op, out, x, group=group, async_op=True)

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self._call("reduce_scatter_tensor", [x], [out], async_op, out, x, group=group, async_op=True)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        return self._call("all_reduce", [x], [x], async_op, x, op, group=group, async_op=True)

    def all_to_all_single(self, out: Tensor, x: Tensor, *sizes: Any, group: Any = None, async_op: bool = False) -> Any:
        return self._call("all_to_all_single", [x], [out], async_op, out, x, *sizes, group=group, async_op=True)

    def broadcast(self, x: Tensor, group: Any = None, group_src: int = 0, async_op: bool = False) -> Any:
        return self._call("broadcast", [x], [x], async_op, x, group=group, group_src=group_src, async_op=True)


class SideCopy:
    """A copy on a stream beside the one that computes; it is over when that one waits for an event behind it."""

    def __init__(self) -> None:
        self.is_over = False

    def __str__(self) -> str:
        return "a copy on another stream"


class SideStream:
    """A stream that only copies.

    Args:
        gpu: of which GPU.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._copies: list[SideCopy] = []

    def start_copy(self) -> SideCopy:
        """A copy begins."""
        self._copies.append(SideCopy())
        return self._copies[-1]

    def wait_stream(self, stream: Any) -> None:
        """What is launched from now on comes after the stream that computes, which runs at once."""

    def record_event(self) -> list[SideCopy]:
        """An event behind all copies so far."""
        copies, self._copies = self._copies, []
        return copies

    def wait_event(self, event: Any) -> None:
        """Copies from now on come behind an event of the stream that computes, which runs at once."""

    @contextmanager
    def use_for_copies(self) -> Iterator[None]:
        """What is copied within the context is copied on this stream."""
        self._gpu.side_stream = self
        try:
            yield
        finally:
            self._gpu.side_stream = None


class ComputeStream:
    """The stream that computes: what is launched on it runs at once.

    Args:
        gpu: of which GPU.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.device = gpu.device

    def synchronize(self) -> None:
        """The host waits."""
        self._gpu.wait_for_device("cuda.synchronize")

    def wait_event(self, event: Any) -> None:
        """Copies before an event of another stream are over."""
        for copy in event if isinstance(event, list) else ():
            copy.is_over = True

    def wait_stream(self, stream: SideStream) -> None:
        """All copies of another stream are over."""
        self.wait_event(stream.record_event())

    def record_event(self) -> None:
        """Nothing to wait for."""


class _SimulatedEvent:
    """An event; one that was recorded in a capture is a place in its graph, of which nothing can be asked."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._is_captured = False

    def record(self, stream: Any = None) -> None:
        self._is_captured = self._gpu.graph is not None

    def synchronize(self) -> None:
        self._refuse_captured("cudaEventSynchronize")
        self._gpu.wait_for_device("Event.synchronize")

    def query(self) -> bool:
        self._refuse_captured("cudaEventQuery")
        return True

    def elapsed_time(self, other: Any) -> float:
        self._refuse_captured("cudaEventElapsedTime")
        return 0.0

    def _refuse_captured(self, what: str) -> None:
        self._gpu.refuse_in_capture(what)
        if self._is_captured:
            raise RuntimeError(f"CUDA error: {what} of an event last recorded in a capturing stream")


class SimulatedGenerator(torch.Generator):
    """The generator of a GPU that is used where none is given."""

    gpu: SimulatedGpu

    def _ask(self, name: str, *args: Any) -> Any:
        self.gpu.refuse_in_capture(f"Generator.{name}")
        return getattr(super(), name)(*args)

    get_state = functools.partialmethod(_ask, "get_state")
    set_state = functools.partialmethod(_ask, "set_state")
    initial_seed = functools.partialmethod(_ask, "initial_seed")
    manual_seed = functools.partialmethod(_ask, "manual_seed")
    clone_state = functools.partialmethod(_ask, "clone_state")


def _make_generator(gpu: SimulatedGpu) -> SimulatedGenerator:
    generator = SimulatedGenerator("cpu")
    generator.gpu = gpu
    return generator


def _list_cuda_replacements(gpu: SimulatedGpu, memory_bytes: int) -> dict[str, Any]:
    """Each name of torch.cuda that ditile and diffusers use, and what stands for it."""

    def empty_cache() -> None:
        gpu.refuse_in_capture("cudaFree")

    about = SimpleNamespace(name="a simulated GPU", total_memory=memory_bytes, major=9, minor=0, uuid="simulated")

    stream = ComputeStream(gpu)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: GPUS_PER_HOST,
        "current_device": lambda: gpu.device.index,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: about,
        "get_device_capability": lambda device=None: (about.major, about.minor),
        "get_device_name": lambda device=None: about.name,
        "mem_get_info": lambda device=None: (memory_bytes - gpu.record.live_bytes, memory_bytes),
        "memory_allocated": lambda device=None: gpu.record.live_bytes,
        "memory_reserved": lambda device=None: gpu.record.live_bytes,
        "max_memory_allocated": lambda device=None: gpu.record.peak_bytes,
        "memory_snapshot": lambda *_, **__: [],
        "get_allocator_backend": lambda: "native",
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": empty_cache,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": lambda: SimulatedGraph(gpu),
        "synchronize": lambda device=None: gpu.wait_for_device("cuda.synchronize"),
        "current_stream": lambda device=None: stream,
        "Event": lambda **_: _SimulatedEvent(gpu),
        "Stream": lambda device=None: SideStream(gpu),
        "stream": SideStream.use_for_copies,
        "set_stream": lambda stream: None,
        "default_generators": [_make_generator(gpu) for _ in range(GPUS_PER_HOST)],
    }


_make_cpu_tensor = torch.tensor


def _make_tensor(data: Any, *, device: Any = None, **about: Any) -> Tensor:
    """`torch.tensor`: made on the host, and copied to the device."""
    made = _make_cpu_tensor(data, **about)
    return made if device is None else made.to(device)


@contextmanager
def simulate_gpu(
    gpu: SimulatedGpu, messages: SimulatedMessages | None = None, memory_bytes: int = 80 << 30
) -> Iterator[SimulatedGpu]:
    """Within it torch has GPUs, and the only one that is used is simulated. One process at a time, in one thread.

    Args:
        gpu: this rank's.
        messages: those of its rank; None where it needs none.
        memory_bytes: of the GPU.

    Raises:
        PlanError: where torch cannot be made to name a GPU.
    """
    install_device_guard()
    # torch lists once what makes tensors: with what stands for torch.tensor here it would not find the real one.
    _device_constructors()
    record, enter_micro_step, become = gpu.record, Generation.enter_micro_step, Generation.become
    begin_iteration = DryIterations.begin

    def enter_and_note(generation: Generation, micro: MicroStep) -> None:
        enter_micro_step(generation, micro)
        record.enter_place(f"step {micro.step}" + ("" if micro.patch is None else f" patch {micro.patch}"))

    def become_and_note(generation: Generation, other: Generation) -> None:
        become(generation, other)
        record.enter_place(CALL if other.is_under_way or record.place in (CALL, SETUP) else AFTER)

    def begin_and_note(dry: DryIterations, *iteration: Any) -> Tensor:
        timestep = begin_iteration(dry, *iteration)
        record.enter_place(REHEARSAL)
        return timestep

    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(DryIterations, begin=begin_and_note))
        # Within it no mode of dispatch is asked for the tensor's device.
        stack.enter_context(mock.patch.object(torch, "tensor", _make_tensor))
        stack.enter_context(mock.patch.multiple(torch.cuda, **_list_cuda_replacements(gpu, memory_bytes)))
        # A build of torch without CUDA has none.
        stack.enter_context(mock.patch.object(torch._C, "_cuda_releasePool", gpu.release_pool, create=True))
        hooks: dict[str, Any] = {"enter_micro_step": enter_and_note, "become": become_and_note}
        stack.enter_context(mock.patch.multiple(Generation, **hooks))
        if messages is not None:
            stack.enter_context(mock.patch.multiple(dist, **messages.replacements))
            bound: dict[str, Any] = {
                "_all_gather": messages.all_gather_into_tensor,
                "_reduce_scatter": messages.reduce_scatter_tensor,
            }
            stack.enter_context(mock.patch.multiple(collectives, **bound))
        # A parameter's memory cannot become that of a tensor of another class.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        stack.enter_context(gpu)
        yield gpu

"""Segments of tapes as CUDA graphs, and the watch that says what cannot be recorded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.distributed.recording.tape import CURRENT, Action, Segments

UNFIT_TAGS = {
    torch.Tag.data_dependent_output: "whose result the host reads",
    torch.Tag.dynamic_output_shape: "whose numbers decide on a size",
    torch.Tag.nondeterministic_seeded: "which is random",
}
"""Operators of these kinds would give what they gave when they were recorded."""
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
"""Operators whose sizes depend on numbers only where they index by a mask."""


OPERATORS_IN_PYTHON: dict[Any, Callable[..., Any]] = {}
"""Operators that call others, as attention within compiled code does -> what they run. A watch looks into them."""


class OperatorWatch(TorchDispatchMode):
    """Sees the operators of a call: what cannot be recorded, and the memory from outside that is read.

    Attributes:
        problem: why the call cannot be recorded; empty if it can.
        read: tensors from outside that were read, by the address of their memory.
        written: addresses of memory that was written in place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem = ""
        self.read: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self._made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled under the watch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Quantized weights do it by operators on their parts, which come here again.
        if any(map(has_own_operators, types)):
            return NotImplemented
        # What messages do to tensors is not part of a segment.
        if CURRENT.is_exchanging:
            return func(*args, **(kwargs or {}))
        if func in OPERATORS_IN_PYTHON:
            with self:
                return OPERATORS_IN_PYTHON[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        inputs = list_tensors((args, kwargs))
        outputs = list_tensors(result)
        self.problem = self.problem or _find_operator_problem(func, inputs, outputs)
        for tensor in _list_written_tensors(func, args, kwargs or {}):
            self.written.add(tensor.untyped_storage().data_ptr())
        addresses = set()
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            addresses.add(address)
            if address not in self._made:
                self.read.setdefault(address, tensor)
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in addresses:
                self._made.add(address)
        return result


def has_own_operators(tensor_class: type) -> bool:
    """Whether tensors of a class consist of others, as quantized weights do."""
    return hasattr(tensor_class, "__tensor_flatten__")


def _list_written_tensors(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call of an operator writes in place."""
    written: list[Tensor] = []
    if operator._schema.is_mutable:
        for index, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name)
                if index < len(args):
                    value = args[index]
                written += list_tensors(value)
    return written


def _find_operator_problem(operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """Why a call of an operator cannot be recorded, or nothing."""
    name = operator._schema.name
    is_by_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    # Attention counts as random because of its dropout, which models of diffusers do not use.
    is_fit = "attention" in name or (name in INDEXING and not is_by_mask)
    for tag, description in UNFIT_TAGS.items():
        if tag in operator.tags and not is_fit:
            return f"it calls {name}, {description}"
    if "attention" in name:
        # After its result and their logarithms some kernels give the seed of a dropout that is not used, on the CPU.
        outputs = outputs[:2]
    if len({tensor.device.type for tensor in (*inputs, *outputs)}) > 1:
        return f"{name} has tensors on the CPU and on the device"
    # `torch.tensor(..., device="cuda")` copies from the CPU before any operator sees it.
    if name == "aten::lift_fresh" and outputs[0].device.type != "cpu":
        return "it makes a tensor of numbers of the host"
    return ""


def list_tensors(values: Any) -> list[Tensor]:
    """The tensors within nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def has_room_to_capture(device: torch.device, pools_bytes: int, own_pool_bytes: int) -> bool:
    """Whether a call can be captured on a GPU, and later ones still run as code; frees what the capture will need.

    Args:
        pools_bytes: of the pools of all graphs.
        own_pool_bytes: of the pool that the capture uses.
    """
    allocated = torch.cuda.memory_allocated(device)
    # A capture takes as much as the code of a call, whose own memory is not in a pool.
    working = torch.cuda.max_memory_allocated(device) - allocated
    needed = max(0, working - own_pool_bytes)
    free, _ = torch.cuda.mem_get_info(device)
    cached = max(0, torch.cuda.memory_reserved(device) - allocated - pools_bytes)
    if free < needed:
        # While a graph is captured, torch's allocator gives back nothing of what it keeps for others.
        torch.cuda.empty_cache()
    return free + cached >= needed + working


class GraphSegments(Segments):
    """Segments as CUDA graphs that share their memory.

    All are captured on one stream: memory of a pool is used again only on the stream on which it was allocated. Tapes
    of one size share the pool too, as one is played at a time and holds what outlives it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # A pool without any graph is gone, and a capture into it fails.
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outer_stream = torch.cuda.current_stream(device)

    def open(self) -> None:
        """Begins to capture."""
        if self._anchor is None:
            self._begin()
            torch.zeros(1, device=self._device)
            self._anchor = self._end()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._outer_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._outer_stream)
        torch.cuda.set_stream(self._stream)
        # Threads of the process group query events meanwhile, which any stricter mode would forbid.
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            torch.cuda.set_stream(self._outer_stream)
            raise
        self._graph = graph

    def _end(self) -> torch.cuda.CUDAGraph:
        graph = self._graph
        if graph is None:
            raise RuntimeError("no segment is open")
        self._graph = None
        try:
            graph.capture_end()
        finally:
            torch.cuda.set_stream(self._outer_stream)
        return graph

    def close(self) -> Action | None:
        """Ends the graph, and runs it: what is captured is not computed."""
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            graph = self._end()
        # Between two messages may be views alone.
        if any("empty" in str(message.message) for message in messages):
            return None
        graph.replay()
        return graph.replay

    def abandon(self) -> None:
        """Ends the graph without running it."""
        # A graph that CUDA itself has ended is an error here, and the first error is the one to see.
        with contextlib.suppress(RuntimeError):
            self._end()

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, which torch's allocator gives back once no graph of it is left."""
        blocks = [block for block in torch.cuda.memory_snapshot() if block["segment_pool_id"] == self._pool]
        return sum(block["total_size"] for block in blocks)

    def borrow(self, tensor: Tensor) -> Tensor:
        """A tensor that does not own its memory, so that the pool gives it to others once the call dropped it."""
        if tensor.device.type != "cuda" or not tensor.numel():
            return tensor
        memory = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
        borrowed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return borrowed.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

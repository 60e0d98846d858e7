"""Segments of tapes as CUDA graphs, and the watch that says what cannot be recorded."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.distributed.recording.tape import CURRENT, Action

HOST_READS = frozenset({
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::item", "aten::unique"
})  # fmt: skip
"""Operators whose result the host reads, or has the size of: they would be what they were."""
RANDOM = frozenset({
    "aten::randn", "aten::rand", "aten::randint", "aten::bernoulli", "aten::normal_", "aten::uniform_", "aten::randperm"
})  # fmt: skip
"""Operators that draw other numbers each time."""


class OperatorWatch(TorchDispatchMode):
    """Sees the operators of a call: what cannot be recorded, and the memory from outside that is read.

    Attributes:
        problem: why the call cannot be recorded; empty if it can.
        read: tensors from outside that were read, by the address of their memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem = ""
        self.read: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What messages do to tensors is not part of a segment.
        if CURRENT.is_exchanging:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if not self.problem and (name in HOST_READS or name in RANDOM):
            self.problem = f"it calls {name}"
        result = func(*args, **(kwargs or {}))
        inputs = list_tensors((args, kwargs))
        outputs = list_tensors(result)
        if not self.problem and len({tensor.device.type for tensor in (*inputs, *outputs)}) > 1:
            self.problem = f"{name} has tensors on the CPU and on the device"
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


def list_tensors(values: Any) -> list[Tensor]:
    """The tensors within nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class GraphSegments:
    """Segments as CUDA graphs that share their memory.

    All are captured on one stream: memory of a pool is used again only on the stream on which it was allocated. Tapes
    share the pool too, as one is played at a time and holds what outlives it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outer_stream = torch.cuda.current_stream(device)

    def open(self) -> None:
        """Begins to capture."""
        self._graph = torch.cuda.CUDAGraph()
        self._outer_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._outer_stream)
        torch.cuda.set_stream(self._stream)
        # Threads of the process group query events meanwhile, which any stricter mode would forbid.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def close(self) -> Action | None:
        """Ends the graph, and runs it: what is captured is not computed."""
        graph = self._graph
        assert graph is not None
        self._graph = None
        try:
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                graph.capture_end()
        finally:
            torch.cuda.set_stream(self._outer_stream)
        # Between two messages may be views alone.
        if any("empty" in str(message.message) for message in messages):
            return None
        graph.replay()
        return graph.replay

    def borrow(self, tensor: Tensor) -> Tensor:
        """A tensor that does not own its memory, so that the pool gives it to others once the call dropped it."""
        if tensor.device.type != "cuda" or not tensor.numel():
            return tensor
        memory = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
        borrowed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return borrowed.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

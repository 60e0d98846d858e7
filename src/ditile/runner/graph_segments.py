"""Segments of tapes as CUDA graphs, and where they can be recorded."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from ditile.distributed.recording.tape import Action


def has_room_to_capture(device: torch.device, pools_bytes: int, own_pool_bytes: int) -> bool:
    """Return whether a GPU has room to capture a call and still run later ones by code. Cached memory is freed if the
    capture needs it.

    Args:
        pools_bytes: the bytes of the pools of all graphs.
        own_pool_bytes: the bytes of the pool that the capture uses.
    """
    allocated = torch.cuda.memory_allocated(device)
    # A capture needs as much memory as a call run by code, which takes it outside of any pool.
    working = torch.cuda.max_memory_allocated(device) - allocated
    needed = max(0, working - own_pool_bytes)
    free, _ = torch.cuda.mem_get_info(device)
    cached = max(0, torch.cuda.memory_reserved(device) - allocated - pools_bytes)
    if free < needed:
        # While a graph is captured, torch's allocator does not free the memory it has cached.
        torch.cuda.empty_cache()
    return free + cached >= needed + working


@functools.cache
def prepare_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream for capturing graphs."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # cuBLAS keeps memory for each stream for good. This memory must not come from the pool of a graph.
        square = torch.ones(16, 16, device=device)
        torch.mm(square, square)
    return stream


class GraphSegments:
    """Segments as CUDA graphs that share their memory.

    All are captured on one stream, because memory of a pool is only reused on the stream on which it was allocated.
    Tapes of one size share the pool too: only one is played at a time, and it holds anything that outlives it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = prepare_capture_stream(device)
        # A pool without any graph is gone, and a capture into it fails.
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outer_stream = torch.cuda.current_stream(device)

    def open(self) -> None:
        """Begin to capture."""
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
        """End the graph."""
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            graph = self._end()
        # A segment of only views, between two messages, has no kernel to capture.
        if any("empty" in str(message.message) for message in messages):
            return None
        return graph.replay

    def abandon(self) -> None:
        """End the graph without using it, and undo the traces of its capture."""
        if self._graph is None:
            return
        try:
            self._end()
        except RuntimeError:
            # `capture_end` raises if CUDA itself has ended the graph, but the user should see the first error.
            if torch.__version__.startswith("2.13.0"):
                # Later releases release the pool themselves (pytorch#190348).
                torch._C._cuda_releasePool(self._device.index, self._pool)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pool. torch's allocator gives them back once no graph of it is left."""
        return sum(block["total_size"] for block in torch.cuda.memory_snapshot(self._pool, include_traces=False))

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor without ownership of its memory, so the pool can reuse it once the call dropped it."""
        if tensor.device.type != "cuda" or not tensor.numel():
            return tensor
        memory = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
        borrowed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return borrowed.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

"""Tensors that say they are on a GPU. What they hold is on the CPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ditile.plan.errors import PlanError

if TYPE_CHECKING:
    from tests.simulated_gpu.gpu import SimulatedGpu

PAGE = 512
"""Bytes of memory come in multiples of it, as from torch's allocator."""
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_NUM_DEVICE_TYPES, _CUDA, _META = 22, 1, 14
_addresses = itertools.count(1 << 40, 1 << 40)


def install_device_guard() -> None:
    """Lets a build of torch without CUDA make tensors that name a GPU: the guard of the meta device does nothing.

    Raises:
        PlanError: where torch's library has no such table.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        table = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (OSError, ValueError) as error:
        raise PlanError(f"needs torch for Linux, and torch {torch.__version__} here is another") from error
    if not table[_CUDA]:
        table[_CUDA] = table[_META]
    torch._C._ensureCUDADeviceGuardSet()


class GpuMemory:
    """A piece of memory of a simulated GPU, which is freed with the last tensor in it.

    Attributes:
        address: where it is; no other piece has it.
        size: its bytes.
        readers, writers: messages that were started and read or write it.
    """

    def __init__(self, gpu: SimulatedGpu, storage: Any) -> None:
        self.gpu, self.size, self.address = gpu, -(-storage.nbytes() // PAGE) * PAGE, next(_addresses)
        self.readers: set[Any] = set()
        self.writers: set[Any] = set()
        self.held = storage  # what it is on the CPU, whose address must not become another's
        gpu.allocate_memory(self)

    def __del__(self) -> None:
        self.gpu.free_memory(self)


class SimulatedTensor(Tensor):
    """A tensor on a simulated GPU, or a parameter that was moved from there to the CPU.

    Attributes:
        content: the same on the CPU.
        gpu: whose it is.
        memory: where it is; None on the CPU.
    """

    content: Tensor
    gpu: SimulatedGpu
    memory: GpuMemory | None
    holds_plain_numbers = True

    @staticmethod
    def __new__(cls: Any, inner: Tensor, gpu: SimulatedGpu, device: torch.device, memory: GpuMemory | None) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )
        made.content, made.gpu, made.memory = inner, gpu, memory
        return made

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        mine = next(x for x in list_leaves((args, kwargs)) if isinstance(x, SimulatedTensor))
        return mine.gpu.run_operator(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.scaled_dot_product_attention:
                # One kernel of a GPU; torch would take it apart where there is none.
                query = args[0] if args else kwargs["query"]
                return query.gpu.attend(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def as_subclass(self, cls: Any) -> Any:
        """The same numbers as a tensor of another class, which is simulated too."""
        kind = SimulatedTensor if cls is Tensor else _derive_class(cls)
        return kind(self.content, self.gpu, self.device, self.memory)

    @property
    def data(self) -> Tensor:
        """The tensor itself, without a history."""
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        if other.shape != self.shape or other.stride() != self.stride():
            raise RuntimeError(f"a simulated tensor {list(self.shape)} cannot become {list(other.shape)} in place")
        if not isinstance(other, SimulatedTensor):
            other = SimulatedTensor(other, self.gpu, other.device, None)
        if other.device != self.device:
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.content, self.memory = other.content, other.memory

    def data_ptr(self) -> int:
        """An address that no other memory has."""
        return (0 if self.memory is None else self.memory.address) + int(
            self.content.storage_offset()
        ) * self.element_size()

    def untyped_storage(self) -> Any:
        """That of the numbers."""
        return self.content.untyped_storage()

    def tolist(self) -> Any:
        """The numbers, on the host."""
        return self.gpu.read_numbers(self, "tolist").tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """The numbers, of a tensor on the CPU alone."""
        if self.device.type != "cpu":
            raise TypeError("a tensor on a simulated GPU has no numpy array; use Tensor.cpu() first")
        return self.content.numpy()


@functools.cache
def _derive_class(cls: type[Tensor]) -> type[Tensor]:
    return type(f"Simulated{cls.__name__}", (cls, SimulatedTensor), {})


def list_leaves(value: Any) -> list[Any]:
    """What is in nested tuples, lists and dicts; torch's own function is general, and slow."""
    leaves: list[Any] = []
    _collect_leaves(value, leaves)
    return leaves


def _collect_leaves(value: Any, leaves: list[Any]) -> None:
    if isinstance(value, tuple | list):
        for each in value:
            _collect_leaves(each, leaves)
    elif isinstance(value, dict):
        for each in value.values():
            _collect_leaves(each, leaves)
    else:
        leaves.append(value)


def replace_leaves(value: Any, change: Any) -> Any:
    """The same nested tuples, lists and dicts, of changed leaves."""
    if isinstance(value, tuple | list):
        changed = [replace_leaves(each, change) for each in value]
        return tuple(changed) if isinstance(value, tuple) else changed
    if isinstance(value, dict):
        return {name: replace_leaves(each, change) for name, each in value.items()}
    return change(value)

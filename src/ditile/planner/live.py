"""Live bytes: what the tensors that exist at one time occupy, exactly; what kernels use inside is not seen.

with LiveBytes() as live:
    vae.decode(latents)
live.peak, live.largest
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Follows the storages that operators make within it, until they are freed.

    Args:
        made: told of each one, by the tensor that came with it; what it returns is called when the storage is freed.
    """

    def __init__(self, on_create: Callable[[Tensor], Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_create, self._known = on_create, dict[int, weakref.ref[Any]]()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._follow_storage(leaf, lambda _: lambda: None)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow_storage(leaf, self._on_create)
        return out

    def _follow_storage(self, tensor: Tensor, on_create: Callable[[Tensor], Callable[[], None]]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        on_free = on_create(tensor)

        def forget_storage(_: Any) -> None:
            del self._known[key]
            on_free()

        self._known[key] = weakref.ref(storage, forget_storage)


class LiveBytes(StorageTracker):
    """Bytes of the storages that operators make within it.

    Attributes:
        now: bytes of the storages that were made and are still there.
        peak: the most that there were at one time.
        largest: bytes of the largest one.
    """

    def __init__(self) -> None:
        super().__init__(self._count_storage)
        self.now = self.peak = self.largest = 0

    def _count_storage(self, tensor: Tensor) -> Callable[[], None]:
        size = tensor.untyped_storage().nbytes()
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

        def subtract_storage() -> None:
            self.now -= size

        return subtract_storage

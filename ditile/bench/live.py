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


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make within it, until they are freed.

    Attributes:
        now: bytes of the storages that were made and are still there.
        peak: the most that there were at one time.
        largest: bytes of the largest one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._meet(leaf, made=False)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._meet(leaf, made=True)
        return out

    def _meet(self, tensor: Tensor, *, made: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if made else 0
        if key in self._known:
            return

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

"""Counts what the host calls of torch: operators as a GPU would be given them, views included."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OpCounter(TorchDispatchMode):
    """Counts operators on tensors while it is entered.

    Attributes:
        ops: calls by name.
        paused: nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self.paused = False

    @property
    def total(self) -> int:
        return sum(self.ops.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            self.ops[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class AsOnGPU(TorchFunctionMode):
    """Counts `rms_norm` as the one operator that it is on a GPU; on CPUs it is eight."""

    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.rms_norm and func is not torch.rms_norm or self._counter.paused:
            return func(*args, **(kwargs or {}))
        self._counter.paused = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counter.paused = False
            self._counter.ops["_fused_rms_norm"] += 1

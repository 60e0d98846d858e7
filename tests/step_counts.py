"""What a rank computes in a step, counted by operators: FLOPs, kernels, and the bytes that they write."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ditile.parallel.pipefusion.loop import Loop
from tests.simulated_gpu.gpu import EMPTY, describe_operator

COUNTED_STEP = 2
"""The first step is synchronous; in the second one modules are looked at."""

ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


@dataclass
class StepCount:
    """What was counted in a step.

    Attributes:
        flops: of products and attention.
        written: bytes that kernels write, by the name of their operator.
        kernels: operators that write, by name.
    """

    flops: int = 0
    written: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        return sum(self.written.values())

    def __add__(self, other: StepCount) -> StepCount:
        return StepCount(self.flops + other.flops, self.written + other.written, self.kernels + other.kernels)


class StepCounter(TorchDispatchMode):
    """Counts the operators of the loop's steps.

    Attributes:
        steps: of all calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepCount] = []
        self.paused = False

    @property
    def count(self) -> StepCount:
        """Of the second asynchronous step after a synchronous one, in which all that is found once is known."""
        return self.steps[COUNTED_STEP]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        about = describe_operator(func)
        if not self.steps or self.paused or about.is_view or about.name in EMPTY:
            return result
        name = func._schema.name.removeprefix("aten::")
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        # A cast or a copy that is not needed returns what it was given.
        if outputs and not about.written and all(id(output) in given for output in outputs):
            return result
        self.note_kernel(name, outputs, _count_flops(func, args, kwargs, result))
        return result

    def note_kernel(self, name: str, outputs: list[Tensor], flops: int = 0) -> None:
        count = self.steps[-1]
        count.flops += flops
        count.written[name] += sum(output.numel() * output.element_size() for output in outputs)
        count.kernels[name] += 1

    @contextmanager
    def count_steps(self) -> Iterator[StepCounter]:
        """Counts within it."""
        begin_step = Loop._begin_step

        def note_step(loop: Loop, step: int) -> None:
            self.steps.append(StepCount())
            begin_step(loop, step)

        with mock.patch.object(Loop, "_begin_step", note_step), _FusedNorms(self), self:
            yield self


class _FusedNorms(TorchFunctionMode):
    """Counts `rms_norm` as the one kernel that it is on a GPU; on CPUs it is eight."""

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_norm = func is functional.rms_norm and not self._counter.paused
        if is_norm:
            self._counter.paused = True
        result = func(*args, **(kwargs or {}))
        if is_norm:
            self._counter.paused = False
            if self._counter.steps:
                self._counter.note_kernel("_fused_rms_norm", [result])
        return result


def _count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    name = func._schema.name
    if any(word in name for word in ATTENTION):
        # Two products of matrices, for each query and key.
        q, k, v = args[:3]
        return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if "_linear_pointwise" in name:
        return 2 * args[0].numel() * args[1].shape[0]
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))

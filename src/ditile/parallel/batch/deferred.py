"""A prediction that another group of guidance computes: it is NaN until it arrives, with the last call of the step.

A pipeline may compute with one prediction before it asks for the next, for instance the image without noise that it
implies. Such operations are recorded and repeated once the prediction has arrived; they write into the tensors of the
first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_READS_VALUES = frozenset(
    {"__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero", "item"}
    | {"numpy", "tolist", "__array__", "__format__", "__repr__"}
)
"""Functions that return a tensor's numbers, not a tensor or its shape."""


@dataclass(slots=True)
class DeferredWork:
    """The operations of a pipeline on a step's predictions before all of these have arrived.

    Attributes:
        is_over: whether all predictions have arrived; after that nothing is recorded.
        problem: the operation that cannot be repeated; empty if all operations can.
    """

    is_over: bool = False
    problem: str = ""
    _calls: list[tuple[Callable[..., Any], Any, Any, Any]] = field(default_factory=list)

    def defer(self, prediction: Tensor) -> Tensor:
        """Return the same prediction, with its uses recorded here."""
        deferred = prediction.as_subclass(DeferredPrediction)
        deferred.work = self
        return deferred

    def record_call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch on deferred predictions; the uses of the returned tensors are recorded too."""
        name = getattr(func, "__name__", "")
        if name in _READS_VALUES:
            self.problem = self.problem or f"asks for numbers of it by {name}"
        # torch names functions that write in place with a trailing underscore.
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
        target = args[0] if is_in_place else kwargs.get("out")
        # A tensor of the pipeline's own would keep the NaN if it is read before the work is repeated.
        if target is not None and not isinstance(target, DeferredPrediction):
            self.problem = self.problem or f"writes it into another tensor by {name}"
        result = _call_plainly(func, args, kwargs)
        # A tensor made like another does not depend on its values and may be random, so it must not be repeated.
        if name.endswith("_like") or name.startswith("new_"):
            return result
        self._calls.append((func, args, kwargs, result))
        return pytree.tree_map_only(Tensor, self.defer, result)

    def finish(self) -> None:
        """Repeat the recorded calls in order, now that the predictions have arrived."""
        for func, args, kwargs, first_result in self._calls:
            result = _call_plainly(func, args, kwargs)
            for old, new in zip(pytree.tree_leaves(first_result), pytree.tree_leaves(result), strict=True):
                # A view shares memory with an earlier result, which already has its new values.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    _call_plainly(Tensor.copy_, (old, new), {})
        self.end()

    def end(self) -> None:
        """Stop recording."""
        self.is_over = True
        self._calls.clear()


class DeferredPrediction(Tensor):
    """A prediction whose uses are recorded."""

    work: DeferredWork

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, cls) and not leaf.work.is_over:
                return leaf.work.record_call(func, args, kwargs)
        return _call_plainly(func, args, kwargs)


def _call_plainly(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)

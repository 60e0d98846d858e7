"""A prediction that another half of guidance computes: it is NaN until it arrives, with the last call of the step.

A pipeline may compute with one prediction before it asks for the next, as one that turns each into a picture without
noise. What it computes is noted, and done again when the prediction is there, into the tensors that it has already.
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
"""What gives a number of a tensor, and not a tensor or its shape."""


@dataclass(slots=True)
class DeferredWork:
    """What a pipeline computes with the predictions of a step before all of them are there.

    Attributes:
        is_over: whether they are; what is computed from then on is computed as ever.
        problem: what cannot be done again; empty if all can.
    """

    is_over: bool = False
    problem: str = ""
    _calls: list[tuple[Callable[..., Any], Any, Any, Any]] = field(default_factory=list)

    def defer(self, prediction: Tensor) -> Tensor:
        """The same prediction, whose uses are noted here."""
        deferred = prediction.as_subclass(DeferredPrediction)
        deferred.work = self
        return deferred

    def note_call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function of torch on such predictions; returns tensors whose uses are noted too."""
        name = getattr(func, "__name__", "")
        if name in _READS_VALUES:
            self.problem = self.problem or f"asks for numbers of it by {name}"
        written = [args[0]] if _writes_in_place(name) else [kwargs["out"]] if kwargs.get("out") is not None else []
        if not all(isinstance(each, DeferredPrediction) for each in written):
            self.problem = self.problem or f"writes it into another tensor by {name}"
        result = _call_plainly(func, args, kwargs)
        # What is made like a tensor does not depend on its values, and may be random.
        if name.endswith("_like") or name.startswith("new_"):
            return result
        self._calls.append((func, args, kwargs, result))
        return pytree.tree_map_only(Tensor, self.defer, result)

    def finish(self) -> None:
        """The predictions are there: does again what was noted, in the same order."""
        for func, args, kwargs, before in self._calls:
            now = _call_plainly(func, args, kwargs)
            for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(now), strict=True):
                # A view has what was written already.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    _call_plainly(Tensor.copy_, (old, new), {})
        self.end()

    def end(self) -> None:
        """Nothing is noted any more."""
        self.is_over = True
        self._calls.clear()


class DeferredPrediction(Tensor):
    """A prediction whose uses are noted."""

    work: DeferredWork

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        works = (x.work for x in pytree.tree_leaves((args, named)) if isinstance(x, cls))
        work = next((each for each in works if not each.is_over), None)
        return _call_plainly(func, args, named) if work is None else work.note_call(func, args, named)


def _call_plainly(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _writes_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))

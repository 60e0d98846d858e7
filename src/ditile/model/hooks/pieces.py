"""Pieces: the elements of latents or a prediction that belong to a patch, in any layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import list_tensors
from ditile.plan.errors import ModelError


def list_predictions(result: Any) -> list[Tensor]:
    """Return the tensors of a model's result, which may be bare, in a tuple or in one of diffusers' output objects.

    A list has a prediction for each row of the batch, and these are stacked. A user's class has predictions in its
    attributes or items.
    """
    open_result_class(result)
    predictions: list[Tensor] = []
    for leaf in pytree.tree_leaves(result, is_leaf=lambda value: isinstance(value, list)):
        if isinstance(leaf, list):
            predictions.append(torch.stack(leaf))
        elif isinstance(leaf, Tensor):
            predictions.append(leaf)
    return predictions


def open_result_class(result: Any) -> None:
    """Register the class of a model's result with pytree, as diffusers registers its own outputs."""
    cls = type(result)
    if result is None or cls in pytree.SUPPORTED_NODES or isinstance(result, Tensor | tuple | list):
        return
    if not hasattr(result, "__dict__") and not dataclasses.is_dataclass(cls):
        return
    if isinstance(result, dict):
        pytree.register_pytree_node(
            cls,
            lambda mapping: (list(mapping.values()), list(mapping)),
            lambda values, names: cls(zip(names, values, strict=True)),
        )
    else:
        pytree.register_pytree_node(cls, _list_attributes, functools.partial(_rebuild_result, cls))


def _list_attributes(result: Any) -> tuple[list[Any], list[str]]:
    names = list(getattr(result, "__dict__", ()))
    if dataclasses.is_dataclass(result):
        names = [field.name for field in dataclasses.fields(result)]
    return [getattr(result, name) for name in names], names


def _rebuild_result(cls: type, values: Iterable[Any], names: Iterable[str]) -> Any:
    result: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)
    return result


def has_nan(values: Any) -> bool:
    """Return whether some tensor in `values` has a NaN. Waits for the device."""
    open_result_class(values)
    flags = [torch.isnan(x).any() for x in list_tensors(values)]
    if not flags:
        return False
    # All flags are read in one wait, on the device of the first.
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())


def poison_latents(inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the arguments of a call with NaN in some of them, such as the latents."""
    named = {name: inputs[name] for name in names if name in inputs}
    return {**inputs, **pytree.tree_map_only(Tensor, lambda x: torch.full_like(x, float("nan")), named)}


def flag_nan_tokens(x: Tensor, dim: int) -> Tensor:
    """Return flags `[tokens]` of the tokens along a dimension that have a NaN."""
    return torch.isnan(x).movedim(dim, 0).flatten(1).any(1)


def find_nan_tokens(x: Tensor, dim: int) -> range | None:
    """Return the run of NaN tokens along a dimension; None if they are not one run. Waits for the device."""
    return find_run(flag_nan_tokens(x, dim))


def find_run(flags: Tensor) -> range | None:
    """Return the run of places with set flags; None if they are not one run. Waits for the device."""
    places = flags.nonzero().flatten().tolist()
    if not places:
        return range(0)
    run = range(places[0], places[-1] + 1)
    if len(run) == len(places):
        return run
    return None


class RehearsedPrediction(Tensor):
    """A prediction that is NaN in the places of a patch, on its way through the pipeline to the scheduler.

    A sum over many places, as in rescaled guidance, is a statistic of the whole: NaN in some of these places says
    nothing about the sum. So a reduction is NaN only where everything that it reduces is NaN.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # `normalize` is not a reduction, but torch computes the norm inside it, where no override is called.
        if name != "normalize" and (
            name not in _DIM_OF_REDUCTIONS or not isinstance(args[0], Tensor) or not args[0].is_floating_point()
        ):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        named = kwargs or {}
        x = args[0].as_subclass(Tensor)
        is_nan = torch.isnan(x)
        result = func(torch.nan_to_num(x), *args[1:], **named)
        if name == "normalize":
            return result.masked_fill(is_nan, float("nan")).as_subclass(cls)
        dim = named.get("dim", named.get("axis"))
        dim_index = _DIM_OF_REDUCTIONS[name]
        if dim is None and len(args) > dim_index:
            dim = args[dim_index]
        options = {}
        # `mean` without a dim takes no `keepdim`.
        if dim is not None:
            options = {"dim": dim, "keepdim": result.ndim == x.ndim}
        share = is_nan.float().mean(**options)
        return result.masked_fill(share == 1, float("nan")).as_subclass(cls)


_DIM_OF_REDUCTIONS = {"mean": 1, "sum": 1, "std": 1, "var": 1, "norm": 2, "vector_norm": 2, "linalg_vector_norm": 2}
"""Reduction -> the position of its argument `dim`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of a tensor that belong to a patch: a run along one dimension, or any elements by their index.

    Attributes:
        dim, run: a run along a dimension; the run is None if the elements are not a run.
        index: indices into each flattened row of `[B, ...]`; if rows differ, into the whole flattened tensor.
        has_rows: whether the first dimension is the batch, and the same elements of each row belong to the patch.
    """

    dim: int = 1
    run: range | None = None
    index: Tensor | None = None
    has_rows: bool = True

    @classmethod
    def from_mask(cls, mask: Tensor) -> Piece:
        """Make the piece of the elements for which a boolean mask is set.

        Waits for the mask's device, which also gets the index of the piece.
        """
        device = mask.device
        mask = mask.cpu()
        has_rows = mask.ndim > 1 and bool((mask[:1] == mask).all())
        for dim in range(int(has_rows), mask.ndim):
            along_dim = mask
            if mask.ndim > 1:
                along_dim = mask.movedim(dim, 0).flatten(1).any(dim=1)
            run = find_run(along_dim)
            if not run or len(run) == mask.shape[dim]:
                continue
            shape = [1] * mask.ndim
            shape[dim] = -1
            if torch.equal(along_dim.view(shape).expand_as(mask), mask):
                return cls(dim, run, has_rows=has_rows)
        if bool(mask.all()) and mask.ndim > 1:
            return cls(1, range(mask.shape[1]), has_rows=True)
        flat = mask[0] if has_rows else mask
        return cls(index=flat.flatten().nonzero().flatten().to(device), has_rows=has_rows)

    @property
    def is_empty(self) -> bool:
        """Return whether the patch has no elements: its tokens, such as those of a reference image, reach no result."""
        return self.run is None and len(self._get_index()) == 0

    def take(self, x: Tensor) -> Tensor:
        """Return the elements: a view of their run, or a copy `[B, n]`, or `[n]` where rows differ."""
        if self.run is not None:
            return x.narrow(self.dim, self.run.start, len(self.run))
        return x.flatten(int(self.has_rows))[..., self._get_index().to(x.device)]

    def take_prefix(self, x: Tensor) -> Tensor:
        """Return this piece's elements of a tensor.

        If the tensor lacks the dimension of the piece, it is returned whole.

        Raises:
            ModelError: if the piece is not a run along a dimension.
        """
        if self.run is None:
            raise ModelError(
                "an argument of scheduler.step has a value for each token, and patches are not runs of tokens"
            )
        if self.dim < x.ndim:
            return self.take(x)
        return x

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values in the form that `take` returns."""
        if self.run is not None:
            self.take(x).copy_(values)
            return
        flat = x.flatten(int(self.has_rows))
        flat[..., self._get_index().to(x.device)] = values.to(x.dtype)
        if flat.data_ptr() != x.data_ptr():
            # Flattening a tensor that is not contiguous made a copy.
            x.copy_(flat.view(x.shape))

    def shape(self, like: Tensor) -> tuple[int, ...]:
        """Return the shape of the result of `take`."""
        if self.run is not None:
            return (*like.shape[: self.dim], len(self.run), *like.shape[self.dim + 1 :])
        length = len(self._get_index())
        if self.has_rows:
            return (like.shape[0], length)
        return (length,)

    def _get_index(self) -> Tensor:
        assert self.index is not None
        return self.index

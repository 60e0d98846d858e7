"""The batch dimension of each tensor of a call, for a class that is in no table.

A table of positions may be as long as the batch, so a length alone says nothing. A copy of the model with shapes but no
data is called with another number of rows: this succeeds only if exactly the batched tensors change their length.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import list_tensors
from ditile.model.hooks.attention_hooks import AttentionWatch
from ditile.model.hooks.batch_rows import BatchDims, TensorPath, list_paths
from ditile.model.hooks.overrides import override_attribute

_MOST_TABLES = 2
"""The most arguments that may be as long as the batch without having rows."""
_MISFITS = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, AssertionError)
"""Errors that a model raises if its arguments do not fit each other."""
_VALUE_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
"""Errors that torch raises if a forward needs the values of a tensor without data."""


def derive_batch_dims(model: nn.Module, arguments: Mapping[str, Any], noisy: str, batch_size: int) -> BatchDims | None:
    """Derive the batch dimensions of a call from the model's own forward, without computing anything.

    If the model cannot be copied, or its forward needs values, every tensor as long as the batch has rows, except in
    containers with tensors of other lengths.

    Returns:
        None if the model takes no other number of rows, or its inputs do not fit its batch.
    """
    candidates = _list_candidates(arguments, batch_size)
    try:
        probe = _ShapeProbe(model, arguments)
        for size in probe.list_other_sizes(batch_size):
            for tables in _list_subsets(candidates, noisy):
                rows = set(_exclude_arguments(candidates, tables))
                if not probe.is_possible(rows, size):
                    # If the unchanged call is not possible, no other call tells more.
                    if not tables and not probe.is_possible((), batch_size):
                        return None
                    continue
                # A table that the model looks up by index may have any length.
                for path in sorted(rows - {locate_argument(noisy)}, key=str):
                    if probe.is_possible(rows - {path}, size):
                        rows.remove(path)
                return BatchDims(dict.fromkeys(rows, 0))
        return None
    except _VALUE_NEEDED:
        return _guess_batch_dims(arguments, batch_size, candidates)


def _guess_batch_dims(
    arguments: Mapping[str, Any], batch_size: int, candidates: Sequence[TensorPath]
) -> BatchDims | None:
    """Guess the batch dimensions from lengths only, for models whose forward needs values."""
    # Embeddings for another number of images: the model itself refuses them.
    for x in arguments.values():
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[0] not in (1, batch_size):
            return None
    mixed: set[object] = set()
    for path, x in list_paths(arguments):
        if x.ndim and x.shape[0] not in (1, batch_size):
            mixed.add(path[0].key)
    return BatchDims(_exclude_arguments(candidates, mixed))


class _ShapeProbe:
    """A copy of a model with the same class and config but no data, which is called to see whether a call is possible.

    Raises:
        UnsupportedFakeTensorException: if it cannot be made.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._mode = fake_tensor.FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        try:
            with self._mode:
                self._copy: nn.Module = type(model).from_config(model.config).eval()  # type: ignore[attr-defined]
        except _MISFITS as error:
            # It is not a class of diffusers, or its config was changed since.
            raise fake_tensor.UnsupportedFakeTensorException(str(error)) from error

    def list_other_sizes(self, batch_size: int) -> Iterator[int]:
        """Yield numbers of rows to try that no tensor has: first not a multiple of the batch, then a multiple."""
        lengths: set[int] = set()
        for x in [*pytree.tree_leaves(self._arguments), *self._copy.parameters()]:
            lengths.update(getattr(x, "shape", ()))
        unused = (size for size in itertools.count(2 * batch_size + 1) if size not in lengths)
        yield next(size for size in unused if size % batch_size)
        yield next(size for size in unused if size % batch_size == 0)

    def is_possible(self, rows: Collection[TensorPath], size: int) -> bool:
        """Return whether the model accepts `size` rows in the tensors `rows` and returns `size` rows."""

        def resize(path: TensorPath, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            # The copy of the model has the default type.
            dtype = torch.get_default_dtype() if x.is_floating_point() else x.dtype
            shape = (size, *x.shape[1:]) if path in rows else x.shape
            return torch.empty(shape, dtype=dtype)

        # Nothing is computed, and no attention backend that needs a GPU is chosen.
        with ExitStack() as stack:
            # It logs every failure as an error, and failures are answers here.
            override_attribute(stack, fake_tensor.log, "disabled", True)
            watch = AttentionWatch(_refuse_misfit_mask)
            for context in (self._mode, torch.no_grad(), attention_backend("native"), watch):
                stack.enter_context(context)
            inputs = pytree.tree_map_with_path(resize, dict(self._arguments))
            try:
                results = list_tensors(self._copy(**inputs))
            except _VALUE_NEEDED:
                raise
            except _MISFITS:
                return False
        return all(x.shape[:1] == (size,) for x in results)


def _refuse_misfit_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
    """Raise `ValueError` for a mask with a wrong number of rows, which attention without data would accept."""
    rows = query.shape[0]
    if mask is not None and mask.ndim == query.ndim and mask.shape[0] not in (1, rows):
        raise ValueError(f"a mask of {mask.shape[0]} rows for {rows}")


def _list_subsets(candidates: Collection[TensorPath], noisy: str) -> Iterator[Collection[object]]:
    """Yield sets of arguments that may have no rows: small sets first, and arguments in containers before others."""
    names = {path[0].key for path in candidates} - {noisy}
    names_in_order = sorted(names, key=lambda name: (locate_argument(name) in candidates, name))
    for count in range(_MOST_TABLES + 1):
        yield from itertools.combinations(names_in_order, count)


def locate_argument(name: str) -> TensorPath:
    """Return the path of an argument that is itself a tensor."""
    return (pytree.MappingKey(name),)


def _exclude_arguments(candidates: Sequence[TensorPath], names: Collection[object]) -> dict[TensorPath, int]:
    """Return dimension 0 for each candidate outside these arguments."""
    return {path: 0 for path in candidates if path[0].key not in names}


def _list_candidates(arguments: Mapping[str, Any], batch_size: int) -> list[TensorPath]:
    """Return the tensors with `batch_size` entries in the first dimension."""
    return [path for path, x in list_paths(arguments) if x.ndim and x.shape[0] == batch_size]

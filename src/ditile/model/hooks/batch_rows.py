"""The batch dimension of each tensor in a transformer call, to cut a call down to some rows and to join several calls.

A row is one branch of guidance of one image. Rows never see each other in a transformer, so any run of them may be
computed apart; only the shapes of matrices change, and with them the last bits.

A table of positions may be as long as the batch. So if ditile does not know a model's class, the length of an argument
says nothing, and the lab studies the class.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.block_table import TransformerEntry, find_table_entry
from ditile.model.hooks.token_arguments import find_unknown_rows
from ditile.plan.anatomy import ROWS, Kinds, select_word
from ditile.plan.extras import import_lab

LOG = logging.getLogger("ditile")
TABLES_WITHIN = {"ip_adapter_masks"}
"""Keys of dicts among the arguments whose tensors have no rows; `ip_adapter_masks` has one for each adapter."""

TensorPath = tuple[Any, ...]
"""The path of a tensor in the arguments of a call, in pytree's keys: the argument's name, then keys and indices."""


@dataclass(frozen=True, slots=True)
class BatchDims:
    """The batch dimension of each tensor of a call.

    Attributes:
        dims: path of a tensor -> its batch dimension. A tensor that is not named is the same for all rows.
    """

    dims: Mapping[TensorPath, int]

    def slice_arguments(self, arguments: Mapping[str, Any], select: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the arguments of a call on some rows, which `select` picks from a tensor `[rows, ...]`."""

        def select_dim(path: TensorPath, x: Any) -> Any:
            dim = self.dims.get(path)
            if dim is None:
                return x
            return select(x.movedim(dim, 0)).movedim(0, dim)

        sliced: dict[str, Any] = pytree.tree_map_with_path(select_dim, dict(arguments))
        return sliced


class BatchDimFinder:
    """Finds the batch dimension of the arguments of a model.

    For diffusers' classes it is read from the table. In an argument outside the table it is the first dimension, if
    that is as long as the batch. For any other class the lab tries the forward, once for each kind of call.

    Args:
        model: the model, as the user gave it.
        inputs: the kinds of its arguments, if known.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Kinds]) -> None:
        self._model = model
        self._inputs = inputs
        self._studied: dict[object, BatchDims | None] = {}
        self._has_warned = False

    def find_dims(self, arguments: Mapping[str, Any], noisy: str, batch_size: int) -> BatchDims | None:
        """Return the batch dimensions of a call; None where they are unknown and only the whole batch can be computed.

        Args:
            noisy: the name of the noisy input.
        """
        if inspect.unwrap(type(self._model).forward).__module__.startswith("diffusers."):
            dims = self._read_dims(arguments, noisy, batch_size)
        else:
            # The result depends only on which tensors are as long as the batch.
            key = tuple((path, x.shape[:1] == (batch_size,), x.ndim) for path, x in list_paths(arguments))
            if key not in self._studied:
                study = import_lab("study.batch_dims")
                self._studied[key] = study.derive_batch_dims(self._model, arguments, noisy, batch_size)
            dims = self._studied[key]
        if dims is None and not self._has_warned:
            self._has_warned = True
            LOG.warning(
                "%s cannot be called with another number of rows than %d, so every rank of the axes data and cfg "
                "computes all of them; data=1 and cfg=1 are as fast",
                type(self._model).__name__,
                batch_size,
            )
        return dims

    def _read_dims(self, arguments: Mapping[str, Any], noisy: str, batch_size: int) -> BatchDims | None:
        entry = find_table_entry(type(self._model)) or TransformerEntry()
        if not entry.has_rows and not self._inputs:
            return None
        dims: dict[TensorPath, int] = {}
        for name, value in arguments.items():
            if name in entry.tables:
                continue
            kinds = self._inputs.get(name, ())
            # A list with an entry for each row is not cut.
            if kinds == (ROWS,) and value is not None:
                return None
            is_unknown = find_unknown_rows({name: value}, self._inputs, noisy, batch_size) is not None
            # Such a tensor has embeddings for another number of images, which the model itself refuses.
            if not kinds and isinstance(value, Tensor) and value.ndim > 2 and value.shape[0] not in (1, batch_size):
                return None
            for place, (path, x) in enumerate(pytree.tree_leaves_with_path({name: value})):
                if not isinstance(x, Tensor) or not x.ndim:
                    continue
                if any(getattr(key, "key", None) in TABLES_WITHIN for key in path):
                    continue
                if is_unknown and x.shape[0] == batch_size:
                    dims[path] = 0
                elif kinds and not is_unknown:
                    word = select_word(kinds[place], x.ndim) or ""
                    if "B" in word and x.shape[word.index("B")] > 1:
                        dims[path] = word.index("B")
        return BatchDims(dims)


def slice_batch_arguments(
    arguments: Mapping[str, Any], batch_size: int, select: Callable[[Tensor], Tensor], whole: Collection[str] = ()
) -> dict[str, Any]:
    """Cut the arguments of a call down to some rows, given a table of the arguments without rows.

    Args:
        arguments: by name. Tensors with `batch_size` entries in the first dimension are cut, also within dicts, lists
            and tuples; everything else (scalars, one row for all, tables per token) is the same for every row.
        select: picks some rows of a tensor.
        whole: names of arguments that have no rows, whatever their length, such as position ids.
    """
    dims = {}
    for path, x in list_paths(arguments):
        if x.ndim and x.shape[0] == batch_size and path[0].key not in whole:
            dims[path] = 0
    return BatchDims(dims).slice_arguments(arguments, select)


def join_batch_results(results: Sequence[Any]) -> Any:
    """Join the results of the parts of a call: tuples or output objects of batched tensors.

    A list has an entry for each row.
    """
    return pytree.tree_map(_join_parts, *results, is_leaf=lambda value: isinstance(value, list))


def _join_parts(*parts: Any) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], list):
        return list(itertools.chain(*parts))
    return parts[0]


def list_paths(arguments: Mapping[str, Any]) -> list[tuple[TensorPath, Tensor]]:
    """Return every tensor of a call with its path, also those within dicts, lists and tuples."""
    leaves = pytree.tree_leaves_with_path(dict(arguments))
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]

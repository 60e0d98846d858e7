"""Cuts the arguments of a transformer call down to some rows of its batch, and joins the results of several such calls.

A row is one branch of guidance of one image. Rows never see each other in a transformer, so any run of them may be
computed apart; only the shapes of matrices change, and with them the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def slice_batch_arguments(
    arguments: Mapping[str, Any], batch_size: int, select: Callable[[Tensor], Tensor], whole: Collection[str] = ()
) -> dict[str, Any]:
    """Arguments of a call on a batch, cut down to some of its rows.

    Args:
        arguments: by name. Tensors with `batch_size` entries in the first dimension are cut, also within dicts, lists
            and tuples; all else (scalars, one row for all, tables per token) is the same for every row.
        batch_size: rows of the batch.
        select: the wanted rows of a tensor.
        whole: names of arguments that have no rows, whatever their length, as position ids.
    """
    return {
        name: value if name in whole else _slice_batch_value(value, batch_size, select)
        for name, value in arguments.items()
    }


def join_batch_results(results: Sequence[Any]) -> Any:
    """The result of a call on all rows, from those of its parts: a tuple or an output object of batched tensors."""
    one = results[0]
    if isinstance(one, Tensor):
        return torch.cat(list(results))
    # Outputs of diffusers are mappings, and dataclasses.
    if isinstance(one, Mapping):
        return type(one)(**{name: join_batch_results([result[name] for result in results]) for name in one})
    if isinstance(one, list | tuple):
        return type(one)(join_batch_results(parts) for parts in zip(*results, strict=True))
    return one


def _slice_batch_value(value: Any, batch_size: int, select: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return select(value) if value.ndim > 0 and value.shape[0] == batch_size else value
    if isinstance(value, dict):
        return {name: _slice_batch_value(part, batch_size, select) for name, part in value.items()}
    if isinstance(value, list):
        return [_slice_batch_value(part, batch_size, select) for part in value]
    if isinstance(value, tuple):
        parts = [_slice_batch_value(part, batch_size, select) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value

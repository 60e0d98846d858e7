"""Rows: a batched transformer call as several calls on some of its rows, and their results joined again.

A row is one image's branch of guidance. Rows never see each other in a transformer, so that any run of them may be
computed apart; only matrix shapes change, and with them the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ditile.layout import share


def row_parts(rows: int, parts: int) -> list[range]:
    """Runs of rows as even as can be, the larger ones first; as many as asked for, but none is empty."""
    parts = min(rows, parts)
    return [share(range(rows), parts, index) for index in range(parts)]


def take_rows(arguments: Mapping[str, Any], part: range, rows: int, whole: Iterable[str] = ()) -> dict[str, Any]:
    """Arguments of a call on `rows` rows, cut down to some of them.

    Args:
        arguments: by name. Tensors whose first dimension has `rows` entries are cut there, also within mappings, lists
            and tuples; all else (scalars, one row for all, tables per token) is the same for every row.
        part: the rows to keep.
        rows: how many there are.
        whole: names of arguments that are not batched, whatever their length.
    """
    kept = set(whole)
    return {name: value if name in kept else _cut(value, part, rows) for name, value in arguments.items()}


def join_rows(results: Sequence[Any]) -> Any:
    """What a call on all rows would have returned: a tuple or an output object of batched tensors."""
    one = results[0]
    if isinstance(one, Tensor):
        return torch.cat(list(results))
    if isinstance(one, Mapping):  # diffusers' outputs are mappings, and dataclasses
        return type(one)(**{name: join_rows([result[name] for result in results]) for name in one})
    if isinstance(one, list | tuple):
        return type(one)(join_rows(parts) for parts in zip(*results, strict=True))
    return one


def _cut(value: Any, part: range, rows: int) -> Any:
    if isinstance(value, Tensor):
        batched = value.ndim > 0 and value.shape[0] == rows
        return value[part.start : part.stop] if batched else value
    if isinstance(value, Mapping):
        return {name: _cut(item, part, rows) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, part, rows) for item in value)
    return value

"""What blocks that are left out would have done to the tokens, forecast from the steps that were computed.

Kept is what they add to the tokens (or, `store="hidden"`, the tokens behind them), for each stream, unit and patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ditile.cache.judge import WHOLE, Call, Unit


class Forecast(Protocol):
    """Continues one sequence of tensors; see `ditile.cache.forecast`."""

    @property
    def bytes(self) -> int: ...

    def add(self, step: int, value: Tensor) -> None:
        """The value of a computed step."""
        ...

    def at(self, step: int) -> Tensor:
        """What it may be at a later step; not to be written to."""
        ...


class Residuals:
    """The memory of one run of blocks.

    Args:
        make: a new forecast for a stream.
        hidden: keep the tokens behind the blocks, and not what is added.
    """

    def __init__(self, make: Callable[[str], Forecast], *, hidden: bool = False) -> None:
        self._make, self._hidden = make, hidden
        self._kept: dict[tuple[object, ...], Forecast] = {}

    def keep(self, stream: str, call: Call, start: Tensor | None, out: Tensor, skips: Sequence[bool]) -> None:
        """A step was computed for the units that are not left out.

        Args:
            stream: "image" or "text".
            call: the call.
            start: the tokens in front of the blocks `[rows, tokens, channels]`; None where the blocks take none.
            out: those behind them.
            skips: the units that are left out.
        """
        added = out.clone() if self._hidden or start is None else out - start
        for patch, tokens in self._cut(stream, call, added):
            for unit, skipped in zip(call.units, skips, strict=True):
                if not skipped:
                    value = tokens[unit.rows].clone() if unit.among > 1 else tokens
                    self._of(stream, call, patch, unit).add(call.step, value)

    def behind(self, stream: str, call: Call, start: Tensor | None, unit: Unit | None = None) -> Tensor:
        """The tokens behind the blocks, of one unit or of all of them.

        Args:
            stream: "image" or "text".
            call: the call.
            start: the tokens in front of the blocks, of all rows.
            unit: whose rows are wanted.
        """
        if unit is None and call.units[0].among > 1:
            rows = [self.behind(stream, call, start, each) for each in call.units]
            whole = rows[0].new_empty((call.rows, *rows[0].shape[1:]))
            for each, part in zip(call.units, rows, strict=True):
                whole[each.rows] = part
            return whole
        one = unit or call.units[0]
        patches = call.moment.patches if stream == "image" else call.moment.patches[:1]
        added = [self._of(stream, call, patch, one).at(call.step) for patch in patches]
        whole = added[0] if len(added) == 1 else torch.cat(added, dim=1)
        if self._hidden or start is None:
            return whole.clone() if start is None else whole.to(start.dtype, copy=True)
        return one.of(start) + whole

    def has(self, stream: str, call: Call) -> bool:
        """Whether the blocks return a stream."""
        return self._key(stream, call, call.moment.patches[0], call.units[0]) in self._kept

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(forecast.bytes for forecast in self._kept.values())

    def _cut(self, stream: str, call: Call, tokens: Tensor) -> list[tuple[int, Tensor]]:
        """By patch; text belongs to the first one."""
        return call.cut(tokens) if stream == "image" else [(call.moment.patches[0], tokens)]

    def _of(self, stream: str, call: Call, patch: int, unit: Unit) -> Forecast:
        key = self._key(stream, call, patch, unit)
        found = self._kept.get(key)
        if found is None:
            whole = self._kept.pop(self._key(stream, call, patch, WHOLE), None) if unit.among > 1 else None
            for each in call.units:
                made = self._kept[self._key(stream, call, patch, each)] = self._make(stream)
                if whole is not None:  # the number of images is known after the first step, which was one unit
                    made.add(0, whole.at(0)[each.rows].clone())
            found = self._kept[key]
        return found

    def _key(self, stream: str, call: Call, patch: int, unit: Unit) -> tuple[object, ...]:
        return (stream, *call.keys(patch, unit))

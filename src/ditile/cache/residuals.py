"""What blocks that are left out would have done to the tokens, forecast from the steps that were computed.

Kept is what they add to the tokens (or, `store="hidden"`, the tokens behind them), for each stream, unit and patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ditile.cache.judge import WHOLE_BATCH, CacheCall, Unit


class ResidualForecaster(Protocol):
    """Continues one sequence of tensors; see `ditile.cache.forecast`."""

    @property
    def memory_bytes(self) -> int: ...

    def add_computed_step(self, step: int, value: Tensor) -> None:
        """The value of a computed step."""
        ...

    def forecast_value(self, step: int) -> Tensor:
        """What it may be at a later step; not to be written to."""
        ...


class Residuals:
    """The memory of one run of blocks.

    Args:
        make: a new forecast for a stream.
        hidden: keep the tokens behind the blocks, and not what is added.
    """

    def __init__(self, make: Callable[[str], ResidualForecaster], *, hidden: bool = False) -> None:
        self._make_forecaster, self._hidden = make, hidden
        self._forecasters: dict[tuple[object, ...], ResidualForecaster] = {}

    def store_residuals(
        self, stream: str, call: CacheCall, start: Tensor | None, out: Tensor, skips: Sequence[bool]
    ) -> None:
        """A step was computed for the units that are not left out.

        Args:
            stream: "image" or "text".
            call: the call.
            start: the tokens in front of the blocks `[rows, tokens, channels]`; None where the blocks take none.
            out: those behind them.
            skips: the units that are left out.
        """
        added = out.clone() if self._hidden or start is None else out - start
        for patch, tokens in self._split_by_patch(stream, call, added):
            for unit, skipped in zip(call.units, skips, strict=True):
                if not skipped:
                    value = tokens[unit.batch_slice].clone() if unit.among > 1 else tokens
                    self._get_forecaster(stream, call, patch, unit).add_computed_step(call.step, value)

    def forecast_tokens(self, stream: str, call: CacheCall, start: Tensor | None, unit: Unit | None = None) -> Tensor:
        """The tokens behind the blocks, of one unit or of all of them.

        Args:
            stream: "image" or "text".
            call: the call.
            start: the tokens in front of the blocks, of all rows.
            unit: whose rows are wanted.
        """
        if unit is None and call.units[0].among > 1:
            unit_tokens = [self.forecast_tokens(stream, call, start, each) for each in call.units]
            whole = unit_tokens[0].new_empty((call.batch_size, *unit_tokens[0].shape[1:]))
            for each, part in zip(call.units, unit_tokens, strict=True):
                whole[each.batch_slice] = part
            return whole
        one = unit or call.units[0]
        patches = call.moment.patches if stream == "image" else call.moment.patches[:1]
        added = [self._get_forecaster(stream, call, patch, one).forecast_value(call.step) for patch in patches]
        whole = added[0] if len(added) == 1 else torch.cat(added, dim=1)
        if self._hidden or start is None:
            return whole.clone() if start is None else whole.to(start.dtype, copy=True)
        return one.slice_batch(start) + whole

    def has_stream(self, stream: str, call: CacheCall) -> bool:
        """Whether the blocks return a stream."""
        return self._make_forecaster_key(stream, call, call.moment.patches[0], call.units[0]) in self._forecasters

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return sum(forecaster.memory_bytes for forecaster in self._forecasters.values())

    def _split_by_patch(self, stream: str, call: CacheCall, tokens: Tensor) -> list[tuple[int, Tensor]]:
        """By patch; text belongs to the first one."""
        return call.split_by_patch(tokens) if stream == "image" else [(call.moment.patches[0], tokens)]

    def _get_forecaster(self, stream: str, call: CacheCall, patch: int, unit: Unit) -> ResidualForecaster:
        key = self._make_forecaster_key(stream, call, patch, unit)
        forecaster = self._forecasters.get(key)
        if forecaster is None:
            whole = (
                self._forecasters.pop(self._make_forecaster_key(stream, call, patch, WHOLE_BATCH), None)
                if unit.among > 1
                else None
            )
            for each in call.units:
                new_forecaster = self._forecasters[self._make_forecaster_key(stream, call, patch, each)] = (
                    self._make_forecaster(stream)
                )
                if whole is not None:  # the number of images is known after the first step, which was one unit
                    new_forecaster.add_computed_step(0, whole.forecast_value(0)[each.batch_slice].clone())
            forecaster = self._forecasters[key]
        return forecaster

    def _make_forecaster_key(self, stream: str, call: CacheCall, patch: int, unit: Unit) -> tuple[object, ...]:
        return (stream, *call.make_unit_key(patch, unit))

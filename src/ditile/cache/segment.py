"""Segments: neighbouring blocks that together run, are skipped, or run for some images of the batch.

In a skipped segment the blocks pass their inputs on, and the last block returns the first block's input plus the
residual. The residual includes what the model's forward does between blocks (a ControlNet adds to the tokens).

The residual is forecast from the computed steps, separately for each stream, patch and unit (rows of the batch that are
decided on together). It is what the blocks add to the tokens, or with `store="hidden"` the tokens after the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ditile.cache.forecast import Forecaster, ForecasterState
from ditile.cache.hooks import BlockHandler, CacheHook
from ditile.cache.unit_decision import WHOLE_BATCH, CacheCall, Unit
from ditile.model.hooks.batch_rows import slice_batch_arguments
from ditile.model.hooks.block_policy import TokenState
from ditile.model.hooks.protocols import SkipAgreement

ROTARY_ARGUMENTS = ("image_rotary_emb", "rotary_emb", "freqs_cis", "rope")
"""Arguments of blocks with a row for each token. As `[tokens, channels]` they have no batch dimension."""


class Segment:
    """Neighbouring blocks.

    Args:
        hooks: the hooks around the blocks, in order.
        residuals: the memory of what the blocks add.
    """

    def __init__(self, hooks: Sequence[CacheHook], residuals: Residuals) -> None:
        self.hooks = hooks
        self.residuals = residuals
        self._first = hooks[0]
        self._last = hooks[-1]
        self._inner = hooks[1:-1]
        self._blocks = [hook.block for hook in hooks]
        self._inside: BlockHandler | None = None
        self._start: TokenState | None = None
        self._index: Tensor | None = None
        self._has_run = False

    def apply_decision(self, call: CacheCall, skips: Sequence[bool], agreement: SkipAgreement) -> None:
        """Install the handlers of this call: run all rows, run some of them, or leave the blocks out."""
        self._call = call
        self._skips = skips
        self._start = None
        ends: BlockHandler
        inside: BlockHandler | None
        if not any(skips):
            ends = self._run_whole_batch
            # Blocks in between run without a handler, once their results have been seen.
            inside = None
            if not self._has_run:
                inside = self._run_whole_batch
        elif all(skips):
            ends = self._skip_whole_batch
            inside = _pass_tokens_on
            agreement.mark_blocks_skipped(self._blocks, call.moment)
        else:
            ends = inside = self._run_part_of_batch
            self._index = None
        self._first.handle = ends
        self._last.handle = ends
        if inside != self._inside:
            self._inside = inside
            for hook in self._inner:
                hook.handle = inside

    def bypass_cache(self) -> None:
        """Let all blocks run, and remember nothing."""
        self._start = None
        self._inside = None
        for hook in self.hooks:
            hook.handle = None

    def _run_whole_batch(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first or last block of a segment. The first call runs all blocks so, to see what they return."""
        if hook is self._first:
            self._start = hook.copy_tokens(args, kwargs)
        out = hook.forward(*args, **kwargs)
        if hook is self._last:
            self._has_run = True
            self._store_residuals(hook.unpack_tokens(out))
        elif not self._has_run:
            # The hook learns in which form its block returns tokens, to return skipped ones alike.
            hook.unpack_tokens(out)
        return out

    def _skip_whole_batch(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Skip the first or last block of a segment. Blocks in between pass their inputs on."""
        state = hook.read_tokens(args, kwargs)
        if hook is self._first:
            self._start = state
            if hook is not self._last:
                # In-place additions between blocks must not change the start: the residual already contains them.
                state = hook.copy_tokens(args, kwargs)
        if hook is self._last:
            start = self._start
            self._start = None
            assert start is not None
            image = self.residuals.forecast_tokens("image", self._call, start.image)
            text = start.text
            # A dummy text is never stored, so it has no forecast.
            if hook.has_text and self._call.moment.has_text():
                text = None
                # The last block of some families returns no text.
                if self.residuals.has_text(self._call):
                    text = self.residuals.forecast_tokens("text", self._call, start.text)
            state = TokenState(image, text)
        return hook.pack_tokens(state)

    def _run_part_of_batch(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block for some rows of the batch."""
        named = hook.bind_arguments(args, kwargs)
        state = hook.read_tokens(args, kwargs)
        if hook is self._first:
            self._start = state
        device = state.image.device
        # The indices of the rows that run are made on the device: a copy from the CPU would wait for it.
        if self._index is None or self._index.device != device:
            batch_index = torch.arange(self._call.batch_size, device=device)
            parts = []
            for unit, skipped in zip(self._call.units, self._skips, strict=True):
                if not skipped:
                    parts.append(batch_index[unit.batch_slice])
            self._index = torch.cat(parts)
        index = self._index
        # Tables of positions have no rows, though one may be as long as the batch.
        tables = [name for name in ROTARY_ARGUMENTS if name in named and _is_flat_table(named[name])]
        cut = slice_batch_arguments(named, self._call.batch_size, lambda x: x.index_select(0, index), tables)
        computed = hook.unpack_tokens(hook.forward(**cut))
        image = _scatter_batch(state.image, computed.image, index, self._call.batch_size)
        text = computed.text
        if text is not None:
            text = _scatter_batch(state.text, text, index, self._call.batch_size)
        out = TokenState(image, text)
        if hook is not self._last:
            return hook.pack_tokens(out)
        start = self._start
        assert start is not None
        self._store_residuals(out)
        for unit, skipped in zip(self._call.units, self._skips, strict=True):
            if not skipped:
                continue
            image[unit.batch_slice] = self.residuals.forecast_tokens("image", self._call, start.image, unit)
            if text is not None:
                text[unit.batch_slice] = self.residuals.forecast_tokens("text", self._call, start.text, unit)
        return hook.pack_tokens(out)

    def _store_residuals(self, out: TokenState) -> None:
        start = self._start
        self._start = None
        assert start is not None
        self.residuals.store_residuals("image", self._call, start.image, out.image, self._skips)
        if out.text is not None and self._call.moment.has_text():
            self.residuals.store_residuals("text", self._call, start.text, out.text, self._skips)


def _pass_tokens_on(hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the inputs of a block in the form of its result."""
    return hook.pack_tokens(hook.read_tokens(args, kwargs))


def _is_flat_table(table: Any) -> bool:
    """Return whether a table, or each table within dicts, lists and tuples, is `[tokens, channels]`."""
    if isinstance(table, Tensor):
        return table.ndim < 3
    if isinstance(table, dict):
        table = tuple(table.values())
    return not isinstance(table, tuple | list) or all(map(_is_flat_table, table))


def _scatter_batch(whole: Tensor | None, new_rows: Tensor, index: Tensor, batch_size: int) -> Tensor:
    """Return `whole` with some of its rows replaced."""
    if whole is not None and whole.shape[1:] == new_rows.shape[1:]:
        output = whole.clone()
    else:
        # The blocks make another form of the stream: the last block replaces the other rows by forecasts.
        output = new_rows.new_zeros((batch_size, *new_rows.shape[1:]))
    output[index] = new_rows
    return output


KeepMemory = Callable[..., Tensor]
"""(*purpose, like) -> memory for that purpose, with the shape and type of `like`."""


class Residuals:
    """The memory of one run of blocks.

    Args:
        make: makes the forecaster of a stream.
        hidden: keep the tokens after the blocks instead of what the blocks add.
        keep: makes memory that stays between generations; None if no memory needs to stay.

    Attributes:
        stored: the keys of what was stored since `describe_state`.
    """

    def __init__(
        self, make: Callable[[str], Forecaster], *, hidden: bool = False, keep: KeepMemory | None = None
    ) -> None:
        self._make_forecaster = make
        self._hidden = hidden
        self._keep = keep
        self._forecasters: dict[tuple[object, ...], Forecaster] = {}
        self._known: dict[tuple[object, ...], ForecasterState] = {}
        self.stored: list[tuple[object, ...]] = []

    def store_residuals(
        self, stream: str, call: CacheCall, start: Tensor | None, out: Tensor, skips: Sequence[bool]
    ) -> None:
        """Store a computed step of the units that are not skipped.

        Args:
            stream: "image" or "text".
            start: the tokens before the blocks `[rows, tokens, channels]`; None if the blocks take no such stream.
            out: the tokens after them.
        """
        added = out.clone() if self._hidden or start is None else out - start
        # Text belongs to the first patch.
        parts = [(call.moment.patches[0], added)]
        if stream == "image":
            parts = call.split_by_patch(added)
        for patch, tokens in parts:
            for unit, skipped in zip(call.units, skips, strict=True):
                if skipped:
                    continue
                # A slice that is not cloned would keep the tokens of the whole batch in memory.
                value = tokens[unit.batch_slice].clone() if unit.among > 1 else tokens
                self._get_forecaster(stream, call, patch, unit).add_computed_step(call.step, value)
                self.stored.append(self._make_forecaster_key(stream, call, patch, unit))

    def forecast_tokens(self, stream: str, call: CacheCall, start: Tensor | None, unit: Unit | None = None) -> Tensor:
        """Return the tokens after the blocks, of one unit or of all of them.

        Args:
            stream: "image" or "text".
            start: the tokens before the blocks, of all rows `[rows, tokens, channels]`.
            unit: the unit whose rows are returned; None is all of them.
        """
        if unit is None and call.units[0].among > 1:
            unit_tokens = [self.forecast_tokens(stream, call, start, unit) for unit in call.units]
            first = unit_tokens[0]
            whole = first.new_empty((call.batch_size, *first.shape[1:]))
            for unit, tokens in zip(call.units, unit_tokens, strict=True):
                whole[unit.batch_slice] = tokens
            return whole
        unit = unit or call.units[0]
        patches = call.moment.patches
        if stream != "image":
            # Text belongs to the first patch, so only the first patch has a forecast of it.
            patches = patches[:1]
        parts = [self._get_forecaster(stream, call, patch, unit).forecast_value(call.step) for patch in patches]
        forecast = parts[0]
        if len(parts) > 1:
            forecast = torch.cat(parts, dim=1)
        # A forecast may be a kept snapshot, so it is copied, never overwritten.
        if start is None:
            return forecast.clone()
        if self._hidden:
            return forecast.to(start.dtype, copy=True)
        return unit.slice_batch(start) + forecast

    def has_text(self, call: CacheCall) -> bool:
        """Return whether the blocks return text."""
        return self._make_forecaster_key("text", call, call.moment.patches[0], call.units[0]) in self._forecasters

    def describe_state(self, call: CacheCall) -> Hashable | None:
        """Describe the state on which the blocks of a call depend, without reading tensors.

        Returns None if that state depends on values in tensors, or nothing is remembered yet.
        """
        self.stored = []
        self._known = {key: forecaster.state for key, forecaster in self._forecasters.items()}
        units = tuple((unit.place, unit.among) for unit in call.units)
        states: list[Hashable] = [units]
        for stream in ("image", "text"):
            for patch in call.moment.patches:
                for unit in call.units:
                    key = self._make_forecaster_key(stream, call, patch, unit)
                    forecaster = self._forecasters.get(key)
                    if forecaster is None and stream == "text":
                        # Some families remember no text, and the others do for the first patch only.
                        states.append(None)
                        continue
                    if forecaster is None:
                        return None
                    state = forecaster.describe_state(call.step)
                    if state is None:
                        return None
                    states.append(state)
        return tuple(states)

    @property
    def has_new_keys(self) -> bool:
        """Return whether something was stored for the first time since `describe_state`."""
        return not self._known.keys() >= {*self.stored}

    @contextmanager
    def go_back(self) -> Iterator[None]:
        """Go back to the state at `describe_state` within this context, which must store under no new keys."""
        stored = self.stored
        states = {key: forecaster.state for key, forecaster in self._forecasters.items()}
        self._set_states(self._known)
        try:
            yield
        finally:
            self._set_states(states)
            self.stored = stored

    def _set_states(self, states: Mapping[tuple[object, ...], ForecasterState]) -> None:
        self.stored = []
        for key, state in states.items():
            self._forecasters[key].state = state

    def note_played_call(self, stored: Iterable[tuple[object, ...]], step: int) -> None:
        """Note that a played tape has stored values; `stored` has the keys from its recording."""
        for key in stored:
            self._forecasters[key].note_played_step(step)

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        return sum(forecaster.memory_bytes for forecaster in self._forecasters.values())

    def _get_forecaster(self, stream: str, call: CacheCall, patch: int, unit: Unit) -> Forecaster:
        key = self._make_forecaster_key(stream, call, patch, unit)
        if key in self._forecasters:
            return self._forecasters[key]
        of_batch = None
        if unit.among > 1:
            # The first step was computed as one unit, because the number of images was not known yet.
            of_batch = self._forecasters.pop(self._make_forecaster_key(stream, call, patch, WHOLE_BATCH), None)
        for new_unit in call.units:
            new_key = self._make_forecaster_key(stream, call, patch, new_unit)
            forecaster = self._forecasters[new_key] = self._make_forecaster(stream)
            if self._keep is not None:
                # The count tells calls of different kinds apart, which may remember tensors of the same shape.
                place = (stream, call.moment.branch, patch, new_unit.place, new_unit.among, len(self._forecasters))
                forecaster.make_slot = partial(self._keep, *place)
            if of_batch is not None:
                forecaster.add_computed_step(0, of_batch.forecast_value(0)[new_unit.batch_slice].clone())
        return self._forecasters[key]

    def _make_forecaster_key(self, stream: str, call: CacheCall, patch: int, unit: Unit) -> tuple[object, ...]:
        return (stream, *call.make_unit_key(patch, unit))

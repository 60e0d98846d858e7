"""A segment: neighbouring blocks that are run, left out, or run for some images of the batch, together.

While it is left out its blocks pass on what comes, and its last one returns what the first one was given plus the
residual: what the model's forward does in between (a ControlNet adds to the tokens) was in the residual already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ditile.cache.hooks import Handle, Slot
from ditile.cache.judge import Call
from ditile.cache.residuals import Residuals
from ditile.hooks.batch_rows import take_rows
from ditile.hooks.block_hooks import State
from ditile.hooks.protocols import Agreement

TABLES = ("image_rotary_emb", "rotary_emb", "freqs_cis", "rope")
"""Arguments of blocks that belong to tokens: as `[tokens, channels]` they have no rows, whatever their length."""


class Segment:
    """Neighbouring blocks.

    Args:
        slots: theirs, in order.
        residuals: what they add.
    """

    def __init__(self, slots: Sequence[Slot], residuals: Residuals) -> None:
        self.slots, self.residuals = slots, residuals
        self._first, self._last, self._inner = slots[0], slots[-1], slots[1:-1]
        self._blocks = [slot.block for slot in slots]
        self._inside: Handle | None = None
        self._start: State | None = None
        self._index: Tensor | None = None
        self._is_known = False

    def begin(self, call: Call, skips: Sequence[bool], agreement: Agreement) -> None:
        """Decides what becomes of the blocks in this call."""
        self._call, self._skips, self._start = call, skips, None
        ends: Handle
        inside: Handle | None
        if not any(skips):
            ends, inside = self._whole, None if self._is_known else self._whole
        elif all(skips):
            ends, inside = self._pass, Slot.pass_on
            agreement.left_out(self._blocks, call.moment)
        else:
            ends = inside = self._some
            self._index = None
        self._first.handle = self._last.handle = ends
        if inside != self._inside:
            self._inside = inside
            for slot in self._inner:
                slot.handle = inside

    def rest(self) -> None:
        """All blocks run, and nothing is remembered."""
        self._start = self._inside = None
        for slot in self.slots:
            slot.handle = None

    def _computed(self, device: torch.device) -> Tensor:
        """The rows that run, made where they are used, once a call: a copy from the CPU would wait for the GPU."""
        if self._index is None or self._index.device != device:
            rows = torch.arange(self._call.rows, device=device)
            units = zip(self._call.units, self._skips, strict=True)
            self._index = torch.cat([rows[unit.rows] for unit, skipped in units if not skipped])
        return self._index

    def _whole(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first or last block of a segment that runs; all of them once, to see what form they return tokens in."""
        if slot is self._first:
            self._start = slot.copy(args, kwargs)
        out = slot.forward(*args, **kwargs)
        if slot is self._last:
            self._is_known = True
            self._keep(slot.unpack(out))
        elif not self._is_known:
            slot.unpack(out)
        return out

    def _pass(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first or last block of a segment that is left out; those between pass on what comes."""
        state = slot.read(args, kwargs)
        if slot is self._first:
            self._start = state
        if slot is self._last:
            start, self._start = self._start, None
            assert start is not None
            state = self._forecast(slot, start)
        return slot.pack(state)

    def _some(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block that runs for some rows."""
        named, state = slot.named(args, kwargs), slot.read(args, kwargs)
        if slot is self._first:
            self._start = state
        index = self._computed(state.image.device)
        tables = [name for name in TABLES if name in named and _is_flat(named[name])]
        cut = take_rows(named, self._call.rows, lambda x: x.index_select(0, index), tables)
        ran = slot.unpack(slot.forward(**cut))
        out = State(
            _put(state.image, ran.image, index), None if ran.text is None else _put(state.text, ran.text, index)
        )
        if slot is self._last:
            start = self._start
            assert start is not None
            self._keep(out)
            for unit, skipped in zip(self._call.units, self._skips, strict=True):
                if skipped:
                    for stream, x, before in (("image", out.image, start.image), ("text", out.text, start.text)):
                        if x is not None:
                            x[unit.rows] = self.residuals.behind(stream, self._call, before, unit)
        return slot.pack(out)

    def _keep(self, out: State) -> None:
        start, self._start = self._start, None
        assert start is not None
        for stream, x, before in (("image", out.image, start.image), ("text", out.text, start.text)):
            if x is not None and self._is_real(stream):
                self.residuals.keep(stream, self._call, before, x, self._skips)

    def _forecast(self, slot: Slot, start: State) -> State:
        image = self.residuals.behind("image", self._call, start.image)
        text = start.text
        if slot.has_text and self._is_real("text") and self.residuals.has("text", self._call):
            text = self.residuals.behind("text", self._call, start.text)
        elif slot.has_text and self._is_real("text"):
            text = None  # the last block of some families returns none
        return State(image, text)

    def _is_real(self, stream: str) -> bool:
        """Dummy text passes through."""
        return stream == "image" or self._call.moment.has_text()


def _is_flat(table: Any) -> bool:
    """Whether a table, or each of those within dicts, lists and tuples, is `[tokens, channels]`."""
    if isinstance(table, Tensor):
        return table.ndim < 3
    parts = table.values() if isinstance(table, dict) else table if isinstance(table, tuple | list) else ()
    return all(map(_is_flat, parts))


def _put(whole: Tensor | None, rows: Tensor, index: Tensor) -> Tensor:
    """`whole` with some of its rows replaced."""
    if whole is None or whole.shape[1:] != rows.shape[1:]:
        made = rows.new_zeros((len(index) if whole is None else whole.shape[0], *rows.shape[1:]))
    else:
        made = whole.clone()
    made[index] = rows
    return made

"""DBCache: the first F blocks say whether the image has changed; if not, those up to the last B are left out.

Probe (F blocks, always run), middle (run or forecast), tail (B blocks, always run). With F = 1 and B = 0 this is
first-block caching. The probe is what the first F blocks add to the image tokens; it is compared with that of the last
step that was computed, and so is the residual of the middle: both are renewed only when the middle runs.

With F = 0 nothing is run to decide: the probe is what comes into the first block, and where the rules alone decide (a
static mask, a threshold of 1) all blocks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ditile.cache.hooks import Slot
from ditile.cache.judge import Call, Judge
from ditile.cache.residuals import Residuals
from ditile.cache.rules import Record
from ditile.cache.segment import Segment
from ditile.hooks.protocols import Agreement


class DBCache:
    """The blocks of one chain.

    Args:
        slots: the blocks, in order.
        judge: decides.
        residuals: makes a memory for a segment.
        first, last: F and B.
        hidden: whether the probe is the tokens themselves, and not what is added to them.

    Attributes:
        middle: the blocks that may be left out.
    """

    def __init__(
        self, slots: Sequence[Slot], judge: Judge, residuals: Callable[[], Residuals], first: int, last: int, *,
        hidden: bool = False,
    ) -> None:  # fmt: skip
        self._slots, self.judge, self._make, self._hidden = slots, judge, residuals, hidden
        self.middle = range(first, max(first, len(slots) - last))
        self._looks = first == 0
        self._probe_end = slots[max(first, 1) - 1] if self.middle else None
        self._segments: list[Segment] = []
        self._before: Tensor | None = None
        self.own(None)

    def own(self, owned: Collection[nn.Module] | None) -> None:
        """This rank runs these blocks of the chain alone; None for all."""
        mine = [self._slots[k] for k in self.middle if owned is None or self._slots[k].block in owned]
        self._segments = [Segment(run, self._make()) for run in _runs(mine)]
        places = [slot.index for slot in self._slots if owned is not None and slot.block in owned]
        self._hears = self._probe_end is not None and bool(places) and min(places) > self._probe_end.index
        self._judges = self._probe_end is not None and (owned is None or self._probe_end.block in owned)
        self._starts = self._probe_end is not None and (owned is None or self._slots[0].block in owned)

    def begin(self, call: Call, agreement: Agreement) -> None:
        """The model is called."""
        self._call, self._agreement, self._before = call, agreement, None
        if self._starts:
            self._slots[0].handle = self._look if self._looks else self._enter
        if self._looks and self._starts:
            return
        if self._judges and self._probe_end is not None:
            self._probe_end.handle = self._probe
        elif self._hears:
            skips = agreement.hear(len(call.units))
            self.judge.note(call, skips)
            self._tell(skips)

    def rest(self) -> None:
        """All blocks run, and nothing is remembered."""
        self._before = None
        for slot in self._slots:
            slot.handle = None
        for segment in self._segments:
            segment.rest()

    def records(self) -> Iterator[tuple[int, int, int, Record]]:
        """(branch, patch, unit, record) of all that was decided on."""
        return self.judge.records()

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self.judge.bytes + sum(segment.residuals.bytes for segment in self._segments)

    def _look(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first block, where no block is a probe."""
        probe = slot.read(args, kwargs).image
        skips = self.judge.judge(probe, self._call, self._agreement)
        if not all(skips):
            self.judge.learn(probe.clone(), self._call, skips)
        self._tell(skips)
        assert slot.handle is not None
        return slot.handle(slot, args, kwargs)

    def _enter(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first block of a probe."""
        before = slot.read(args, kwargs).image.clone()
        if self._judges:
            self._before = before
        elif not self._hidden and self._probe_end is not None:
            self._agreement.give_start(before, self._probe_end.block)
        return slot.forward(*args, **kwargs)

    def _probe(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The last block of a probe, which may be its first."""
        first, self._before = (slot.read(args, kwargs).image.clone() if self._before is None else self._before), None
        out = slot.forward(*args, **kwargs)
        after = slot.unpack(out).image
        if not self._starts and not self._hidden:
            first = self._agreement.take_start(after, self._slots[0].block)
        probe = after.clone() if self._hidden else after - first
        skips = self.judge.judge(probe, self._call, self._agreement)
        if not all(skips):
            self.judge.learn(probe, self._call, skips)
        self._tell(skips)
        return out

    def _tell(self, skips: Sequence[bool]) -> None:
        self._agreement.tell(skips)
        for segment in self._segments:
            segment.begin(self._call, skips, self._agreement)


def _runs(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbours that pass on the same streams; a list of blocks with other streams has a residual of its own."""
    runs: list[list[Slot]] = []
    for slot in slots:
        if runs and runs[-1][-1].has_text == slot.has_text and runs[-1][-1].index + 1 == slot.index:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs

"""DBPrune: each block is left out by itself, where its input has hardly changed since it last ran.

The first F blocks, the last B and those that are named always run. A block's probe is its input; its residual is what
it added then. With a dynamic threshold, a step whose first blocks changed a little more than allowed allows more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ditile.cache.hooks import Slot
from ditile.cache.judge import Call, Judge
from ditile.cache.residuals import Residuals
from ditile.cache.rules import Record, relaxed
from ditile.cache.segment import Segment
from ditile.hooks.protocols import Agreement


class Dynamic(NamedTuple):
    """How the threshold of a step follows its first differences; see `rules.relaxed`."""

    ratio: float
    most: float


class Prunable(NamedTuple):
    """A block that may be left out."""

    judge: Judge
    segment: Segment


class DBPrune:
    """The blocks of one chain.

    Args:
        slots: the blocks, in order.
        judge: makes what decides on a block.
        residuals: makes a memory for a block.
        first, last: F and B.
        never: places of other blocks that always run.
        dynamic: how the threshold follows; None if it does not.

    Attributes:
        middle: the blocks that may be left out.
    """

    def __init__(
        self, slots: Sequence[Slot], judge: Callable[[], Judge], residuals: Callable[[], Residuals], first: int,
        last: int, *, never: Sequence[int] = (), dynamic: Dynamic | None = None,
    ) -> None:  # fmt: skip
        self._dynamic = dynamic
        self.middle = [k for k in range(first, max(first, len(slots) - last)) if k not in never]
        self._all = {slots[k].index: Prunable(judge(), Segment([slots[k]], residuals())) for k in self.middle}
        self._mine = self._all
        self._seen: list[list[float]] = []

    def own(self, owned: Collection[nn.Module] | None) -> None:
        """This rank runs these blocks of the chain alone; None for all."""
        self._mine = {
            k: found for k, found in self._all.items() if owned is None or found.segment.slots[0].block in owned
        }

    def begin(self, call: Call, agreement: Agreement) -> None:
        """The model is called."""
        self._call, self._agreement = call, agreement
        self._seen = [[] for _ in call.units]
        for prunable in self._mine.values():
            prunable.segment.slots[0].handle = self._prune

    def rest(self) -> None:
        """All blocks run, and nothing is remembered."""
        for prunable in self._all.values():
            prunable.segment.rest()

    def records(self) -> Iterator[tuple[int, int, int, Record]]:
        """(branch, patch, unit, record) of all that was decided on, block after block."""
        for prunable in self._all.values():
            yield from prunable.judge.records()

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(found.judge.bytes + found.segment.residuals.bytes for found in self._all.values())

    def _prune(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        judge, segment = self._mine[slot.index]
        probe = slot.read(args, kwargs).image
        skips = judge.judge(probe, self._call, self._agreement, self._thresholds(judge))
        if not all(skips):
            judge.learn(probe.clone(), self._call, skips)
        for seen, difference in zip(self._seen, judge.last_differences(self._call), strict=True):
            if difference is not None:
                seen.append(difference)
        segment.begin(self._call, skips, self._agreement)
        assert slot.handle is not None
        return slot.handle(slot, args, kwargs)

    def _thresholds(self, judge: Judge) -> list[float] | None:
        if self._dynamic is None:
            return None
        base = judge.rules.limits.threshold
        return [relaxed(base, seen, self._dynamic.ratio, self._dynamic.most) for seen in self._seen]

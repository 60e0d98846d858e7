"""The decision whether blocks are left out: for each image with all its rows of a call, and each patch of it.

What is compared is a probe, such as what the first blocks add to the tokens (arXiv 2411.19108 calls this first-block
caching): with that of the last step that was computed, never with that of one that was left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditile.departure import Departure
from ditile.seams import Agreement, Moment
from ditile.steps.difference import Difference, ratio
from ditile.steps.rules import Record, Rules, Verdict


class Unit(NamedTuple):
    """The `place`-th of `among` groups of rows of a call that are decided on together."""

    place: int
    among: int
    rows: slice


WHOLE = Unit(0, 1, slice(None))


def units_of(rows: int, images: int | None, couple: str) -> list[Unit]:
    """The units of a call: an image's rows, one in each branch of guidance; or single rows; or the batch.

    Args:
        rows: of the call. Branches of guidance come one after the other, as diffusers has them.
        images: in the batch; where they are not known, or rows do not belong to them evenly, the batch is one unit.
        couple: "row", "image" or "batch".
    """
    if couple == "row":
        return [Unit(k, rows, slice(k, k + 1)) for k in range(rows)]
    if couple == "batch" or images is None or images < 2 or rows % images:
        return [WHOLE]
    return [Unit(k, images, slice(k, None, images)) for k in range(images)]


class Key(NamedTuple):
    """Whose memory it is."""

    branch: int
    shapes: tuple[Any, ...]
    patch: int
    place: int
    among: int


class Call(NamedTuple):
    """One call of the model.

    Attributes:
        moment: where the pipeline is.
        step: steps since the blocks were first called, from 0.
        units: what is decided apart.
        rows: in the batch.
        shapes: of all that the model was given.
    """

    moment: Moment
    step: int
    units: list[Unit]
    rows: int
    shapes: tuple[Any, ...] = ()

    def cut(self, image: Tensor) -> list[tuple[int, Tensor]]:
        """Image tokens by patch: those that a later step may decide on apart."""
        patches = self.moment.patches
        if len(patches) == 1:
            return [(patches[0], image)]
        return list(zip(patches, image.split(list(self.moment.sizes()), dim=1), strict=True))

    def keys(self, patch: int, unit: Unit) -> Key:
        """Names what is remembered of a unit's patch."""
        return Key(self.moment.branch, self.shapes, patch, unit.place, unit.among)


@dataclass(slots=True)
class Cell:
    """What is remembered of one unit and patch."""

    record: Record = field(default_factory=Record)
    probe: Tensor | None = None


class Judge:
    """Decides on one set of blocks.

    Args:
        rules: when a step may be left out.
        difference: of two probes.
        dtype: in which probes are kept; None as they come.
        shares: whether the difference of the first branch of a step counts for the others too.
    """

    def __init__(
        self, rules: Rules, difference: Difference, dtype: torch.dtype | None = None, *, shares: bool = False
    ) -> None:
        self.rules, self._difference, self._dtype, self._shares = rules, difference, dtype, shares
        self._cells: dict[Key, Cell] = {}

    def judge(
        self, probe: Tensor, call: Call, agreement: Agreement, thresholds: Sequence[float] | None = None
    ) -> list[bool]:
        """Which units are left out.

        Args:
            probe: `[rows, tokens, channels]`, of this rank's tokens.
            call: the call.
            agreement: adds up differences over ranks.
            thresholds: of each unit, in place of that of the rules.
        """
        verdicts = [self._verdict(call, unit) for unit in call.units]
        differences: list[float | None] = [None] * len(verdicts)
        first = self.last_differences(call._replace(moment=call.moment._replace(branch=0))) if self._shares else []
        if Verdict.MEASURE in verdicts and call.moment.branch and None not in first and first:
            differences = [found if v is Verdict.MEASURE else None for v, found in zip(verdicts, first, strict=True)]
        elif Verdict.MEASURE in verdicts:
            rows = [
                self._sums(probe, call, unit) if verdict is Verdict.MEASURE else probe.new_zeros(2, dtype=torch.float64)
                for unit, verdict in zip(call.units, verdicts, strict=True)
            ]
            sums = agreement.add(Departure(rows[0][None] if len(rows) == 1 else torch.stack(rows)).wait()).tolist()
            measured = zip(verdicts, sums, strict=True)
            differences = [ratio(*sums) if verdict is Verdict.MEASURE else None for verdict, sums in measured]
        limits: Sequence[float | None] = thresholds or [None] * len(verdicts)
        skips = [
            verdict is Verdict.SKIP
            or (found is not None and all(self.rules.skips(found, cell.record, limit) for cell in cells))
            for verdict, found, cells, limit in zip(verdicts, differences, self._of(call), limits, strict=True)
        ]
        self.note(call, skips, differences)
        return skips

    def note(self, call: Call, skips: Sequence[bool], differences: Sequence[float | None] | None = None) -> None:
        """Writes down what was decided, here or on another stage."""
        found = differences or [None] * len(skips)
        for skipped, difference, cells in zip(skips, found, self._of(call), strict=True):
            for cell in cells:
                self.rules.note(call.step, cell.record, skipped=skipped, difference=difference)

    def learn(self, probe: Tensor, call: Call, skips: Sequence[bool]) -> None:
        """Keeps the probe of the units that are computed."""
        for patch, tokens in call.cut(probe):
            for unit, skipped in zip(call.units, skips, strict=True):
                if not skipped:
                    kept = tokens[unit.rows].clone() if unit.among > 1 else tokens
                    self._cell(call, patch, unit).probe = kept if self._dtype is None else kept.to(self._dtype)

    def last_differences(self, call: Call) -> list[float | None]:
        """What was just measured, of each unit."""
        return [cells[0].record.differences.get(call.step) for cells in self._of(call)]

    def records(self) -> Iterator[tuple[int, int, int, Record]]:
        """(branch, patch, unit, record) of everything that was decided on."""
        for key, cell in self._cells.items():
            yield key.branch, key.patch, key.place, cell.record

    @property
    def bytes(self) -> int:
        """Bytes held."""
        probes = [cell.probe for cell in self._cells.values() if cell.probe is not None]
        return sum(probe.numel() * probe.element_size() for probe in probes)

    def _verdict(self, call: Call, unit: Unit) -> Verdict:
        cells = [self._cell(call, patch, unit) for patch in call.moment.patches]
        found = {self.rules.before(call.step, cell.record) for cell in cells}
        if call.moment.must or Verdict.COMPUTE in found or any(cell.probe is None for cell in cells):
            return Verdict.COMPUTE
        return Verdict.MEASURE if Verdict.MEASURE in found else Verdict.SKIP

    def _sums(self, probe: Tensor, call: Call, unit: Unit) -> Tensor:
        sums = [self._difference.sums(self._probe(call, patch, unit), x[unit.rows]) for patch, x in call.cut(probe)]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)

    def _probe(self, call: Call, patch: int, unit: Unit) -> Tensor:
        probe = self._cell(call, patch, unit).probe
        assert probe is not None
        return probe

    def _of(self, call: Call) -> Iterator[list[Cell]]:
        for unit in call.units:
            yield [self._cell(call, patch, unit) for patch in call.moment.patches]

    def _cell(self, call: Call, patch: int, unit: Unit) -> Cell:
        key = call.keys(patch, unit)
        if key not in self._cells:
            whole = self._cells.pop(call.keys(patch, WHOLE), None) if unit.among > 1 else None
            for each in call.units:
                made = self._cells[call.keys(patch, each)] = Cell()
                if whole is not None and whole.probe is not None:  # the first step was computed as one unit
                    made.record.computed, made.probe = whole.record.computed, whole.probe[each.rows].clone()
        return self._cells[key]

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

from ditile.cache.difference import Difference, ratio
from ditile.cache.rules import Record, Rules, Verdict
from ditile.distributed.departure import Departure
from ditile.hooks.protocols import Agreement, Moment


class Unit(NamedTuple):
    """The `place`-th of `among` groups of rows of a call that are decided on together."""

    place: int
    among: int
    rows: slice

    def of(self, tokens: Tensor) -> Tensor:
        """Its rows."""
        return tokens if self.among == 1 else tokens[self.rows]


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
    kind: tuple[Any, ...]
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
        kind: shapes and modes of all that the model was given.
    """

    moment: Moment
    step: int
    units: list[Unit]
    rows: int
    kind: tuple[Any, ...] = ()

    def cut(self, image: Tensor) -> list[tuple[int, Tensor]]:
        """Image tokens by patch: those that a later step may decide on apart."""
        patches = self.moment.patches
        if len(patches) == 1:
            return [(patches[0], image)]
        return list(zip(patches, image.split(list(self.moment.sizes()), dim=1), strict=True))

    def keys(self, patch: int, unit: Unit) -> Key:
        """Names what is remembered of a unit's patch."""
        return Key(self.moment.branch, self.kind, patch, unit.place, unit.among)


@dataclass(slots=True)
class Cell:
    """What is remembered of one unit and patch.

    Attributes:
        record: what was decided.
        probe: of the last computed step.
        size: what its absolute values add up to, once that is known.
    """

    record: Record = field(default_factory=Record)
    probe: Tensor | None = None
    size: Tensor | None = None


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
        of_units = self._of(call)
        verdicts = [self._verdict(call, cells) for cells in of_units]
        differences: Sequence[float | None] = [None] * len(verdicts)
        if Verdict.MEASURE in verdicts:
            differences = self._differences(probe, call, agreement, of_units, verdicts)
        skips = []
        for k, (verdict, cells) in enumerate(zip(verdicts, of_units, strict=True)):
            skipped, found = verdict is Verdict.SKIP, differences[k]
            if found is not None:
                limit = None if thresholds is None else thresholds[k]
                skipped = all([self.rules.skips(found, cell.record, limit) for cell in cells])
            for cell in cells:
                self.rules.note(call.step, cell.record, skipped=skipped, difference=found)
            skips.append(skipped)
        return skips

    def note(self, call: Call, skips: Sequence[bool]) -> None:
        """Writes down what was decided on another stage."""
        for skipped, cells in zip(skips, self._of(call), strict=True):
            for cell in cells:
                self.rules.note(call.step, cell.record, skipped=skipped, difference=None)

    def learn(self, probe: Tensor, call: Call, skips: Sequence[bool]) -> None:
        """Keeps the probe of the units that are computed."""
        for patch, tokens in call.cut(probe):
            for unit, skipped in zip(call.units, skips, strict=True):
                if not skipped:
                    kept = tokens[unit.rows].clone() if unit.among > 1 else tokens
                    cell = self._cell(call, patch, unit)
                    cell.probe, cell.size = kept if self._dtype is None else kept.to(self._dtype), None

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

    def _verdict(self, call: Call, cells: list[Cell]) -> Verdict:
        if call.moment.must:
            return Verdict.COMPUTE
        worst = Verdict.SKIP
        for cell in cells:
            found = (
                Verdict.COMPUTE if cell.probe is None else self.rules.before(call.step, cell.record, call.moment.step)
            )
            if found is Verdict.COMPUTE:
                return found
            if found is Verdict.MEASURE:
                worst = found
        return worst

    def _differences(
        self, probe: Tensor, call: Call, agreement: Agreement, of_units: list[list[Cell]], verdicts: list[Verdict]
    ) -> list[float | None]:
        """Of the units that are to be measured."""
        if self._shares and call.moment.branch:
            first = self.last_differences(call._replace(moment=call.moment._replace(branch=0)))
            if None not in first:
                return [found if v is Verdict.MEASURE else None for v, found in zip(verdicts, first, strict=True)]
        found: list[Tensor] = []
        for unit, cells, verdict in zip(call.units, of_units, verdicts, strict=True):
            for (_, tokens), cell in zip(call.cut(probe), cells, strict=True):
                if verdict is Verdict.MEASURE and cell.probe is not None:
                    change, size = self._difference.sums(cell.probe, unit.of(tokens), cell.size)
                    cell.size = size if self._difference.important <= 0 else None
                    found += change, size
                else:
                    found += probe.new_zeros(2, dtype=self._difference.kind(probe))
        sums = torch.stack(found).view(len(verdicts), -1)
        if sums.shape[1] > 2:
            sums = sums.double().view(len(verdicts), -1, 2).sum(dim=1)
        numbers = agreement.add(Departure(sums).wait()).tolist()
        return [ratio(*n) if verdict is Verdict.MEASURE else None for verdict, n in zip(verdicts, numbers, strict=True)]

    def _of(self, call: Call) -> list[list[Cell]]:
        return [[self._cell(call, patch, unit) for patch in call.moment.patches] for unit in call.units]

    def _cell(self, call: Call, patch: int, unit: Unit) -> Cell:
        key = call.keys(patch, unit)
        found = self._cells.get(key)
        if found is None:
            whole = self._cells.pop(call.keys(patch, WHOLE), None) if unit.among > 1 else None
            for each in call.units:
                made = self._cells[call.keys(patch, each)] = Cell()
                if whole is not None and whole.probe is not None:  # the first step was computed as one unit
                    made.record.computed, made.probe = whole.record.computed, whole.probe[each.rows].clone()
            found = self._cells[key]
        return found

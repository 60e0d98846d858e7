"""What a cache did in the last generation, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ditile.steps.cached import Trace

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (0, 25, 50, 75, 95, 100)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What was decided on one image (or row, or batch), branch of guidance and patch; in DBPrune also block.

    Attributes:
        branch, patch, unit: which.
        skipped: the steps that were left out.
        differences: (step, relative difference) where one was measured.
    """

    branch: int
    patch: int
    unit: int
    skipped: list[int]
    differences: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Blocks that were decided on together.

    Attributes:
        name: the lists of blocks.
        settings: in one word, as `strify`.
        blocks: in all.
        middle: that could be left out.
        steps: of the generation.
        kept_bytes: remembered when it ended, by all contexts of the model.
        decisions: of each image, branch and patch.
        stage: of the rank that reports.
    """

    name: str
    settings: str
    blocks: int
    middle: int
    steps: int
    kept_bytes: int
    decisions: list[Decisions]
    stage: int = 0

    @classmethod
    def of(cls, trace: Trace, kept_bytes: int) -> ContextReport:
        """The report of a context."""
        decisions = [
            Decisions(branch, patch, unit, list(record.skipped), sorted(record.differences.items()))
            for branch, patch, unit, record in trace.records
        ]
        return cls(trace.name, trace.text, trace.blocks, trace.middle, trace.steps, kept_bytes, decisions)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ContextReport:
        """The inverse of `to_dict`."""
        decisions = [
            Decisions(**{**each, "differences": [(int(step), float(d)) for step, d in each["differences"]]})
            for each in values["decisions"]
        ]
        return cls(**{**values, "decisions": decisions})

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @property
    def cached_steps(self) -> list[int]:
        """The steps in which something was left out for every image, branch and patch."""
        of_each = [set(each.skipped) for each in self.decisions]
        return sorted(set.intersection(*of_each)) if of_each else []

    @property
    def differences(self) -> list[float]:
        """All that were measured, in ascending order."""
        return sorted(difference for each in self.decisions for _, difference in each.differences)

    @property
    def saved(self) -> float:
        """The share of all runs of blocks that was saved, 0 to 1."""
        if not self.decisions or not self.steps:
            return 0.0
        skipped = sum(len(each.skipped) for each in self.decisions)
        return skipped / (len(self.decisions) * self.steps) * self.middle / self.blocks


def percentile(numbers: Sequence[float], percent: float) -> float:
    """Of ascending numbers, between neighbours in proportion."""
    at = (len(numbers) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(numbers) - 1)
    return numbers[low] + (numbers[high] - numbers[low]) * (at - low)


def table(reports: Iterable[ContextReport], *, details: bool) -> Table:
    """A line for each context; with `details` one for each image, branch and patch, and percentiles of differences."""
    from rich.table import Table

    columns = ["context", "settings", "steps", "left out", "blocks saved"]
    columns += ["branch", "patch", "image"] if details else []
    columns += [f"p{percent}" for percent in PERCENTILES] if details else ["median difference"]
    made = Table(*columns, title="what the cache left out")
    for report in reports:
        head = [report.name + (f" @{report.stage}" if report.stage else ""), report.settings, str(report.steps)]
        if not details:
            found = report.differences
            median = f"{percentile(found, 50):.3f}" if found else "-"
            made.add_row(*head, _steps(report.cached_steps), f"{report.saved:.0%}", median)
            continue
        for each in report.decisions:
            found = sorted(difference for _, difference in each.differences)
            saved = len(each.skipped) / max(report.steps, 1) * report.middle / report.blocks
            place = [str(each.branch), str(each.patch), str(each.unit)]
            numbers = [f"{percentile(found, percent):.3f}" if found else "-" for percent in PERCENTILES]
            made.add_row(*head, _steps(each.skipped), f"{saved:.0%}", *place, *numbers)
            head = ["", "", ""]
    return made


def _steps(steps: Sequence[int]) -> str:
    """Steps with runs written as `4-6`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{len(steps)}: {text}" if steps else "0"

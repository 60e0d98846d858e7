"""What a cache did in the last generation, as numbers and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ditile.cache.build import CacheContext, Chain

PERCENTILES = (0, 25, 50, 75, 95, 100)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What was decided on one image (or row, or batch), branch of guidance and patch; in DBPrune also block.

    Attributes:
        branch, patch, unit: their numbers.
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
        name: the names of their lists.
        settings: in one word, as `strify` says them.
        blocks: their number.
        middle: the number of those that could be left out.
        steps: the number of steps in which they were called.
        kept_bytes: bytes that all contexts of the model remembered when the generation ended.
        decisions: one for each image, branch and patch.
        stage: the stage of the rank that reports.
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
        skipped_sets = [set(each.skipped) for each in self.decisions]
        return sorted(set.intersection(*skipped_sets)) if skipped_sets else []

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


def build_context_report(context: CacheContext, chain: Chain, steps: int, kept_bytes: int) -> ContextReport:
    """The report of a context and its chain after a generation of so many steps."""
    decisions = [
        Decisions(branch, patch, unit, list(record.skipped), sorted(record.differences.items()))
        for branch, patch, unit, record in chain.iterate_records()
    ]
    middle = len(chain.middle)
    return ContextReport(context.name, context.text, len(context.hooks), middle, steps, kept_bytes, decisions)


def merge_rank_reports(reports_by_rank: Sequence[tuple[Sequence[int], Sequence[ContextReport]]]) -> list[ContextReport]:
    """The reports of all ranks as one for each stage and context, with the decisions on all images and branches.

    Args:
        reports_by_rank: ((replica, half of guidance, stage), reports) of each rank. Ranks of one place have the same
            decisions. Halves of guidance have the same, or each has those of its branch. Replicas have other images.
    """
    context_reports = []
    for stage in sorted({place[2] for place, _ in reports_by_rank}):
        reports_by_half = {
            (place[0], place[1]): reports for place, reports in reversed(reports_by_rank) if place[2] == stage
        }
        count = max(map(len, reports_by_half.values()))
        whole = {half: reports for half, reports in sorted(reports_by_half.items()) if len(reports) == count}
        context_reports += [
            _merge_context_reports(stage, {half: reports[k] for half, reports in whole.items()}) for k in range(count)
        ]
    return context_reports


def _merge_context_reports(stage: int, reports_by_half: dict[tuple[int, int], ContextReport]) -> ContextReport:
    """One context of one stage, by replica and half of guidance."""
    decisions: list[Decisions] = []
    units = 0
    for replica in sorted({replica for replica, _ in reports_by_half}):
        halves = [report.decisions for (of, _), report in reports_by_half.items() if of == replica]
        for branch in sorted({each.branch for half in halves for each in half}):
            branch_decisions = [[each for each in half if each.branch == branch] for half in halves]
            best = max(
                branch_decisions, key=lambda each: (sum(len(d.skipped) + len(d.differences) for d in each), len(each))
            )
            decisions += [replace(each, unit=units + each.unit) for each in best]
        units = 1 + max((each.unit for each in decisions), default=units - 1)
    kept_bytes = max(report.kept_bytes for report in reports_by_half.values())
    return replace(next(iter(reports_by_half.values())), stage=stage, kept_bytes=kept_bytes, decisions=decisions)


def interpolate_percentile(numbers: Sequence[float], percent: float) -> float:
    """A percentile of ascending numbers, interpolated linearly between neighbours."""
    at = (len(numbers) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(numbers) - 1)
    return numbers[low] + (numbers[high] - numbers[low]) * (at - low)


def build_report_table(reports: Iterable[ContextReport], *, details: bool) -> Table:
    """A line for each context; with `details` one for each image, branch and patch, and percentiles of differences."""
    from rich.table import Table

    columns = ["context", "settings", "steps", "left out", "blocks saved"]
    columns += ["branch", "patch", "image"] if details else []
    columns += [f"p{percent}" for percent in PERCENTILES] if details else ["median difference"]
    report_table = Table(*columns, title="what the cache left out")
    for report in reports:
        head = [report.name + (f" @{report.stage}" if report.stage else ""), report.settings, str(report.steps)]
        if not details:
            differences = report.differences
            median = f"{interpolate_percentile(differences, 50):.3f}" if differences else "-"
            report_table.add_row(*head, format_steps(report.cached_steps), f"{report.saved:.0%}", median)
            continue
        for each in report.decisions:
            differences = sorted(difference for _, difference in each.differences)
            saved = len(each.skipped) / max(report.steps, 1) * report.middle / report.blocks
            place = [str(each.branch), str(each.patch), str(each.unit)]
            numbers = [
                f"{interpolate_percentile(differences, percent):.3f}" if differences else "-" for percent in PERCENTILES
            ]
            report_table.add_row(*head, format_steps(each.skipped), f"{saved:.0%}", *place, *numbers)
            head = ["", "", ""]
    return report_table


def format_steps(steps: Sequence[int]) -> str:
    """How many steps, and which, with runs written as `4-6`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{len(steps)}: {text}" if steps else "0"


def summarize_cache_reports(calls: Sequence[Sequence[ContextReport]]) -> list[dict[str, Any]]:
    """What caches left out in some calls: an entry for each stage and context, as JSON types.

    `cached_steps` are the steps that were left out for all images, branches and patches of a call. `blocks_saved` also
    counts blocks that were left out for some of them.
    """
    reports_by_context: dict[tuple[int, str, int], list[ContextReport]] = {}
    for reports in calls:
        places = [(report.stage, report.name) for report in reports]
        for k, report in enumerate(reports):
            reports_by_context.setdefault((*places[k], places[:k].count(places[k])), []).append(report)
    return [
        _summarize_context(stage, name, reports) for (stage, name, _), reports in sorted(reports_by_context.items())
    ]


def _summarize_context(stage: int, name: str, reports: Sequence[ContextReport]) -> dict[str, Any]:
    steps = sum(report.steps for report in reports)
    differences = [difference for report in reports for difference in report.differences]
    return {
        "stage": stage,
        "context": name,
        "settings": reports[0].settings,
        "blocks": reports[0].blocks,
        "middle": reports[0].middle,
        "steps": steps,
        "cached_steps": [report.cached_steps for report in reports],
        "blocks_saved": sum(report.saved * report.steps for report in reports) / max(steps, 1),
        "median_difference": statistics.median(differences) if differences else None,
    }

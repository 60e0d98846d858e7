"""Reports what a cache did in the last generation, as numbers and as a table."""

from __future__ import annotations

import itertools
import operator
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from ditile.plan.layout import merge_ranges
from ditile.plan.option_classes import JsonObject

if TYPE_CHECKING:
    from rich.table import Table


PERCENTILES = (0, 25, 50, 75, 95, 100)


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions on one image (or row, or batch), branch of guidance, patch and, in DBPrune, block.

    Attributes:
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
    """The report of blocks that were decided on together.

    Attributes:
        name: the names of their lists.
        settings: the settings in one word, as `strify` shows them.
        middle: the number of blocks that could be left out.
        steps: the number of steps in which they were called.
        kept_bytes: bytes that all contexts of the model remembered when the generation ended.
        decisions: one for each image, branch and patch.
        mag_ratios: the ratio of each step, if MagCache was calibrated.
    """

    name: str
    settings: str
    blocks: int
    middle: int
    steps: int
    kept_bytes: int
    decisions: list[Decisions]
    stage: int = 0
    mag_ratios: list[float] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: JsonObject) -> ContextReport:
        """Build a report from the result of `to_dict`."""
        return TypeAdapter(cls).validate_python(values)

    def to_dict(self) -> JsonObject:
        """Return the report as JSON types."""
        return asdict(self)

    @property
    def cached_steps(self) -> list[int]:
        """Return the steps in which something was left out for every image, branch and patch."""
        if not self.decisions:
            return []
        return sorted(set.intersection(*[set(decision.skipped) for decision in self.decisions]))

    @property
    def differences(self) -> list[float]:
        """Return all measured differences, in ascending order."""
        differences = []
        for decision in self.decisions:
            differences += [difference for _, difference in decision.differences]
        return sorted(differences)

    @property
    def saved(self) -> float:
        """Return the saved share of all runs of blocks, 0 to 1."""
        if not self.decisions or not self.steps:
            return 0.0
        skipped = sum(len(decision.skipped) for decision in self.decisions)
        return skipped / (len(self.decisions) * self.steps) * self.middle / self.blocks


def merge_rank_reports(reports_by_rank: Sequence[tuple[Sequence[int], Sequence[ContextReport]]]) -> list[ContextReport]:
    """Merge the reports of all ranks into one for each stage and context, with the decisions on all images and
    branches.

    Args:
        reports_by_rank: ((replica, half of guidance, stage), reports) of each rank. Ranks of one such place made the
            same decisions. Halves of guidance made the same, or each on a branch of its own. Replicas have own images.
    """
    reports_by_stage: dict[int, dict[tuple[int, int], Sequence[ContextReport]]] = {}
    # The reports are read backwards, so that the reports of a place's first rank are kept.
    for (replica, half, stage), reports in reversed(reports_by_rank):
        reports_by_stage.setdefault(stage, {})[replica, half] = reports
    context_reports: list[ContextReport] = []
    for stage, reports_by_half in sorted(reports_by_stage.items()):
        count = max(map(len, reports_by_half.values()))
        # A replica without images has no reports.
        complete = [place for place, reports in sorted(reports_by_half.items()) if len(reports) == count]
        for number in range(count):
            context = {place: reports_by_half[place][number] for place in complete}
            context_reports.append(_merge_context_reports(stage, context))
    return context_reports


def _merge_context_reports(stage: int, reports_by_half: dict[tuple[int, int], ContextReport]) -> ContextReport:
    """Merge the reports of one context in one stage. Their keys are (replica, half of guidance)."""
    # (replica, branch) -> the decisions of each half that has some on this branch.
    choices: dict[tuple[int, int], list[list[Decisions]]] = {}
    get_branch = operator.attrgetter("branch")
    for (replica, _), report in reports_by_half.items():
        for branch, decisions in itertools.groupby(sorted(report.decisions, key=get_branch), get_branch):
            choices.setdefault((replica, branch), []).append(list(decisions))
    merged: list[Decisions] = []
    first_units: dict[int, int] = {}
    for (replica, _), by_half in sorted(choices.items()):
        num_units = 1 + max((decision.unit for decision in merged), default=-1)
        first_unit = first_units.setdefault(replica, num_units)

        def count_known(decisions: Sequence[Decisions]) -> tuple[int, int]:
            known = sum(len(decision.skipped) + len(decision.differences) for decision in decisions)
            return known, len(decisions)

        # The half that computed a branch knows most of its decisions.
        for decision in max(by_half, key=count_known):
            merged.append(replace(decision, unit=first_unit + decision.unit))
    kept_bytes = max(report.kept_bytes for report in reports_by_half.values())
    first = next(iter(reports_by_half.values()))
    return replace(first, stage=stage, kept_bytes=kept_bytes, decisions=merged)


def build_report_parts(reports: Iterable[ContextReport], *, details: bool) -> list[Table | str]:
    """Build a table of 80 columns with a row for each context, and below it lines that name the rows. With `details`
    it has a row for each image, branch and patch, and percentiles of differences."""
    import numpy as np
    from rich.table import Table

    percentiles: tuple[int, ...] = (50,)
    if details:
        percentiles = PERCENTILES
    table = Table("", "left out", "saved", *(f"p{percent}" for percent in percentiles), title="what the cache left out")
    lines: list[str] = []
    for report in reports:
        name = report.name
        if report.stage:
            name += f" @{report.stage}"
        name += f", {report.settings}, {report.steps} steps"
        rows = [(name, report.cached_steps, report.saved, report.differences)]
        if details:
            rows = []
            for decision in report.decisions:
                label = f"{name}, branch {decision.branch}, patch {decision.patch}, image {decision.unit}"
                share = len(decision.skipped) / max(report.steps, 1) * report.middle / report.blocks
                rows.append((label, decision.skipped, share, [difference for _, difference in decision.differences]))
        for label, skipped, saved, differences in rows:
            number = table.row_count + 1
            numbers = ["-"] * len(percentiles)
            if differences:
                numbers = [f"{value:.3f}" for value in np.percentile(differences, percentiles)]
            table.add_row(str(number), str(len(skipped)), f"{saved:.0%}", *numbers)
            lines.append(f"{number:>2}  {label}: {format_steps(skipped)}")
        # Users copy a measured table of ratios from here.
        if report.mag_ratios:
            lines.append("ratios=" + ",".join(f"{ratio:.5f}" for ratio in report.mag_ratios))
    return [table, *lines, "saved: share of the work of blocks; p50: median of the measured differences"]


def format_steps(steps: Sequence[int]) -> str:
    """Format the number of steps, and the steps, with runs written like `4-6`."""
    if not steps:
        return "0"
    words = []
    for run in merge_ranges(range(step, step + 1) for step in steps):
        word = str(run.start)
        if len(run) > 1:
            word += f"-{run.stop - 1}"
        words.append(word)
    return f"{len(steps)}: {','.join(words)}"


def summarize_cache_reports(calls: Sequence[Sequence[ContextReport]]) -> list[JsonObject]:
    """Summarize what caches left out in some calls, with an entry for each stage and context, as JSON types.

    `cached_steps` are the steps that were left out for all images, branches and patches of a call. `blocks_saved` also
    counts blocks that were left out for some of them.
    """
    reports_by_context: dict[tuple[int, str, int], list[ContextReport]] = {}
    for reports_of_call in calls:
        # Two models of a pipeline may have lists of the same names.
        counts: Counter[tuple[int, str]] = Counter()
        for report in reports_of_call:
            place = (report.stage, report.name)
            reports_by_context.setdefault((*place, counts[place]), []).append(report)
            counts[place] += 1
    summaries: list[JsonObject] = []
    for _, reports in sorted(reports_by_context.items()):
        first = reports[0]
        steps = sum(report.steps for report in reports)
        differences = list(itertools.chain.from_iterable(report.differences for report in reports))
        median = None
        if differences:
            median = statistics.median(differences)
        summary: JsonObject = {
            "stage": first.stage,
            "context": first.name,
            "settings": first.settings,
            "blocks": first.blocks,
            "middle": first.middle,
            "steps": steps,
            "cached_steps": [report.cached_steps for report in reports],
            "blocks_saved": sum(report.saved * report.steps for report in reports) / max(steps, 1),
            "median_difference": median,
        }
        # Only reports of a calibrated MagCache have ratios.
        if first.mag_ratios:
            summary["mag_ratios"] = first.mag_ratios
        summaries.append(summary)
    return summaries

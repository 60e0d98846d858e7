"""What came out of a run: files, what every rank reports, and what caches left out; of one call, or of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditile.cache.report import ContextReport

NUM_PERF_CALLS = 3
"""Calls of --perf that are measured, after one that is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of a run: the files, and every rank's report in rank order.

    Attributes:
        images: all pictures, those that were there before included.
        skipped: how many were there before.
        reports: of all calls together; empty if there was none to make.
        settings: of what was left out or changed; empty for a plain run.
        left_out: see `left_out`.
        totals: seconds of each call that --perf measured.
        tracks_memory: whether to say what was held.
    """

    plan: str
    model: str
    seed: int
    images: list[str]
    reports: list[dict[str, Any]]
    skipped: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    tracks_memory: bool = False


def sum_reports(reports: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The reports of several calls as one, for each rank."""
    rank_reports = []
    for of_rank in zip(*reports, strict=True):
        whole = dict(of_rank[-1])
        whole["seconds"] = {name: sum(r["seconds"][name] for r in of_rank) for name in whole["seconds"]}
        for name in ("steps", "bytes_sent"):
            whole[name] = sum(r[name] for r in of_rank)
        whole["synchronous"] = [step for r in of_rank for step in r["synchronous"]]
        for name in ("peak_memory_bytes", "key_bytes", "cache_bytes"):
            whole[name] = max(r[name] for r in of_rank)
        rank_reports.append(whole)
    return rank_reports


def compute_median_reports(reports: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The last of several equal calls, with the medians of their seconds, for each rank."""
    rank_reports = []
    for of_rank in zip(*reports, strict=True):
        names = of_rank[-1]["seconds"]
        rank_reports.append(
            of_rank[-1] | {"seconds": {name: statistics.median(r["seconds"][name] for r in of_rank) for name in names}}
        )
    return rank_reports


def summarize_cache_reports(calls: Sequence[Sequence[ContextReport]]) -> list[dict[str, Any]]:
    """What caches left out in some calls: an entry for each stage and context, as JSON types.

    Steps that are named are those that were left out for all images, branches and patches of a call; the share counts
    all that was.
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

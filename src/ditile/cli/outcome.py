"""The results of commands, an `Outcome` or a `PlanVerdict`, as tables for people and as JSON for programs.

Nothing here imports torch, because a process that only starts ranks shows the results that they return.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditile.cache.report import format_steps
from ditile.plan.units import format_bytes

NUM_PERF_CALLS = 3
"""Calls of --perf that are measured, after one that is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a run of `ditile generate`: the files, and every rank's report in rank order.

    Attributes:
        images: the files of all pictures or videos, those that were there before included.
        has_videos: whether they are videos, which have posters beside them.
        skipped: how many of them were there before.
        reports: one for each rank, over all calls; empty if there was no call.
        settings: settings of cache, quantization and LoRA; empty for a plain run.
        left_out: what caches left out; see `summarize_cache_reports`.
        totals: seconds of each call that --perf measured.
        tracks_memory: whether to show the memory of stale keys and caches.
    """

    plan: str
    model: str
    seed: int
    images: list[str]
    reports: list[dict[str, Any]]
    has_videos: bool = False
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
        for name in ("synchronous", "reference_steps"):
            whole[name] = [step for r in of_rank for step in r[name]]
        for name in ("peak_memory_bytes", "key_bytes", "cache_bytes"):
            whole[name] = max(r[name] for r in of_rank)
        rank_reports.append(whole)
    return rank_reports


def compute_median_reports(reports: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The report of the last of several equal calls, with the medians of their seconds, for each rank."""
    rank_reports = []
    for of_rank in zip(*reports, strict=True):
        names = of_rank[-1]["seconds"]
        rank_reports.append(
            of_rank[-1] | {"seconds": {name: statistics.median(r["seconds"][name] for r in of_rank) for name in names}}
        )
    return rank_reports


SECONDS = ("total", "text", "denoise", "decode")
MAX_ITEMS_SHOWN = 4
"""Files that are named one by one."""


def summarize_outcome(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON types; seconds are those of rank 0, and lists are in the order of the ranks."""
    nothing: dict[str, Any] = {
        "steps": 0,
        "synchronous": [],
        "warmup_mode": "serial",
        "seconds": dict.fromkeys(SECONDS, 0.0),
    }
    first = outcome.reports[0] if outcome.reports else nothing
    return {
        "plan": outcome.plan,
        "model": outcome.model,
        "seed": outcome.seed,
        "steps": first["steps"],
        "synchronous_steps": len(first["synchronous"]),
        "warmup_mode": first["warmup_mode"],
        "ranks": len(outcome.reports),
        **_name_files(outcome),
        "skipped": outcome.skipped,
        "seconds": {name: first["seconds"][name] for name in SECONDS},
        "peak_memory_bytes": [report["peak_memory_bytes"] for report in outcome.reports],
        "bytes_sent": [report["bytes_sent"] for report in outcome.reports],
    } | _summarize_optional_facts(outcome)


def _name_files(outcome: Outcome) -> dict[str, list[str]]:
    """The files of pictures; of videos the posters, and the videos themselves."""
    if not outcome.has_videos:
        return {"images": outcome.images}
    posters = [str(Path(name).with_suffix(".png")) for name in outcome.images]
    return {"images": posters, "videos": outcome.images}


def _summarize_optional_facts(outcome: Outcome) -> dict[str, Any]:
    """The entries of the summary that only some runs have."""
    facts: dict[str, Any] = {}
    if outcome.settings:
        facts["settings"] = outcome.settings
    if "cache_config" in outcome.settings:
        facts["cache"] = {"blocks_saved": _compute_saved_share(outcome.left_out), "contexts": outcome.left_out}
    if outcome.reports and (tokens := outcome.reports[0]["reference_tokens"]):
        facts["references"] = {"tokens": tokens, "computed_steps": len(outcome.reports[0]["reference_steps"])}
    if outcome.tracks_memory:
        for name in ("key_bytes", "cache_bytes"):
            facts[name] = [report[name] for report in outcome.reports]
    if outcome.totals:
        facts["measured_seconds"] = outcome.totals
    return facts


def _compute_saved_share(entries: list[dict[str, Any]]) -> float:
    """The share of all runs of blocks that caches saved."""
    runs: list[int] = [entry["blocks"] * entry["steps"] for entry in entries]
    saved: list[float] = [entry["blocks_saved"] for entry in entries]
    return sum(share * count for share, count in zip(saved, runs, strict=True)) / max(sum(runs), 1)


def list_outcome_lines(outcome: Outcome) -> Iterator[str]:
    """The outcome for people: lines that begin with what they are about."""
    facts = summarize_outcome(outcome)
    seconds, steps, synchronous = facts["seconds"], facts["steps"], facts["synchronous_steps"]
    exact = f", {synchronous} of them synchronous" if synchronous < steps else ""
    exact += f" (warmup_mode={facts['warmup_mode']})" if facts["warmup_mode"] != "serial" else ""
    parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("text", "denoise", "decode"))
    for name, text in (
        ("videos" if "videos" in facts else "images", _format_image_names(outcome)),
        ("model", outcome.model),
        ("seed", str(outcome.seed)),
        ("plan", outcome.plan),
        ("seconds", f"{seconds['total']:.2f}  ({parts})"),
        *_list_perf_rows(outcome),
        ("per step", f"{seconds['denoise'] / max(1, steps):.3f} s over {steps} steps{exact}"),
        *_list_reference_rows(facts),
        *_list_cache_rows(outcome),
        ("peak memory", _format_per_rank(facts["peak_memory_bytes"])),
        *_list_memory_rows(facts),
        ("bytes sent", _format_per_rank(facts["bytes_sent"])),
    ):
        yield f"{name:<15}{text}"


def _list_perf_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    if outcome.totals:
        each = ", ".join(f"{total:.2f}" for total in outcome.totals[:MAX_ITEMS_SHOWN])
        more = f" .. ({len(outcome.totals)})" if len(outcome.totals) > MAX_ITEMS_SHOWN else ""
        yield "measured", f"medians of {NUM_PERF_CALLS} runs after one that is not counted: {each}{more}"


def _list_reference_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if references := facts.get("references"):
        steps = f"computed in {references['computed_steps']} of {facts['steps']} steps"
        yield "references", f"{references['tokens']} tokens, {steps}"


def _list_cache_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Rows for quantization, LoRA and cache, with what the cache saved."""
    settings, entries = outcome.settings, outcome.left_out
    if "quantize_config" in settings:
        yield "weights", str(settings["quantize_config"].get("quant_type", "quantized by component"))
    if "lora" in settings:
        yield "LoRA", settings["lora"] + (" (fused)" if settings["fuse_lora"] else "")
    if "cache_config" not in settings or not outcome.reports:
        return
    if not entries:
        yield "cache", "nothing was left out: these settings compute every step"
        return
    words = ", ".join(dict.fromkeys(entry["settings"] for entry in entries))
    yield "cache", f"{words}: {_compute_saved_share(entries):.0%} of blocks saved"
    stages = len({entry["stage"] for entry in entries}) > 1
    for entry in entries:
        place = f"stage {entry['stage']}, " if stages else ""
        calls = entry["cached_steps"]
        shown = f" ({format_steps(calls[0]).partition(': ')[2]})" if len(calls) == 1 and calls[0] else ""
        cached = f"{sum(map(len, calls))} of {entry['steps']} steps cached whole{shown}"
        yield "", f"{place}{entry['context']}: {cached}, {entry['blocks_saved']:.0%} of blocks saved"


def _list_memory_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, name in (("key_bytes", "stale keys"), ("cache_bytes", "held by caches")):
        if key in facts:
            yield name, _format_per_rank(facts[key])


def _format_image_names(outcome: Outcome) -> str:
    """The names of all files if they are few, else the first and the last."""
    files = outcome.images
    text = " ".join(files) if len(files) <= MAX_ITEMS_SHOWN else f"{files[0]} .. {files[-1]} ({len(files)})"
    return text + (f", {outcome.skipped} of them there before" if outcome.skipped else "")


def _format_per_rank(counts: list[int]) -> str:
    return ", ".join(f"rank {rank}: {format_bytes(count)}" for rank, count in enumerate(counts))

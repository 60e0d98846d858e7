"""The results of commands, an `Outcome` or a `PlanVerdict`, as tables for people and as JSON for programs.

Nothing here imports torch, because a process that only starts ranks shows the results that they return.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditile.cache.report import format_steps
from ditile.model.recording.recorded_calls import format_recorded_calls, sum_recorded_calls
from ditile.plan.numbers import format_bytes
from ditile.plan.option_classes import JsonObject

NUM_PERF_CALLS = 3
"""Calls of --perf that are measured, after one that is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a run of `ditile generate`: the files, and every rank's report in rank order.

    Attributes:
        images: the files of all images or videos, including those that were there before.
        has_videos: whether they are videos, which have posters.
        skipped: the number of files that were there before.
        reports: one for each rank, over all calls; empty if there was no call.
        settings: the settings of cache, quantization and LoRA; empty for a plain run.
        left_out: the work that caches skipped; see `summarize_cache_reports`.
        totals: seconds of each call that --perf measured.
        tracks_memory: whether to show the memory of stale keys and caches.
        promise: the promise of bounds; empty without bounds.
        components: component -> the file with its weights; the model's own are left out.
    """

    plan: str
    model: str
    seed: int
    images: list[str]
    reports: list[JsonObject]
    has_videos: bool = False
    skipped: int = 0
    settings: JsonObject = field(default_factory=dict)
    left_out: list[JsonObject] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    tracks_memory: bool = False
    promise: JsonObject = field(default_factory=dict)
    components: dict[str, str] = field(default_factory=dict)


def sum_reports(reports: Sequence[list[JsonObject]]) -> list[JsonObject]:
    """Sum the reports of several calls for each rank."""
    rank_reports = []
    for calls in zip(*reports, strict=True):
        # Values that cannot be added, such as the warmup mode, are from the last call.
        total = dict(calls[-1])
        total["seconds"] = {}
        for name in calls[-1]["seconds"]:
            total["seconds"][name] = sum(call["seconds"][name] for call in calls)
        for name in ("steps", "bytes_sent"):
            total[name] = sum(call[name] for call in calls)
        for name in ("synchronous", "reference_steps"):
            total[name] = list(itertools.chain.from_iterable(call[name] for call in calls))
        for name in ("peak_memory_bytes", "key_bytes", "cache_bytes"):
            total[name] = max(call[name] for call in calls)
        if total["recorded"] is not None:
            total["recorded"] = sum_recorded_calls([call["recorded"] for call in calls])
        rank_reports.append(total)
    return rank_reports


def compute_median_reports(reports: Sequence[list[JsonObject]]) -> list[JsonObject]:
    """Return the report of the last of several equal calls for each rank, with the medians of their seconds."""
    rank_reports = []
    for calls in zip(*reports, strict=True):
        seconds = {}
        for name in calls[-1]["seconds"]:
            seconds[name] = statistics.median(call["seconds"][name] for call in calls)
        rank_reports.append(calls[-1] | {"seconds": seconds})
    return rank_reports


SECONDS = ("total", "text", "denoise", "decode")
MAX_ITEMS_SHOWN = 4
"""Files that are named one by one."""
_NO_REPORT: Mapping[str, Any] = {
    "steps": 0,
    "synchronous": [],
    "warmup_mode": "serial",
    "seconds": dict.fromkeys(SECONDS, 0.0),
}
"""The report of a run without a call: all images were there."""


def summarize_outcome(outcome: Outcome) -> JsonObject:
    """Return the outcome as JSON types. Seconds are from rank 0, and lists are in the order of the ranks."""
    first = outcome.reports[0] if outcome.reports else _NO_REPORT
    summary = {
        "plan": outcome.plan,
        "model": outcome.model,
        "seed": outcome.seed,
        "steps": first["steps"],
        "synchronous_steps": len(first["synchronous"]),
        "warmup_mode": first["warmup_mode"],
        "ranks": len(outcome.reports),
        "images": outcome.images,
    }
    if outcome.has_videos:
        # For videos the summary lists the posters as images.
        summary["images"] = [str(Path(name).with_suffix(".png")) for name in outcome.images]
        summary["videos"] = outcome.images
    summary["skipped"] = outcome.skipped
    summary["seconds"] = {name: first["seconds"][name] for name in SECONDS}
    for name in ("peak_memory_bytes", "bytes_sent"):
        summary[name] = [report[name] for report in outcome.reports]
    return summary | _summarize_optional_facts(outcome)


def _summarize_optional_facts(outcome: Outcome) -> JsonObject:
    """Return the entries of the summary that only some runs have."""
    facts: JsonObject = {}
    if outcome.components:
        facts["components"] = outcome.components
    if outcome.promise:
        facts["promise"] = outcome.promise
    if outcome.settings:
        facts["settings"] = outcome.settings
    if "cache_config" in outcome.settings:
        facts["cache"] = {"blocks_saved": _compute_saved_share(outcome.left_out), "contexts": outcome.left_out}
    if outcome.reports and outcome.reports[0]["reference_tokens"]:
        first = outcome.reports[0]
        facts["references"] = {"tokens": first["reference_tokens"], "computed_steps": len(first["reference_steps"])}
    if outcome.reports and outcome.reports[0]["recorded"] is not None:
        facts["recorded"] = [report["recorded"] for report in outcome.reports]
    if outcome.tracks_memory:
        for name in ("key_bytes", "cache_bytes"):
            facts[name] = [report[name] for report in outcome.reports]
    if outcome.totals:
        facts["measured_seconds"] = outcome.totals
    return facts


def _compute_saved_share(entries: list[JsonObject]) -> float:
    """Return the share of block runs that caches saved."""
    # Each entry counts by its blocks and steps.
    runs = 0
    saved = 0.0
    for entry in entries:
        runs += entry["blocks"] * entry["steps"]
        saved += entry["blocks_saved"] * entry["blocks"] * entry["steps"]
    return saved / max(runs, 1)


def list_outcome_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of the outcome for people, each with its subject first."""
    for name, text in _list_rows(outcome):
        yield f"{name:<15}{text}"


def _list_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    facts = summarize_outcome(outcome)
    kind = "videos" if outcome.has_videos else "images"
    yield kind, _format_image_names(outcome)
    yield "model", outcome.model
    yield from outcome.components.items()
    yield "seed", str(outcome.seed)
    yield "plan", outcome.plan
    # If all images were there before, nothing was measured.
    if outcome.reports:
        yield from _list_time_rows(outcome, facts)
    if outcome.promise:
        yield "promised", _format_promise(outcome.promise)
    yield from _list_cache_rows(outcome)
    if "recorded" in facts:
        yield "recorded steps", format_recorded_calls(facts["recorded"])
    if outcome.reports:
        yield "peak memory", _format_per_rank(facts["peak_memory_bytes"])
        for key, name in (("key_bytes", "stale keys"), ("cache_bytes", "held by caches")):
            if key in facts:
                yield name, _format_per_rank(facts[key])
        if "recorded" in facts and any(recorded["tape_bytes"] for recorded in facts["recorded"]):
            yield "held by tapes", _format_per_rank([recorded["tape_bytes"] for recorded in facts["recorded"]])
        yield "bytes sent", _format_per_rank(facts["bytes_sent"])


def _format_promise(promise: JsonObject) -> str:
    """Format the values promised under bounds, in the order of the results above them."""
    parts = []
    if promise["seconds"] is not None:
        parts.append(f"{promise['seconds']:.2f} s an image")
    parts.append(f"{promise['computed_steps']} of {promise['steps']} steps")
    if promise["mean_psnr"] is not None:
        parts.append(f"{promise['mean_psnr']:.1f} dB on average, {promise['worst_psnr']:.1f} at worst")
    return ", ".join(parts)


def _list_time_rows(outcome: Outcome, facts: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield rows for the times of the calls, and their steps."""
    seconds = facts["seconds"]
    steps = facts["steps"]
    parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("text", "denoise", "decode"))
    yield "seconds", f"{seconds['total']:.2f}  ({parts})"
    if outcome.totals:
        totals = ", ".join(f"{total:.2f}" for total in outcome.totals[:MAX_ITEMS_SHOWN])
        if len(outcome.totals) > MAX_ITEMS_SHOWN:
            totals += f" .. ({len(outcome.totals)})"
        yield "measured", f"medians of {NUM_PERF_CALLS} runs after one that is not counted: {totals}"
    text = f"{seconds['denoise'] / max(1, steps):.3f} s over {steps} steps"
    if facts["synchronous_steps"] < steps:
        kind = "synchronous" if facts["ranks"] > 1 else "computed"
        text += f", {facts['synchronous_steps']} of them {kind}"
    if facts["warmup_mode"] != "serial":
        text += f" (warmup_mode={facts['warmup_mode']})"
    yield "per step", text
    if "references" in facts:
        references = facts["references"]
        computed = f"computed in {references['computed_steps']} of {steps} steps"
        yield "references", f"{references['tokens']} tokens, {computed}"


def _list_cache_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield rows for quantization, LoRA and cache, with the savings of the cache."""
    settings = outcome.settings
    entries = outcome.left_out
    if "quantize_config" in settings:
        yield "weights", str(settings["quantize_config"].get("quant_type", "quantized by component"))
    if "lora" in settings:
        fused = " (fused)" if settings["fuse_lora"] else ""
        yield "LoRA", settings["lora"] + fused
    if "cache_config" not in settings or not outcome.reports:
        return
    if not entries:
        yield "cache", "nothing was left out: these settings compute every step"
        return
    words = ", ".join(dict.fromkeys(entry["settings"] for entry in entries))
    yield "cache", f"{words}: {_compute_saved_share(entries):.0%} of blocks saved"
    has_stages = len({entry["stage"] for entry in entries}) > 1
    for entry in entries:
        calls = entry["cached_steps"]
        text = f"{entry['context']}: {sum(map(len, calls))} of {entry['steps']} steps cached whole"
        if has_stages:
            text = f"stage {entry['stage']}, {text}"
        if len(calls) == 1 and calls[0]:
            text += f" ({format_steps(calls[0]).partition(': ')[2]})"
        yield "", f"{text}, {entry['blocks_saved']:.0%} of blocks saved"


def _format_image_names(outcome: Outcome) -> str:
    """Format the names of all files if they are few, otherwise of the first and the last."""
    names = outcome.images
    text = " ".join(names)
    if len(names) > MAX_ITEMS_SHOWN:
        text = f"{names[0]} .. {names[-1]} ({len(names)})"
    if outcome.skipped:
        text += f", {outcome.skipped} of them there before"
    return text


def _format_per_rank(counts: list[int]) -> str:
    return ", ".join(f"rank {rank}: {format_bytes(count)}" for rank, count in enumerate(counts))

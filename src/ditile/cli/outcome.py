"""The result of `ditile generate`, as JSON for programs and as lines for people.

Nothing here imports torch, because a process that only starts ranks shows the results that they return.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ditile.cache.report import ContextReport, format_steps, summarize_cache_reports
from ditile.model.recording.recorded_calls import format_recorded_calls, sum_recorded_calls
from ditile.plan.numbers import format_bytes
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import OutputKind
from ditile.runner.requests.prompts import PromptLine

NUM_PERF_CALLS = 3
"""Measured calls of --perf, after a first call that is not measured."""


class RunnerCallResult(NamedTuple):
    """Results of a runner's call: reports of all ranks, reports of caches, and the seconds of --perf."""

    reports: list[JsonObject]
    saved: list[ContextReport]
    totals: list[float]


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
    """Return each rank's report of the last call, with the medians of the seconds of all calls."""
    rank_reports = []
    for calls in zip(*reports, strict=True):
        seconds = {}
        for name in calls[-1]["seconds"]:
            seconds[name] = statistics.median(call["seconds"][name] for call in calls)
        rank_reports.append(calls[-1] | {"seconds": seconds})
    return rank_reports


SECONDS = ("total", "text", "denoise", "decode")
MAX_ITEMS_SHOWN = 4
"""How many files, or seconds of --perf calls, are listed one by one."""
_NO_REPORT: JsonObject = {
    "steps": 0,
    "synchronous": [],
    "warmup_mode": "serial",
    "seconds": dict.fromkeys(SECONDS, 0.0),
}
"""The report of a run without a call: all images were there."""


def summarize_outcome(
    request: GenerateOptions,
    plan: Plan,
    cache: CacheOptions,
    lines: Sequence[PromptLine],
    call_results: Sequence[RunnerCallResult] = (),
    *,
    kind: OutputKind = "image",
    skipped: int = 0,
    promise: JsonObject | None = None,
) -> JsonObject:
    """Summarize a run of `ditile generate` in JSON types. Seconds are from rank 0, and lists in the order of the ranks.

    Args:
        lines: all images, videos or sounds, including those that were there before.
        call_results: the results of all calls; empty without calls.
        kind: what was generated; videos have posters.
        skipped: the number of files that were there before.
    """
    reports = sum_reports([call_result.reports for call_result in call_results])
    first_report = reports[0] if reports else _NO_REPORT
    images = [line.path for line in lines]
    settings = cache.describe_settings()
    summary: JsonObject = {
        "plan": str(plan),
        "model": request.model,
        "seed": lines[0].seed,
        "steps": first_report["steps"],
        "synchronous_steps": len(first_report["synchronous"]),
        "warmup_mode": first_report["warmup_mode"],
        "ranks": len(reports),
        "images": images,
    }
    if kind != "image":
        # For videos the summary lists the posters as images.
        summary["images"] = [str(Path(name).with_suffix(".png")) for name in images if kind == "video"]
        summary[f"{kind}s"] = images
    summary["skipped"] = skipped
    summary["seconds"] = {name: first_report["seconds"][name] for name in SECONDS}
    names = ["peak_memory_bytes", "bytes_sent"]
    if first_report.get("recorded") is not None:
        names.append("recorded")
    if cache.track_memory:
        names += ["key_bytes", "cache_bytes"]
    for name in names:
        summary[name] = [report[name] for report in reports]
    totals = list(itertools.chain.from_iterable(call_result.totals for call_result in call_results))
    optional = {"components": request.components, "promise": promise, "settings": settings, "measured_seconds": totals}
    for name, value in optional.items():
        if value:
            summary[name] = value
    if "cache_config" in settings:
        left_out = summarize_cache_reports([call_result.saved for call_result in call_results])
        summary["cache"] = {"blocks_saved": _compute_saved_share(left_out), "contexts": left_out}
    if first_report.get("reference_tokens"):
        computed = len(first_report["reference_steps"])
        summary["references"] = {"tokens": first_report["reference_tokens"], "computed_steps": computed}
    return summary


def _compute_saved_share(entries: Sequence[JsonObject]) -> float:
    """Return the share of block runs that caches saved."""
    # Each entry is weighted by its blocks and steps. Without entries nothing was saved.
    runs = 0
    saved = 0.0
    for entry in entries:
        runs += entry["blocks"] * entry["steps"]
        saved += entry["blocks_saved"] * entry["blocks"] * entry["steps"]
    return saved / max(runs, 1)


def list_outcome_lines(summary: JsonObject) -> Iterator[str]:
    """Yield the lines of a summary for people, each with its subject first."""
    for name, text in _list_rows(summary):
        yield f"{name:<15}{text}"


def _list_rows(facts: JsonObject) -> Iterator[tuple[str, str]]:
    kind = next(name for name in ("videos", "sounds", "images") if name in facts)
    names = facts[kind]
    text = " ".join(names)
    if len(names) > MAX_ITEMS_SHOWN:
        text = f"{names[0]} .. {names[-1]} ({len(names)})"
    if facts["skipped"]:
        text += f", {facts['skipped']} of them there before"
    yield kind, text
    yield "model", facts["model"]
    yield from facts.get("components", {}).items()
    yield "seed", str(facts["seed"])
    yield "plan", facts["plan"]
    # If all images were there before, nothing was measured.
    if facts["ranks"]:
        yield from _list_time_rows(facts)
    if "promise" in facts:
        promise = facts["promise"]
        parts = [f"{promise['computed_steps']} of {promise['steps']} steps"]
        if promise["seconds"] is not None:
            parts.insert(0, f"{promise['seconds']:.2f} s an image")
        if promise["mean_psnr"] is not None:
            parts.append(f"{promise['mean_psnr']:.1f} dB on average ({promise['worst_psnr']:.1f} or more when fitted)")
        yield "promised", ", ".join(parts)
    yield from _list_cache_rows(facts)
    if "recorded" in facts:
        yield "recorded steps", format_recorded_calls(facts["recorded"])
    if facts["ranks"]:
        yield "peak memory", _format_per_rank(facts["peak_memory_bytes"])
        for key, name in (("key_bytes", "stale keys"), ("cache_bytes", "held by caches")):
            if key in facts:
                yield name, _format_per_rank(facts[key])
        if "recorded" in facts and any(recorded["tape_bytes"] for recorded in facts["recorded"]):
            yield "held by tapes", _format_per_rank([recorded["tape_bytes"] for recorded in facts["recorded"]])
        yield "bytes sent", _format_per_rank(facts["bytes_sent"])


def _list_time_rows(facts: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield rows for the times of the calls, and their steps."""
    seconds = facts["seconds"]
    steps = facts["steps"]
    parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("text", "denoise", "decode"))
    yield "seconds", f"{seconds['total']:.2f}  ({parts})"
    measured = facts.get("measured_seconds")
    if measured:
        totals = ", ".join(f"{total:.2f}" for total in measured[:MAX_ITEMS_SHOWN])
        if len(measured) > MAX_ITEMS_SHOWN:
            totals += f" .. ({len(measured)})"
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


def _list_cache_rows(facts: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield rows for quantization, LoRA and cache, with the savings of the cache."""
    settings = facts.get("settings", {})
    if "quantize_config" in settings:
        yield "weights", str(settings["quantize_config"].get("quant_type", "quantized by component"))
    if "lora" in settings:
        fused = " (fused)" if settings["fuse_lora"] else ""
        yield "LoRA", settings["lora"] + fused
    if "cache" not in facts or not facts["ranks"]:
        return
    entries = facts["cache"]["contexts"]
    if not entries:
        yield "cache", "nothing was left out: these settings compute every step"
        return
    words = ", ".join(dict.fromkeys(entry["settings"] for entry in entries))
    yield "cache", f"{words}: {facts['cache']['blocks_saved']:.0%} of blocks saved"
    has_stages = len({entry["stage"] for entry in entries}) > 1
    for entry in entries:
        steps_by_call = entry["cached_steps"]
        text = f"{entry['context']}: {sum(map(len, steps_by_call))} of {entry['steps']} steps cached whole"
        if has_stages:
            text = f"stage {entry['stage']}, {text}"
        if len(steps_by_call) == 1 and steps_by_call[0]:
            text += f" ({format_steps(steps_by_call[0]).partition(': ')[2]})"
        yield "", f"{text}, {entry['blocks_saved']:.0%} of blocks saved"


def _format_per_rank(counts: list[int]) -> str:
    return ", ".join(f"rank {rank}: {format_bytes(count)}" for rank, count in enumerate(counts))

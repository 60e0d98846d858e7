"""What a run has to say when it is over: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ditile.cache.report import format_steps
from ditile.cli.outcome import NUM_PERF_CALLS
from ditile.plan.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from ditile.cli.outcome import Outcome

SECONDS = ("total", "text", "denoise", "decode")
MAX_ITEMS_SHOWN = 4
"""Files that are named one by one."""


def summarize_outcome(outcome: Outcome) -> dict[str, Any]:
    """The summary as JSON types; seconds are those of rank 0, lists are in the order of the ranks."""
    nothing: dict[str, Any] = {"steps": 0, "synchronous": [], "seconds": dict.fromkeys(SECONDS, 0.0)}
    first = outcome.reports[0] if outcome.reports else nothing
    return {
        "plan": outcome.plan,
        "model": outcome.model,
        "seed": outcome.seed,
        "steps": first["steps"],
        "synchronous_steps": len(first["synchronous"]),
        "ranks": len(outcome.reports),
        "images": outcome.images,
        "skipped": outcome.skipped,
        "seconds": {name: first["seconds"][name] for name in SECONDS},
        "peak_memory_bytes": [report["peak_memory_bytes"] for report in outcome.reports],
        "bytes_sent": [report["bytes_sent"] for report in outcome.reports],
    } | _summarize_optional_facts(outcome)


def _summarize_optional_facts(outcome: Outcome) -> dict[str, Any]:
    """What only some runs have to say."""
    facts: dict[str, Any] = {}
    if outcome.settings:
        facts["settings"] = outcome.settings
    if "cache_config" in outcome.settings:
        facts["cache"] = {"blocks_saved": _compute_saved_share(outcome.left_out), "contexts": outcome.left_out}
    if outcome.tracks_memory:
        for name in ("key_bytes", "cache_bytes"):
            facts[name] = [report[name] for report in outcome.reports]
    if outcome.totals:
        facts["measured_seconds"] = outcome.totals
    return facts


def _compute_saved_share(entries: list[dict[str, Any]]) -> float:
    """The share of all runs of blocks."""
    runs: list[int] = [entry["blocks"] * entry["steps"] for entry in entries]
    saved: list[float] = [entry["blocks_saved"] for entry in entries]
    return sum(share * count for share, count in zip(saved, runs, strict=True)) / max(sum(runs), 1)


def build_outcome_table(outcome: Outcome) -> Table:
    """The same as a table."""
    from rich.table import Table

    facts = summarize_outcome(outcome)
    seconds, steps, synchronous = facts["seconds"], facts["steps"], facts["synchronous_steps"]
    exact = f", {synchronous} of them synchronous" if synchronous < steps else ""
    parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("text", "denoise", "decode"))
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in (
        ("images", _format_image_names(outcome)),
        ("model", outcome.model),
        ("seed", str(outcome.seed)),
        ("plan", outcome.plan),
        ("seconds", f"{seconds['total']:.2f}  ({parts})"),
        *_list_perf_rows(outcome),
        ("per step", f"{seconds['denoise'] / max(1, steps):.3f} s over {steps} steps{exact}"),
        *_list_cache_rows(outcome),
        ("peak memory", _format_per_rank(facts["peak_memory_bytes"])),
        *_list_memory_rows(facts),
        ("bytes sent", _format_per_rank(facts["bytes_sent"])),
    ):
        table.add_row(name, text)
    return table


def _list_perf_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    if outcome.totals:
        each = ", ".join(f"{total:.2f}" for total in outcome.totals[:MAX_ITEMS_SHOWN])
        more = f" .. ({len(outcome.totals)})" if len(outcome.totals) > MAX_ITEMS_SHOWN else ""
        yield "measured", f"medians of {NUM_PERF_CALLS} runs after one that is not counted: {each}{more}"


def _list_cache_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What was done to do less, and what came of it."""
    settings, entries = outcome.settings, outcome.left_out
    if "quantize_config" in settings:
        yield "weights", str(settings["quantize_config"]["quant_type"])
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
    """All of a few, else the first and the last."""
    files = outcome.images
    text = " ".join(files) if len(files) <= MAX_ITEMS_SHOWN else f"{files[0]} .. {files[-1]} ({len(files)})"
    return text + (f", {outcome.skipped} of them there before" if outcome.skipped else "")


def _format_per_rank(counts: list[int]) -> str:
    return ", ".join(f"rank {rank}: {format_bytes(count)}" for rank, count in enumerate(counts))

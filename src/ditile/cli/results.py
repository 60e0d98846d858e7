"""What a run has to say when it is over: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ditile.cache.report import steps_text
from ditile.cli.outcome import MEASURED
from ditile.plan.units import amount

if TYPE_CHECKING:
    from rich.table import Table

    from ditile.cli.outcome import Outcome

SECONDS = ("total", "text", "denoise", "decode")
SHOWN = 4
"""Files that are named one by one."""


def as_dict(outcome: Outcome) -> dict[str, Any]:
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
    } | _also(outcome)


def _also(outcome: Outcome) -> dict[str, Any]:
    """What only some runs have to say."""
    found: dict[str, Any] = {}
    if outcome.settings:
        found["settings"] = outcome.settings
    if "cache_config" in outcome.settings:
        found["cache"] = {"blocks_saved": _saved(outcome.left_out), "contexts": outcome.left_out}
    if outcome.tracks_memory:
        for name in ("key_bytes", "cache_bytes"):
            found[name] = [report[name] for report in outcome.reports]
    if outcome.totals:
        found["measured_seconds"] = outcome.totals
    return found


def _saved(entries: list[dict[str, Any]]) -> float:
    """The share of all runs of blocks."""
    runs: list[int] = [entry["blocks"] * entry["steps"] for entry in entries]
    saved: list[float] = [entry["blocks_saved"] for entry in entries]
    return sum(share * count for share, count in zip(saved, runs, strict=True)) / max(sum(runs), 1)


def as_table(outcome: Outcome) -> Table:
    """The same as a table."""
    from rich.table import Table

    facts = as_dict(outcome)
    seconds, steps, synchronous = facts["seconds"], facts["steps"], facts["synchronous_steps"]
    exact = f", {synchronous} of them synchronous" if synchronous < steps else ""
    parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("text", "denoise", "decode"))
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in (
        ("images", _images(outcome)),
        ("model", outcome.model),
        ("seed", str(outcome.seed)),
        ("plan", outcome.plan),
        ("seconds", f"{seconds['total']:.2f}  ({parts})"),
        *_measured(outcome),
        ("per step", f"{seconds['denoise'] / max(1, steps):.3f} s over {steps} steps{exact}"),
        *_changed(outcome),
        ("peak memory", _per_rank(facts["peak_memory_bytes"])),
        *_held(facts),
        ("bytes sent", _per_rank(facts["bytes_sent"])),
    ):
        table.add_row(name, text)
    return table


def _measured(outcome: Outcome) -> Iterator[tuple[str, str]]:
    if outcome.totals:
        each = ", ".join(f"{total:.2f}" for total in outcome.totals[:SHOWN])
        more = f" .. ({len(outcome.totals)})" if len(outcome.totals) > SHOWN else ""
        yield "measured", f"medians of {MEASURED} runs after one that is not counted: {each}{more}"


def _changed(outcome: Outcome) -> Iterator[tuple[str, str]]:
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
    yield "cache", f"{words}: {_saved(entries):.0%} of blocks saved"
    stages = len({entry["stage"] for entry in entries}) > 1
    for entry in entries:
        place = f"stage {entry['stage']}, " if stages else ""
        calls = entry["cached_steps"]
        shown = f" ({steps_text(calls[0]).partition(': ')[2]})" if len(calls) == 1 and calls[0] else ""
        cached = f"{sum(map(len, calls))} of {entry['steps']} steps cached whole{shown}"
        yield "", f"{place}{entry['context']}: {cached}, {entry['blocks_saved']:.0%} of blocks saved"


def _held(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, name in (("key_bytes", "stale keys"), ("cache_bytes", "held by caches")):
        if key in facts:
            yield name, _per_rank(facts[key])


def _images(outcome: Outcome) -> str:
    """All of a few, else the first and the last."""
    files = outcome.images
    text = " ".join(files) if len(files) <= SHOWN else f"{files[0]} .. {files[-1]} ({len(files)})"
    return text + (f", {outcome.skipped} of them there before" if outcome.skipped else "")


def _per_rank(counts: list[int]) -> str:
    return ", ".join(f"rank {rank}: {amount(count)}" for rank, count in enumerate(counts))

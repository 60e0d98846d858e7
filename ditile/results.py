"""What a run has to say when it is over: a table for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ditile.generate import Outcome

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
    }


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
        ("per step", f"{seconds['denoise'] / max(1, steps):.3f} s over {steps} steps{exact}"),
        ("peak memory", _per_rank(facts["peak_memory_bytes"])),
        ("bytes sent", _per_rank(facts["bytes_sent"])),
    ):
        table.add_row(name, text)
    return table


def _images(outcome: Outcome) -> str:
    """All of a few, else the first and the last."""
    files = outcome.images
    text = " ".join(files) if len(files) <= SHOWN else f"{files[0]} .. {files[-1]} ({len(files)})"
    return text + (f", {outcome.skipped} of them there before" if outcome.skipped else "")


def _per_rank(counts: list[int]) -> str:
    from ditile.table import amount

    return ", ".join(f"rank {rank}: {amount(count)}" for rank, count in enumerate(counts))

"""The counts of recorded calls in a call of a pipeline, in numbers and in a line. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """Counts of recorded calls in a call of a pipeline on this rank.

    Attributes:
        calls: of models, in its steps.
        recorded, played: how many of them.
        as_code: why the others ran as code, and how many.
        tape_bytes: of the memory held by tapes after it, including the keys and values kept in place for them.
    """

    calls: int
    recorded: int
    played: int
    as_code: dict[str, int]
    tape_bytes: int


def sum_recorded_calls(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the records of several calls of a pipeline, from and to JSON types."""
    as_code: Counter[str] = Counter()
    for summary in summaries:
        as_code.update(summary["as_code"])
    total: dict[str, Any] = {}
    for name in ("calls", "recorded", "played"):
        total[name] = sum(summary[name] for summary in summaries)
    total["as_code"] = dict(as_code)
    total["tape_bytes"] = max(summary["tape_bytes"] for summary in summaries)
    return total


def format_recorded_calls(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format the number of calls played on the rank that played the fewest, and the main reason for code there."""
    # A replica without an image calls nothing.
    busy = [rank for rank in ranks if rank["calls"]] or ranks
    recorded = min(busy, key=lambda rank: rank["played"] / max(1, rank["calls"]))
    text = f"{recorded['played']} of {recorded['calls']} calls played"
    if not recorded["as_code"]:
        return text
    reason, count = max(recorded["as_code"].items(), key=lambda item: item[1])
    return f"{text}; {count} ran as code: {reason}"

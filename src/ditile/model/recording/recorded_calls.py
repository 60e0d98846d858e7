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
        calls: the number of calls of models in its steps.
        recorded, played: how many of these calls were recorded, or played.
        as_code: reason -> how many of the other calls ran as code.
        tape_bytes: the bytes held by tapes afterwards, including the keys and values kept in place for them.
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
    """Format the number of played calls on the rank that played the smallest share, and its main reason for code."""
    # A replica without an image calls nothing.
    busy = [rank for rank in ranks if rank["calls"]] or ranks
    lowest = min(busy, key=lambda rank: rank["played"] / max(1, rank["calls"]))  # perhaps no rank made a call
    text = f"{lowest['played']} of {lowest['calls']} calls played"
    if not lowest["as_code"]:
        return text
    reason, count = max(lowest["as_code"].items(), key=lambda item: item[1])
    return f"{text}; {count} ran as code: {reason}"

"""The rows of `ditile bench` as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from ditile.plan.numbers import format_bytes
from ditile.runner.requests.console import make_numbered_tables
from ditile_lab.bench.cells import ONE_RANK
from ditile_lab.rows import Row, format_columns


def make_rows_title(rows: Sequence[Row]) -> str:
    """Return the model, size, steps and machine that the rows have in common."""
    first = rows[0]
    parts = [first["model"]]
    sizes = {(row["width"], row["height"]) for row in rows}
    if len(sizes) == 1 and first["height"] is not None:
        parts.append(f"{first['width']} x {first['height']} px")
    if first["steps"] is not None:
        parts.append(f"{first['steps']} steps")
    if first["machine"]["gpus"]:
        parts.append(first["machine"]["gpus"][0])
    elif first["threads"] == 1:
        parts.append("1 thread a rank")
    else:
        parts.append(f"{first['threads']} threads a rank")
    return ", ".join(parts)


def make_bench_tables(rows: Sequence[Row]) -> list[Table | str]:
    """Make tables of numbers for a terminal, and lines for the plans."""
    if not rows:
        return []
    columns = list_bench_columns(rows)
    return [make_rows_title(rows), *make_numbered_tables(columns.pop("plan"), columns)]


def list_bench_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return title -> a text for each row. Empty columns are left out, and so is the size if all rows have the same.

    Seconds are those of whole calls, of the denoising loop, and of the prediction for the loop. Speed-ups have the
    range of the rounds; "undisturbed" is the speed-up if every step is as fast as in its fastest round. Bytes sent are
    those of the rank that sends most, memory is that of the rank that needs most. In brackets after the exposed share
    is its part in synchronous warmup steps.
    """
    columns = format_columns(COLUMNS, rows)
    # The title has the size in this case.
    if len({(row["height"], row["width"]) for row in rows}) == 1:
        columns.pop("size", None)
    return columns


def find_peak_rank(row: Row) -> dict[str, int]:
    """Return the memory, by use, of the rank that needs most; empty if it was not measured."""
    memory_of_ranks = row.get("memory") or [{}]
    return max(memory_of_ranks, key=lambda memory: sum(memory.values()))


def _format_size(row: Row) -> str:
    if row["height"] is None:
        return ""
    return f"{row['width']}x{row['height']}"


def _format_row_plan(row: Row) -> str:
    if row["plan"] == ONE_RANK:
        return "one rank"
    text: str = row["plan"]
    if row["pictures"] > 1:
        text += f" ({row['pictures']} images)"
    if row["cache"]:
        text += f"\n  | {row['cache']}"
    return text


def _format_speedup(row: Row) -> str:
    if "ratio" not in row:
        return ""
    text = f"{row['ratio']:.2f}x"
    if row["rounds"] > 1:
        text += f" ({row['ratio_lowest']:.2f}-{row['ratio_highest']:.2f})"
    return text


def _format_sent_bytes(row: Row) -> str:
    if "bytes_sent" not in row:
        return ""
    # Steps that a cache skipped send nothing, so only the others count.
    return format_bytes(max(row["bytes_sent"]) / max(row["steps_run"], 1))


def _format_exposed_share(row: Row) -> str:
    # One rank waits for no message.
    if "exposed" not in row or row["world"] == 1:
        return ""
    text = f"{row['exposed']:.1%}"
    if row["exposed_warmup"]:
        text += f" ({row['exposed_warmup']:.1%})"
    return text


def _format_weights(row: Row) -> str:
    rank = find_peak_rank(row)
    if not rank:
        return ""
    return format_bytes(rank["parameters"])


def _format_activations(row: Row) -> str:
    rank = find_peak_rank(row)
    if not rank:
        return ""
    return format_bytes(sum(rank.values()) - rank["parameters"])


def _format_predicted_memory(row: Row) -> str:
    if "predicted_memory_bytes" not in row:
        return ""
    return format_bytes(row["predicted_memory_bytes"])


def _make_formatter(name: str, text: str) -> Callable[[Row], str]:
    """Make a function that formats a number of a row; "" if the row has none."""
    return lambda row: text.format(row[name]) if row.get(name) else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "link": _make_formatter("link", "{}"),
    "size": _format_size,
    "ranks": _make_formatter("world", "{}"),
    "plan": _format_row_plan,
    "median, s": _make_formatter("median_s", "{:.3f}"),
    "loop, s": _make_formatter("loop_s", "{:.3f}"),
    "predicted": _make_formatter("predicted_loop_s", "{:.3f}"),
    "speed-up": _format_speedup,
    "undisturbed": _make_formatter("undisturbed_ratio", "{:.2f}x"),
    "bound": _make_formatter("bound", "{:.2f}x"),
    "sent/step": _format_sent_bytes,
    "exposed": _format_exposed_share,
    "weights": _format_weights,
    "activations": _format_activations,
    "both, predicted": _format_predicted_memory,
}
"""Column -> its text for a row; "" is empty."""

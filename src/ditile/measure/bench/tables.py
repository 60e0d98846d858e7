"""The rows of `ditile bench` as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from ditile.measure.bench.cells import ONE_RANK
from ditile.measure.bench.runs import Row
from ditile.plan.units import format_bytes
from ditile.runner.requests.console import make_numbered_tables


def make_rows_title(rows: Sequence[Row]) -> str:
    """The model, size, steps and machine that the rows have in common."""
    first = rows[0]
    sizes = {(row["width"], row["height"]) for row in rows}
    size = [] if len(sizes) > 1 or first["height"] is None else [f"{first['width']} x {first['height']} px"]
    steps = [] if first["steps"] is None else [f"{first['steps']} steps"]
    machine = first["machine"]
    gpus = machine["gpus"]
    device = gpus[0] if gpus else f"{first['threads']} thread{'s' * (first['threads'] > 1)} a rank"
    return ", ".join([first["model"], *size, *steps, device])


def make_bench_table(rows: Sequence[Row]) -> Table:
    """The rows in one table, in their order; see `list_bench_columns`."""
    shown = Table(title=make_rows_title(rows) if rows else None, title_justify="left")
    columns = list_bench_columns(rows)
    for name in columns:
        shown.add_column(name, justify="left" if name in ("link", "plan") else "right", overflow="fold")
    for texts in zip(*columns.values(), strict=True):
        shown.add_row(*texts)
    return shown


def make_bench_tables(rows: Sequence[Row]) -> list[Table | str]:
    """The rows for a terminal: tables of numbers, and the plans as lines."""
    if not rows:
        return []
    columns = list_bench_columns(rows)
    return [make_rows_title(rows), *make_numbered_tables(columns.pop("plan"), columns)]


def list_bench_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Title -> a text for each row. Empty columns are left out, and so is the size if all rows have the same.

    Seconds are those of whole calls, of the denoising loop, and of the prediction for the loop. Speed-ups have the
    range of the rounds; "undisturbed" is the speed-up if every step is as fast as in its fastest round. Bytes sent are
    those of the rank that sends most, memory is that of the rank that needs most. In brackets behind the exposed share
    is its part in synchronous warmup steps.
    """
    sizes = len({(row["height"], row["width"]) for row in rows})
    columns = {name: [text(row) for row in rows] for name, text in COLUMNS.items() if name != "size" or sizes > 1}
    return {name: texts for name, texts in columns.items() if any(texts)}


def _format_row_plan(row: Row) -> str:
    if row["plan"] == ONE_RANK:
        return "one rank"
    pictures = f" ({row['pictures']} pictures)" if row["pictures"] > 1 else ""
    return f"{row['plan']}{pictures}" + (f"\n  | {row['cache']}" if row["cache"] else "")


def _format_speedup(row: Row) -> str:
    if "ratio" not in row:
        return ""
    spread = f" ({row['ratio_lowest']:.2f}-{row['ratio_highest']:.2f})" if row["rounds"] > 1 else ""
    return f"{row['ratio']:.2f}x{spread}"


def _format_sent_bytes(row: Row) -> str:
    return "" if "bytes_sent" not in row else format_bytes(max(row["bytes_sent"]) / max(row["steps_run"], 1))


def _format_exposed_share(row: Row) -> str:
    if "exposed" not in row or row["world"] == 1:
        return ""
    warm = f" ({row['exposed_warmup']:.1%})" if row["exposed_warmup"] else ""
    return f"{row['exposed']:.1%}{warm}"


def _format_peak_memory(row: Row, *, weights: bool) -> str:
    """The weights of the rank with the highest peak, or the rest of its memory."""
    if not row.get("memory"):
        return ""
    most = max(row["memory"], key=lambda rank: sum(rank.values()))
    return format_bytes(most["parameters"] if weights else sum(most.values()) - most["parameters"])


def _make_formatter(name: str, text: str) -> Callable[[Row], str]:
    """A function that formats a number of a row; "" if the row has none."""
    return lambda row: text.format(row[name]) if row.get(name) else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "link": lambda row: row["link"],
    "size": lambda row: "" if row["height"] is None else f"{row['width']}x{row['height']}",
    "ranks": lambda row: str(row["world"]),
    "plan": _format_row_plan,
    "median, s": _make_formatter("median_s", "{:.3f}"),
    "loop, s": _make_formatter("loop_s", "{:.3f}"),
    "predicted": _make_formatter("predicted_loop_s", "{:.3f}"),
    "speed-up": _format_speedup,
    "undisturbed": _make_formatter("undisturbed_ratio", "{:.2f}x"),
    "bound": _make_formatter("bound", "{:.2f}x"),
    "sent/step": _format_sent_bytes,
    "exposed": _format_exposed_share,
    "weights": lambda row: _format_peak_memory(row, weights=True),
    "activations": lambda row: _format_peak_memory(row, weights=False),
    "both, predicted": lambda row: (
        format_bytes(row["predicted_memory_bytes"]) if "predicted_memory_bytes" in row else ""
    ),
}
"""Column -> its text for a row, "" for none."""

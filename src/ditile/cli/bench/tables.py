"""The rows of `ditile bench` as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table

from ditile.cli.bench.cells import ONE_RANK
from ditile.cli.bench.figures import make_rows_title
from ditile.cli.bench.runs import Row
from ditile.plan.units import format_bytes


class Column(NamedTuple):
    """One column: shown where any row has something to say.

    Attributes:
        text: of a row, "" for nothing.
        right: whether it is a number.
    """

    name: str
    text: Callable[[Row], str]
    right: bool = True


def make_bench_table(rows: Sequence[Row]) -> Table:
    """The rows, in their order; columns that are empty are left out, and the size where there is one."""
    sizes = len({(row["height"], row["width"]) for row in rows})
    columns = [one for one in COLUMNS if any(one.text(row) for row in rows) and (one.name != "size" or sizes > 1)]
    shown = Table(title=make_rows_title(rows) if rows else None, title_justify="left")
    for column in columns:
        shown.add_column(column.name, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(column.text(row) for column in columns))
    return shown


def _format_row_size(row: Row) -> str:
    return "" if row["height"] is None else f"{row['width']}x{row['height']}"


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


def _format_speedup_bound(row: Row) -> str:
    return "" if not row.get("bound") else f"{row['bound']:.2f}x"


def _format_sent_bytes(row: Row) -> str:
    return "" if "bytes_sent" not in row else format_bytes(max(row["bytes_sent"]) / max(row["steps_run"], 1))


def _format_exposed_share(row: Row) -> str:
    if "exposed" not in row or row["world"] == 1:
        return ""
    warm = f" ({row['exposed_warmup']:.1%})" if row["exposed_warmup"] else ""
    return f"{row['exposed']:.1%}{warm}"


def _make_memory_formatter(part: str) -> Callable[[Row], str]:
    """Of the rank whose peak is highest."""

    def format_peak_memory(row: Row) -> str:
        if not row.get("memory"):
            return ""
        most = max(row["memory"], key=lambda rank: sum(rank.values()))
        return format_bytes(sum(most.values()) - most["parameters"] if part == "rest" else most["parameters"])

    return format_peak_memory


COLUMNS = (
    Column("link", lambda row: row["link"], right=False),
    Column("size", _format_row_size),
    Column("ranks", lambda row: str(row["world"])),
    Column("plan", _format_row_plan, right=False),
    Column("median, s", lambda row: f"{row['median_s']:.3f}"),
    Column("loop, s", lambda row: f"{row['loop_s']:.3f}"),
    Column("predicted", lambda row: f"{row['predicted_loop_s']:.3f}" if "predicted_loop_s" in row else ""),
    Column("speed-up", _format_speedup),
    Column("undisturbed", lambda row: f"{row['undisturbed_ratio']:.2f}x" if "undisturbed_ratio" in row else ""),
    Column("bound", _format_speedup_bound),
    Column("sent/step", _format_sent_bytes),
    Column("exposed", _format_exposed_share),
    Column("weights", _make_memory_formatter("parameters")),
    Column("activations", _make_memory_formatter("rest")),
    Column(
        "both, predicted",
        lambda row: format_bytes(row["predicted_memory_bytes"]) if "predicted_memory_bytes" in row else "",
    ),
)
"""Seconds of whole calls and of the denoising loop, and those predicted of the loop; speed-ups with the range of the
rounds; undisturbed: the speed-up in which every step is as fast as in its fastest round; bytes sent are those of the
rank that sends most, memory that of the rank that holds most; of the exposed share, the part in synchronous warmup
steps."""

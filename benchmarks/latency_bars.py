"""Bars of the seconds of each plan, from the rows of `ditile bench`, and what all figures of its rows share.

Every mark is in a legend. Methods have the names of their papers, and the colours of `benchmarks.palette`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from benchmarks.palette import NAMES, choose_plan_colour, save_figure
from ditile.plan.plan import Plan
from ditile_lab.bench.cells import ONE_RANK
from ditile_lab.bench.tables import make_rows_title
from ditile_lab.rows import Row, list_values

# This backend needs no display, and must be set before the first figure is made.
matplotlib.use("Agg")

WIDTH = 7.2
"""Inches, the width of a page."""
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "ditile",
    "hatch.linewidth": 0.6,
}
DIAMOND: Any = {
    "color": "#333333",
    "marker": "D",
    "mfc": "w",
    "ms": 4,
    "ls": "none",
    "label": "loop, predicted",
    "zorder": 3,
}


def save_bench_figure(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG and close it; return the files."""
    png = stem.with_name(f"{stem.name}.png")
    svg = stem.with_name(f"{stem.name}.svg")
    save_figure(figure, png, dpi=160, bbox_inches="tight", metadata=None)
    # Without a date the same rows give the same file.
    save_figure(figure, svg, dpi=160, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return [png, svg]


def list_plan_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of plans, without the rows of one rank."""
    return [row for row in rows if row["plan"] != ONE_RANK]


def draw_latency_bars(rows: Sequence[Row]) -> Any:
    """Draw a bar for each plan, and the plain pipeline as a line."""
    plans = list_plan_rows(rows)
    figure, axes = create_bar_axes(len(plans))
    for place, row in enumerate(plans):
        median = row["median_s"]
        loop = row["loop_s"]
        colour = choose_plan_colour(row["plan"])
        # Plans with and without a cache have one colour.
        hatch = "///" if row["cache"] else None
        axes.barh(place, loop, height=0.7, color=colour, hatch=hatch, ec="w")
        axes.barh(place, median - loop, left=loop, height=0.7, color=colour, alpha=0.35, ec="w")
        spread = [[median - row["lowest_s"]], [row["highest_s"] - median]]
        axes.errorbar(median, place, xerr=spread, color="#333333", capsize=2, lw=0.9)
        axes.text(1.02, place, f"{row['ratio']:.2f}x", transform=axes.get_yaxis_transform(), va="center")
        if "predicted_loop_s" in row:
            axes.plot(row["predicted_loop_s"], place, **DIAMOND)
    axes.annotate("speed-up", (1.02, 1), (0, 6), xycoords="axes fraction", textcoords="offset points")
    for row in rows:
        if row["plan"] == ONE_RANK:
            axes.axvline(row["median_s"], color="#333333", ls="--", lw=1, label="one rank")
    axes.set_yticks(range(len(plans)), _label_plan_rows(plans))
    axes.set_xlim(0, 1.05 * find_most_seconds(rows))
    axes.set_xlabel("seconds of a call (speed-up: images per second)")
    # These empty bars are for the legend.
    axes.barh(0, 0, color="#555555", label="denoising loop")
    axes.barh(0, 0, color="#555555", alpha=0.35, label="text and decode")
    if any(list_values(plans, "cache")):
        axes.barh(0, 0, color="#555555", ec="w", hatch="///", label="with a cache")
    label_whiskers(axes)
    place_legend_below(axes)
    axes.set_title(make_rows_title(rows), loc="left")
    return figure


def find_most_seconds(rows: Sequence[Row]) -> float:
    """Return the most seconds in the rows, measured or predicted, for the end of an axis."""
    return float(max(max(row["highest_s"], row.get("predicted_loop_s", 0.0)) for row in rows))


def create_bar_axes(count: int) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(WIDTH, 0.29 * count + 1.1))
    axes.grid(axis="x")
    # The axis is upside down, so that the first row is on top.
    axes.set_ylim(count - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _label_plan_rows(rows: Sequence[Row]) -> list[str]:
    """Return the labels of rows: the method, or only the cache if the row above has the same method."""
    sizes = {(row["height"], row["width"]) for row in rows}
    labels = []
    above = None
    for row in rows:
        method = describe_row_method(row | {"cache": ""})
        if len(sizes) > 1:
            method += f" | {row['width']}x{row['height']}"
        if not row["cache"]:
            labels.append(method)
        elif method == above:
            labels.append(f"+ {row['cache']}")
        else:
            labels.append(f"{method} | {row['cache']}")
        above = method
    return labels


def label_whiskers(axes: Any) -> None:
    """Add whiskers to the legend, through an invisible point."""
    style = {"color": "#333333", "capsize": 2, "lw": 0.9, "ls": "none"}
    axes.errorbar([math.nan], [math.nan], xerr=[1], label="slowest and fastest round", **style)


def place_legend_below(axes: Any, columns: int = 3, below: float = -0.48) -> None:
    """Place the legend below the axes; `below` is for axes of 100 pixels, because labels need a fixed space."""
    handles, labels = axes.get_legend_handles_labels()
    # A label appears once, although every bar has it.
    handle_by_label = dict(zip(labels, handles, strict=True))
    if handle_by_label:
        axes.legend(
            handle_by_label.values(),
            handle_by_label.keys(),
            loc="upper left",
            bbox_to_anchor=(0, below / axes.bbox.height * 100),
            ncols=columns,
            borderaxespad=0,
        )


def describe_row_method(row: Row, *, with_counts: bool = True) -> str:
    """Describe a row's plan and cache in words: `PipeFusion, M = 4, pipelined warmup | F=1 W=4`.

    Args:
        with_counts: also name degrees, M, W and the number of images.
    """
    if row["plan"] == ONE_RANK:
        return "one rank"
    plan = Plan.parse(row["plan"])
    degrees = []
    for axis, name in NAMES.items():
        degree = getattr(plan, axis)
        if degree > 1:
            degrees.append((name, degree))
    names = [name for name, _ in degrees]
    if len(degrees) > 1 and with_counts:
        names = [f"{name} {degree}" for name, degree in degrees]
    words = [" x ".join(names) or "one rank"]
    if with_counts and plan.num_patches > 1:
        words.append(f"M = {plan.num_patches}")
    if with_counts and plan.warmup != 1:
        words.append(f"W = {plan.warmup}")
    if plan.warmup_mode != "serial":
        words.append(f"{plan.warmup_mode} warmup")
    if plan.async_ulysses:
        words.append("overlapped")
    if plan.wire_dtype is not None:
        words.append(f"{plan.wire_dtype} messages")
    if plan.split_scheme != "row":
        words.append("tokens split")
    if plan.vae != "whole" and plan.vae_block_size:
        words.append(f"VAE by rows in blocks of {plan.vae_block_size}")
    elif plan.vae != "whole":
        words.append("VAE by rows")
    if plan.data > 1 and with_counts:
        words.append(f"{plan.data} images")
    text = ", ".join(words)
    if row["cache"]:
        text += f" | {row['cache']}"
    return text

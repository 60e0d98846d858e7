"""The figure of an evaluation: PSNR over latency, from `evaluation.json` of `ditile evaluate`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

# This backend needs no display, and must be set before the first figure is made.
matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from benchmarks.palette import MARKERS, assign_plan_colours, save_figure
from ditile_lab.quality.contact_sheet import SAME_PSNR, name_cache, name_plan
from ditile_lab.rows import Row, list_values


def draw_tradeoff(evaluation: Row, out: Path) -> None:
    """Draw the settings of an evaluation, PSNR over latency, with a line through the Pareto front.

    Each plan has a colour and each cache a marker. A setting whose images equal the original's has no finite PSNR, and
    is drawn at the top.
    """
    rows = evaluation["settings"]
    finite = [row["psnr"] for row in rows if row["psnr"] < SAME_PSNR] or [30.0, 40.0]
    low = min(finite)
    high = max(finite)
    room = max(2.0, 0.15 * (high - low))
    # Settings whose images equal the original's lie above a dashed line.
    top = high + 2 * room
    figure, axes = plt.subplots(figsize=(9.6, 5))
    _draw_settings(axes, rows, top)
    axes.axhline(high + room, color="#cccccc", lw=0.8, ls="--", label="above it the same image, without a PSNR")
    # This is an entry for the legend, without data.
    axes.errorbar([], [], xerr=[], color="#555555", ls="none", lw=0.8, label="lowest to highest")
    axes.set_ylim(low - room, top + 0.8 * room)
    ticks = [tick for tick in axes.get_yticks() if low - room <= tick <= high + 0.4 * room]
    labels = [f"{tick:g}" for tick in ticks]
    axes.set_yticks([*ticks, top], [*labels, "same\nimage"])
    axes.set_xlim(left=0)
    axes.set_xlabel("time of an image, % of the original pipeline's (median; bars: lowest and highest)")
    axes.set_ylabel("mean PSNR to the original's image (dB)")
    count = evaluation["captions"]["count"]
    facts = evaluation["measured"]["machine"]
    machine = ", ".join(sorted(set(facts["gpus"]))) or facts["processor"]
    axes.set_title(f"{evaluation['model']}, {count} caption(s), {machine}", fontsize=10)
    axes.grid(alpha=0.3)
    _add_legend(axes, rows)
    figure.tight_layout()
    save_figure(figure, out, dpi=110)
    plt.close(figure)


def _draw_settings(axes: Any, rows: Sequence[Row], top: float) -> None:
    """Draw the settings and the Pareto front; settings without a finite PSNR are drawn at `top`."""
    colours = assign_plan_colours(list_values(rows, "plan"))
    markers = _assign_cache_markers(rows)
    front = select_pareto_front(rows)
    x = [100 * row["latency_ratio"] for row in front]
    y = [_locate_psnr(row, top) for row in front]
    axes.plot(x, y, color="#999999", lw=1.2, zorder=1, label="the best (Pareto front)")
    style = {"ms": 8, "lw": 0.8, "mec": "white", "mew": 0.6, "zorder": 2, "alpha": 0.9}
    for row in rows:
        median = 100 * row["latency_ratio"]
        below = median - 100 * row["latency_lowest"]
        above = 100 * row["latency_highest"] - median
        style["color"] = colours[row["plan"]]
        style["marker"] = markers[row["cache"]]
        axes.errorbar(median, _locate_psnr(row, top), xerr=[[below], [above]], **style)


def _locate_psnr(row: Row, top: float) -> float:
    return top if row["psnr"] >= SAME_PSNR else float(row["psnr"])


def _assign_cache_markers(rows: Sequence[Row]) -> dict[str, str]:
    caches = dict.fromkeys(list_values(rows, "cache"))
    return {cache: MARKERS[index % len(MARKERS)] for index, cache in enumerate(caches)}


def _add_legend(axes: Any, rows: Sequence[Row]) -> None:
    """Add a legend of the plans' colours, the caches' markers, and the lines, to the right of the axes."""
    lines, _ = axes.get_legend_handles_labels()
    handles = []
    for plan, colour in assign_plan_colours(list_values(rows, "plan")).items():
        handles.append(Patch(color=colour, label=textwrap.fill(name_plan(plan), 34)))
    for cache, marker in _assign_cache_markers(rows).items():
        handles += axes.plot([], [], marker, color="#555555", label=textwrap.fill(name_cache(cache), 34))
    axes.legend(handles=[*handles, *lines], frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def select_pareto_front(rows: Iterable[Row]) -> list[Row]:
    """Select the settings that no other beats in both latency and PSNR, the fastest first."""
    pareto_rows: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["latency_ratio"], -row["psnr"])):
        if not pareto_rows or row["psnr"] > pareto_rows[-1]["psnr"]:
            pareto_rows.append(row)
    return pareto_rows

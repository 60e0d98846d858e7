"""The figures of `ditile bench`, as PNG and SVG: those of the PipeFusion paper (arXiv 2405.14430, figures 5 to 12).

    draw_sweep_figures({"methods": rows, "patches": rows}, Path("folder"))

Every mark is in a legend. Methods have the names of their papers, and the colours of `ditile.measure.palette`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from ditile.distributed.files import write_atomically
from ditile.measure.bench.cells import ONE_RANK
from ditile.measure.bench.links import parse_link_rate
from ditile.measure.bench.runs import Row
from ditile.measure.bench.tables import make_rows_title
from ditile.measure.palette import MARKERS, NAMES, assign_plan_colours, choose_plan_colour, name_plan_methods
from ditile.plan.plan import WARMUP_MODES, Plan
from ditile.runner.requests.pictures import save_figure

matplotlib.use("Agg")


WIDTH = 7.2
"""Inches: a page."""
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
PARTS = (
    ("parameters", "weights, text encoders included", "#4477aa"),
    ("activations", "activations", "#ee6677"),
    ("keys", "stale keys and values", "#ccbb44"),
    ("cache", "caches", "#228833"),
)


def draw_sweep_figures(shown: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Draws the figures of each sweep, and writes the table of --sweep warmup; returns the files.

    Each sweep's rows include those of one rank.
    """
    files: list[Path] = []
    for sweep, rows in shown.items():
        if not any(row["plan"] != ONE_RANK for row in rows):
            continue
        which = "links" if any(row["link"] for row in rows) else sweep
        if which == "warmup":
            files.append(folder / "warmup.md")
            write_atomically(files[-1], format_warmup_table(rows))
        for name, make in FIGURES_OF_SWEEP[which].items():
            if make is draw_exposed_bars and max(row["world"] for row in rows) == 1:
                continue  # one rank waits for no message
            with plt.rc_context(STYLE):
                figure = make(rows)
                for suffix in (".png", ".svg"):
                    path = folder / f"{name}{suffix}"
                    metadata = {"Date": None} if suffix == ".svg" else None
                    save_figure(figure, path, dpi=160, bbox_inches="tight", metadata=metadata)
                    files.append(path)
                plt.close(figure)
    return files


def draw_latency_bars(rows: Sequence[Row]) -> Any:
    """Draws a bar for each plan, and the plain pipeline as a line."""
    several = len({(row["height"], row["width"]) for row in rows}) > 1
    plans = [row for row in rows if row["plan"] != ONE_RANK]
    figure, axes = _create_bar_axes(len(plans))
    for place, row in enumerate(plans):
        lowest, middle, highest = row["lowest_s"], row["median_s"], row["highest_s"]
        colour, loop = choose_plan_colour(row["plan"]), row["loop_s"]
        axes.barh(place, loop, height=0.7, color=colour, hatch="///" if row["cache"] else None, ec="w")
        axes.barh(place, middle - loop, left=loop, height=0.7, color=colour, alpha=0.35, ec="w")
        axes.errorbar(middle, place, xerr=[[middle - lowest], [highest - middle]], color="#333333", capsize=2, lw=0.9)
        axes.text(1.02, place, f"{row['ratio']:.2f}x", transform=axes.get_yaxis_transform(), va="center")
    axes.annotate("speed-up", (1.02, 1), (0, 6), xycoords="axes fraction", textcoords="offset points")
    _plot_predicted_loops(axes, plans)
    for one in (row for row in rows if row["plan"] == ONE_RANK):
        axes.axvline(one["median_s"], color="#333333", ls="--", lw=1, label="one rank")
    axes.set_yticks(range(len(plans)), _label_plan_rows(plans, several))
    axes.set_xlim(0, 1.05 * max(max(row["highest_s"], row.get("predicted_loop_s", 0.0)) for row in rows))
    axes.set_xlabel("seconds of a call (speed-up: pictures per second)")
    axes.barh(0, 0, color="#555555", label="denoising loop")
    axes.barh(0, 0, color="#555555", alpha=0.35, label="text and decode")
    if any(row["cache"] for row in plans):
        axes.barh(0, 0, color="#555555", ec="w", hatch="///", label="with a cache")
    _label_whiskers(axes)
    _place_legend_below(axes)
    axes.set_title(make_rows_title(rows), loc="left")
    return figure


def draw_memory_bars(rows: Sequence[Row]) -> Any:
    """Draws the peak memory of the rank that needs most, in parts."""
    some = [row for row in rows if row.get("memory")]
    figure, axes = _create_bar_axes(len(some))
    unit, size = ("GB", 1e9) if max(row["peak_memory_bytes"] for row in some) >= 1e9 else ("MB", 1e6)
    present = [part for part in PARTS if any(rank[part[0]] for row in some for rank in row["memory"])]
    for place, row in enumerate(some):
        most, left = max(row["memory"], key=lambda rank: sum(rank.values())), 0.0
        for name, label, colour in present:
            axes.barh(
                place, most[name] / size, left=left, height=0.7, color=colour, ec="w", label="" if place else label
            )
            left += most[name] / size
        axes.annotate(f"{left:.3g}", (left, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(some)), [describe_row_method(row) for row in some])
    axes.set_xlabel(f"peak memory of the rank that holds most, without the VAE ({unit})")
    axes.set_xlim(0, 1.12 * max(row["peak_memory_bytes"] for row in some) / size)
    _place_legend_below(axes, columns=len(present))
    axes.set_title(make_rows_title(some), loc="left")
    return figure


def draw_exposed_bars(rows: Sequence[Row]) -> Any:
    """Draws the share of the time in which ranks waited for messages, the mean of the ranks."""
    plans = [row for row in rows if row["plan"] != ONE_RANK and row["world"] > 1]
    figure, axes = _create_bar_axes(len(plans))
    for place, row in enumerate(plans):
        warm, share, colour = 100 * row["exposed_warmup"], 100 * row["exposed"], choose_plan_colour(row["plan"])
        axes.barh(place, share - warm, height=0.7, color=colour, ec="w")
        if warm:
            axes.barh(place, warm, left=share - warm, height=0.7, color="#dddddd", ec="#777777", hatch="////", lw=0.5)
        axes.annotate(f"{share:.1f} %", (share, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(plans)), [describe_row_method(row) for row in plans])
    axes.set_xlim(0, 1.15 * max(1.0, *(100 * row["exposed"] for row in plans)))
    axes.set_xlabel("share of the denoising time in which a rank waits for messages (%; mean of the ranks)")
    if any(row["exposed_warmup"] for row in plans):
        axes.barh(0, 0, color="#dddddd", ec="#777777", hatch="////", lw=0.5, label="in synchronous warmup steps")
        _place_legend_below(axes)
    axes.set_title(make_rows_title(plans), loc="left")
    return figure


def draw_scalability_lines(rows: Sequence[Row]) -> Any:
    """Draws the speed-up over the number of ranks, a line for each method."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    worlds = sorted({row["world"] for row in rows} | {1})
    axes.plot(worlds, worlds, color="#999999", ls=":", lw=1, label="as many times as ranks")
    colours = _assign_method_colours(rows)
    for index, (name, points) in enumerate(_group_points_by_method(rows, lambda row: row["world"]).items()):
        _plot_line_with_range(axes, index, name, colours[name], [(1, 1.0, 1.0, 1.0), *points])
    return _finish_speedup_figure(figure, rows, "ranks", {world: str(world) for world in worlds})


def draw_link_lines(rows: Sequence[Row]) -> Any:
    """Draws the speed-up over the bandwidth between two hosts."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    plans = [row for row in rows if row["link"]]
    lines = _group_points_by_method(plans, lambda row: parse_link_rate(row["link"]) / 1e6)
    colours = _assign_method_colours(plans)
    for index, (name, points) in enumerate(lines.items()):
        _plot_line_with_range(axes, index, name, colours[name], points)
    axes.axhline(1, color="#999999", ls=":", lw=1, label="one rank")
    axes.set_xscale("log")
    rates = sorted({parse_link_rate(row["link"]) / 1e6 for row in plans})
    ticks = {rate: f"{rate / 1e3:g} Gbit/s" if rate >= 1e3 else f"{rate:g} Mbit/s" for rate in rates}
    return _finish_speedup_figure(figure, rows, "link between two hosts", ticks)


def draw_patch_count_lines(rows: Sequence[Row]) -> Any:
    """Draws the seconds over the number of patches M."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    plans = sorted((row for row in rows if row["plan"] != ONE_RANK), key=_parse_num_patches)
    x = [_parse_num_patches(row) for row in plans]
    points = [(m, row["median_s"], row["lowest_s"], row["highest_s"]) for m, row in zip(x, plans, strict=True)]
    colour = choose_plan_colour(plans[0]["plan"])
    _plot_line_with_range(axes, 0, "whole call", colour, points)
    _label_whiskers(axes)
    loops = [row["loop_s"] for row in plans]
    axes.plot(x, loops, color=colour, marker="o", mfc="w", ms=4.5, lw=1.2, ls="-.", label="denoising loop")
    _plot_predicted_loops(axes, plans, x)
    for one in (row for row in rows if row["plan"] == ONE_RANK):
        axes.axhline(one["median_s"], color="#333333", ls="--", lw=1, label="one rank")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{m}\n{row['ratio']:.2f}x" for m, row in zip(x, plans, strict=True)])
    axes.minorticks_off()
    axes.set_xlabel("patches M; below, the speed-up over one rank")
    axes.set_ylabel("seconds for a picture")
    axes.set_ylim(0, 1.08 * max(max(row["highest_s"], row.get("predicted_loop_s", 0.0)) for row in rows))
    axes.set_title(
        f"{name_plan_methods(plans[0]['plan'])}, {plans[0]['world']} ranks, no warmup; {make_rows_title(rows)}",
        loc="left",
    )
    axes.grid(axis="y")
    _place_legend_below(axes, columns=4, below=-0.62)
    return figure


def draw_resolution_panels(rows: Sequence[Row]) -> Any:
    """Draws seconds and speed-up over the size, in two panels."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.4))
    lines = _group_points_by_method(rows, lambda row: row["height"])
    ones = sorted((row for row in rows if row["plan"] == ONE_RANK), key=lambda row: row["height"])
    left.plot([r["height"] for r in ones], [r["median_s"] for r in ones], color="#333333", ls="--", marker="x", ms=4)
    colours = _assign_method_colours(rows)
    for index, (name, points) in enumerate(lines.items()):
        _plot_line_with_range(right, index, name, colours[name], points)
        mine = [row for row in rows if describe_row_method(row, patches=False) == name]
        seconds = sorted((r["height"], r["median_s"], r["lowest_s"], r["highest_s"]) for r in mine)
        _plot_line_with_range(left, index, name, colours[name], seconds)
    _label_whiskers(right)
    right.plot([], [], color="#333333", ls="--", marker="x", ms=4, label="one rank")
    sides = sorted({row["height"] for row in ones})
    for axes, label in ((left, "seconds for a picture"), (right, "speed-up over one rank (times)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sides, [str(side) for side in sides])
        axes.minorticks_off()
        axes.set_xlabel("pixels of a side")
        axes.set_ylabel(label, labelpad=8)
        axes.grid(axis="y")
    set_logarithmic_scale(left)
    right.set_ylim(0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.17))
    left.set_title(make_rows_title(rows), loc="left")
    figure.tight_layout()
    return figure


def format_warmup_table(rows: Sequence[Row]) -> str:
    """The table of `tabulate_warmups` as Markdown."""
    header, lines = tabulate_warmups(rows)
    table = [header, ["---:"] * len(header), *lines]
    return "\n".join(
        [
            f"Seconds for a picture, and how much more than without warmup; {make_rows_title(rows)}:\n",
            *(f"| {' | '.join(cells)} |" for cells in table),
            "",
        ]
    )


FIGURES_OF_SWEEP: dict[str, dict[str, Callable[[Sequence[Row]], Any]]] = {
    "methods": {
        "methods-latency": draw_latency_bars,
        "methods-memory": draw_memory_bars,
        "methods-exposed": draw_exposed_bars,
    },
    "plans": {"plans-latency": draw_latency_bars, "plans-memory": draw_memory_bars, "plans-exposed": draw_exposed_bars},
    "scaling": {"scalability": draw_scalability_lines},
    "patches": {"patches": draw_patch_count_lines},
    "warmup": {},
    "resolution": {"resolution": draw_resolution_panels},
    "links": {"links": draw_link_lines},
    "cache": {"cache-latency": draw_latency_bars},
}
"""Sweep -> name of a file -> what draws it."""


def _create_bar_axes(count: int) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(WIDTH, 0.29 * count + 1.1))
    axes.grid(axis="x")
    axes.set_ylim(count - 0.4, -0.6)  # the first on top
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _group_points_by_method(
    rows: Sequence[Row], x: Callable[[Row], float]
) -> dict[str, list[tuple[float, float, float, float]]]:
    """(x, ratio, lowest, highest) of each method, by x."""
    points_by_method: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        if row["plan"] != ONE_RANK:
            point = (x(row), row["ratio"], row["ratio_lowest"], row["ratio_highest"])
            points_by_method.setdefault(describe_row_method(row, patches=False), []).append(point)
    return {name: sorted(points) for name, points in points_by_method.items()}


def _assign_method_colours(rows: Sequence[Row]) -> dict[str, str]:
    """The colour of each line of `_group_points_by_method`."""
    plans: dict[str, str] = {}
    for row in rows:
        plans.setdefault(describe_row_method(row, patches=False), "" if row["plan"] == ONE_RANK else row["plan"])
    colours = assign_plan_colours(plans.values())
    return {name: colours[plan] for name, plan in plans.items()}


def _label_whiskers(axes: Any) -> None:
    """Adds whiskers to the legend."""
    axes.errorbar(
        [math.nan],
        [math.nan],
        xerr=[1],
        color="#333333",
        capsize=2,
        lw=0.9,
        ls="none",
        label="slowest and fastest round",
    )


def _plot_line_with_range(
    axes: Any, index: int, name: str, colour: str, points: Sequence[tuple[float, float, float, float]]
) -> None:
    x, y = [p[0] for p in points], [p[1] for p in points]
    spread = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
    marker = MARKERS[index % len(MARKERS)]
    axes.errorbar(x, y, yerr=spread, color=colour, marker=marker, ms=4.5, lw=1.5, capsize=2, label=name)


def _label_plan_rows(rows: Sequence[Row], several: bool) -> list[str]:
    """The labels of rows: the method, or only the cache if the row above has the same method."""
    labels, above = [], None
    for row in rows:
        own = describe_row_method(row | {"cache": ""}, size=several)
        labels.append(f"+ {row['cache']}" if row["cache"] and own == above else describe_row_method(row, size=several))
        above = own
    return labels


def _plot_predicted_loops(axes: Any, rows: Sequence[Row], x: Sequence[int] | None = None) -> None:
    """Draws the predictions as diamonds, over x, or on the bars of the rows if x is None."""
    places = range(len(rows)) if x is None else x
    points = [(m, row["predicted_loop_s"]) for m, row in zip(places, rows, strict=True) if "predicted_loop_s" in row]
    if points:
        along, upwards = zip(*points, strict=True)
        axes.plot(*((upwards, along) if x is None else (along, upwards)), **DIAMOND)


def _finish_speedup_figure(figure: Any, rows: Sequence[Row], label: str, ticks: Mapping[float, str]) -> Any:
    (axes,) = figure.axes
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over one rank (times)")
    axes.set_ylim(0)
    axes.grid(axis="y")
    _label_whiskers(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_title(make_rows_title(rows), loc="left")
    return figure


def _place_legend_below(axes: Any, columns: int = 3, below: float = -0.48) -> None:
    """Places the legend below the axes; `below` is for axes of 100 pixels, because labels need a fixed space."""
    handles, labels = axes.get_legend_handles_labels()
    of_label = dict(zip(labels, handles, strict=True))
    if of_label:
        axes.legend(
            of_label.values(),
            of_label.keys(),
            loc="upper left",
            bbox_to_anchor=(0, below / axes.bbox.height * 100),
            ncols=columns,
            borderaxespad=0,
        )


def _parse_num_patches(row: Row) -> int:
    return Plan.parse(row["plan"]).num_patches


def set_logarithmic_scale(axes: Any) -> None:
    """A logarithmic scale upwards, with 1, 2 and 5 of each power of ten written out."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def describe_row_method(row: Row, *, patches: bool = True, size: bool = False) -> str:
    """A row's plan and cache, in words: `PipeFusion, M = 4, pipelined warmup | F=1 W=4`.

    Args:
        patches: also name degrees, M and W.
        size: also name the pixels.
    """
    if row["plan"] == ONE_RANK:
        return "one rank"
    plan = Plan.parse(row["plan"])
    degrees = [(name, getattr(plan, axis)) for axis, name in NAMES.items() if getattr(plan, axis) > 1]
    several = len(degrees) > 1 and patches
    words = [" x ".join(f"{name} {n}" if several else name for name, n in degrees) or "one rank"]
    if patches and plan.num_patches > 1:
        words.append(f"M = {plan.num_patches}")
    if patches and plan.warmup != 1:
        words.append(f"W = {plan.warmup}")
    if plan.warmup_mode != "serial":
        words.append(f"{plan.warmup_mode} warmup")
    if plan.async_ulysses:
        words.append("overlapped")
    if plan.wire_dtype is not None:
        words.append(f"{plan.wire_dtype} messages")
    if plan.split_scheme != "row":
        words.append("tokens split")
    if plan.vae != "whole":
        words.append("VAE by rows" + (f" in blocks of {plan.vae_block_size}" if plan.vae_block_size else ""))
    if plan.data > 1 and patches:
        words.append(f"{plan.data} pictures")
    text = ", ".join(words) + (f" | {row['cache']}" if row["cache"] else "")
    return text + (f" | {row['width']}x{row['height']}" if size else "")


def tabulate_warmups(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the lines of the table over W: seconds, and how much more than the same plan without warmup.

    Without warmup all modes are the same, and are shown as `serial`.
    """
    plans = [(Plan.parse(row["plan"]), row) for row in rows if row["plan"] != ONE_RANK]
    kinds = dict.fromkeys((name_plan_methods(str(plan)), plan.cfg, mode) for plan, _ in plans for mode in WARMUP_MODES)
    seconds: dict[tuple[Any, ...], float] = {
        (name_plan_methods(str(plan)), plan.cfg, plan.warmup_mode, plan.warmup): row["median_s"] for plan, row in plans
    }
    columns = [column for column in kinds if any(key[:3] == column and key[3] != 0 for key in seconds)]
    header = ["W"] + [f"{kind}, {mode}" for kind, _, mode in columns]
    lines = []
    for w in sorted({plan.warmup for plan, _ in plans}, key=str):
        cells = [str(w)]
        for kind, cfg, mode in columns:
            base = seconds.get((kind, cfg, "serial", 0))
            took = seconds.get((kind, cfg, mode, w))
            more = "" if took is None or base is None or w == 0 else f" ({took / base - 1:+.0%})"
            cells.append("" if took is None else f"{took:.3f} s{more}")
        lines.append(cells)
    return header, lines

"""The figures of the PipeFusion paper (arXiv 2405.14430, figures 5 to 12 and table 2) from the rows of `ditile bench`.

    ditile bench --sweep scaling --out scaling && python -m benchmarks.sweep_figures scaling --sweep scaling

`warmup` is a table, `warmup.md`; the other sweeps have figures, as PNG and SVG. `plans` are those of `ditile bench
--plans`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.latency_bars import (
    DIAMOND,
    STYLE,
    WIDTH,
    create_bar_axes,
    describe_row_method,
    draw_latency_bars,
    find_most_seconds,
    label_whiskers,
    list_plan_rows,
    place_legend_below,
    save_bench_figure,
)
from benchmarks.palette import MARKERS, NAMES, assign_plan_colours, choose_plan_colour
from benchmarks.two_hosts import parse_link_rate
from ditile.distributed.files import write_atomically
from ditile.plan.plan import Plan
from ditile_lab.bench.cells import ONE_RANK
from ditile_lab.bench.runs import ROWS
from ditile_lab.bench.sweeps import WARMUP_MODES
from ditile_lab.bench.tables import find_peak_rank, make_rows_title
from ditile_lab.rows import Row

MEMORY_PARTS = (
    ("parameters", "weights, text encoders included", "#4477aa"),
    ("activations", "activations", "#ee6677"),
    ("keys", "stale keys and values", "#ccbb44"),
    ("cache", "caches", "#228833"),
)
Point = tuple[float, float, float, float]
"""x, y, and the lowest and the highest y of the rounds."""
ONE_RANK_LINE: Any = {"color": "#333333", "ls": "--", "label": "one rank"}


def draw_sweep_files(sweep: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws the figures of a sweep, or writes the table of `warmup`; returns the files, none without plans."""
    if not list_plan_rows(rows):
        return []
    if sweep == "warmup":
        path = folder / "warmup.md"
        write_atomically(path, format_warmup_table(rows))
        return [path]
    files = []
    for name, draw in FIGURES[sweep].items():
        # One rank waits for no message.
        if draw is draw_exposed_bars and max(row["world"] for row in rows) == 1:
            continue
        with plt.rc_context(STYLE):
            files += save_bench_figure(draw(rows), folder / name)
    return files


def draw_memory_bars(rows: Sequence[Row]) -> Any:
    """Draws the peak memory of the rank that needs most, in parts."""
    measured = [row for row in rows if row.get("memory")]
    highest = max(row["peak_memory_bytes"] for row in measured)
    unit = "MB"
    unit_bytes = 1e6
    if highest >= 1e9:
        unit = "GB"
        unit_bytes = 1e9
    figure, axes = create_bar_axes(len(measured))
    labels = set[str]()
    for place, row in enumerate(measured):
        rank = find_peak_rank(row)
        left = 0.0
        for name, label, colour in MEMORY_PARTS:
            size = rank.get(name, 0) / unit_bytes
            if size:
                axes.barh(place, size, left=left, height=0.7, color=colour, ec="w", label=label)
                labels.add(label)
                left += size
        axes.annotate(f"{left:.3g}", (left, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(measured)), [describe_row_method(row) for row in measured])
    axes.set_xlabel(f"peak memory of the rank that holds most, without the VAE ({unit})")
    axes.set_xlim(0, 1.12 * highest / unit_bytes)
    place_legend_below(axes, columns=len(labels))
    axes.set_title(make_rows_title(measured), loc="left")
    return figure


def draw_exposed_bars(rows: Sequence[Row]) -> Any:
    """Draws the share of the time in which ranks waited for messages, the mean of the ranks."""
    plans = [row for row in list_plan_rows(rows) if row["world"] > 1]
    figure, axes = create_bar_axes(len(plans))
    hatched: Any = {"color": "#dddddd", "ec": "#777777", "hatch": "////", "lw": 0.5}
    highest = 1.0
    for place, row in enumerate(plans):
        warm = 100 * row["exposed_warmup"]
        share = 100 * row["exposed"]
        highest = max(highest, share)
        axes.barh(place, share - warm, height=0.7, color=choose_plan_colour(row["plan"]), ec="w")
        if warm:
            label = "in synchronous warmup steps"
            axes.barh(place, warm, left=share - warm, height=0.7, label=label, **hatched)
        axes.annotate(f"{share:.1f} %", (share, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(plans)), [describe_row_method(row) for row in plans])
    axes.set_xlim(0, 1.15 * highest)
    axes.set_xlabel("share of the denoising time in which a rank waits for messages (%; mean of the ranks)")
    place_legend_below(axes)
    axes.set_title(make_rows_title(plans), loc="left")
    return figure


def draw_scalability_lines(rows: Sequence[Row]) -> Any:
    """Draws the speed-up over the number of ranks, a line for each method."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    worlds = sorted({row["world"] for row in rows} | {1})
    axes.plot(worlds, worlds, color="#999999", ls=":", lw=1, label="as many times as ranks")
    lines = _group_points_by_method(rows, lambda row: row["world"])
    # Every method begins at one rank, with a speed-up of 1.
    lines = {name: [(1, 1.0, 1.0, 1.0), *points] for name, points in lines.items()}
    _plot_lines(axes, lines, _assign_method_colours(rows))
    _finish_speedup_axes(axes, rows, "ranks", {world: str(world) for world in worlds})
    return figure


def draw_link_lines(rows: Sequence[Row]) -> Any:
    """Draws the speed-up over the bandwidth between two hosts."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    plans = [row for row in rows if row["link"]]
    lines = _group_points_by_method(plans, lambda row: parse_link_rate(row["link"]) / 1e6)
    _plot_lines(axes, lines, _assign_method_colours(plans))
    axes.axhline(1, color="#999999", ls=":", lw=1, label="one rank")
    axes.set_xscale("log")
    ticks = {}
    for megabits in sorted({parse_link_rate(row["link"]) / 1e6 for row in plans}):
        ticks[megabits] = f"{megabits:g} Mbit/s"
        if megabits >= 1e3:
            ticks[megabits] = f"{megabits / 1e3:g} Gbit/s"
    _finish_speedup_axes(axes, rows, "link between two hosts", ticks)
    return figure


def draw_patch_count_lines(rows: Sequence[Row]) -> Any:
    """Draws the seconds over the number of patches M."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    plans = sorted(list_plan_rows(rows), key=_parse_num_patches)
    first = plans[0]
    colour = choose_plan_colour(first["plan"])
    points = [(_parse_num_patches(row), row["median_s"], row["lowest_s"], row["highest_s"]) for row in plans]
    _plot_line_with_range(axes, 0, "whole call", colour, points)
    label_whiskers(axes)
    x = [point[0] for point in points]
    loops = [row["loop_s"] for row in plans]
    axes.plot(x, loops, color=colour, marker="o", mfc="w", ms=4.5, lw=1.2, ls="-.", label="denoising loop")
    for row in plans:
        if "predicted_loop_s" in row:
            axes.plot(_parse_num_patches(row), row["predicted_loop_s"], **DIAMOND)
    for row in rows:
        if row["plan"] == ONE_RANK:
            axes.axhline(row["median_s"], lw=1, **ONE_RANK_LINE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{_parse_num_patches(row)}\n{row['ratio']:.2f}x" for row in plans])
    axes.minorticks_off()
    axes.set_xlabel("patches M; below, the speed-up over one rank")
    axes.set_ylabel("seconds for an image")
    axes.set_ylim(0, 1.08 * find_most_seconds(rows))
    title = f"{name_plan_methods(first['plan'])}, {first['world']} ranks, no warmup; {make_rows_title(rows)}"
    axes.set_title(title, loc="left")
    axes.grid(axis="y")
    place_legend_below(axes, columns=4, below=-0.62)
    return figure


def draw_resolution_panels(rows: Sequence[Row]) -> Any:
    """Draws seconds and speed-up over the size, in two panels."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.4))
    plain = sorted((row for row in rows if row["plan"] == ONE_RANK), key=lambda row: row["height"])
    sides = [row["height"] for row in plain]
    left.plot(sides, [row["median_s"] for row in plain], marker="x", ms=4, **ONE_RANK_LINE)
    colours = _assign_method_colours(rows)
    _plot_lines(right, _group_points_by_method(rows, lambda row: row["height"]), colours)
    _plot_lines(left, _group_points_by_method(rows, lambda row: row["height"], seconds=True), colours)
    label_whiskers(right)
    right.plot([], [], marker="x", ms=4, **ONE_RANK_LINE)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sides, [str(side) for side in sides])
        axes.minorticks_off()
        axes.set_xlabel("pixels of a side")
        axes.grid(axis="y")
    left.set_ylabel("seconds for an image", labelpad=8)
    right.set_ylabel("speed-up over one rank (times)", labelpad=8)
    set_logarithmic_scale(left)
    right.set_ylim(0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.17))
    left.set_title(make_rows_title(rows), loc="left")
    figure.tight_layout()
    return figure


FIGURES: dict[str, dict[str, Callable[[Sequence[Row]], Any]]] = {
    "methods": {
        "methods-latency": draw_latency_bars,
        "methods-memory": draw_memory_bars,
        "methods-exposed": draw_exposed_bars,
    },
    "plans": {
        "plans-latency": draw_latency_bars,
        "plans-memory": draw_memory_bars,
        "plans-exposed": draw_exposed_bars,
    },
    "cache": {"cache-latency": draw_latency_bars},
    "scaling": {"scalability": draw_scalability_lines},
    "patches": {"patches": draw_patch_count_lines},
    "resolution": {"resolution": draw_resolution_panels},
    "links": {"links": draw_link_lines},
}
"""Sweep -> the name of a figure's files, and the function that draws it."""


def name_plan_methods(plan: str) -> str:
    """The names of a plan's methods, such as `cfg x PipeFusion`."""
    parsed = Plan.parse(plan)
    names = [name for axis, name in NAMES.items() if getattr(parsed, axis) > 1]
    return " x ".join(names) or "one rank"


def set_logarithmic_scale(axes: Any) -> None:
    """Makes the y axis logarithmic, with 1, 2 and 5 of each power of ten written out."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def format_warmup_table(rows: Sequence[Row]) -> str:
    """The table of `tabulate_warmups` as Markdown."""
    header, lines = tabulate_warmups(rows)
    text = f"Seconds for an image, and how much more than without warmup; {make_rows_title(rows)}:\n\n"
    for cells in (header, ["---:"] * len(header), *lines):
        text += f"| {' | '.join(cells)} |\n"
    return text


def tabulate_warmups(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the lines of the table over W: seconds, and how much more than the same plan without warmup.

    Without warmup all modes are the same, and are shown as `serial`.
    """
    seconds: dict[tuple[str, int, str], dict[int | str, float]] = {}
    warmups = set[int | str]()
    for row in list_plan_rows(rows):
        plan = Plan.parse(row["plan"])
        column = (name_plan_methods(row["plan"]), plan.cfg, plan.warmup_mode)
        seconds.setdefault(column, {})[plan.warmup] = row["median_s"]
        warmups.add(plan.warmup)
    methods = dict.fromkeys((name, cfg) for name, cfg, _ in seconds)
    columns = []
    for name, cfg in methods:
        for mode in (*WARMUP_MODES, "auto"):
            column = (name, cfg, mode)
            # A column of W = 0 alone would repeat the serial one.
            if set(seconds.get(column, ())) - {0}:
                columns.append(column)
    header = ["W", *(f"{name}, {mode}" for name, _, mode in columns)]
    lines = []
    for warmup in sorted(warmups, key=str):
        cells = [str(warmup)]
        for name, cfg, mode in columns:
            measured = seconds[name, cfg, mode].get(warmup)
            without_warmup = seconds.get((name, cfg, "serial"), {}).get(0)
            text = ""
            if measured is not None:
                text = f"{measured:.3f} s"
                if without_warmup is not None and warmup != 0:
                    text += f" ({measured / without_warmup - 1:+.0%})"
            cells.append(text)
        lines.append(cells)
    return header, lines


def _group_points_by_method(
    rows: Sequence[Row], x: Callable[[Row], float], *, seconds: bool = False
) -> dict[str, list[Point]]:
    """The points of each method by x: its speed-up, or its seconds."""
    points: dict[str, list[Point]] = {}
    for row in list_plan_rows(rows):
        point = (x(row), row["ratio"], row["ratio_lowest"], row["ratio_highest"])
        if seconds:
            point = (x(row), row["median_s"], row["lowest_s"], row["highest_s"])
        points.setdefault(describe_row_method(row, with_counts=False), []).append(point)
    return {name: sorted(of_method) for name, of_method in points.items()}


def _assign_method_colours(rows: Sequence[Row]) -> dict[str, str]:
    """The colour of each line of `_group_points_by_method`."""
    plans: dict[str, str] = {}
    for row in rows:
        plans.setdefault(describe_row_method(row, with_counts=False), row["plan"])
    colours = assign_plan_colours(plans.values())
    return {name: colours[plan] for name, plan in plans.items()}


def _plot_lines(axes: Any, lines: Mapping[str, Sequence[Point]], colours: Mapping[str, str]) -> None:
    for index, (name, points) in enumerate(lines.items()):
        _plot_line_with_range(axes, index, name, colours[name], points)


def _plot_line_with_range(axes: Any, index: int, name: str, colour: str, points: Sequence[Point]) -> None:
    x = [point[0] for point in points]
    y = [point[1] for point in points]
    below = [middle - lowest for _, middle, lowest, _ in points]
    above = [highest - middle for _, middle, _, highest in points]
    marker = MARKERS[index % len(MARKERS)]
    axes.errorbar(x, y, yerr=[below, above], color=colour, marker=marker, ms=4.5, lw=1.5, capsize=2, label=name)


def _finish_speedup_axes(axes: Any, rows: Sequence[Row], label: str, ticks: Mapping[float, str]) -> None:
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over one rank (times)")
    axes.set_ylim(0)
    axes.grid(axis="y")
    label_whiskers(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_title(make_rows_title(rows), loc="left")


def _parse_num_patches(row: Row) -> int:
    return Plan.parse(row["plan"]).num_patches


def main() -> None:
    """Draws the figures of one folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out of ditile bench")
    parser.add_argument("--sweep", required=True, choices=[*FIGURES, "warmup"])
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.folder / ROWS).read_text("utf-8").splitlines()]
    for path in draw_sweep_files(options.sweep, rows, options.folder):
        print(path)


if __name__ == "__main__":
    main()

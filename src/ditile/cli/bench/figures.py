"""The figures of `ditile bench`, as PNG and SVG: those of the PipeFusion paper (arXiv 2405.14430, figures 5 to 12).

    draw({"methods": rows, "patches": rows}, Path("folder"))

A whisker is from the fastest counted round to the slowest; a diamond is what was predicted of the denoising loop, the
dark part of a bar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ditile.cli.bench.cells import ONE_RANK
from ditile.cli.bench.links import checked_rate
from ditile.cli.bench.naming import COLOURS, colour_of, kind_of, method, title, warmup_table
from ditile.cli.bench.runs import Row
from ditile.plan.plan import Plan

WIDTH = 7.2
"""Inches: a page."""
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "grid.alpha": 0.3, "legend.frameon": False, "legend.fontsize": 8, "svg.hashsalt": "ditile", "hatch.linewidth": 0.6,
}  # fmt: skip
MARKERS = "osD^vP*X"
DIAMOND: Any = {
    "color": "#333333", "marker": "D", "mfc": "w", "ms": 4, "ls": "none", "label": "loop, predicted", "zorder": 3,
}  # fmt: skip
PARTS = (
    ("parameters", "weights, text encoders included", "#4477aa"), ("activations", "activations", "#ee6677"),
    ("keys", "stale keys and values", "#ccbb44"), ("cache", "caches", "#228833"),
)  # fmt: skip


def draw(shown: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Draws what each sweep is about, and returns the files. Rows of one rank are among those of every sweep."""
    files: list[Path] = []
    for sweep, rows in shown.items():
        if not any(row["plan"] != ONE_RANK for row in rows):
            continue
        which = "links" if any(row["link"] for row in rows) else sweep
        for name, make in OF_SWEEP[which].items():
            if make is exposed and max(row["world"] for row in rows) == 1:
                continue  # nobody to wait for
            with plt.rc_context(STYLE):
                figure = make(rows)
                for suffix in (".png", ".svg"):
                    path = folder / f"{name}{suffix}"
                    metadata = {"Date": None} if suffix == ".svg" else None
                    figure.savefig(path, dpi=160, bbox_inches="tight", metadata=metadata)
                    files.append(path)
                plt.close(figure)
    return files


def latency(rows: Sequence[Row]) -> Any:
    """A bar for each plan, the plain pipeline as a line."""
    several = len({(row["height"], row["width"]) for row in rows}) > 1
    plans = [row for row in rows if row["plan"] != ONE_RANK]
    figure, axes = _bars(len(plans))
    for place, row in enumerate(plans):
        lowest, middle, highest = row["lowest_s"], row["median_s"], row["highest_s"]
        colour, loop = colour_of(row["plan"]), row["loop_s"]
        axes.barh(place, loop, height=0.7, color=colour, hatch="///" if row["cache"] else None, ec="w")
        axes.barh(place, middle - loop, left=loop, height=0.7, color=colour, alpha=0.35, ec="w")
        axes.errorbar(middle, place, xerr=[[middle - lowest], [highest - middle]], color="#333333", capsize=2, lw=0.9)
        axes.text(1.02, place, f"{row['ratio']:.2f}x", transform=axes.get_yaxis_transform(), va="center")
    axes.annotate("speed-up", (1.02, 1), (0, 6), xycoords="axes fraction", textcoords="offset points")
    _predicted(axes, plans)
    for one in (row for row in rows if row["plan"] == ONE_RANK):
        axes.axvline(one["median_s"], color="#333333", ls="--", lw=1, label="one rank")
    axes.set_yticks(range(len(plans)), _labels(plans, several))
    axes.set_xlim(0, 1.05 * max(max(row["highest_s"], row.get("predicted_loop_s", 0.0)) for row in rows))
    axes.set_xlabel("seconds of a call: denoising dark, text and decode light (speed-up: pictures per second)")
    _legend(axes)
    axes.set_title(title(rows), loc="left")
    return figure


def memory(rows: Sequence[Row]) -> Any:
    """Peak bytes of the rank that holds most, in parts."""
    some = [row for row in rows if row.get("memory")]
    figure, axes = _bars(len(some))
    unit, size = _unit(max(row["peak_memory_bytes"] for row in some))
    present = [part for part in PARTS if any(rank[part[0]] for row in some for rank in row["memory"])]
    for place, row in enumerate(some):
        most, left = max(row["memory"], key=lambda rank: sum(rank.values())), 0.0
        for name, label, colour in present:
            axes.barh(
                place, most[name] / size, left=left, height=0.7, color=colour, ec="w", label="" if place else label
            )
            left += most[name] / size
        axes.annotate(f"{left:.3g}", (left, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(some)), [method(row) for row in some])
    axes.set_xlabel(f"peak memory of the rank that holds most, without the VAE ({unit})")
    axes.set_xlim(0, 1.12 * max(row["peak_memory_bytes"] for row in some) / size)
    _legend(axes, columns=len(present))
    axes.set_title(title(some), loc="left")
    return figure


def exposed(rows: Sequence[Row]) -> Any:
    """The share of the time in which ranks waited for messages, mean of the ranks."""
    plans = [row for row in rows if row["plan"] != ONE_RANK and row["world"] > 1]
    figure, axes = _bars(len(plans))
    for place, row in enumerate(plans):
        warm, share, colour = 100 * row["exposed_warmup"], 100 * row["exposed"], colour_of(row["plan"])
        axes.barh(place, share - warm, height=0.7, color=colour, ec="w")
        if warm:
            axes.barh(place, warm, left=share - warm, height=0.7, color="#dddddd", ec="#777777", hatch="////", lw=0.5)
        axes.annotate(f"{share:.1f} %", (share, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(plans)), [method(row) for row in plans])
    axes.set_xlim(0, 1.15 * max(1.0, *(100 * row["exposed"] for row in plans)))
    axes.set_xlabel("share of the denoising time in which a rank waits for messages (%; mean of the ranks)")
    if any(row["exposed_warmup"] for row in plans):
        axes.barh(0, 0, color="#dddddd", ec="#777777", hatch="////", lw=0.5, label="in synchronous warmup steps")
        _legend(axes)
    axes.set_title(title(plans), loc="left")
    return figure


def scalability(rows: Sequence[Row]) -> Any:
    """Speed-up over the number of ranks, a line for each method."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    worlds = sorted({row["world"] for row in rows} | {1})
    axes.plot(worlds, worlds, color="#999999", ls=":", lw=1, label="as many times as ranks")
    lines = _lines(rows, lambda row: row["world"])
    for index, (name, points) in enumerate(lines.items()):
        _line(axes, index, name, [(1, 1.0, 1.0, 1.0), *points])
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlabel("ranks")
    return _speedups(figure, axes, rows)


def links(rows: Sequence[Row]) -> Any:
    """Speed-up over the bandwidth between two hosts."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    plans = [row for row in rows if row["link"]]
    for index, (name, points) in enumerate(_lines(plans, lambda row: checked_rate(row["link"]) / 1e6).items()):
        _line(axes, index, name, points)
    rates = sorted({checked_rate(row["link"]) / 1e6 for row in plans})
    axes.axhline(1, color="#999999", ls=":", lw=1, label="one rank")
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate / 1e3:g} Gbit/s" if rate >= 1e3 else f"{rate:g} Mbit/s" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("link between two hosts")
    return _speedups(figure, axes, rows)


def patches(rows: Sequence[Row]) -> Any:
    """Seconds over M."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    plans = sorted((row for row in rows if row["plan"] != ONE_RANK), key=_patches)
    x = [_patches(row) for row in plans]
    _seconds_line(axes, x, plans)
    _one_rank_line(axes, rows)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{m}\n{row['ratio']:.2f}x" for m, row in zip(x, plans, strict=True)])
    axes.minorticks_off()
    axes.set_xlabel("patches M; below, the speed-up over one rank")
    axes.set_ylabel("seconds for a picture")
    axes.set_ylim(0, 1.08 * max(max(row["highest_s"], row.get("predicted_loop_s", 0.0)) for row in rows))
    axes.set_title(f"{kind_of(plans[0]['plan'])}, {plans[0]['world']} ranks, no warmup; {title(rows)}", loc="left")
    axes.grid(axis="y")
    _legend(axes, columns=4, below=-0.62)
    return figure


def resolution(rows: Sequence[Row]) -> Any:
    """Seconds and speed-up over the size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.4))
    lines = _lines(rows, lambda row: row["height"])
    ones = sorted((row for row in rows if row["plan"] == ONE_RANK), key=lambda row: row["height"])
    left.plot([r["height"] for r in ones], [r["median_s"] for r in ones], color="#333333", ls="--", marker="x", ms=4)
    for index, (name, points) in enumerate(lines.items()):
        _line(right, index, name, points)
        mine = [row for row in rows if _name(row) == name]
        _line(left, index, name, sorted((r["height"], r["median_s"], r["lowest_s"], r["highest_s"]) for r in mine))
    right.plot([], [], color="#333333", ls="--", marker="x", ms=4, label="one rank")
    sides = sorted({row["height"] for row in ones})
    for axes, label in ((left, "seconds for a picture"), (right, "speed-up over one rank (times)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sides, [str(side) for side in sides])
        axes.minorticks_off()
        axes.set_xlabel("pixels of a side")
        axes.set_ylabel(label, labelpad=8)
        axes.grid(axis="y")
    logarithmic(left)
    right.set_ylim(0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.12))
    left.set_title(title(rows), loc="left")
    figure.tight_layout()
    return figure


def warmup(rows: Sequence[Row]) -> Any:
    """A table: W, and the ways of warming up."""
    header, lines = warmup_table(rows)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.3 * (len(lines) + 2)))
    axes.axis("off")
    rest = 0.94 / (len(header) - 1)
    made = axes.table(
        cellText=lines, colLabels=header, cellLoc="center", colWidths=[0.06] + [rest] * (len(header) - 1),
        bbox=Bbox.unit(),
    )  # fmt: skip
    made.auto_set_font_size(False)
    made.set_fontsize(8)
    for (place, _), cell in made.get_celld().items():
        cell.set_edgecolor("#cccccc")
        cell.set_facecolor("#eeeeee" if place == 0 else "white")
        cell.set_height((2.0 if place == 0 else 1.2) / (1.2 * len(lines) + 2.0))
    axes.set_title(f"seconds for a picture (and how much more than without warmup)\n{title(rows)}", loc="left")
    return figure


OF_SWEEP: dict[str, dict[str, Callable[[Sequence[Row]], Any]]] = {
    "methods": {"methods-latency": latency, "methods-memory": memory, "methods-exposed": exposed},
    "plans": {"plans-latency": latency, "plans-memory": memory, "plans-exposed": exposed},
    "scaling": {"scalability": scalability}, "patches": {"patches": patches}, "warmup": {"warmup": warmup},
    "resolution": {"resolution": resolution}, "links": {"links": links}, "cache": {"cache-latency": latency},
}  # fmt: skip
"""What is drawn for a sweep, by the name of the file."""


def _bars(count: int) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(WIDTH, 0.29 * count + 1.1))
    axes.grid(axis="x")
    axes.set_ylim(count - 0.4, -0.6)  # the first on top
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _name(row: Row) -> str:
    return method(row, patches=False)


def _lines(rows: Sequence[Row], x: Callable[[Row], float]) -> dict[str, list[tuple[float, float, float, float]]]:
    """(x, ratio, lowest, highest) of each method, by x."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        if row["plan"] != ONE_RANK:
            point = (x(row), row["ratio"], row["ratio_lowest"], row["ratio_highest"])
            found.setdefault(_name(row), []).append(point)
    return {name: sorted(points) for name, points in found.items()}


def _line(axes: Any, index: int, name: str, points: Sequence[tuple[float, float, float, float]]) -> None:
    x, y = [p[0] for p in points], [p[1] for p in points]
    spread = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
    colour = COLOURS[index % len(COLOURS)]
    axes.errorbar(x, y, yerr=spread, color=colour, marker=MARKERS[index % 8], ms=4.5, lw=1.5, capsize=2, label=name)


def _seconds_line(axes: Any, x: Sequence[int], rows: Sequence[Row]) -> None:
    middle = [row["median_s"] for row in rows]
    spread = [[row["median_s"] - row["lowest_s"] for row in rows], [row["highest_s"] - row["median_s"] for row in rows]]
    axes.errorbar(x, middle, yerr=spread, color=COLOURS[0], marker="o", ms=4.5, lw=1.5, capsize=2, label="whole call")
    loops = [row["loop_s"] for row in rows]
    axes.plot(x, loops, color=COLOURS[0], marker="o", mfc="w", ms=4.5, lw=1.2, ls="-.", label="denoising loop")
    foretold = [(m, row["predicted_loop_s"]) for m, row in zip(x, rows, strict=True) if "predicted_loop_s" in row]
    if foretold:
        axes.plot(*zip(*foretold, strict=True), **DIAMOND)


def _labels(rows: Sequence[Row], several: bool) -> list[str]:
    """The methods; a cache by itself below the plan that it is with."""
    found, above = [], None
    for row in rows:
        own = method(row | {"cache": ""}, size=several)
        found.append(f"+ {row['cache']}" if row["cache"] and own == above else method(row, size=several))
        above = own
    return found


def _predicted(axes: Any, rows: Sequence[Row]) -> None:
    points = [(row["predicted_loop_s"], place) for place, row in enumerate(rows) if "predicted_loop_s" in row]
    if points:
        axes.plot(*zip(*points, strict=True), **DIAMOND)


def _one_rank_line(axes: Any, rows: Sequence[Row]) -> None:
    for one in (row for row in rows if row["plan"] == ONE_RANK):
        axes.axhline(one["median_s"], color="#333333", ls="--", lw=1, label="one rank")


def _speedups(figure: Any, axes: Any, rows: Sequence[Row]) -> Any:
    axes.set_ylabel("speed-up over one rank (times)")
    axes.set_ylim(0)
    axes.grid(axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_title(title(rows), loc="left")
    return figure


def _legend(axes: Any, columns: int = 3, below: float = -0.48) -> None:
    """Below the axes, by inches that the labels there need."""
    handles, labels = axes.get_legend_handles_labels()
    of_label = dict(zip(labels, handles, strict=True))
    if of_label:
        axes.legend(
            of_label.values(), of_label.keys(), loc="upper left", bbox_to_anchor=(0, below / axes.bbox.height * 100),
            ncols=columns, borderaxespad=0,
        )  # fmt: skip


def _patches(row: Row) -> int:
    return Plan.parse(row["plan"]).num_patches


def _unit(largest: float) -> tuple[str, float]:
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)


def logarithmic(axes: Any) -> None:
    """A logarithmic scale upwards, with 1, 2 and 5 of each power of ten written out."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.yaxis.set_minor_locator(NullLocator())

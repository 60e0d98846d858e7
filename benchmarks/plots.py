"""Figures for the docs: the Gantt chart of a real trace, the ages of keys, and quality over speed.

python -m benchmarks.plots gantt trace.json docs/images/gantt.png --steps 1-4
python -m benchmarks.plots freshness docs/images/freshness.png --patches 4
python -m benchmarks.plots pareto pixart.jsonl flux.jsonl curves.png
python -m benchmarks.plots tradeoff evaluation/evaluation.json docs/images/evaluation.png
python -m benchmarks.plots suite gpu-results/gpu.jsonl gpu.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.cache_quality import average_image_rows, find_speed_quality_front, read_image_rows
from benchmarks.cache_settings import OURS, THEIRS
from benchmarks.sweep_figures import set_logarithmic_scale
from ditile.measure.evaluate.figures import draw_tradeoff
from ditile.measure.palette import COLOURS, MARKERS, ONE_RANK_COLOUR
from ditile.plan.schedule import MicroStep, Schedule

FRESH, STALE = "#4477aa", "#dddddd"
PATCH_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#777777")
GROUP_COLOURS = {
    "tensor": COLOURS["tensor"],
    "sequence": COLOURS["ulysses"],
    "DistriFusion": COLOURS["distrifusion"],
    "PipeFusion": COLOURS["pipefusion"],
}
"""Group of methods -> colour; any other has `ONE_RANK_COLOUR`."""


def save_figure(figure: Any, out: Path) -> None:
    """Writes a figure, and closes it."""
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def draw_gantt_chart(trace: Path, out: Path, steps: range) -> None:
    """Draws the computed micro-steps of each stage, one colour per patch; waiting is hatched."""
    slices = [e for e in json.loads(trace.read_text("utf-8"))["traceEvents"] if e["ph"] == "X"]
    shown = [e for e in slices if e["args"]["step"] in steps and e["cat"] in ("compute", "receive", "take")]
    stages = 1 + max(e["tid"] for e in shown)
    origin = min(e["ts"] for e in shown if e["cat"] == "compute")
    figure, axes = plt.subplots(figsize=(11, 0.6 * stages + 1.2))
    for event in shown:
        _draw_event_bar(axes, event, origin)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_xlim(0, max(e["ts"] + e["dur"] - origin for e in shown if e["cat"] == "compute") / 1e3)
    title = (
        f"steps {steps.start} to {steps.stop - 1}: grey = whole synchronous step, colours = patches, hatched = waiting"
    )
    axes.set_title(title, fontsize=10)
    save_figure(figure, out)


def freshness(patches: int, out: Path) -> None:
    """Draws which patches' keys are fresh in each micro-step of a step (figure 4 of arXiv 2405.14430)."""
    schedule = Schedule(stages=patches, patches=patches, steps=3, warmup=1)
    figure, rows = plt.subplots(2, 1, figsize=(8, 3.4))
    own = [tuple(int(q != p) for q in range(patches)) for p in range(patches)]
    ours = [schedule.compute_key_ages(MicroStep(1, p)) for p in range(patches)]
    for axes, ages, title in zip(rows, (ours, own), ("PipeFusion", "DistriFusion"), strict=True):
        _draw_key_ages(axes, ages)
        axes.set_title(
            f"{title}: keys of each patch while patch p is computed (blue fresh, grey one step old)",
            fontsize=9,
        )
    save_figure(figure, out)


def draw_pareto_panels(files: Sequence[Path], out: Path) -> None:
    """Draws PSNR over speed-up, a panel for each model and number of steps: every setting, and each engine's front."""
    rows = [row for row in average_image_rows(row for path in files for row in read_image_rows(path)) if row["engine"]]
    panels = sorted({(row["model"], row["steps"]) for row in rows})
    figure, grid = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), squeeze=False)
    for axes, (model, steps) in zip(grid[0], panels, strict=True):
        here = [row for row in rows if (row["model"], row["steps"]) == (model, steps)]
        for engine, colour, marker in ((THEIRS, "#cc3311", "s"), (OURS, "#004488", "o")):
            mine = [row for row in here if row["engine"] == engine]
            if not mine:
                continue
            speed, quality = ([row[name] for row in mine] for name in ("speedup", "psnr"))
            axes.scatter(speed, quality, s=16, color=colour, marker=marker, alpha=0.45, lw=0)
            axes.plot(
                *zip(*find_speed_quality_front(mine, engine), strict=True),
                color=colour,
                marker=marker,
                ms=4.5,
                lw=1.6,
                label=engine,
            )
        captions = max(row["captions"] for row in here)
        axes.set_title(f"{model}, {steps} steps, {captions} captions", fontsize=10)
        axes.set_xlabel("speed-up over no cache (times, whole picture)")
        axes.set_ylabel("mean PSNR to the picture without a cache (dB)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save_figure(figure, out)
    if out.suffix != ".svg":
        save_figure(figure, out.with_suffix(".svg"))


def scaling(panels: Mapping[str, Mapping[str, Mapping[int, float]]], out: Path) -> None:
    """Draws seconds over devices, both logarithmic, a panel for each title and a line for each group of methods."""
    figure, grid = plt.subplots(-(-len(panels) // 2), 2, figsize=(10.4, 3.9 * -(-len(panels) // 2)), squeeze=False)
    for axes, (title, groups) in zip(grid.flat, panels.items(), strict=False):
        for k, (name, seconds) in enumerate(groups.items()):
            if seconds:
                colour = GROUP_COLOURS.get(name, ONE_RANK_COLOUR)
                axes.plot(list(seconds), list(seconds.values()), color=colour, marker=MARKERS[k], ms=5, label=name)
        devices = sorted({count for seconds in groups.values() for count in seconds})
        axes.set_xscale("log", base=2)
        set_logarithmic_scale(axes)
        axes.set_xticks(devices, list(map(str, devices)))
        axes.set_xlabel("devices")
        axes.set_ylabel("predicted latency (s)")
        axes.set_title(title, fontsize=9.5)
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, out)


def draw_suite_bars(file: Path, out: Path) -> None:
    """Draws the seconds of each timed call of `ditile bench --suite gpu` as a share of the plain pipeline's."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    timed = [row for row in rows if "seconds" in row]
    labels = [f"{row['what']}, {row['size']} px, {row['ranks']} rank(s)" for row in timed]
    figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.22 * len(timed)))
    axes.barh(range(len(timed)), [row["of_plain"] for row in timed], color="#4477aa")
    axes.axvline(1.0, color="#333333", lw=0.8)
    axes.set_yticks(range(len(timed)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds / seconds of one rank")
    save_figure(figure, out)


def main() -> None:
    """Draws one figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    chart = kinds.add_parser("gantt")
    chart.add_argument("trace", type=Path)
    chart.add_argument("out", type=Path)
    chart.add_argument("--steps", default="0-3", help="first-last")
    fresh = kinds.add_parser("freshness")
    fresh.add_argument("out", type=Path)
    fresh.add_argument("--patches", type=int, default=4)
    curves = kinds.add_parser("pareto")
    curves.add_argument("files", type=Path, nargs="+")
    curves.add_argument("out", type=Path)
    points = kinds.add_parser("tradeoff")
    points.add_argument("file", type=Path)
    points.add_argument("out", type=Path)
    bars = kinds.add_parser("suite")
    bars.add_argument("file", type=Path)
    bars.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.kind == "suite":
        draw_suite_bars(given.file, given.out)
    elif given.kind == "tradeoff":
        draw_tradeoff(json.loads(given.file.read_text("utf-8")), given.out)
    elif given.kind == "pareto":
        draw_pareto_panels(given.files, given.out)
    elif given.kind == "freshness":
        freshness(given.patches, given.out)
    else:
        first, _, last = given.steps.partition("-")
        draw_gantt_chart(given.trace, given.out, range(int(first), int(last or first) + 1))


def _draw_event_bar(axes: Any, event: dict[str, Any], origin: float) -> None:
    start = (event["ts"] - origin) / 1e3
    width = event["dur"] / 1e3
    patch = event["args"]["patch"]
    if event["cat"] != "compute":
        axes.barh(event["tid"], width, left=start, height=0.3, color="none", edgecolor="#999999", hatch="////", lw=0)
        return
    colour = "#888888" if patch is None else PATCH_COLOURS[patch % len(PATCH_COLOURS)]
    axes.barh(event["tid"], width, left=start, height=0.8, color=colour, edgecolor="white", lw=0.5)
    axes.text(
        start + width / 2,
        event["tid"],
        "all" if patch is None else patch,
        ha="center",
        va="center",
        fontsize=7,
    )


def _draw_key_ages(axes: Any, ages: Sequence[Sequence[int]]) -> None:
    patches = len(ages)
    for column, of_patch in enumerate(ages):
        for row, age in enumerate(of_patch):
            colour = STALE if age else FRESH
            axes.barh(row, 0.9, left=column * 1.2, height=0.9, color=colour)
    axes.set_xticks([1.2 * p + 0.45 for p in range(patches)], [f"p = {p}" for p in range(patches)], fontsize=8)
    axes.set_yticks(range(patches), [f"patch {p}" for p in range(patches)], fontsize=8)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


if __name__ == "__main__":
    main()

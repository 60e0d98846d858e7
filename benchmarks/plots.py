"""Figures for the docs: the Gantt chart of a real trace, the ages of keys, and quality over speed.

python -m benchmarks.plots gantt trace.json docs/images/gantt.png --steps 1-4
python -m benchmarks.plots freshness docs/images/freshness.png --patches 4
python -m benchmarks.plots pareto pixart.jsonl flux.jsonl curves.png
python -m benchmarks.plots tradeoff evaluation/evaluation.json docs/images/evaluation.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.cache_quality import average_image_rows, find_speed_quality_front, read_image_rows
from benchmarks.cache_settings import OURS, THEIRS
from benchmarks.palette import COLOURS, MARKERS, ONE_RANK_COLOUR
from benchmarks.sweep_figures import set_logarithmic_scale
from benchmarks.tradeoff import draw_tradeoff
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile_lab.rows import Row, list_values

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
    events = []
    for event in json.loads(trace.read_text("utf-8"))["traceEvents"]:
        # Only slices have a duration.
        if event["ph"] == "X" and event["args"]["step"] in steps and event["cat"] in ("compute", "receive", "take"):
            events.append(event)
    computed = [event for event in events if event["cat"] == "compute"]
    origin = min(list_values(computed, "ts"))
    stages = 1 + max(list_values(events, "tid"))
    figure, axes = plt.subplots(figsize=(11, 0.6 * stages + 1.2))
    for event in events:
        _draw_event_bar(axes, event, origin)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    end = max(event["ts"] + event["dur"] for event in computed)
    axes.set_xlim(0, (end - origin) / 1e3)
    span = f"steps {steps.start} to {steps.stop - 1}"
    axes.set_title(f"{span}: grey = whole synchronous step, colours = patches, hatched = waiting", fontsize=10)
    save_figure(figure, out)


def freshness(patches: int, out: Path) -> None:
    """Draws which patches' keys are fresh in each micro-step of a step (figure 4 of arXiv 2405.14430)."""
    schedule = PatchSchedule(stages=patches, patches=patches, steps=3, warmup=1)
    pipefusion = []
    distrifusion = []
    for patch in range(patches):
        pipefusion.append(schedule.compute_key_ages(MicroStep(1, patch)))
        # All keys but the patch's own are a step old.
        ages = [1] * patches
        ages[patch] = 0
        distrifusion.append(ages)
    figure, (first, second) = plt.subplots(2, 1, figsize=(8, 3.4))
    for axes, ages_of_patches, method in ((first, pipefusion, "PipeFusion"), (second, distrifusion, "DistriFusion")):
        _draw_key_ages(axes, ages_of_patches)
        title = f"{method}: keys of each patch while patch p is computed (blue fresh, grey one step old)"
        axes.set_title(title, fontsize=9)
    save_figure(figure, out)


def draw_pareto_panels(files: Sequence[Path], out: Path) -> None:
    """Draws PSNR over speed-up, a panel for each model and number of steps: every setting, and each engine's front."""
    image_rows: list[Row] = []
    for path in files:
        image_rows += read_image_rows(path)
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in average_image_rows(image_rows):
        # The plain pipeline has no engine.
        if row["engine"]:
            panels.setdefault((row["model"], row["steps"]), []).append(row)
    figure, grid = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), squeeze=False)
    for axes, (model, steps) in zip(grid[0], sorted(panels), strict=True):
        rows = panels[model, steps]
        for engine, colour, marker in ((THEIRS, "#cc3311", "s"), (OURS, "#004488", "o")):
            engine_rows = [row for row in rows if row["engine"] == engine]
            if not engine_rows:
                continue
            speedups = list_values(engine_rows, "speedup")
            axes.scatter(
                speedups, list_values(engine_rows, "psnr"), s=16, color=colour, marker=marker, alpha=0.45, lw=0
            )
            front = zip(*find_speed_quality_front(engine_rows, engine), strict=True)
            axes.plot(*front, color=colour, marker=marker, ms=4.5, lw=1.6, label=engine)
        captions = max(list_values(rows, "captions"))
        axes.set_title(f"{model}, {steps} steps, {captions} captions", fontsize=10)
        axes.set_xlabel("speed-up over no cache (times, whole image)")
        axes.set_ylabel("mean PSNR to the image without a cache (dB)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save_figure(figure, out)
    if out.suffix != ".svg":
        save_figure(figure, out.with_suffix(".svg"))


def scaling(panels: Mapping[str, Mapping[str, Mapping[int, float]]], out: Path) -> None:
    """Draws seconds over devices, both logarithmic, a panel for each title and a line for each group of methods."""
    num_rows = math.ceil(len(panels) / 2)
    figure, grid = plt.subplots(num_rows, 2, figsize=(10.4, 3.9 * num_rows), squeeze=False)
    for axes, (title, groups) in zip(grid.flat, panels.items(), strict=False):
        devices = set[int]()
        for (name, seconds), marker in zip(groups.items(), MARKERS, strict=False):
            devices |= seconds.keys()
            if seconds:
                colour = GROUP_COLOURS.get(name, ONE_RANK_COLOUR)
                axes.plot(list(seconds), list(seconds.values()), color=colour, marker=marker, ms=5, label=name)
        axes.set_xscale("log", base=2)
        set_logarithmic_scale(axes)
        axes.set_xticks(sorted(devices), list(map(str, sorted(devices))))
        axes.set_xlabel("devices")
        axes.set_ylabel("predicted latency (s)")
        axes.set_title(title, fontsize=9.5)
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False, fontsize=8)
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
    options = parser.parse_args()
    if options.kind == "tradeoff":
        draw_tradeoff(json.loads(options.file.read_text("utf-8")), options.out)
    elif options.kind == "pareto":
        draw_pareto_panels(options.files, options.out)
    elif options.kind == "freshness":
        freshness(options.patches, options.out)
    else:
        first, _, last = options.steps.partition("-")
        draw_gantt_chart(options.trace, options.out, range(int(first), int(last or first) + 1))


def _draw_event_bar(axes: Any, event: dict[str, Any], origin: float) -> None:
    start = (event["ts"] - origin) / 1e3
    width = event["dur"] / 1e3
    stage = event["tid"]
    if event["cat"] != "compute":
        axes.barh(stage, width, left=start, height=0.3, color="none", edgecolor="#999999", hatch="////", lw=0)
        return
    patch = event["args"]["patch"]
    colour = "#888888"
    label = "all"
    if patch is not None:
        colour = PATCH_COLOURS[patch % len(PATCH_COLOURS)]
        label = str(patch)
    axes.barh(stage, width, left=start, height=0.8, color=colour, edgecolor="white", lw=0.5)
    axes.text(start + width / 2, stage, label, ha="center", va="center", fontsize=7)


def _draw_key_ages(axes: Any, ages_of_patches: Sequence[Sequence[int]]) -> None:
    patches = range(len(ages_of_patches))
    for column, ages in enumerate(ages_of_patches):
        for row, age in enumerate(ages):
            colour = STALE if age else FRESH
            axes.barh(row, 0.9, left=column * 1.2, height=0.9, color=colour)
    axes.set_xticks([1.2 * patch + 0.45 for patch in patches], [f"p = {patch}" for patch in patches], fontsize=8)
    axes.set_yticks(patches, [f"patch {patch}" for patch in patches], fontsize=8)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


if __name__ == "__main__":
    main()

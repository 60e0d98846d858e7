"""Compares images of few calls with those of the model's own steps, and with those of many.

    python -m benchmarks.finer_fits --captions 6 --out rows.json --figure distances.png

Fits are on the last captions, and these are the first. A file of results is taken as it is, and only drawn again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ditile
from benchmarks.palette import MARKERS, save_figure
from ditile.distributed import files
from ditile_lab.quality.captions import load_captions
from ditile_lab.quality.schedule_fit import Frames, compute_decibels

OWN = 20
"""The model's own steps."""
MANY = 96
"""Plain steps that stand for what the model means."""
PLAIN = (6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24)
FITTED = (6, 8, 10, 12, 15)
LINES = {None: "plain steps", 20: "fitted, of 20 steps", 48: "fitted, of 48 steps"}
"""The steps of the schedule -> its name; None for no schedule."""
COLOURS = ("#777777", "#4477aa", "#228833")
Row = dict[str, Any]


def measure(model: str, count: int, out: Path) -> None:
    """Generate the captions in every way; write a row for each after each caption, with both distances."""
    pipe = ditile.load(model)
    pipe.set_progress_bar_config(disable=True)
    rows: list[Row] = []
    for schedule in LINES:
        for calls in PLAIN if schedule is None else FITTED:
            rows.append({"model": model, "schedule": schedule, "calls": calls, "to_own": [], "to_many": []})
    for seed, caption in enumerate(load_captions("bundled", None, count)):

        def draw(steps: int, prompt: str = caption.text, seed: int = seed) -> Frames:
            call = ditile.defaults(model) | {"prompt": prompt, "num_inference_steps": steps}
            return np.asarray(pipe(**call, generator=torch.Generator().manual_seed(seed)).images[0])[None]

        own = draw(OWN)
        many = draw(MANY)
        for row in rows:
            if row["schedule"] is None:
                image = draw(row["calls"])
            else:
                ditile.enable_cache(pipe, ditile.FittedScheduleConfig(steps=row["calls"]))
                image = draw(row["schedule"])
                ditile.disable_cache(pipe)
            row["to_own"].append(round(compute_decibels(image, own), 2))
            row["to_many"].append(round(compute_decibels(image, many), 2))
        files.write_atomically(out, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        print(f"{seed + 1} of {count}", file=sys.stderr, flush=True)


def print_table(rows: list[Row]) -> None:
    """Print a line for each row, with the mean and the worst of both distances."""
    print(f"| calls | {rows[0]['model']}, {len(rows[0]['to_own'])} captions | to {OWN} steps | to {MANY} steps |")
    print("|--:|---|--:|--:|")
    for row in rows:
        cells = [f"{np.mean(row[name]):.1f} ({min(row[name]):.1f})" for name in ("to_own", "to_many")]
        print(f"| {row['calls']} | {LINES[row['schedule']]} | {cells[0]} | {cells[1]} |")


def draw_distances(rows: list[Row], out: Path) -> None:
    """Draw both distances over the calls of the model, a line for each kind of schedule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.2), sharey=True)
    titles = {"to_own": f"to the model's own {OWN} steps", "to_many": f"to {MANY} plain steps"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for (schedule, label), colour, marker in zip(LINES.items(), COLOURS, MARKERS, strict=False):
            line = [row for row in rows if row["schedule"] == schedule]
            if schedule is None and name == "to_own":
                # These are the images that the others are compared with.
                line = [row for row in line if row["calls"] != OWN]
            means = [float(np.mean(row[name])) for row in line]
            drops = [mean - min(row[name]) for mean, row in zip(means, line, strict=True)]
            bars = [drops, [0.0] * len(line)]
            calls = [row["calls"] for row in line]
            axes.errorbar(
                calls, means, yerr=bars, label=label, color=colour, marker=marker, lw=1.2, elinewidth=0.6, capsize=2
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("calls of the model")
        axes.set_xticks(range(PLAIN[0], PLAIN[-1] + 1, 2))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean PSNR (dB); bars reach to the worst image")
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"{rows[0]['model']}, {len(rows[0]['to_own'])} captions that nothing was fitted to", fontsize=10)
    figure.tight_layout()
    save_figure(figure, out, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, or read what was measured; print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes-flux")
    parser.add_argument("--captions", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("finer-fits.json"), help="file of results")
    parser.add_argument("--figure", type=Path, help="file of the figure")
    options = parser.parse_args()
    if not options.out.exists():
        measure(options.model, options.captions, options.out)
    rows = json.loads(options.out.read_text("utf-8"))
    print_table(rows)
    if options.figure is not None:
        draw_distances(rows, options.figure)


if __name__ == "__main__":
    main()

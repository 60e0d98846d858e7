"""All methods that skip work, on one model: the remaining work, and its cost in quality (`ditile evaluate --methods`).

Each method has a few settings, from careful to fast. The table has them in the order of the remaining work, and the
figure has a line for each method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ditile.cache.fitted.schedule import FEWEST_FORECAST_STEPS
from ditile.plan.extras import require_extra
from ditile.runner.requests.console import make_numbered_tables
from ditile_lab.palette import MARKERS, save_figure
from ditile_lab.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

METHODS_FILE = "methods.png"
SCHEDULE = "fitted schedule"
COMPARED: dict[str, tuple[str, ...]] = {
    "step mask": ("F=0 W=3 R=1 MC=1 taylor=1 reach=0.5", "F=0 W=3 R=1 MC=2 taylor=1 reach=0.5"),
    "DBCache": ("F=1 W=4 R=0.12 taylor=1", "F=1 W=4 R=0.25 taylor=1"),
    "SeaCache": ("sea=0.2", "sea=0.3", "sea=0.5"),
    "Spectrum": ("spectrum=0.75", "spectrum=3"),
    "EasyCache": ("easy=0.02", "easy=0.05", "easy=0.1"),
    "gating": ("gate=0.8", "gate=0.6", "gate=0.5"),
}
"""Method -> its settings, each a cache in one line."""
MEASURED_SHARES = (0.75, 0.6, 0.5, 0.4, 0.3)
"""The shares of computed steps that are measured: above them little is saved, and below them images change."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


def choose_measured_sizes(num_steps: int) -> list[int]:
    """Choose the numbers of computed steps for which images are compared with those of all steps, the most first."""
    if num_steps < FEWEST_FORECAST_STEPS:
        return list(range(num_steps - 1, 1, -1))
    return [round(share * num_steps) for share in MEASURED_SHARES]


def list_method_lines(num_steps: int, *, is_guided: bool) -> dict[str, str]:
    """List the compared caches for a number of steps, in one line each, with their methods.

    A few steps are skipped only by a schedule: thresholds and lines were made for many.
    """
    lines = {f"steps={count}": SCHEDULE for count in choose_measured_sizes(num_steps)}
    for title, settings in COMPARED.items():
        fits = num_steps >= FEWEST_FORECAST_STEPS
        if title == "gating":
            fits = is_guided
        if fits:
            lines |= dict.fromkeys(settings, title)
    return lines


def build_methods_table(evaluation: Row, methods: Mapping[str, str]) -> list[Table | str]:
    """Build numbered tables of the methods in the order of the remaining work, with a line for each setting."""
    columns: dict[str, list[str]] = {"work, %": [], "PSNR, dB": [], "worst": [], "speed-up": []}
    labels = []
    for row in _sort_by_work(evaluation, methods):
        columns["work, %"].append(f"{100 * (1 - row['blocks_saved']):.0f}")
        columns["PSNR, dB"].append(f"{row['psnr']:.1f}")
        columns["worst"].append(f"{row['psnr_lowest']:.1f}")
        columns["speed-up"].append(f"{row['speedup']:.2f}x")
        if "all_right" in row:
            columns.setdefault("right, %", []).append(f"{row['all_right']:.0f}")
        labels.append(f"{methods[row['cache']]}: {row['cache']}")
    title = f"{evaluation['model']}, {evaluation['captions']['count']} caption(s), against the image of all the work"
    return [title, *make_numbered_tables(labels, columns)]


def draw_methods(evaluation: Row, methods: Mapping[str, str], out: Path) -> None:
    """Draw each method's mean PSNR over the remaining work, with the worst image below it."""
    require_extra("plots", "the figure of methods")
    import matplotlib

    # This backend needs no display. It must be chosen before pyplot is imported.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    by_method: dict[str, list[Row]] = {}
    for row in _sort_by_work(evaluation, methods):
        by_method.setdefault(methods[row["cache"]], []).append(row)
    figure, axes = plt.subplots(figsize=(9.6, 5))
    for index, method in enumerate(dict.fromkeys(methods.values())):
        rows = by_method.get(method, [])
        work = [100 * (1 - row["blocks_saved"]) for row in rows]
        means = [row["psnr"] for row in rows]
        drops = [row["psnr"] - row["psnr_lowest"] for row in rows]
        nothing = [0.0] * len(rows)
        axes.errorbar(
            work,
            means,
            yerr=[drops, nothing],
            label=method,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            lw=1.2,
            elinewidth=0.6,
            capsize=2,
        )
    axes.set_xlabel("work that is left, % of all blocks or calls")
    axes.set_ylabel("mean PSNR to the image of all the work (dB)")
    count = evaluation["captions"]["count"]
    axes.set_title(f"{evaluation['model']}, {count} caption(s); bars reach to the worst image", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    save_figure(figure, out, dpi=110)
    plt.close(figure)


def _sort_by_work(evaluation: Row, methods: Mapping[str, str]) -> Sequence[Row]:
    rows = [row for row in evaluation["settings"] if row["cache"] in methods]
    return sorted(rows, key=lambda row: (row["blocks_saved"], row["psnr"]))

"""All methods that skip work, on one model: the remaining work, and its cost in quality.

    python -m benchmarks.methods --model shapes-flux --num 24 --out methods

It is `ditile evaluate` of one rank with a few settings of each method, from careful to fast. The table has them in the
order of the remaining work, and the figure has a line for each method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

# This backend needs no display, and must be set before the first figure is made.
matplotlib.use("Agg")

from matplotlib import pyplot as plt
from rich.table import Table

from benchmarks.palette import MARKERS, save_figure
from ditile.cache.fitted.schedule import FEWEST_FORECAST_STEPS, read_shipped_schedules
from ditile.plan.errors import DitileError
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.runner.model_files import defaults
from ditile.runner.requests.console import make_console, make_numbered_tables, print_parts
from ditile.runner.requests.facts import build_dry_run_call, count_request_steps
from ditile.runner.requests.options import GenerateOptions
from ditile_lab.quality.command import run_evaluation
from ditile_lab.quality.options import ORIGINAL, EvaluateOptions, JudgeOptions, SessionOptions
from ditile_lab.quality.schedule_fit import choose_measured_sizes
from ditile_lab.rows import Row

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
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


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


def choose_method_lines(request: GenerateOptions) -> dict[str, str]:
    """Choose the compared caches for a caption's image, in one line each, with their methods."""
    model = request.model
    own_request = GenerateOptions(model=model, prompt=request.prompt)
    own_call = build_dry_run_call(own_request, defaults(model))
    call = build_dry_run_call(request, defaults(model))
    scales = [call[name] for name in ("true_cfg_scale", "guidance_scale") if name in call]
    lines = list_method_lines(count_request_steps(request), is_guided=max(scales, default=0.0) > 1)
    is_shipped = any(schedule.model == model for schedule in read_shipped_schedules().values())
    if is_shipped and call != own_call:
        # The schedules that come with a bundled model fit only its own call, and are refused for another.
        return {line: method for line, method in lines.items() if method != SCHEDULE}
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


def main() -> None:
    """Measures the methods, prints the table, and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, EvaluateOptions, title="images", left_out=("plans", "caches"))
    add_arguments(parser, SessionOptions, title="run")
    arguments = parser.parse_args()
    try:
        options = EvaluateOptions(**collect_arguments(EvaluateOptions, arguments))
        session = SessionOptions(**collect_arguments(SessionOptions, arguments))
        lines = choose_method_lines(options.build_generate_options())
        options = replace(options, plans=ORIGINAL.plan, caches="; ".join(lines))
        evaluation = run_evaluation(options, JudgeOptions(), session)
    except DitileError as error:
        sys.exit(str(error))
    # Under torchrun only the first rank has it.
    if evaluation is not None:
        print_parts(make_console(), build_methods_table(evaluation, lines))
        draw_methods(evaluation, lines, Path(session.out, METHODS_FILE))


if __name__ == "__main__":
    main()

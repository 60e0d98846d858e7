"""The curves of the sweeps: axes say what they show and in what unit, files are there, and no text lies on another."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from PIL import Image

from benchmarks import palette, sweep_figures
from benchmarks.latency_bars import STYLE, list_plan_rows
from benchmarks.tests.drawn import assert_apart, make_rows
from ditile.plan.plan import Plan
from ditile_lab.bench import runs, sweeps
from ditile_lab.bench.cells import ONE_RANK, BenchCell
from ditile_lab.rows import Row
from tests.lab.bench.test_bench import run as ran

RATES = ("100mbit", "1gbit", "10gbit")
SIDES = (256, 512, 1024, 2048)
LABELS: dict[str, list[tuple[str, str]]] = {
    "methods-latency": [("seconds of a call", "")],
    "cache-latency": [("seconds of a call", "")],
    "methods-memory": [("MB)", "")],
    "methods-exposed": [("share of the denoising time in which a rank waits for messages (%", "")],
    "scalability": [("ranks", "speed-up over one rank (times)")],
    "patches": [("patches M", "seconds for an image")],
    "resolution": [("pixels of a side", "seconds"), ("pixels of a side", "speed-up over one rank (times)")],
    "links": [("link between two hosts", "speed-up over one rank (times)")],
}
"""What the axes of a figure are called, from left to right."""


def rows_of(sweep: str) -> list[Row]:
    """Rows of eight ranks as they might have been measured, beside those of one rank; of two hosts for links."""
    if sweep == "links":
        rows = []
        for rate in RATES:
            rows += [row | {"link": rate} for row in list_plan_rows(rows_of("methods"))]
        return [*(row for row in rows_of("methods") if row["plan"] == ONE_RANK), *rows]
    sizes: list[tuple[int | None, int | None]] = [(512, 512)]
    if sweep == "resolution":
        sizes = [(side, side) for side in SIDES]
    return make_rows(sweeps.list_sweep_cells(sweep, 8, sizes, lambda plan: plan.num_patches <= 16))


@pytest.mark.parametrize("sweep", [sweep for sweep in sweep_figures.FIGURES if sweep != "plans"])
def test_axes_say_what_and_in_which_unit(sweep: str) -> None:
    """A failure means a figure that cannot be read without the program that drew it."""
    for name, draw in sweep_figures.FIGURES[sweep].items():
        with plt.rc_context(STYLE):
            figure = draw(rows_of(sweep))
            labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
            for (x, y), (along, upwards) in zip(labels, LABELS[name], strict=True):
                assert along in x and y.startswith(upwards), name
                assert y or all(text.get_text() for text in figure.axes[0].get_yticklabels()), name
            assert figure.axes[0].get_title(loc="left"), name
            assert_apart(figure)
            plt.close(figure)


def test_links_have_their_rates_and_sizes_their_pixels() -> None:
    """A failure means ticks that are numbers of nothing."""
    for sweep, wanted in (
        ("links", ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"]),
        ("resolution", list(map(str, SIDES))),
        ("scaling", ["1", "2", "4", "8"]),
    ):
        (draw,) = sweep_figures.FIGURES[sweep].values()
        figure = draw(rows_of(sweep))
        assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == wanted
        plt.close(figure)


def test_a_method_has_one_colour_in_all_figures() -> None:
    """A failure means figures that contradict each other."""
    for sweep in ("scaling", "links", "resolution"):
        (draw,) = sweep_figures.FIGURES[sweep].values()
        figure = draw(rows_of(sweep))
        for axes in figure.axes:
            drawn = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            for axis, name in palette.NAMES.items():
                if name in drawn:
                    assert drawn[name].lines[0].get_color() == palette.COLOURS[axis], name
        plt.close(figure)


@pytest.mark.parametrize("sweep", ["methods", "cache", "scaling", "patches", "resolution", "links", "warmup"])
def test_files_are_written(tmp_path: Path, sweep: str) -> None:
    files = sweep_figures.draw_sweep_files(sweep, rows_of(sweep), tmp_path)
    if sweep == "warmup":
        text = (tmp_path / "warmup.md").read_text("utf-8")
        assert text.splitlines()[2].startswith("| W | ") and " s" in text
    else:
        png, svg, *_ = files
        assert len(files) == 2 * len(sweep_figures.FIGURES[sweep])
        with Image.open(png) as image:
            assert image.width > 900
        assert "<svg" in svg.read_text("utf-8")
    one = [row for row in rows_of("scaling") if row["plan"] == ONE_RANK]
    assert one and sweep_figures.draw_sweep_files(sweep, one, tmp_path) == [], "one rank alone is not a comparison"


def test_the_table_of_warmup_by_hand() -> None:
    seconds = {"warmup=0": 2.0, "": 3.0, "warmup_mode=pipelined": 2.5}
    rows = runs.summarize_runs(
        ran(BenchCell(str(Plan.parse(f"pipefusion=2 patches=4 {more}"))), took, 4.0) for more, took in seconds.items()
    )
    header, lines = sweep_figures.tabulate_warmups(rows)
    assert header == ["W", "PipeFusion, serial", "PipeFusion, pipelined"]
    assert lines == [["0", "2.000 s", ""], ["1", "3.000 s (+50%)", "2.500 s (+25%)"]]

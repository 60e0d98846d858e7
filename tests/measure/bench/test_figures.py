"""Every figure is drawn: axes say what they show and in what unit, files are there, and no text lies on another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.transforms import Bbox
from PIL import Image

from ditile.measure import palette
from ditile.measure.bench import figures, runs, sweeps
from ditile.measure.bench.cells import ONE_RANK
from tests.measure.bench.test_bench import JOB, all_fit
from tests.measure.bench.test_bench import run as ran

RATES = ("100mbit", "1gbit", "10gbit")
SIDES = (256, 512, 1024, 2048)
LABELS: dict[str, list[tuple[str, str]]] = {
    "scalability": [("ranks", "speed-up over one rank (times)")],
    "patches": [("patches M", "seconds for a picture")],
    "resolution": [("pixels of a side", "seconds"), ("pixels of a side", "speed-up over one rank (times)")],
    "links": [("link between two hosts", "speed-up over one rank (times)")],
    "methods-latency": [("seconds of a call", "")],
    "methods-memory": [("MB)", "")],
    "methods-exposed": [("share of the denoising time in which a rank waits for messages (%", "")],
    "cache-latency": [("seconds of a call", "")],
}
"""What the axes of a figure are called, from left to right; bars have names instead of numbers upwards."""


def rows_of(sweep: str) -> list[runs.Row]:
    """Rows of eight ranks as they might have been measured, beside those of one rank."""
    job = JOB | {"threads": 2, "steps": 20}
    sizes: list[tuple[int | None, int | None]] = [(512, 512)]
    if sweep == "resolution":
        sizes = [(side, side) for side in SIDES]
    name, rates = ("methods", RATES) if sweep == "links" else (sweep, ("",))
    cells = [cell._replace(link=rate) for cell in sweeps.list_sweep_cells(name, 8, sizes, all_fit) for rate in rates]
    found, foretold = [], {}
    for place, cell in enumerate(dict.fromkeys([*(cell.one_rank_baseline for cell in cells), *cells])):
        key, whole = runs.make_run_key(job, cell), ((cell.height or 512) / 256) ** 2
        parts = {"parameters": 3 * 10**7, "activations": 10**6 * place, "keys": 10**6, "cache": 10**5}
        memory = [{name: size // cell.num_ranks for name, size in parts.items()}] * cell.num_ranks
        lines = [ran(cell, whole * (0.4 + k / 10) / cell.num_ranks**0.7, whole) for k in range(2)]
        for line in lines:
            line["key"] = runs.json.loads(key)
        found += [*lines, {"key": lines[0]["key"], "memory": memory}]
        foretold[key] = runs.Prediction(0.3 * whole, 10**7)
    return runs.summarize_runs(found, foretold)


def texts(figure: Any) -> Iterator[tuple[str, Bbox]]:
    """What is written beside the data, and where."""
    figure.canvas.draw()
    for axes in figure.axes:
        if not axes.axison:
            continue
        written = [axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            written += [label for place, label in ticks if min(low, high) <= place <= max(low, high)]
        legends = [axes.get_legend(), *figure.legends]
        written += [text for legend in legends if legend is not None for text in legend.get_texts()]
        for text in written:
            if text.get_visible() and text.get_text():
                yield text.get_text(), text.get_window_extent()


def assert_apart(figure: Any) -> None:
    """Raises if a piece of text lies on another."""
    for (one, box), (other, its) in itertools.combinations(dict(texts(figure)).items(), 2):
        shared = Bbox.intersection(box, its)
        assert shared is None or min(shared.width, shared.height) < 1, f"{one!r} lies on {other!r}"


@pytest.mark.parametrize("sweep", ["scaling", "patches", "resolution", "links", "methods", "cache"])
def test_axes_say_what_and_in_which_unit(sweep: str) -> None:
    """A failure means a figure that cannot be read without the program that drew it."""
    found = rows_of(sweep)
    for name, make in figures.FIGURES_OF_SWEEP[sweep].items():
        with plt.rc_context(figures.STYLE):
            figure = make(found)
            labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
            for (x, y), (along, upwards) in zip(labels, LABELS[name], strict=True):
                assert along in x and y.startswith(upwards), name
                assert y or all(text.get_text() for text in figure.axes[0].get_yticklabels()), name
            assert all(axes.get_title(loc="left") for axes in figure.axes[:1]), name
            assert_apart(figure)
            plt.close(figure)


def test_links_have_their_rates_and_sizes_their_pixels() -> None:
    """A failure means ticks that are numbers of nothing."""
    for sweep, wanted in (
        ("links", ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"]), ("resolution", list(map(str, SIDES))),
        ("scaling", ["1", "2", "4", "8"]),
    ):  # fmt: skip
        (make,) = figures.FIGURES_OF_SWEEP[sweep].values()
        figure = make(rows_of(sweep))
        assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == wanted
        plt.close(figure)


def test_a_method_has_one_colour_in_all_figures() -> None:
    """Several plans of a method have shades. A failure means figures that contradict each other."""
    for sweep in ("scaling", "links", "resolution"):
        (make,) = figures.FIGURES_OF_SWEEP[sweep].values()
        figure = make(rows_of(sweep))
        for axes in figure.axes:
            drawn = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            for axis, name in palette.NAMES.items():
                if name in drawn:
                    assert drawn[name].lines[0].get_color() == palette.COLOURS[axis], name
        plt.close(figure)
    colours = palette.assign_plan_colours(["pipefusion=2", "ring=2", "pipefusion=4", "pipefusion=2", "pipefusion=1"])
    assert len(set(colours.values())) == 4 and colours["ring=2"] == palette.COLOURS["ring"]
    assert colours["pipefusion=2"] == palette.COLOURS["pipefusion"]


def test_every_mark_of_the_bars_is_in_the_legend() -> None:
    figure = figures.draw_latency_bars(rows_of("cache"))
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert {"denoising loop", "text and decode", "with a cache", "slowest and fastest round", "one rank"} <= labels
    plt.close(figure)


@pytest.mark.parametrize("sweep", sorted(figures.FIGURES_OF_SWEEP))
def test_both_files_are_written(tmp_path: Path, sweep: str) -> None:
    """As PNG and SVG. A failure means that a sweep ends, after minutes, without its figure."""
    files = figures.draw_sweep_figures({sweep: rows_of("methods" if sweep == "plans" else sweep)}, tmp_path)
    wanted = {f"{name}{suffix}" for name in figures.FIGURES_OF_SWEEP[sweep] for suffix in (".png", ".svg")}
    assert {file.name for file in files} == (wanted or {"warmup.md"})
    for file in files:
        if file.suffix == ".md":
            assert file.read_text("utf-8").splitlines()[2].startswith("| W | ") and " s" in file.read_text("utf-8")
            continue
        if file.suffix == ".png":
            with Image.open(file) as image:
                assert image.width > 900
        else:
            assert "<svg" in file.read_text("utf-8")
    one = [row for row in rows_of("scaling") if row["plan"] == ONE_RANK]
    assert one and figures.draw_sweep_figures({sweep: one}, tmp_path) == [], "one rank alone is no comparison"

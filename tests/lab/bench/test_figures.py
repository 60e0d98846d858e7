"""Every figure is drawn, and its files are there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.transforms import Bbox
from PIL import Image

from ditile_lab.bench import figures, runs, sweeps
from ditile_lab.bench.cells import ONE_RANK, BenchCell
from ditile_lab.rows import Row
from tests.lab.bench.test_bench import JOB, all_fit
from tests.lab.bench.test_bench import run as ran


def rows_of(sweep: str) -> list[Row]:
    """Rows of eight ranks as they might have been measured, beside those of one rank."""
    return make_rows(sweeps.list_sweep_cells(sweep, 8, [(512, 512)], all_fit))


def make_rows(cells: Sequence[BenchCell]) -> list[Row]:
    """Rows of cells as they might have been measured, beside those of one rank."""
    job = JOB | {"threads": 2, "steps": 20}
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


@pytest.mark.parametrize("sweep", ["plans", "methods", "cache"])
def test_both_files_are_written(tmp_path: Path, sweep: str) -> None:
    """As PNG and SVG. A failure means that a sweep ends, after minutes, without its figure."""
    rows = rows_of("methods" if sweep == "plans" else sweep)
    files = figures.draw_bench_figure(sweep, rows, tmp_path)
    assert {file.name for file in files} == {f"{sweep}-latency.{ending}" for ending in ("png", "svg")}
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as image:
                assert image.width > 900
        else:
            assert "<svg" in file.read_text("utf-8")
    one = [row for row in rows if row["plan"] == ONE_RANK]
    assert one and figures.draw_bench_figure(sweep, one, tmp_path) == [], "one rank alone is not a comparison"

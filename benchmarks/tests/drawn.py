"""Rows as they might have been measured, and a check of the figures that are drawn of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.transforms import Bbox

from ditile_lab.bench import runs
from ditile_lab.bench.cells import BenchCell
from ditile_lab.rows import Row
from tests.lab.bench.test_bench import JOB
from tests.lab.bench.test_bench import run as ran


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

"""The figures of benchmarks/data that no sweep of `ditile bench` draws."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from benchmarks.cache_settings import OURS, THEIRS
from benchmarks.tests.drawn import assert_apart


def test_quality_over_speed_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each number of steps, with both engines. A failure means that a page of the docs has no figure."""
    figures, lines, save = list[Any](), list[str](), plots.save_figure
    monkeypatch.setattr(plots, "save_figure", lambda figure, out: (figures.append(figure), save(figure, out)))
    for (steps, engine), k in itertools.product(itertools.product((20, 28), (OURS, THEIRS)), range(3)):
        seconds = {f"{name}_s": 4.0 / (1 + k) for name in ("cpu", "wall")} | {"outside_cpu_s": 0.1}
        plain = {f"plain_{name}_s": 4.0 for name in ("cpu", "wall")} | {"plain_outside_cpu_s": 0.1}
        quality = {"psnr": 40.0 - k, "ssim": 0.9, "all_right": 1, "steps_left_out": 1, "blocks_left_out": 0.5}
        about = {"model": "shapes-flux", "steps": steps, "engine": engine, "setting": f"R={k}"}
        lines.append(json.dumps(about | seconds | plain | quality))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    plots.draw_pareto_panels([tmp_path / "rows.jsonl"], tmp_path / "curves.png")
    for axes in figures[0].axes:
        assert axes.get_xlabel() == "speed-up over no cache (times, whole image)" and "(dB)" in axes.get_ylabel()
        assert {text.get_text() for text in axes.get_legend().get_texts()} == {OURS, THEIRS}
    assert len(figures[0].axes) == 2
    assert_apart(figures[0])
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "curves.png", "curves.svg"}

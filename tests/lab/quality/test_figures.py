"""The figure of `ditile evaluate`: quality over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from PIL import Image

from ditile_lab.quality.figures import draw_tradeoff
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting
from ditile_lab.quality.store import summarize_settings
from tests.lab.bench.test_figures import assert_apart
from tests.lab.quality.test_evaluate import row as drawn


def test_quality_over_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of `ditile evaluate`. A failure means an evaluation of hours without its picture."""
    figures = list[Any]()
    monkeypatch.setattr(plt, "close", figures.append)
    settings = [EvaluationSetting("pipefusion=2", "none"), EvaluationSetting("ulysses=2", "F=1"), ORIGINAL]
    pictures = {(s, 0): drawn(s, 0, 1.0 + k, 30.0 + 35 * k) for k, s in enumerate(settings)}
    about = {"model": "shapes-flux", "captions": {"count": 1}, "measured": {"machine": "a processor"}}
    draw_tradeoff(about | {"settings": summarize_settings(pictures, settings, 1)}, tmp_path / "pareto.png")
    (axes,) = figures[0].axes
    assert "% of the original" in axes.get_xlabel() and axes.get_ylabel().endswith("(dB)")
    assert_apart(figures[0])
    with Image.open(tmp_path / "pareto.png") as image:
        assert image.width > 900

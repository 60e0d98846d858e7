"""The comparison of all methods that skip work: its settings, its table and its figure."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ditile_lab.quality.methods import build_methods_table
from ditile_lab.quality.options import ORIGINAL, EvaluateOptions


def make_row(cache: str, saved: float, psnr: float) -> dict[str, Any]:
    return {
        "setting": cache,
        "cache": cache,
        "blocks_saved": saved,
        "psnr": psnr,
        "psnr_lowest": psnr - 5,
        "speedup": 1.5,
        "all_right": 100.0,
    }


METHODS = {"steps=10": "fitted schedule", "steps=6": "fitted schedule", "sea=0.3": "SeaCache"}
EVALUATION = {
    "model": "shapes-flux",
    "captions": {"count": 24},
    "settings": [
        make_row("none", 0.0, 100.0),
        make_row("sea=0.3", 0.4, 45.0),
        make_row("steps=10", 0.5, 52.0),
        make_row("steps=6", 0.7, 41.0),
    ],
}


def test_every_setting_is_a_cache() -> None:
    """A failure means a comparison that ends at the setting that cannot be read, after minutes."""
    options = EvaluateOptions(model="shapes-flux", methods=True)
    settings = options.candidate_settings
    assert len(settings) == len(options.method_lines) > 15
    for setting in settings:
        assert setting.plan == ORIGINAL.plan
        assert setting.cache_arguments["cache_config"] is not None
    assert "gating" in options.method_lines.values()


def test_the_table_has_the_least_work_last() -> None:
    title, *parts = build_methods_table(EVALUATION, METHODS)
    assert "24 caption(s)" in str(title)
    labels = [part for part in parts if isinstance(part, str)]
    assert [label.split(": ")[-1] for label in labels] == ["sea=0.3", "steps=10", "steps=6"]
    console = Console(width=80, record=True)
    for part in parts:
        if isinstance(part, Table):
            console.print(part)
    assert "52.0" in console.export_text()

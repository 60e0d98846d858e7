"""README's figure shows what the tables of docs/benchmarks.md have."""

from __future__ import annotations

import pytest

from benchmarks.overview import PAGE, PANELS, Panel, read_speedups


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.table)
def test_every_bar_is_a_row_of_its_table(panel: Panel) -> None:
    """A failure means that a table was made without a plan that the figure shows: draw it anew."""
    speedups = read_speedups(PAGE.read_text("utf-8"), panel.table, panel.link)
    assert {bar.plan for bar in panel.bars} <= set(speedups)

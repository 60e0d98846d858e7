"""`benchmarks.few_steps`. A failure means that the table of docs/pipefusion.md is made of other pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import few_steps
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan


def test_what_is_compared() -> None:
    settings = few_steps.list_settings(4, (2, 4))
    assert [each.steps for each in settings[:3]] == [4, 3, 2] and {each.steps for each in settings[3:]} == {4}
    plans = [each.plan for each in settings[3:]]
    assert len(plans) == len(set(plans)) == 12 and all(plan.num_patches >= plan.pipefusion for plan in plans)


def test_rows_of_pictures_and_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to run a synchronous step draw the same, and what is drawn with stale keys differs from one process."""
    monkeypatch.setattr(few_steps, "NUM_CAPTIONS", 2)
    monkeypatch.setattr(few_steps, "PATCHES", (2,))
    monkeypatch.setattr(few_steps, "WARMUPS", (1,))
    rows = few_steps.measure_few_steps("shapes-flux-turbo", 4, [2], 1, tmp_path / "out")
    assert rows == [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["steps"] for row in rows] == [4, 3, 2, 4, 4]
    assert [round(row["bound"], 2) for row in rows] == [1.0, 1.33, 2.0, 1.45, 1.78]
    serial, shared = (row["psnr"] for row in rows[3:])
    assert rows[0]["psnr"] is None and 25 < serial < 60 and shared == pytest.approx(serial, abs=0.1)
    table = few_steps.make_few_steps_table(rows)
    assert table.row_count == 4 and list(table.columns[7].cells)[-1] == "1.45x"
    assert list(table.columns[8].cells)[-1] == "1.78x" and Plan.parse(rows[4]["plan"]).warmup_mode == "sequence"


@pytest.mark.parametrize(
    ("model", "steps", "says"),
    [
        ("shapes-flux", 20, "is for 2 to 16 steps, and there are 20"),
        ("shapes-wan", 4, "checks images of bundled models, and not shapes-wan"),
    ],
)
def test_what_cannot_be_compared(model: str, steps: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=says):
        few_steps.measure_few_steps(model, steps, [2], 1, tmp_path / "out")
    assert not list(tmp_path.iterdir())

"""`ditile bench --sweep few-steps`. A failure means that the table of docs/pipefusion.md is made of other pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ditile.cli.main import main
from ditile.measure.bench import few_steps
from ditile.measure.bench.options import Comparison, Workload
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
    compared = Comparison(sweep="few-steps", ranks=2, out=str(tmp_path / "out"))
    rows = few_steps.measure_few_steps(compared, Workload(model="shapes-flux-turbo", threads=1))
    assert rows == [
        {name: value for name, value in json.loads(line).items() if name not in ("model", "captions")}
        for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    ]
    assert [row["steps"] for row in rows] == [4, 3, 2, 4, 4]
    assert [round(row["bound"], 2) for row in rows] == [1.0, 1.33, 2.0, 1.45, 1.78]
    serial, shared = (row["psnr"] for row in rows[3:])
    assert rows[0]["psnr"] is None and 25 < serial < 60 and shared == pytest.approx(serial, abs=0.1)
    table = few_steps.make_few_steps_table(rows)
    assert table.row_count == 4 and list(table.columns[7].cells)[-1] == "1.45x"
    assert list(table.columns[8].cells)[-1] == "1.78x" and Plan.parse(rows[4]["plan"]).warmup_mode == "sequence"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "few-steps,warmup"), "run it by itself"),
        (("--sweep", "few-steps", "--model", "shapes-flux"), "is for 2 to 16 steps, and there are 20"),
        (("--sweep", "few-steps", "--model", "shapes-wan"), "checks pictures of bundled models, and not shapes-wan"),
    ],
)
def test_what_cannot_be_compared(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())

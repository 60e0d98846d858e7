"""Predictions beside measurements. A failure means that the table flatters the planner, or loses a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predictions
from benchmarks.page import markdown
from ditile.planner.hardware import load_profile
from ditile_lab.bench.cells import parse_cells


def row(plan: str, world: int, loop: float, predicted: float, cache: str = "") -> dict[str, Any]:
    return {
        "plan": plan,
        "cache": cache,
        "world": world,
        "loop_s": loop,
        "predicted_loop_s": predicted,
        "predicted_error": predicted / loop - 1,
        "predicted_memory_error": None if cache else 0.04,
    }


ROWS = [row("", 1, 2.0, 1.8), row("ring=2", 2, 1.0, 1.1), row("cfg=2", 2, 1.25, 1.0), row("cfg=2", 2, 0.1, 0.1, "F=1")]


def test_jobs_are_measured_once_and_set_beside_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        out = Path(words[words.index("--out") + 1])
        out.parent.mkdir(parents=True, exist_ok=True)
        if words[3] == "bench":
            out.mkdir(exist_ok=True)
            (out / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
        else:
            out.write_text(load_profile("l40-pcie").to_json())
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(predictions.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["predictions", "--out", str(tmp_path / "found.json")])
    predictions.main()
    assert [words[3] for words in asked] == ["calibrate", "bench"] * len(predictions.JOBS)
    rows = json.loads((tmp_path / "found.json").read_text())
    assert len(rows) == len(ROWS) * len(predictions.JOBS) and not (tmp_path / "found").exists()
    assert (
        f"up to 2 ranks: {len(rows)} measured; error of the loop (median, worst) 10.0%, 20.0%, "
        "of the speed-up 12.5%, 18.2%" in capsys.readouterr().out
    )
    shown = markdown(predictions.make_predictions_table(rows))
    assert "| one rank | 2.00 s, -10% |" in shown and "| cfg=2 \\| F=1 | 0.10 s, +0% |" in shown
    assert "| of the speed-up | 12.5%, 18.2% |" in shown
    assert "| predicted fastest | cfg=2: 25% behind the fastest |" in shown, "a cache is not a plan"


def test_a_run_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 2))
    with pytest.raises(SystemExit, match="ditile calibrate ended with exit code 2"):
        predictions.measure(tmp_path)


def test_every_plan_of_every_job_is_one() -> None:
    for job in predictions.JOBS:
        assert len(parse_cells(job.plans)) >= 6

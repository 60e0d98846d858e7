"""What the fidelity benchmark measures, with which plans, and what it says in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fidelity
from benchmarks.fidelity import FidelityJob, by_warmup, compared, measure_fidelity_rows, read_rows_of_job
from benchmarks.page import markdown
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile_lab.quality.metrics import compute_psnr, compute_ssim
from training.caption_scores import VERDICT_ITEMS


def test_both_methods_at_every_number_of_ranks_and_warmup() -> None:
    """A failure means that a table lacks rows, or that its controls warm up otherwise than the plans beside them."""
    plans = FidelityJob().parse_plans()
    assert len(plans) == len(set(plans)) == 2 * 3 * 4
    assert {(p.pipefusion, p.distrifusion) for p in plans} == {(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)}
    assert {p.warmup for p in plans} == {0, 1, 2, 3}
    assert FidelityJob().controls() == [Plan(patches=4, warmup=w) for w in (0, 1, 2, 3)]


def test_plans_by_hand() -> None:
    """A failure means that plans of the command line are not those that run."""
    job = FidelityJob(plans="pipefusion=4; distrifusion=4 warmup=2")
    assert job.parse_plans() == [Plan(pipefusion=4), Plan(distrifusion=4, warmup=2)]
    assert job.controls() == [Plan(patches=4, warmup=1), Plan(patches=4, warmup=2)]
    with pytest.raises(PlanError, match="pipe=4"):
        FidelityJob(plans="pipe=4").parse_plans()


def test_a_method_that_is_worse_is_said_to_be() -> None:
    """Pairs of equal ranks and warmup alone. A failure means that a bad result is not seen."""
    measured = {
        "pipefusion=1": 100.0,
        "pipefusion=2": 44.0,
        "distrifusion=2": 40.0,
        "pipefusion=4 warmup=0": 30.0,
        "distrifusion=4 warmup=0": 31.0,
        "pipefusion=8": 20.0,
        "patches=4 (control: own patch only)": 10.0,
    }
    lines = compared([{"model": "m", "plan": plan, "psnr": value} for plan, value in measured.items()])
    assert len(lines) == 2
    assert lines[0].startswith("m, pipefusion=2: 44.0 dB") and lines[0].endswith("PipeFusion comes closer")
    assert lines[1].startswith("m, pipefusion=4 warmup=0: 30.0 dB") and "does NOT" in lines[1]


def test_measures_of_known_pictures() -> None:
    """A failure means that every number of the table is off."""
    black = np.zeros((2, 16, 16, 3), np.uint8)
    gray = np.full_like(black, 51)  # a fifth: 10 log10(25) dB
    assert compute_psnr(black, gray) == pytest.approx([13.9794] * 2, abs=1e-4)
    assert compute_psnr(gray, gray) == pytest.approx([100.0] * 2)
    assert compute_ssim(gray, gray) == pytest.approx([1.0] * 2)
    assert compute_ssim(black, gray) == pytest.approx([1e-4 / (0.04 + 1e-4)] * 2, rel=1e-6)  # flat: means alone count


def test_a_run_that_was_broken_off_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of the same job are kept, of another are not. A failure means hours lost, or a table of two jobs."""
    drawn: list[str] = []

    def launched(fn: Any, ranks: int, args: tuple[Any, ...], **_: Any) -> list[Any]:
        drawn.append(f"{args[3]}{' control' if args[4] else ''}")
        return [(np.zeros((2, 32, 32, 3), np.uint8), 1.0)]

    monkeypatch.setattr(fidelity, "launch", launched)
    monkeypatch.setattr(fidelity, "score_images", lambda *_: dict.fromkeys(VERDICT_ITEMS, 99.0))
    job, captions = FidelityJob(ranks="2", warmups="0"), ["a red circle", "a blue square"]
    found = list(measure_fidelity_rows("shapes-flux", captions, job))
    everything = ["pipefusion=1", "pipefusion=2 warmup=0", "distrifusion=2 warmup=0", "patches=4 warmup=0 control"]
    assert drawn == everything and len(found) == 4
    assert list(measure_fidelity_rows("shapes-flux", captions, job, found)) == found and len(drawn) == 4
    assert list(measure_fidelity_rows("shapes-flux", captions, job, found[:2])) == found
    assert drawn[4:] == [everything[0], *everything[2:]], "one process is drawn again, as what the others are held to"
    path = tmp_path / "rows.json"
    assert read_rows_of_job(path, captions, job) == []
    path.write_text(json.dumps(found))
    assert read_rows_of_job(path, captions, job) == found
    assert read_rows_of_job(path, captions[:1], job) == [], "another number of captions is another job"


def test_a_column_for_each_warmup() -> None:
    """A failure means that the table of warmups names other rows than were measured."""
    measured = [
        ("pipefusion=1", 20.0, 100.0),
        ("pipefusion=2 warmup=0", 0.0, 43.61),
        ("distrifusion=2 warmup=0", 0.0, 39.4),
        ("pipefusion=2 warmup=3", 3.0, 48.6),
        ("pipefusion=2", 1.0, 47.0),
        (f"patches=4{fidelity.CONTROL}", 1.0, 9),
    ]
    found = [{"model": "m", "plan": plan, "synchronous": w, "psnr": psnr} for plan, w, psnr in measured]
    assert markdown(by_warmup(found)).splitlines()[2:] == [
        "| m | pipefusion=2 | 43.6 | 47.0 | 48.6 |",
        "| m | distrifusion=2 | 39.4 |  |  |",
    ]
    assert "| model | plan | W = 0 | W = 1 | W = 3 |" in markdown(by_warmup(found))

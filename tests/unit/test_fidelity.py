"""What the fidelity benchmark measures, with which plans, and what it says in the end."""

from __future__ import annotations

import numpy as np
import pytest

from ditile.bench.fidelity import Job, compared, psnr, ssim
from ditile.errors import PlanError
from ditile.plan import Plan


def test_both_methods_at_every_number_of_ranks_and_warmup() -> None:
    """A failure means that a table lacks rows, or that its controls warm up otherwise than the plans beside them."""
    plans = Job().parsed()
    assert len(plans) == len(set(plans)) == 2 * 3 * 4
    assert {(p.pipefusion, p.distrifusion) for p in plans} == {(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)}
    assert {p.warmup for p in plans} == {0, 1, 2, "auto"}
    assert Job().controls() == [Plan(patches=4, warmup=w) for w in (0, 1, 2, 3)], "auto has at least 3"


def test_plans_by_hand() -> None:
    """A failure means that plans of the command line are not those that run."""
    job = Job(plans="pipefusion=4; distrifusion=4 warmup=2")
    assert job.parsed() == [Plan(pipefusion=4), Plan(distrifusion=4, warmup=2)]
    assert job.controls() == [Plan(patches=4, warmup=1), Plan(patches=4, warmup=2)]
    with pytest.raises(PlanError, match="pipe=4"):
        Job(plans="pipe=4").parsed()


def test_a_method_that_is_worse_is_said_to_be() -> None:
    """Pairs of equal ranks and warmup alone. A failure means that a bad result is not seen."""
    measured = {
        "pipefusion=1": 100.0, "pipefusion=2": 44.0, "distrifusion=2": 40.0, "pipefusion=4 warmup=0": 30.0,
        "distrifusion=4 warmup=0": 31.0, "pipefusion=8": 20.0, "patches=4 (control: own patch only)": 10.0,
    }  # fmt: skip
    lines = compared([{"model": "m", "plan": plan, "psnr": value} for plan, value in measured.items()])
    assert len(lines) == 2
    assert lines[0].startswith("m, pipefusion=2: 44.0 dB") and lines[0].endswith("PipeFusion comes closer")
    assert lines[1].startswith("m, pipefusion=4 warmup=0: 30.0 dB") and "does NOT" in lines[1]


def test_measures_of_known_pictures() -> None:
    """A failure means that every number of the table is off."""
    black = np.zeros((2, 16, 16, 3), np.uint8)
    gray = np.full_like(black, 51)  # a fifth: 10 log10(25) dB
    assert psnr(black, gray) == pytest.approx([13.9794] * 2, abs=1e-4)
    assert psnr(gray, gray) == pytest.approx([100.0] * 2)
    assert ssim(gray, gray) == pytest.approx([1.0] * 2)
    assert ssim(black, gray) == pytest.approx([1e-4 / (0.04 + 1e-4)] * 2, rel=1e-6)  # flat: means alone count

"""What is measured of a machine, and the fit to real calls."""

from __future__ import annotations

import math

import pytest
import torch

from ditile.planner.hardware import load_profile
from ditile.planner.profile import Link
from ditile_lab.machine import timings as calibrate
from ditile_lab.machine.timings import Bench, fit_kernel_costs
from tests.pool import Pool

CPU = torch.device("cpu")
SMALL = {
    "ROWS": (1, 64), "WIDTHS": (128,), "LENGTHS": (16, 64), "SIZES": (2**12, 2**14), "REPEATS": 2,
    "MESSAGES": (1 << 10, 1 << 12, 1 << 14, 1 << 16), "RATED_SECONDS": 0.01,
    "PARTS": 7,
}  # fmt: skip
"""All that is measured, in a second, also beside others."""


def shrink_measurements(patch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        patch.setattr(calibrate, name, value)
    make = Bench.make_linear
    patch.setattr(Bench, "make_linear", lambda bench, *sides: make(bench, *(min(side, 128) for side in sides)))


@pytest.mark.parametrize(("slower", "kernel_s"), [(1.3, 2e-6), (1.0, 5e-6), (1.5, 0.0)])
def test_the_fit_finds_what_calls_cost_besides_their_work(slower: float, kernel_s: float) -> None:
    """A failure means that every latency on this machine is predicted with the wrong share for each kernel."""
    counts = ((0.1, 1e4), (0.2, 1e4), (0.5, 2e4), (0.9, 3e4))
    before = load_profile("l40-pcie")
    fitted = fit_kernel_costs(before, [(slower * known + n * kernel_s, known, n) for known, n in counts])
    assert fitted.kernel_s == pytest.approx(kernel_s, rel=1e-3, abs=1e-12)
    for name in ("matmul", "attention"):
        rate = getattr(before, name).interpolate(64, 512) / slower
        assert getattr(fitted, name).interpolate(64, 512) == pytest.approx(rate, rel=1e-3)


def test_curves_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are finite, larger products are not slower by much, and what is too large has its neighbour's rate."""
    monkeypatch.setattr(calibrate, "ROWS", (1, 64))
    monkeypatch.setattr(calibrate, "WIDTHS", (128, 512, 1 << 20))
    done: list[int] = []
    curve = calibrate.measure_matmul(Bench(CPU, torch.float32, lambda: done.append(1)))
    assert len(done) == 2 and all(math.isfinite(rate) and rate > 1e6 for row in curve.rates for rate in row)
    assert all(row[2] == row[1] for row in curve.rates) and curve.rates[1][1] > curve.rates[0][0]


def _measure_link() -> Link:
    with pytest.MonkeyPatch.context() as patch:
        shrink_measurements(patch)
        return calibrate.measure_link(Bench(CPU, torch.float32))


def test_links_are_of_these_ranks(pool: Pool) -> None:
    link = pool.run(_measure_link, 2)[0]
    assert 0 < link.latency_s < 1 and link.bandwidth > 1e6 and link.call_s >= 0
    assert link.sum_s is not None and link.sum_s >= 0 and link.gather is not None
    assert all(0 < share <= 1 for share in (link.collective, link.neighbours, link.reduce, link.gather))
    assert 0 <= link.overlap <= 1

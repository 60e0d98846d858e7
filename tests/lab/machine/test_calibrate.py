"""What is measured of a machine, and the fit to real calls."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.cli.main import main
from ditile.distributed.torchrun import list_ranks_by_host
from ditile.plan.errors import PlanError
from ditile.planner.hardware import load_profile
from ditile.planner.profile import Profile
from ditile_lab.machine import calibrate as command
from ditile_lab.machine import timings as calibrate
from ditile_lab.machine.options import CalibrateOptions
from ditile_lab.machine.timings import Bench, fit_kernel_costs
from tests.pool import Pool

CPU = torch.device("cpu")
SMALL = {
    "ROWS": (1, 64), "WIDTHS": (128,), "LENGTHS": (16, 64), "SIZES": (2**12, 2**14), "REPEATS": 2,
    "MESSAGES": (1 << 10, 1 << 12, 1 << 14, 1 << 16), "RATED_SECONDS": 0.01,
    "PARTS": 7,
}  # fmt: skip
"""All that is measured, in a second, also beside others."""


def shrink_command(patch: pytest.MonkeyPatch) -> None:
    """Make the whole calibration take a few seconds."""
    for name, value in SMALL.items():
        patch.setattr(calibrate, name, value)
    make = Bench.make_linear
    patch.setattr(Bench, "make_linear", lambda bench, *sides: make(bench, *(min(side, 128) for side in sides)))
    calls = (("shapes-pixart", 64), ("shapes-flux", 64))
    for name, value in {"CALLS": calls, "STEPS": 2, "ROUNDS": 1}.items():
        patch.setattr(command, name, value)


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


def note_progress(patch: pytest.MonkeyPatch) -> list[int]:
    """What is left of each bar: a 0 if as much was done as it says there is."""
    left = list[int]()

    @contextlib.contextmanager
    def show_progress_bar(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
        place = len(left)
        left.append(total)

        def advance(count: int) -> None:
            left[place] -= count

        yield advance

    patch.setattr(command, "show_progress_bar", show_progress_bar)
    return left


def plan_with_profile(profile: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--profile", str(profile), "--height", "64", "--steps", "4", "--json", "-", *words]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_command_writes_what_plan_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, in this process. A failure means that a user who calibrates cannot plan."""
    shrink_command(monkeypatch)
    left = note_progress(monkeypatch)
    monkeypatch.setattr(command, "launch", lambda fn, ranks, args, **_: [fn(*args)])
    out = tmp_path / "here.json"
    words = ["calibrate", "--ranks", "1", "--name", "here", "--out", str(out)]
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert left == [0]
    written = Profile.from_json_file(out)
    assert (written.name, written.devices, written.interlink) == ("here", 1, None)
    assert written.micro_s > 0 and written.matmul.interpolate(64, 128) > 1e6
    answer = plan_with_profile(out, capsys)
    assert answer["hardware"] == "here" and answer["plans"][0]["latency_s"] > 0
    assert main(["plan", "--profile", str(out), "--hosts", "2", "--devices", "2"]) == 2
    assert "measure it with `ditile calibrate` under torchrun" in capsys.readouterr().err


def _calibrate_as_host(ranks: int, out: str | None) -> tuple[Any, set[tuple[int, int]]]:
    """On a rank, one of so many on each host: what was measured, and who sent messages to whom."""
    pairs, send = set[tuple[int, int]](), dist.send
    host, local = divmod(dist.get_rank(), ranks)

    def note_pair(x: torch.Tensor, to: int, group: Any = None) -> Any:
        pairs.add((dist.get_rank(), to))
        return send(x, to, group)

    def rate_by_rank(bench: Bench) -> float:
        bench.done()
        return 3.0 * 2 ** dist.get_rank()

    with pytest.MonkeyPatch.context() as patch:
        shrink_command(patch)
        patch.setattr(dist, "send", note_pair)
        patch.setattr(command.curves, "measure_rank_rate", rate_by_rank)
        patch.setattr(command, "launch", lambda *args, **_: [load_profile("l40-pcie")])
        patch.setenv("LOCAL_RANK", str(local))
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        if out is None:
            left = note_progress(patch)
            links = command.measure_links("float32", list_ranks_by_host())
            assert dist.get_rank() > 0 or left == [0]
            return links, pairs
        with pytest.raises(PlanError, match=f"ranks=9, and torchrun started {ranks} on each host; leave it out"):
            command.calibrate_machine(CalibrateOptions(ranks=9, out=out))
        return command.calibrate_machine(CalibrateOptions(out=out, dtype="float32")), pairs


def test_links_between_hosts_are_measured_between_hosts(pool: Pool) -> None:
    """Two hosts of two ranks. A failure means that the link between hosts is taken for one within, or the other way."""
    results = pool.run(_calibrate_as_host, 4, 2, None)
    assert [pairs for _, pairs in results] == [{(0, 1), (0, 2)}, {(1, 0)}, {(2, 0)}, set()]
    first = results[0][0]
    for link in (first["link"], first["interlink"]):
        assert 0 < link.latency_s < 1 and link.bandwidth > 1e3 and 0 < link.collective <= 1
    assert first["link"] != first["interlink"]
    assert [device.speed for device in first["ranks"]] == [1, 2, 4, 8]


def test_torchrun_measures_its_hosts(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts of one rank each: one file, by the first, with the link that `ditile plan --hosts 2` is about."""
    out = tmp_path / "hosts.json"
    assert [path for path, _ in pool.run(_calibrate_as_host, 2, 1, str(out))] == [out, None]
    written = Profile.from_json_file(out)
    assert written.devices == 1 and written.interlink == written.link and written.interlink is not None
    assert written.interlink.bandwidth > 1e3 and written.matmul == load_profile("l40-pcie").matmul
    plans = plan_with_profile(out, capsys, "--hosts", "2", "--devices", "2")["plans"]
    assert any(plan["exposed_comm_s"] > 0 for plan in plans)

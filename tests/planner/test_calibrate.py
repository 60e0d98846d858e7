"""What `ditile calibrate` makes of what it measures, and that it measures something."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.cli import calibrate as calls
from ditile.cli import calibrate as command
from ditile.cli.main import main
from ditile.cli.options import CalibrateOptions
from ditile.errors import PlanError
from ditile.planner import calibrate
from ditile.planner.calibrate import MESSAGES, Bench, SharedCall, fit_collectives, fit_kernel_costs
from ditile.planner.hardware import load_profile
from ditile.planner.profile import Link, Profile
from tests.pool import Pool


@pytest.mark.parametrize(("slower", "kernel_s"), [(1.3, 2e-6), (1.0, 5e-6), (1.5, 0.0)])
def test_what_calls_cost_besides_their_work_is_found(slower: float, kernel_s: float) -> None:
    """A failure means that every latency on this machine is predicted with the wrong share for each kernel."""
    counts = ((0.1, 1e4), (0.2, 1e4), (0.5, 2e4), (0.9, 3e4))
    calls = [(slower * known + kernels * kernel_s, known, kernels) for known, kernels in counts]
    before = load_profile("l40-pcie")
    found = fit_kernel_costs(before, calls)
    assert found.kernel_s == pytest.approx(kernel_s, rel=1e-3, abs=1e-12)
    for name in ("matmul", "attention"):
        assert getattr(found, name).interpolate(64, 512) == pytest.approx(
            getattr(before, name).interpolate(64, 512) / slower, rel=1e-3
        )


def test_a_rate_is_never_faster_than_its_curve() -> None:
    """Calls faster than their kernels, or with less than none for each, are noise."""
    before = load_profile("l40-pcie")
    assert fit_kernel_costs(before, [(0.5, 1.0, 10.0), (0.9, 2.0, 10.0)]).matmul == before.matmul
    assert fit_kernel_costs(before, [(1.0, 1.0, 1e4), (3.0, 2.0, 1e4)]).kernel_s == 0


def test_curves_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are finite, larger products are not slower by much, and what is too large has its neighbour's rate."""
    monkeypatch.setattr(calibrate, "ROWS", (1, 64))
    monkeypatch.setattr(calibrate, "WIDTHS", (128, 512, 1 << 20))
    done: list[int] = []
    bench = Bench(torch.device("cpu"), torch.float32, lambda: done.append(1))
    curve = calibrate.measure_matmul(bench)
    assert len(done) == 2 and all(math.isfinite(rate) and rate > 1e6 for row in curve.rates for rate in row)
    assert all(row[2] == row[1] for row in curve.rates) and curve.rates[1][1] > curve.rates[0][0]


def _joined() -> Link:
    with pytest.MonkeyPatch.context() as patch:
        _shrink(patch)
        return calibrate.measure_link(Bench(torch.device("cpu"), torch.float32))


def test_links_are_of_these_ranks(pool: Pool) -> None:
    link = pool.run(_joined, 2)[0]
    assert 0 < link.latency_s < 1 and link.bandwidth > 1e6 and link.call_s >= 0
    assert all(0 < share <= 1 for share in (link.collective, link.neighbours, link.reduce))
    assert 0 <= link.overlap <= 1


def test_what_exchanges_take_is_read_off_shared_calls() -> None:
    """Known work and so many exchanges a call; a sum may start more slowly. A failure would mean that plans which
    exchange in every block are predicted too fast."""
    before = dataclasses.replace(load_profile("l40-pcie"), link=Link(latency_s=0.0, bandwidth=1e9, call_s=1.0))
    calls = [SharedCall(2.0 + 0.3 * 1.5 + 0.003 * n, known=2.0, sending=0.3, exchanges=n) for n in (100, 400)]
    sums = [SharedCall(1.0 + 0.1 * m + 0.005 * 50, known=1.0, sending=0.1 * m, exchanges=50) for m in (1, 4)]
    link = fit_collectives(before, calls, sums).link
    for call in calls:
        priced = call.known + call.sending / link.collective + call.exchanges * link.call_s
        assert priced == pytest.approx(call.took, rel=0.03)
    assert link.call_s == pytest.approx(0.003, rel=0.15) and 1 / 1.5 < link.collective < 0.9
    assert link.sum_s == pytest.approx(0.005) and link.reduce == pytest.approx(1.0)
    assert fit_collectives(before, [], []).link == before.link
    faster = fit_collectives(before, [SharedCall(1.0, known=2.0, sending=0.1, exchanges=5)], []).link
    assert faster.call_s == 0.0 and faster.collective == 1.0
    once = fit_collectives(before, [SharedCall(1.2, known=1.0, sending=0.1, exchanges=50)], []).link
    assert once.call_s * 50 + 0.1 / once.collective == pytest.approx(0.2)


def test_a_disturbed_call_does_not_make_bytes_slow() -> None:
    """Of two calls, one with twice the bytes of the other, the larger took 6 % too long. A failure means that a larger
    picture, whose exchanges are nearly all bytes, is predicted far too slow."""
    before = dataclasses.replace(load_profile("l40-pcie"), link=Link(latency_s=0.0, bandwidth=1e9))
    calls = [(0.8 + sending + 0.001 * 200, sending) for sending in (0.05, 0.1)]
    calls[1] = (1.06 * calls[1][0], calls[1][1])
    link = fit_collectives(before, [], [SharedCall(took, 0.8, sending, 200) for took, sending in calls]).link
    assert link.reduce > 0.6 and link.sum_s == pytest.approx(0.001, rel=0.25)


def _sizes(dtype: str) -> set[int]:
    """Bytes of the messages by which bandwidth is measured on rank 0."""
    bench, found = Bench(torch.device("cpu"), getattr(torch, dtype)), set[int]()
    send, isend = dist.send, dist.isend

    def noted(call: Any) -> Any:
        def sent(x: torch.Tensor, *args: Any) -> Any:
            found.add(x.numel() * x.element_size())
            return call(x, *args)

        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", noted(send))
        patch.setattr(dist, "isend", noted(isend))
        calibrate._time_one_way(bench, MESSAGES[0])
        calibrate._measure_overlap(bench)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_messages_have_their_bytes_in_any_type(pool: Pool, dtype: str) -> None:
    """A failure means that in half precision half the bytes travel, and a link is said to be twice as fast as it is."""
    assert pool.run(_sizes, 2, dtype)[0] == {MESSAGES[0], MESSAGES[-1]}
    bench = Bench(torch.device("cpu"), getattr(torch, dtype))
    assert bench.make_message(MESSAGES[1], 3).nbytes == 3 * MESSAGES[1]


def _shrink(patch: pytest.MonkeyPatch) -> None:
    """All that is measured, in a second, also beside others."""
    small = {"ROWS": (1, 64), "WIDTHS": (128,), "LENGTHS": (16, 64), "SIZES": (2**12, 2**14), "REPEATS": 2,
             "MESSAGES": (1 << 10, 1 << 12, 1 << 14, 1 << 16)}  # fmt: skip
    for name, value in small.items():
        patch.setattr(calibrate, name, value)
    made = (("shapes-pixart", 64), ("shapes-flux", 64))
    for name, value in {"CALLS": made, "STEPS": 2, "ROUNDS": 1}.items():
        patch.setattr(calls, name, value)
    for name in ("ON_CURVES", "IN_CALLS", "ON_LINKS"):
        patch.setattr(command, name, (1, 1))


def _planned(profile: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    asked = ["plan", "--profile", str(profile), "--height", "64", "--steps", "4", "--json", "-", *words]
    assert main(asked) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_writes_what_plan_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, in this process. A failure means that a user who calibrates cannot plan."""
    _shrink(monkeypatch)
    monkeypatch.setattr(command, "launch", lambda fn, ranks, args, **_: [fn(*args)])
    out = tmp_path / "here.json"
    assert main(["calibrate", "--ranks", "1", "--name", "here", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    found = Profile.from_json_file(out)
    assert (found.name, found.devices, found.interlink) == ("here", 1, None)
    assert found.micro_s > 0 and found.matmul.interpolate(64, 128) > 1e6
    assert 0 < found.product_s < 1 and 0 <= found.disturbed <= 1
    monkeypatch.setattr(command, "compute_disturbed_share", lambda *_: 0.5)
    assert main(["calibrate", "--ranks", "1", "--name", "here", "--out", str(out)]) == 0
    assert "others slowed the cores in 50% of what was timed" in capsys.readouterr().err
    answer = _planned(out, capsys)
    assert answer["hardware"] == "here" and answer["plans"][0]["latency_s"] > 0
    assert main(["plan", "--profile", str(out), "--hosts", "2", "--devices", "2"]) == 2
    assert "measure it with `ditile calibrate` under torchrun" in capsys.readouterr().err


def _of_hosts(ranks: int, out: str | None) -> tuple[Any, set[tuple[int, int]]]:
    """On a rank, one of so many on each host: what was measured, and who sent messages to whom."""
    pairs, send = set[tuple[int, int]](), dist.send
    host, local = divmod(dist.get_rank(), ranks)

    def noted(x: torch.Tensor, to: int, group: Any = None) -> Any:
        pairs.add((dist.get_rank(), to))
        return send(x, to, group)

    with pytest.MonkeyPatch.context() as patch:
        _shrink(patch)
        patch.setattr(dist, "send", noted)
        patch.setattr(calls, "measure_joint_slowdown", lambda dtype, device: 1.0)
        patch.setattr(command, "launch", lambda *args, **_: [load_profile("l40-pcie")])
        patch.setenv("LOCAL_RANK", str(local))
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        if out is None:
            return command.measure_all_ranks("float32", [], list_ranks_by_host()), pairs
        with pytest.raises(PlanError, match=f"ranks=9, and torchrun started {ranks} on each host; leave it out"):
            command.calibrate_machine(CalibrateOptions(ranks=9, out=out))
        return command.calibrate_machine(CalibrateOptions(out=out, dtype="float32")), pairs


def test_links_between_hosts_are_measured_between_hosts(pool: Pool) -> None:
    """Two hosts of two ranks. A failure means that the wire between hosts is taken for one within, or the other way."""
    found = pool.run(_of_hosts, 4, 2, None)
    assert [pairs for _, pairs in found] == [{(0, 1), (0, 2)}, {(1, 0)}, {(2, 0)}, set()]
    first = found[0][0]
    for link in (first.link, first.interlink):
        assert 0 < link.latency_s < 1 and link.bandwidth > 1e3 and 0 < link.collective <= 1
    assert first.link != first.interlink


def test_torchrun_measures_its_hosts(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts of one rank each: one file, by the first, with the link that `ditile plan --hosts 2` is about."""
    out = tmp_path / "hosts.json"
    found = pool.run(_of_hosts, 2, 1, str(out))
    assert [path for path, _ in found] == [out, None]
    written = Profile.from_json_file(out)
    assert written.devices == 1 and written.interlink == written.link and written.interlink is not None
    assert written.interlink.bandwidth > 1e3 and written.matmul == load_profile("l40-pcie").matmul
    plans = _planned(out, capsys, "--hosts", "2", "--devices", "2")["plans"]
    assert any(plan["exposed_comm_s"] > 0 for plan in plans)

"""The suite for machines with GPUs, tried on a CPU in tiny sizes: a failure means that a rented machine is wasted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditile.cli.main import main
from ditile.measure.bench.gpu.items import CACHES, WIDE, SuiteItem, SuiteTask
from ditile.measure.bench.gpu.rank_session import ANSWERS, SuiteSession, open_suite_file
from ditile.measure.bench.gpu.suite import fill_workload, run_items_on_ranks
from ditile.measure.bench.options import Workload
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.messages import simulate_gpu


def test_every_part_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--suite", "gpu", "--device", "cpu", "--small", "--quick", "--out", str(tmp_path)]
    assert main(words) == 0
    rows = open_suite_file(tmp_path / "gpu.jsonl").read()
    assert rows[0]["part"] == "machine" and rows[0]["torch"] and rows[0]["messages"] == "gloo"
    assert {row["part"] for row in rows} - {"machine"} >= ANSWERS.keys()
    assert not [row for row in rows if "error" in row]
    assert all(row["equal"] for row in rows if row["part"] == "exact")
    assert all(row["ok"] for row in rows if row["part"] == "verify")
    timed = [row for row in rows if "seconds" in row]
    assert all(row["finite"] and row["relative"] < 0.1 for row in timed) and {row["ranks"] for row in timed} == {1, 2}
    shown = capsys.readouterr().out
    assert "offload=blocks" in shown and "ulysses=2" in shown


def test_an_item_that_ends_its_rank_is_a_line_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    work = fill_workload(Workload(device="cpu"), 0, 2, small=True)
    items = (SuiteItem("nothing", "like it"), SuiteItem("exact", "patches=9999"), SuiteItem("exact", "patches=2"))
    task = SuiteTask(items=items, work=work, out=str(path), ends_at=time.time() + 300, small=True)
    run_items_on_ranks(task, 1)
    lost, refused, answered = open_suite_file(path).read()
    assert lost["part"] == "nothing" and "KeyError" in lost["error"]
    assert "patches=9999 exceeds" in refused["error"]
    assert answered["equal"] and answered["ranks"] == 1
    run_items_on_ranks(replace(task, items=items[2:], ends_at=0.0), 1)
    assert open_suite_file(path).read()[-1]["skipped"] == "no time left"


@pytest.mark.parametrize("family", ["flux", "pixart"])
def test_calls_are_timed_on_a_gpu(family: str, tmp_path: Path) -> None:
    """On a simulated one, which refuses an operator on tensors of two devices as a real one does. A failure means that
    every timed item of a rented machine is an error."""
    gpu = SimulatedGpu(keeps_numbers=True)
    work = Workload(model=f"random-{family} blocks=3 heads=2 head_dim=16", device="cuda:0", dtype="float32")
    task = SuiteTask(
        items=(), work=replace(work, steps=2, output="latent"), out=str(tmp_path / "gpu.jsonl"), ends_at=0.0, small=True
    )
    with torch.no_grad(), simulate_gpu(gpu):
        session = SuiteSession(task)
        for part, what in (("methods", "patches=4"), ("caches", CACHES[0])):
            row = ANSWERS[part](session, SuiteItem(part, what, 128))
            assert row["finite"] and row["relative"] < 0.1
        assert ANSWERS["exact"](session, SuiteItem("exact", WIDE))["equal"]
    assert not gpu.record.findings

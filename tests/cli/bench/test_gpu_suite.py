"""The suite for machines with GPUs, tried on a CPU in tiny sizes: a failure means that a rented machine is wasted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ditile.cli.bench.gpu.items import SuiteItem, SuiteTask
from ditile.cli.bench.gpu.rank_session import ANSWERS
from ditile.cli.bench.gpu.suite import fill_workload, read_lines, run_items_on_ranks
from ditile.cli.bench.options import Workload
from ditile.cli.main import main


def test_every_part_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--suite", "gpu", "--device", "cpu", "--small", "--out", str(tmp_path)]
    assert main(words) == 0
    rows = read_lines(tmp_path / "gpu.jsonl")
    assert rows[0]["part"] == "machine" and rows[0]["torch"] and rows[0]["messages"] == "gloo"
    assert {row["part"] for row in rows} - {"machine"} >= ANSWERS.keys() - {"wire"}
    assert not [row for row in rows if "error" in row]
    assert all(row["equal"] for row in rows if row["part"] == "exact")
    assert all(row["ok"] for row in rows if row["part"] == "verify")
    timed = [row for row in rows if "seconds" in row]
    assert all(row["finite"] and row["relative"] < 0.1 for row in timed) and {row["ranks"] for row in timed} == {1, 2}
    shown = capsys.readouterr().out
    assert "offload=blocks" in shown and "ulysses=2" in shown and (tmp_path / "gpu.png").stat().st_size > 1000


def test_an_item_that_ends_its_rank_is_a_line_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    work = fill_workload(Workload(device="cpu"), 0, 2, small=True)
    items = (SuiteItem("nothing", "like it"), SuiteItem("exact", "patches=9999"), SuiteItem("exact", "patches=2"))
    task = SuiteTask(items=items, work=work, out=str(path), ends_at=time.time() + 300, small=True)
    run_items_on_ranks(task, 1, path)
    lost, refused, answered = read_lines(path)
    assert lost["part"] == "nothing" and "KeyError" in lost["error"]
    assert "patches=9999 exceeds" in refused["error"]
    assert answered["equal"] and answered["ranks"] == 1
    run_items_on_ranks(replace(task, items=items[2:], ends_at=0.0), 1, path)
    assert json.loads(path.read_text().splitlines()[-1])["skipped"] == "no time left"

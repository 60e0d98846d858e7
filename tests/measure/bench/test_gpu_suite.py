"""The suite for machines with GPUs, tried on a CPU in tiny sizes: a failure means that a rented machine is wasted."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.cli.main import main
from ditile.measure.bench.gpu import rank_session, suite
from ditile.measure.bench.gpu.items import (
    ALL_METHODS,
    CACHE_DIT,
    COMPILED,
    RECORDED,
    SuiteItem,
    SuiteTask,
    list_all_rank_items,
)
from ditile.measure.bench.gpu.rank_session import ANSWERS, SuiteSession, open_suite_file, run_suite_items
from ditile.measure.bench.gpu.suite import fill_workload, run_gpu_suite, run_items_on_ranks
from ditile.measure.bench.options import SUITE_PARTS, Comparison, Workload
from ditile.plan.errors import PlanError
from ditile.runner.requests.console import LINE_WIDTH
from ditile.runner.requests.prepare import silence_libraries
from tests.pool import Pool
from tests.recorded_calls import record_on_simulated_gpus
from tests.rotation import rotate
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.messages import GlooMessages, simulate_gpu

TIMED = "methods,caches,memory"
PARTS = [TIMED, "exact,synchronisations,compile", "few steps,wire", "verify"]
"""On every commit the first is answered on processors, and the last two on simulated GPUs. The second's questions have
tests of their own, in test_recorded_gpu and test_simulated_gpu."""


@pytest.mark.parametrize("parts", rotate(PARTS, always=[TIMED]))
def test_every_part_runs_here(parts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On processors, by ranks that `launch` starts."""
    words = [
        "bench",
        "--suite",
        "gpu",
        "--device",
        "cpu",
        "--small",
        "--quick",
        "--only",
        parts,
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    rows = open_suite_file(tmp_path / "gpu.jsonl").read()
    assert rows[0]["part"] == "machine" and rows[0]["torch"] and rows[0]["messages"] == "gloo"
    assert {row["part"] for row in rows} == {"machine", *parts.split(",")}
    assert not [row for row in rows if "error" in row]
    assert all(row["equal"] for row in rows if row["part"] == "exact")
    assert all(row["ok"] for row in rows if row["part"] == "verify")
    timed = [row for row in rows if "seconds" in row]
    assert all(row["finite"] and row["relative"] < 0.1 for row in timed)
    shown = capsys.readouterr().out
    tables = [line for line in shown.splitlines() if line and line[0] in "┏┃┡│├└"]
    assert tables and all(len(line) == LINE_WIDTH for line in tables)
    if parts == TIMED:
        assert {row["ranks"] for row in timed} == {1, 2}
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


def test_parts_that_are_none_are_refused() -> None:
    with pytest.raises(PlanError, match="'speed' is no part of the suite; there are exact, methods"):
        Comparison(suite="gpu", only="exact, speed")
    assert set(SUITE_PARTS) == ANSWERS.keys()


def test_methods_are_not_timed_over_gloo() -> None:
    """Two ranks that share a GPU send gigabytes through the CPU: one line says why no method is timed."""
    apart, shared = (
        list_all_rank_items(2, 128, lambda plan: True, quick=False, small=False, share_gpu=share_gpu)
        for share_gpu in (False, True)
    )
    assert [item.what for item in shared if item.part == "methods"] == [ALL_METHODS]
    assert {item.part for item in shared[:3]} == {"few steps", "wire"}
    assert [item for item in apart if item.part != "methods"] == [item for item in shared if item.part != "methods"]
    assert len([item for item in apart if item.part == "methods"]) > 5


def test_a_cast_of_a_model_is_silent() -> None:
    """diffusers warns of each cast, even where no module should stay in float32; another warning is shown."""
    silence_libraries()
    logger = logging.getLogger("diffusers.models.modeling_utils")
    for modules, shown in (("[]", False), ("['norm']", True)):
        record = logger.makeRecord(
            "", 30, "", 0, f"There are modules that should be kept in float32: {modules}.", (), None
        )
        assert bool(logger.filter(record)) == shown


@pytest.mark.parametrize(("part", "what", "recorded"), [
    ("methods", "patches=4", False),
    ("compile", COMPILED, False),
    ("compile", RECORDED, True),
])  # fmt: skip
def test_only_rows_that_say_so_have_recorded_steps(
    part: str, what: str, recorded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default "auto" decides, so that a row would be of one or the other."""
    settings = []

    def note_setting(*_: Any, cuda_graphs: Any = "auto", **__: Any) -> Any:
        settings.append(cuda_graphs)
        raise PlanError("noted")

    monkeypatch.setattr(rank_session, "parallelize", note_setting)
    work = fill_workload(Workload(device="cpu"), 0, 2, small=True)
    item = SuiteItem(part, what, 64)
    session = SuiteSession(SuiteTask(items=(item,), work=work, out=str(tmp_path), ends_at=0.0, small=True))
    with pytest.raises(PlanError, match="noted"):
        ANSWERS[part](session, item)
    assert settings == [recorded]


def answer_on_simulated_gpu(task: SuiteTask) -> list[Any]:
    """On a rank: answers the items of a task on a simulated GPU, and returns what it finds."""
    gpu = SimulatedGpu(dist.get_rank(), keeps_numbers=True)
    messages = GlooMessages(gpu) if dist.get_world_size() > 1 else None
    with ExitStack() as stack:
        stack.enter_context(record_on_simulated_gpus())
        stack.enter_context(torch.no_grad())
        stack.enter_context(simulate_gpu(gpu, messages))
        run_suite_items(task)
    return [*gpu.record.findings]


@pytest.mark.parametrize("parts", rotate([*PARTS[1:], TIMED], always=PARTS[2:]))
def test_the_whole_suite_runs_on_simulated_gpus(
    pool: Pool, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means that an item of a rented machine is an error, such as tensors on two devices, which these GPUs
    refuse as real ones do."""
    findings: list[Any] = []

    def launch_on_simulated_gpus(fn: Any, ranks: int, args: tuple[SuiteTask], **_: Any) -> None:
        for found in pool.run(answer_on_simulated_gpu, ranks, *args):
            findings.extend(found)

    monkeypatch.setattr(suite, "launch", launch_on_simulated_gpus)
    monkeypatch.setattr(suite, "shutil", SimpleNamespace(which=lambda name: None))
    compared = Comparison(suite="gpu", small=True, quick=True, only=parts, devices=2, out=str(tmp_path))
    with simulate_gpu(SimulatedGpu()):
        (machine, *rows), _, _ = run_gpu_suite(compared, Workload(dtype="float32"))
    assert machine["gpus"] and machine["messages"] == "NCCL"
    assert not [row for row in rows if "error" in row]
    assert not [row for row in rows if "skipped" in row and row["what"] != CACHE_DIT]
    assert {row["part"] for row in rows} == set(compared.suite_parts)
    assert all(row["equal"] for row in rows if row["part"] == "exact")
    assert all(row["ok"] for row in rows if row["part"] == "verify")
    assert all(row["finite"] and row["relative"] < 0.1 and row["peak_gb"] for row in rows if "seconds" in row)
    assert not findings


def test_calls_of_pixart_are_timed_on_a_gpu(tmp_path: Path) -> None:
    """The other family of random weights, whose guidance is in one batch."""
    gpu = SimulatedGpu(keeps_numbers=True)
    work = Workload(model="random-pixart blocks=3 heads=2 head_dim=16", device="cuda:0", dtype="float32")
    task = SuiteTask(
        items=(), work=replace(work, steps=2, output="latent"), out=str(tmp_path / "gpu.jsonl"), ends_at=0.0, small=True
    )
    with torch.no_grad(), simulate_gpu(gpu):
        row = ANSWERS["methods"](SuiteSession(task), SuiteItem("methods", "patches=4", 128))
    assert row["finite"] and row["relative"] < 0.1
    assert not gpu.record.findings

"""`ditile bench --alone`: a rank sends what its plan says, and takes the slope of its calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditile.cli import main
from ditile.plan import cost
from ditile.plan.plan import Plan
from ditile_lab.bench.cells import BenchCell
from ditile_lab.bench.options import Workload
from ditile_lab.bench.random_models import RandomModel
from ditile_lab.bench.subjects import create_bench_subject
from ditile_lab.machine import comparison, rank_steps
from ditile_lab.machine.rank_steps import MeasuredCalls, measure_rank, measure_step
from tests.recorded_calls import record_on_cpu

CPU = torch.device("cpu")
MODEL = "random-flux blocks=6 heads=2 head_dim=16"
SIDE = 128
STEPS = (4, 8)


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes half a second, as calls of a tiny model on a busy machine take anything."""
    monkeypatch.setattr(rank_steps, "compute_step_seconds", lambda *_: 0.5)


def plan_calls() -> MeasuredCalls:
    make = RandomModel.parse_model_name(MODEL).make_call_arguments
    return MeasuredCalls(device=CPU, steps=STEPS, rounds=1, make_arguments=lambda _, steps: make(SIDE, SIDE, steps))


def test_set_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of ten seconds and a quarter for each step, on a clock that only it moves."""
    clock = [0.0]
    monkeypatch.setattr(rank_steps.time, "perf_counter", lambda: clock[0])
    called = []

    def run(steps: int) -> None:
        called.append(steps)
        clock[0] += 10 + steps / 4

    step = measure_step(run, replace(plan_calls(), rounds=2), rank=3)
    assert (step.rank, step.step_s, step.host_s, step.device_s) == (3, 0.25, None, None)
    assert called == [4, 4, 4, 8, 4, 8], "two calls that do not count, then short and long ones in turns"
    assert step.call_s == ([11.0, 11.0], [12.0, 12.0])


PLANS = ["pipefusion=2 patches=4", "ulysses=2", "distrifusion=2", "pipefusion=2 patches=2 warmup_mode=sequence"]


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_rank_alone_sends_what_its_plan_says(text: str, recorded: bool) -> None:
    """Bytes of a step equal the formulas, and the pipeline is bit for bit what it was; a failure means that another
    computation was measured than that of the plan's ranks."""
    subject = create_bench_subject(Workload(model=MODEL, height=SIDE, width=SIDE, steps=STEPS[1]))
    plan = Plan.parse(text)
    job = subject.make_cost_job(BenchCell(text, "", SIDE, SIDE))
    assert job is not None
    pipe = subject.create_whole_pipeline(CPU)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    for rank in (0, plan.world - 1):
        with record_on_cpu() as recorders:
            step = measure_rank(pipe, plan, rank, plan_calls(), recorded=recorded)
        assert step.recorded == recorded == any(recorder.num_played for recorder in recorders)
        assert not step.as_code and not step.problem
        formula = cost.count_traffic_in_step(job, rank, STEPS[1] - 2)
        assert step.sent_bytes == {kind: size for kind, size in formula.items() if size}
        assert step.messages > 0
    after = pipe.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("elsewhere", "no_clock")
def test_the_command_writes_a_row_for_each_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "launch", lambda measure, ranks, arguments, **_: [measure(*arguments)])
    words = ["--plans", "pipefusion=3 patches=3; data=2; patches=2", "--model", MODEL, "--height", str(SIDE)]
    words += ["--width", str(SIDE), "--rounds", "1", "--hardware", "h200-nvlink", "--alone", "--out", "a"]
    assert main.main(["bench", *words]) == 0
    rows = [json.loads(line) for line in Path("a/alone.jsonl").read_text().splitlines()]
    ranks = [(row["plan"], row["rank"]) for row in rows]
    assert ranks[0] == ("", 0) and rows[0]["times_plain"] == 1
    assert {rank for plan, rank in ranks if plan == "pipefusion=3 patches=3"} >= {0, 2}
    assert [rank for plan, rank in ranks if plan == "patches=2"] == [0]
    (replica, _) = [row for row in rows if row["plan"] == "data=2"]
    assert replica["times_plain"] == pytest.approx(2), "each of two replicas makes an image"
    assert all(row["step_s"] == 0.5 and row["steps"] == [4, 9] and row["world"] >= 1 for row in rows)
    out = capsys.readouterr().out
    assert "link: computed, not measured" in " ".join(out.split())
    assert "recorded steps (cuda_graphs) need a GPU" in " ".join(out.split())
    assert "the plain pipeline, without ditile" in out

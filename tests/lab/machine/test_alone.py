"""`ditile bench --alone`: a rank sends what its plan says, takes the slope of its calls, and leaves torch as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from ditile.cli import main
from ditile.parallel.tensor import collectives
from ditile.plan import cost
from ditile.plan.errors import ModelError, PlanError, StateError
from ditile.plan.plan import Plan
from ditile.planner import hardware
from ditile.planner.profile import Link
from ditile.planner.search import make_pricer
from ditile.planner.seconds import DeviceLoad
from ditile.runner.requests.console import LINE_WIDTH
from ditile_lab.bench.cells import BenchCell, parse_cells
from ditile_lab.bench.options import Workload
from ditile_lab.bench.random_models import RandomModel
from ditile_lab.bench.random_weights import PublishedConfigs, make_random_arguments
from ditile_lab.bench.subjects import create_bench_subject
from ditile_lab.machine import comparison, rank_steps
from ditile_lab.machine.comparison import choose_recording, choose_steps, make_alone_tables
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from ditile_lab.machine.rank_steps import MeasuredCalls, compute_step_seconds, measure_rank, measure_step
from ditile_lab.machine.session import choose_measured_ranks
from ditile_lab.machine.step_parts import compute_step_parts
from ditile_lab.rows import Row
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
    model = RandomModel.parse_model_name(MODEL)
    return MeasuredCalls(
        device=CPU,
        steps=STEPS,
        rounds=1,
        make_arguments=lambda pipe, steps: model.make_call_arguments(SIDE, SIDE, steps),
    )


def test_a_step_is_the_slope_between_calls() -> None:
    assert compute_step_seconds([3.0, 2.0, 9.0], [7.0, 4.0], 4) == 0.5
    with pytest.raises(ModelError, match="calls of 4 more steps took no longer"):
        compute_step_seconds([2.0], [2.0], 4)


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


@pytest.mark.parametrize(
    "text",
    [
        "pipefusion=2 patches=4",
        "ulysses=2",
        "ring=2",
        "tensor=2",
        "distrifusion=2",
        "pipefusion=2 patches=2 ulysses=2",
        "pipefusion=2 patches=2 warmup_mode=sequence",
    ],
)
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
        assert not step.as_code
        formula = cost.count_traffic_in_step(job, rank, STEPS[1] - 2)
        assert step.sent_bytes == {kind: size for kind, size in formula.items() if size}
        assert step.messages > 0
    after = pipe.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_torch_is_as_before_even_after_an_error() -> None:
    names = [*LoneMessages(0, 2, CPU).list_replacements()]
    before = {name: getattr(dist, name) for name in names}
    gather, scatter = collectives._all_gather, collectives._reduce_scatter
    assert {"group", "P2POp", "isend", "irecv", "all_reduce", "all_to_all_single", "broadcast"} <= set(names)
    with pytest.raises(ZeroDivisionError), replace_torch_distributed(LoneMessages(1, 2, CPU)):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
        with (
            pytest.raises(StateError, match="has a process group of its own"),
            replace_torch_distributed(LoneMessages(0, 2, CPU)),
        ):
            pass
        assert dist.get_rank() == 1
        raise ZeroDivisionError
    assert all(getattr(dist, name) is before[name] for name in names)
    assert (collectives._all_gather, collectives._reduce_scatter) == (gather, scatter)


def test_a_failing_call_gives_the_pipeline_back(no_clock: None) -> None:
    pipe = RandomModel.parse_model_name(MODEL).create_pipeline(SIDE)

    def refuse(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    forward = pipe.transformer.transformer_blocks[0].forward
    with pytest.raises(ZeroDivisionError):
        measure_rank(pipe, Plan(ulysses=2), 0, replace(plan_calls(), make_arguments=refuse))
    assert not dist.is_initialized() and pipe.transformer.transformer_blocks[0].forward == forward


def test_ranks_agree_with_themselves_and_get_random_activations() -> None:
    messages = LoneMessages(1, 4, CPU)
    parts = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    messages.all_gather(parts, torch.tensor([3, 5]))
    assert [part.tolist() for part in parts] == [[3, 5]] * 4 and messages.num_messages == 0
    received = torch.zeros(10, 20)
    messages.irecv(received)
    assert received.std() > 0.5 and messages.num_messages == 1
    packed = torch.full((8,), 7, dtype=torch.uint8)
    messages.irecv(packed)
    assert not packed.any()
    own = torch.ones(100)
    messages.broadcast(own, group_src=1)
    assert own.eq(1).all()


def make_parts(text: str, loads: list[float], link: Link) -> Any:
    subject = create_bench_subject(Workload(model=MODEL, height=SIDE, width=SIDE, steps=STEPS[1]))
    cell = BenchCell(text, "", SIDE, SIDE)
    job = subject.make_cost_job(cell)
    assert job is not None
    profile = replace(hardware.load_profile("h200-nvlink"), link=link)
    pricer = make_pricer(subject.planner_subject, subject.make_planning_arguments(cell), profile)
    return compute_step_parts(pricer, job, [DeviceLoad(seconds, 0.0) for seconds in loads])


FREE = Link(latency_s=0.0, bandwidth=1e18)


@pytest.mark.parametrize(
    ("text", "loads", "step_s", "waiting_s"),
    [
        ("ulysses=2", [1.0], 1.0, 0.0),
        ("pipefusion=2 patches=2", [1.0, 0.5], 1.0, 0.0),
        # With one patch a stage waits for the other one.
        ("pipefusion=2 patches=1", [1.0, 0.5], 1.5, 0.5),
    ],
)
def test_the_slowest_stage_is_the_step_and_gaps_are_waiting(
    text: str, loads: list[float], step_s: float, waiting_s: float
) -> None:
    parts = make_parts(text, loads, FREE)
    assert parts == pytest.approx((step_s, 0.0, waiting_s), abs=1e-9)


def test_links_are_added_to_what_was_measured() -> None:
    """Six blocks exchange twice, and the prediction is gathered once; each message takes a tenth of a second more."""
    parts = make_parts("ulysses=2", [1.0], replace(FREE, latency_s=0.1))
    assert parts.link_s == pytest.approx(0.1 * 13) and parts.step_s == pytest.approx(2.3)


def test_the_busiest_rank_is_measured_too() -> None:
    """A stage of double blocks computes more than one of single ones; of ranks that are alike two are enough."""
    assert choose_measured_ranks(None, None, 8, all_ranks=True) == list(range(8))
    assert choose_measured_ranks(None, None, 8, all_ranks=False) == [0, 7]
    assert choose_measured_ranks(None, None, 1, all_ranks=False) == [0]


def test_all_plans_have_calls_of_the_same_steps() -> None:
    cells = parse_cells("ulysses=2; pipefusion=2 patches=2 warmup=3")
    assert choose_steps(cells, None) == (6, 11) and choose_steps(cells, 20) == (6, 20)
    with pytest.raises(PlanError, match="give 7 or more"):
        choose_steps(cells, 6)


GPU_ROW: Row = {
    "model": "random-flux blocks=57 heads=24 head_dim=128", "machine": {"gpus": ["NVIDIA H200"]}, "threads": 16,
    "height": 1024, "width": 1024, "recorded": False, "host_s": 1.2345, "device_s": 0.9999, "link_s": 0.0123,
    "waiting_s": 0.1004,
}  # fmt: skip


def test_a_table_has_80_columns() -> None:
    """With every column and numbers of five characters; a failure means a table in two parts, or one that is cut."""
    rows = [
        {name: value for name, value in GPU_ROW.items() if name not in ("link_s", "waiting_s")}
        | {"plan": "", "rank": 0, "world": 1, "step_s": 1.2345, "plan_step_s": 1.2345, "times_plain": 1.0},
        GPU_ROW | {"plan": "ulysses=8", "rank": 0, "world": 8, "step_s": 0.1, "plan_step_s": 0.2, "times_plain": 6.17},
        GPU_ROW | {"plan": "ulysses=8", "rank": 7, "world": 8, "step_s": 0.15, "plan_step_s": 0.2, "times_plain": 6.17},
        GPU_ROW | {
            "plan": "ulysses=8", "rank": 7, "world": 8, "recorded": True, "step_s": 0.03, "plan_step_s": 0.2,
            "times_plain": 15.17,
        },
        GPU_ROW | {
            "plan": "ulysses=4", "rank": 0, "world": 4, "recorded": True, "as_code": "adapters are on the model",
            "step_s": 0.03, "plan_step_s": 0.2, "times_plain": 15.17,
        },
    ]  # fmt: skip
    tables = make_alone_tables(rows)
    console = Console(width=LINE_WIDTH)
    with console.capture() as captured:
        for part in tables:
            console.print(part)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= LINE_WIDTH
    assert sum(not isinstance(part, str) for part in tables) == 1
    assert "7 of 8" in captured.get() and "0 of 8" not in captured.get(), "the slowest rank is shown"
    for title in ("host", "GPU", "alone", "link", "waiting", "step", "of plain"):
        assert title in captured.get()
    assert "ulysses=8, recorded steps" in captured.get(), "both ways of a plan are shown"
    assert "ulysses=4, not recorded: adapters" in captured.get()


def test_ranks_are_recorded_where_there_is_a_gpu() -> None:
    gpu = torch.device("cuda")
    cells = parse_cells("ulysses=2; patches=2 offload=blocks")
    assert choose_recording(None, gpu, cells)
    assert not choose_recording(False, gpu, cells)
    assert not choose_recording(None, CPU, cells)
    assert choose_recording(True, gpu, cells[:1])
    with pytest.raises(PlanError, match="recorded steps are CUDA graphs, and the device is cpu"):
        choose_recording(True, CPU, cells)
    with pytest.raises(PlanError, match="the plan 'patches=2 offload=blocks' cannot be recorded"):
        choose_recording(True, gpu, cells)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(measure: Callable[..., Any], ranks: int, arguments: tuple[Any, ...], **_: Any) -> list[Any]:
        return [measure(*arguments)]

    monkeypatch.setattr(comparison, "launch", run_here)


@pytest.mark.usefixtures("in_this_process", "no_clock")
def test_the_command_writes_a_row_for_each_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
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


def test_published_models_have_names_with_random_weights() -> None:
    assert PublishedConfigs.find_by_model_name("random-flux blocks=2") is None
    assert PublishedConfigs.find_by_model_name("qwen-image") is None
    published = PublishedConfigs.find_by_model_name("random-wan2.1-t2v-1.3b blocks=2 heads=1")
    assert published is not None and str(published) == "random-wan2.1-t2v-1.3b blocks=2 heads=1"
    config = published.read_configs().transformer
    assert (config["num_layers"], config["num_attention_heads"]) == (2, 1)
    with pytest.raises(ModelError, match="blocks of this model is not one number"):
        PublishedConfigs.find_by_model_name("random-flux.1-dev blocks=2")


def test_a_published_model_runs_with_random_weights() -> None:
    """Two steps of Wan with one head, on embeddings in place of a prompt, with guidance as its authors recommend."""
    work = Workload(model="random-wan2.1-t2v-1.3b blocks=1 heads=1", height=32, width=32, steps=2)
    subject = create_bench_subject(work)
    cell = BenchCell("", "", 32, 32)
    pipe = subject.create_whole_pipeline(CPU)
    call = subject.make_planning_arguments(cell) | {"num_frames": 5}
    arguments = make_random_arguments(pipe, call, torch.float32, CPU)
    assert {"prompt_embeds", "negative_prompt_embeds", "guidance_scale"} <= arguments.keys()
    frames = pipe(**arguments).frames
    assert frames.shape == (1, 16, 2, 4, 4) and frames.isfinite().all()


@pytest.mark.usefixtures("in_this_process", "no_clock")
def test_every_rank_is_measured_both_ways(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plain pipeline too, which is one rank of ditile then. What stands for graphs runs on a CPU here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "choose_recording", lambda *_: True)
    plans = ["", "ulysses=2", "pipefusion=2 patches=2"]
    code_alone = "patches=2 offload=blocks"
    words = ["--plans", "; ".join([*plans[1:], code_alone]), "--model", MODEL, "--height", str(SIDE)]
    words += ["--width", str(SIDE), "--rounds", "1", "--alone", "--out", "a"]
    with record_on_cpu() as recorders:
        assert main.main(["bench", *words]) == 0
    rows = [json.loads(line) for line in Path("a/alone.jsonl").read_text().splitlines()]
    ways = [(row["plan"], row["rank"], row["recorded"]) for row in rows]
    assert (code_alone, 0, False) in ways and (code_alone, 0, True) not in ways
    for plan in plans:
        ranks = {rank for own, rank, _ in ways if own == plan}
        assert all((plan, rank, recorded) in ways for rank in ranks for recorded in (False, True))
    assert len(recorders) == sum(recorded for *_, recorded in ways)
    assert all(recorder.num_played for recorder in recorders)
    out = capsys.readouterr().out
    for label in ("one rank of ditile, recorded steps", "ulysses=2, recorded steps"):
        assert label in out

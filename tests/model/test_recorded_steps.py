"""Calls that are recorded in one step and played in later ones give the same image, on one rank and on several."""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ditile
from ditile.cli.outcome import RunnerCallResult, list_outcome_lines, sum_reports, summarize_outcome
from ditile.distributed.recording.tape import CURRENT
from ditile.model.recording.recorded_steps import LOOKS, RecordedSteps
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.prompts import PromptLine
from tests.pool import Pool
from tests.recorded_calls import OperatorSegments, draw_both_ways, generate, record_on_cpu, run_step
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [
    *[("flux", axis) for axis in ("ulysses=2", "ring=2", "tensor=2", "distrifusion=2 warmup=1")],
    ("flux", "pipefusion=2 patches=2 warmup=1"),
    ("flux", "distrifusion=2 warmup=1 wire_dtype=int8"),
    # Masks of the text are gathered within calls.
    ("pixart-sigma", "ring=2"),
    # Two transformers in turns.
    ("wan-2.2", "pipefusion=2 patches=2 warmup=1"),
]
"""Other pipelines are rows of tests/zoo/test_recorded.py."""


def generate_in_turns(name: str, plan: Plan) -> tuple[int, int]:
    """Return how many calls are recorded, and played, in three images, a larger one, another prompt, and one more."""

    def draw(runner: Any) -> list[Tensor]:
        images = []
        for seed, call in enumerate([{}, {}, {}, ZOO[name].larger(), ZOO[name].other_prompt(), {}]):  # type: ignore[misc]
            images += generate(runner, name, seed, **call | {"num_inference_steps": 5})
        return images

    _, recorder = draw_both_ways(ZOO[name].make, plan, draw)
    return recorder.num_recorded, recorder.num_played


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_played_steps_give_the_same_images(pool: Pool, name: str, axis: str) -> None:
    """A failure means another image, or other messages than those of the code."""
    for recorded, played in pool.run(generate_in_turns, 2, name, Plan.parse(axis)):
        assert recorded and played


def generate_reports(name: str, plan: Plan) -> list[Any]:
    """The reports of recorded calls of three images of five steps; for flux there are two branches of guidance."""
    with record_on_cpu():
        runner = ditile.parallelize(ZOO[name].make(), plan, cuda_graphs=True)
    reports = []
    for seed in range(3):
        generate(runner, name, seed)
        assert runner.report is not None
        reports.append(runner.report)
    return reports


@pytest.mark.parametrize(
    ("name", "axis", "counts"),
    [
        ("flux", "tensor=2", [4, 10, 10]),
        # Its first step makes keys.
        ("flux", "distrifusion=2 warmup=1", [0, 4, 8]),
        # Each patch has buffers of its own on the first stage, for which later patches ask later.
        ("flux-2", "pipefusion=2 patches=2 warmup=1", [4, 8, 8]),
    ],
)
def test_all_steps_of_later_images_are_played(pool: Pool, name: str, axis: str, counts: list[int]) -> None:
    """With four steps the first one is a quarter of the image. A failure may mean that each image is recorded again."""
    for reports in pool.run(generate_reports, 2, name, Plan.parse(axis)):
        assert [report.recorded.played for report in reports] == counts


def test_a_tape_is_not_played_where_what_it_shares_was_not_computed() -> None:
    """The tape of the first patch is lost again and again. A failure: a patch reads another step's numbers."""

    def draw(runner: Any) -> list[Tensor]:
        images = generate(runner, "flux")
        for seed in range(1, LOOKS + 2):
            if runner._parts.recorder is not None:
                calls = runner._parts.recorder._tapes._calls.values()
                # Their tapes read what the tape of another patch writes.
                dependent = [call for call in calls if call.makers]
                assert dependent
                makers = set().union(*(call.makers for call in dependent))
                for call in calls:
                    if call.tape is not None and ref(call.tape) in makers:
                        call.tape = None
            images += generate(runner, "flux", seed)
        return images

    _, recorder = draw_both_ways(ZOO["flux"].make, Plan(patches=3, warmup=1), draw)
    assert recorder.num_played


@pytest.mark.parametrize("changed", ["prompt_embeds", "negative_prompt_embeds"])
def test_tapes_of_another_prompt_keep_what_patches_share(changed: str) -> None:
    """One branch of guidance is recorded again, later than the other. A failure: that one writes into what it shares.

    The tapes of both share memory, in which those of the other branch were the last ones to be recorded.
    """
    call = ZOO["qwen-image"].call()
    longer: dict[str, Any] = {}
    for argument in (changed, f"{changed}_mask"):
        longer[argument] = torch.cat([call[argument], call[argument][:, :2]], dim=1)
    counts: list[int] = []

    def draw(runner: Any) -> list[Tensor]:
        images = []
        for more in ({}, longer, longer, {}):
            images += generate(runner, "qwen-image", **more)
            if runner._parts.recorder is not None:
                counts.append(runner._parts.recorder.num_recorded)
        return images

    draw_both_ways(ZOO["qwen-image"].make, Plan(patches=3, warmup=1), draw)
    # Three patches of one branch are recorded again, and only once.
    assert [count - counts[0] for count in counts] == [0, 3, 3, 3]


class CountingModel(nn.Linear):
    """A model whose result depends on how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        # A tape would add to its own copy, once more in each step.
        (lambda model, x: x.add_(1), "it writes into its arguments"),
        (lambda model, x: model(x), "it changes its own settings"),
        (lambda model, x: x * float(x.sum()), "aten::_local_scalar_dense"),
        (lambda model, x: x * torch.rand_like(x), "aten::rand_like"),
        (lambda model, x: x[x > 0].sum() * x, "aten::index"),
        (lambda model, x: x.sum() * x[torch.tensor([0])], ""),
    ],
)
def test_what_cannot_be_recorded_runs_as_code(function: Callable[..., Tensor], reason: str) -> None:
    torch.manual_seed(0)
    recorder = RecordedSteps(OperatorSegments)
    model, plain = CountingModel(2, 2), CountingModel(2, 2)
    plain.load_state_dict(model.state_dict())
    for seed in range(5):
        results = []
        for run in (lambda x: run_step(recorder, model, lambda x: function(model, x), x), lambda x: function(plain, x)):
            torch.manual_seed(seed)
            results.append(run(torch.rand(2, 2)).detach())
        assert torch.equal(*results)
    assert bool(recorder.num_played) == (not reason)
    assert all(reason in problem for problem in recorder.problems)


SIZES = (32, 48, 64)


def draw_rounds(plan: Plan, limit_bytes: int) -> tuple[list[int], int]:
    """Return the calls that are recorded in each of three rounds of three sizes, and the most bytes held."""
    counts = [0]
    most_bytes = 0

    def draw(runner: Any) -> list[Tensor]:
        nonlocal most_bytes
        images = []
        for _ in range(3):
            for size in SIZES:
                images += generate(runner, "flux", height=size, width=size)
                if runner._parts.recorder is not None:
                    most_bytes = max(most_bytes, runner.report.recorded.tape_bytes)
            if runner._parts.recorder is not None:
                counts.append(runner._parts.recorder.num_recorded)
        return images

    draw_both_ways(ZOO["flux"].make, plan, draw, limit_bytes=limit_bytes)
    return [after - before for before, after in itertools.pairwise(counts)], most_bytes


@pytest.mark.parametrize("plan", [Plan(), Plan(patches=2, warmup=1)], ids=str)
def test_sizes_that_fit_are_recorded_once(plan: Plan) -> None:
    """A failure means that a server of a few sizes records at each change."""
    rounds, whole_bytes = draw_rounds(plan, sys.maxsize)
    assert rounds[0]
    assert rounds[1:] == [0, 0]
    # Two sizes of three: each comes back after the other two, so it has gone by then.
    limit = whole_bytes * 3 // 4
    rounds, most_bytes = draw_rounds(plan, limit)
    assert rounds[1] == rounds[2] > 0
    assert most_bytes <= limit


def test_what_does_not_fit_runs_as_code() -> None:
    _, most_bytes = draw_rounds(Plan(), 1000)
    assert most_bytes <= 1000


def generate_with_one_recorder(name: str, plan: Plan, recording_rank: int) -> int:
    """Return how many calls are played where one rank alone records."""

    def draw(runner: Any) -> list[Tensor]:
        if runner._parts.recorder is not None and runner.mesh.rank != recording_rank:
            runner._parts.recorder.failure = "this rank does not record"
        return [tensor for seed in range(2) for tensor in generate(runner, name, seed)]

    return draw_both_ways(ZOO[name].make, plan, draw)[1].num_played


@pytest.mark.parametrize("recording_rank", [0, 1])
@pytest.mark.parametrize(("name", "axis"), [case for case in CASES if "wire" not in case[1] and case[0] != "wan-2.2"])
def test_one_rank_alone_may_record(pool: Pool, name: str, axis: str, recording_rank: int) -> None:
    """Messages and their order are the same in a replay as in code, so ranks need not agree. A failure may hang."""
    played = pool.run(generate_with_one_recorder, 2, name, Plan.parse(axis), recording_rank)
    assert [bool(calls) for calls in played] == [rank == recording_rank for rank in range(2)]


class FailingSegments(OperatorSegments):
    """A capture that fails at an operator.

    Args:
        fails_at: which one of all, messages excluded.
    """

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self._left = fails_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not CURRENT.is_exchanging:
            self._left -= 1
            if not self._left:
                raise RuntimeError("operation not permitted when stream is capturing")
        return super().__torch_dispatch__(func, types, args, kwargs)


def generate_with_failure(plan: Plan, fails_at: int) -> list[str]:
    """Return why calls run as code if a capture fails on rank 0."""

    def make_segments() -> OperatorSegments:
        return OperatorSegments() if dist.is_initialized() and dist.get_rank() else FailingSegments(fails_at)

    def draw(runner: Any) -> list[Tensor]:
        return [tensor for seed in range(3) for tensor in generate(runner, "flux", seed)]

    return list(draw_both_ways(ZOO["flux"].make, plan, draw, make_segments)[1].problems)


@pytest.mark.parametrize(
    ("axis", "fails_at"),
    [
        ("data=1", 40),
        ("ulysses=2", 1),
        # Within the blocks of the first stage, which only sends.
        ("pipefusion=2 patches=2 warmup=1", 60),
    ],
)
def test_other_ranks_do_not_see_that_a_capture_fails(pool: Pool, axis: str, fails_at: int) -> None:
    plan = Plan.parse(axis)
    first, *others = pool.run(generate_with_failure, plan.world, plan, fails_at)
    assert first == ["a recording failed: RuntimeError"]
    assert not any(others)


def test_an_error_in_a_call_forgets_all_tapes() -> None:
    with record_on_cpu() as recorders:
        runner = ditile.parallelize(ZOO["flux"].make(), Plan(patches=2, warmup=1), cuda_graphs=True)
    before = generate(runner, "flux")

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(runner, "flux", callback_on_step_end=fail)
    assert not recorders[0]._tapes._calls
    assert all(map(torch.equal, before, generate(runner, "flux")))


@torch.no_grad()
def test_compiled_code_stays_compiled() -> None:
    """A failure means that tapes hold uncompiled kernels, and that steps after them run uncompiled too."""
    calls: list[int] = []

    def compile_and_count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    double = torch.compile(lambda x: x * 2, backend=compile_and_count)
    recorder, model = RecordedSteps(OperatorSegments), nn.Linear(2, 2)
    for _ in range(3):
        run_step(recorder, model, double, torch.ones(2))
    # It runs when it is watched, when it is made and when it is captured, and not when it is played.
    assert len(calls) == 3
    double(torch.ones(2))
    assert len(calls) == 4


def test_every_call_is_accounted_for() -> None:
    first, second, _ = generate_reports("flux", Plan())
    # Two branches of guidance.
    assert (first.recorded.calls, first.recorded.recorded, first.recorded.played) == (10, 2, 4)
    assert first.recorded.as_code == {"the first step": 2, "the first call of its form": 2}
    assert (second.recorded.calls, second.recorded.recorded, second.recorded.played) == (10, 0, 10)
    assert second.recorded.as_code == {}
    assert second.recorded.tape_bytes > 1000
    assert json.loads(json.dumps(second.to_dict()))["recorded"] == asdict(second.recorded)
    total = sum_reports([[first.to_dict()], [second.to_dict()]])
    request, prompts = GenerateOptions(model="flux", prompt="a dog"), [PromptLine("a dog", 0, "a.png")]
    outcome = summarize_outcome(request, Plan(), CacheOptions(), prompts, [RunnerCallResult(total, [], [])])
    (line,) = [line for line in list_outcome_lines(outcome) if line.startswith("recorded steps")]
    assert line == "recorded steps 14 of 20 calls played; 2 ran as code: the first step"
    assert outcome["recorded"][0]["calls"] == 20


def test_a_call_that_makes_the_first_keys_is_not_recorded() -> None:
    """A failure means that later images capture it, and drop the tape."""
    first, second, _ = generate_reports("flux", Plan(patches=2, warmup=2))
    assert first.recorded.recorded
    assert second.recorded.recorded == 0
    assert second.recorded.as_code == {"the first step": 2, "it makes its first keys": 2}


def test_the_memory_of_a_recorder_goes_with_it() -> None:
    """A failure means gigabytes until the next collection of cycles."""
    gc.disable()
    try:
        recorder = RecordedSteps(OperatorSegments)
        buffer = ref(recorder.kept_buffers.get_memory("keys", (2,), torch.zeros(2)))
        assert buffer() is not None
        del recorder
        assert buffer() is None
    finally:
        gc.enable()

"""Calls that are recorded in one step and played in later ones give the same image, on one rank and on several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import ditile
from ditile.distributed.recording.tape import CURRENT
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.recording.kept_tapes import CallTape
from ditile.model.recording.recorded_steps import LOOKS, RecordedSteps
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep
from tests.pool import Pool
from tests.recorded_calls import OperatorSegments, record_on_cpu
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

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


def generate(runner: Any, name: str, seed: int = 0, **more: Any) -> list[Tensor]:
    call = ZOO[name].call() | {"num_inference_steps": 5} | more
    return [x.clone() for x in list_tensors(runner(**call | {"generator": torch.Generator().manual_seed(seed)}))]


def generate_if_allowed(runner: Any, name: str, seed: int, **more: Any) -> list[Tensor]:
    """The image; nothing where a plan refuses the size."""
    try:
        return generate(runner, name, seed, **more)
    except PlanError:
        return []


def generate_with_and_without(name: str, plan: Plan) -> tuple[list[bool], int, int]:
    """Whether each image is that of the same plan without tapes; how many calls were recorded, and played.

    Three images, a larger one, another prompt, and one like the first again; sent messages and checked ages are equal.
    """
    outcomes: list[tuple[list[list[Tensor]], object]] = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            checks = AgeChecks()
            runner = ditile.parallelize(ZOO[name].make(), plan, cuda_graphs=recorded, checks=checks)
            images = [generate(runner, name, seed) for seed in range(3)]
            if ZOO[name].larger is not None:
                sizes = {key: value for key, value in ZOO[name].larger().items() if key in ("height", "width")}
                images.append(generate_if_allowed(runner, name, 3, **sizes))
            if ZOO[name].other_prompt is not None:
                images.append(generate_if_allowed(runner, name, 4, **ZOO[name].other_prompt()))
            images.append(generate(runner, name, 5))
            traffic = runner.mesh.traffic
            outcomes.append((images, (dict(traffic.bytes), dict(traffic.calls), checks.passed)))
    (plain, sent), (played, sent_by_tapes) = outcomes
    assert sent == sent_by_tapes
    equal = []
    for image, other in zip(plain, played, strict=True):
        equal.append(all(map(torch.equal, image, other)))
    return equal, recorders[0].num_recorded, recorders[0].num_played


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_played_steps_give_the_same_images(pool: Pool, name: str, axis: str) -> None:
    plan = Plan.parse(axis)
    for equal, recorded, played in pool.run(generate_with_and_without, plan.world, name, plan):
        assert len(equal) >= 4
        assert all(equal)
        assert recorded and played
        # Ranks that exchange keys record each form of a call anew; one rank alone does not.
        assert played > recorded or plan.world > 1


def count_played_calls(name: str, plan: Plan) -> list[int]:
    """The calls of each of three images that are played; with five steps, and for flux two branches of guidance."""
    counts = []
    with record_on_cpu() as recorders:
        runner = ditile.parallelize(ZOO[name].make(), plan, cuda_graphs=True)
        for seed in range(3):
            before = recorders[0].num_played
            generate(runner, name, seed)
            counts.append(recorders[0].num_played - before)
    return counts


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
    plan = Plan.parse(axis)
    assert pool.run(count_played_calls, plan.world, name, plan) == [counts] * plan.world


def list_dependent_calls(recorder: RecordedSteps) -> list[CallTape]:
    """The calls whose tapes read what the tape of another patch writes."""
    return [call for call in recorder._tapes._calls.values() if call.makers]


def test_a_tape_is_not_played_where_what_it_shares_was_not_computed() -> None:
    """The tape of the first patch is lost again and again. A failure: a patch reads another step's numbers."""
    times = LOOKS + 1
    images: list[list[list[Tensor]]] = []
    for recorded in (False, True):
        with record_on_cpu() as recorders:
            runner = ditile.parallelize(ZOO["flux"].make(), Plan(patches=3, warmup=1), cuda_graphs=recorded)
        images.append([generate(runner, "flux")])
        for seed in range(1, times + 1):
            for recorder in recorders[:recorded]:
                dependent = list_dependent_calls(recorder)
                assert dependent
                makers = set().union(*(call.makers for call in dependent))
                for call in recorder._tapes._calls.values():
                    if call.tape is not None and ref(call.tape) in makers:
                        call.tape = None
            images[-1].append(generate(runner, "flux", seed))
    for image, other in zip(*images, strict=True):
        assert all(map(torch.equal, image, other))
    assert recorders[0].num_played


@pytest.mark.parametrize("changed", ["prompt_embeds", "negative_prompt_embeds"])
def test_tapes_of_another_prompt_keep_what_patches_share(changed: str) -> None:
    """One branch of guidance is recorded again, later than the other. A failure: that one writes into what it shares.

    The tapes of both share memory, in which those of the other branch were the last ones to be recorded.
    """
    call = ZOO["qwen-image"].call()
    longer: dict[str, Any] = {}
    for argument in (changed, f"{changed}_mask"):
        longer[argument] = torch.cat([call[argument], call[argument][:, :2]], dim=1)
    images: list[list[list[Tensor]]] = []
    counts: list[int] = []
    for recorded in (False, True):
        with record_on_cpu() as recorders:
            runner = ditile.parallelize(ZOO["qwen-image"].make(), Plan(patches=3, warmup=1), cuda_graphs=recorded)
        images.append([])
        for more in ({}, longer, longer, {}):
            images[-1].append(generate(runner, "qwen-image", **more))
            counts += [recorder.num_recorded for recorder in recorders[:recorded]]
    for image, other in zip(*images, strict=True):
        assert all(map(torch.equal, image, other))
    # Three patches of one branch are recorded again, and only once.
    assert [count - counts[0] for count in counts] == [0, 3, 3, 3]


def add_hook(pipe: Any) -> None:
    pipe.transformer.transformer_blocks[0].ff.register_forward_hook(lambda module, args, output: output * 1.5)


def test_a_model_with_code_of_a_user_runs_its_code() -> None:
    """It may keep something in Python, as a processor does that counts its calls."""
    recorder = check_same_images(add_hook)
    assert not recorder.num_recorded


def write_argument(x: Tensor) -> Tensor:
    return x.add_(1)


@torch.no_grad()
def test_a_model_that_writes_into_its_arguments_runs_its_code() -> None:
    """A failure means that a tape adds to its own copy, once more in each step."""
    recorder = RecordedSteps(OperatorSegments)
    generation = Generation(calls=1, micro_step=MicroStep(1, None))
    model = torch.nn.Linear(2, 2)
    x = torch.zeros(2)
    for step in range(5):
        result = recorder.run_call(generation, model, write_argument, (x,), {})
        assert result.tolist() == [step + 1.0, step + 1.0]
    assert recorder.problems == {"it writes into its arguments": 3}


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * float(x.sum()), "aten::_local_scalar_dense"),
        (lambda x: x * torch.rand_like(x), "aten::rand_like"),
        (lambda x: x[x > 0].sum() * x, "aten::index"),
        (lambda x: x.sum() * x[torch.tensor([0])], ""),
    ],
)
def test_operators_that_cannot_be_recorded_are_seen(function: Callable[[Tensor], Tensor], reason: str) -> None:
    recorder = RecordedSteps(OperatorSegments)
    generation = Generation(calls=1, micro_step=MicroStep(1, None))
    model = torch.nn.Linear(2, 2)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.rand(2, 2)
        result = recorder.run_call(generation, model, lambda x: function(model(x)), (x,), {})
        torch.manual_seed(seed)
        x = torch.rand(2, 2)
        assert torch.equal(result, function(model(x)))
    assert bool(recorder.num_played) == (not reason)
    assert all(reason in problem for problem in recorder.problems)


def check_same_images(change: Callable[[Any], None], **more: Any) -> RecordedSteps:
    """Two images each of a changed pipeline, with tapes and without."""
    images = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            pipe = ZOO["flux"].make()
            change(pipe)
            runner = ditile.parallelize(pipe, Plan(patches=2, warmup=1), cuda_graphs=recorded, trust_code=True)
            images.append(generate(runner, "flux", 0, **more) + generate(runner, "flux", 1, **more))
    assert all(map(torch.equal, *images))
    return recorders[0]


SIZES = (32, 48, 64)


def generate_sizes(plan: Plan, limit_bytes: int) -> tuple[list[int], int, list[bool]]:
    """The calls that are recorded in each of three rounds of three sizes, the most bytes held, and what was equal."""
    images = []
    counts = []
    most_bytes = 0
    for recorded in (False, True):
        with record_on_cpu(limit_bytes=limit_bytes) as recorders:
            runner = ditile.parallelize(ZOO["flux"].make(), plan, cuda_graphs=recorded)
        for _ in range(3):
            for size in SIZES:
                images.append(generate(runner, "flux", height=size, width=size)[0])
                if recorded:
                    counts.append(recorders[0].num_recorded)
                    most_bytes = max(most_bytes, runner.report.recorded.tape_bytes)
    rounds = [counts[2], counts[5] - counts[2], counts[8] - counts[5]]
    half = len(images) // 2
    return rounds, most_bytes, list(map(torch.equal, images[:half], images[half:]))


@pytest.mark.parametrize("plan", [Plan(), Plan(patches=2, warmup=1)], ids=str)
def test_sizes_that_fit_are_recorded_once(plan: Plan) -> None:
    """A failure means that a server of a few sizes records at each change."""
    rounds, whole_bytes, equal = generate_sizes(plan, sys.maxsize)
    assert rounds[0]
    assert rounds[1:] == [0, 0]
    assert all(equal)
    # Two sizes of three: each comes back after the other two, so it has gone by then.
    limit = whole_bytes * 3 // 4
    rounds, most_bytes, equal = generate_sizes(plan, limit)
    assert rounds[1] == rounds[2] > 0
    assert most_bytes <= limit
    assert all(equal)


def test_what_does_not_fit_runs_as_code() -> None:
    rounds, most_bytes, equal = generate_sizes(Plan(), 1000)
    assert most_bytes <= 1000
    assert all(equal)


def generate_with_one_recorder(name: str, plan: Plan, recording_rank: int) -> tuple[bool, int]:
    """Whether images are those of the same plan without tapes if one rank alone records, and its calls played."""
    images: list[list[Tensor]] = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            checks = AgeChecks()
            runner = ditile.parallelize(ZOO[name].make(), plan, cuda_graphs=recorded, checks=checks)
            if recorded and runner.mesh.rank != recording_rank:
                recorders[0].failure = "this rank does not record"
            images.append([tensor for seed in range(2) for tensor in generate(runner, name, seed)])
    return all(map(torch.equal, *images)), recorders[0].num_played


@pytest.mark.parametrize("recording_rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("flux", "ulysses=2"),
        ("flux", "ring=2"),
        ("flux", "tensor=2"),
        ("flux", "distrifusion=2 warmup=1"),
        ("flux", "pipefusion=2 patches=2 warmup=1"),
        ("pixart-sigma", "ring=2"),
    ],
)
def test_one_rank_alone_may_record(pool: Pool, name: str, axis: str, recording_rank: int) -> None:
    """Messages and their order are the same in a replay as in code, so ranks need not agree. A failure may hang."""
    plan = Plan.parse(axis)
    outcomes = pool.run(generate_with_one_recorder, plan.world, name, plan, recording_rank)
    assert all(equal for equal, _ in outcomes)
    for rank, (_, played) in enumerate(outcomes):
        assert bool(played) == (rank == recording_rank)


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


def generate_with_failure(name: str, plan: Plan, fails_at: int) -> tuple[list[bool], str, list[str]]:
    """Which images are as without tapes if a capture fails on rank 0; the error; why calls ran as code."""

    def make_segments() -> OperatorSegments:
        return OperatorSegments() if runner.mesh.rank else FailingSegments(fails_at)

    with record_on_cpu(make_segments) as recorders:
        plain = ditile.parallelize(ZOO[name].make(), plan, cuda_graphs=False)
        expected = [generate(plain, name, seed) for seed in range(3)]
        runner = ditile.parallelize(ZOO[name].make(), plan, cuda_graphs=True)
    equal = []
    error = ""
    for seed in range(3):
        try:
            image = generate(runner, name, seed)
        except RuntimeError as raised:
            error = str(raised)
        else:
            equal.append(all(map(torch.equal, image, expected[seed])))
    return equal, error, list(recorders[0].problems)


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
    first, *others = pool.run(generate_with_failure, plan.world, "flux", plan, fails_at)
    assert first == ([True, True, True], "", ["a recording failed: RuntimeError"])
    assert others == [([True, True, True], "", [])] * len(others)


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
    recorder = RecordedSteps(OperatorSegments)
    generation = Generation(calls=1, micro_step=MicroStep(1, None))
    model = torch.nn.Linear(2, 2)
    for _ in range(3):
        recorder.run_call(generation, model, double, (torch.ones(2),), {})
    # It runs when it is watched, when it is made and when it is captured, and not when it is played.
    assert len(calls) == 3
    double(torch.ones(2))
    assert len(calls) == 4

"""What a report says of recorded calls, and the weights, scales and settings that they see change."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import ditile
from ditile.cli.outcome import RunnerCallResult, list_outcome_lines, sum_reports, summarize_outcome
from ditile.model.hooks.generation import Generation
from ditile.model.recording.recorded_steps import RecordedSteps
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.prompts import PromptLine
from tests.model.test_recorded_steps import generate
from tests.recorded_calls import OperatorSegments, record_on_cpu
from tests.runner.cases import MAKE, run
from tests.runner.loras import NAMES, folders_of, load
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")


def generate_reports(change: Any = None, plan: Plan | None = None) -> list[Any]:
    """The reports of two images of five steps."""
    with record_on_cpu():
        pipe = ZOO["flux"].make()
        if change is not None:
            change(pipe)
        runner = ditile.parallelize(pipe, plan or Plan(), cuda_graphs=True)
    reports = []
    for seed in range(2):
        generate(runner, "flux", seed)
        reports.append(runner.report)
    return reports


def summarize(reports: list[dict[str, Any]]) -> dict[str, Any]:
    request = GenerateOptions(model="flux", prompt="a dog")
    results = [RunnerCallResult(reports, [], [])]
    return summarize_outcome(request, Plan(), CacheOptions(), [PromptLine("a dog", 0, "a.png")], results)


def test_every_call_is_accounted_for() -> None:
    first, second = generate_reports()
    # Two branches of guidance.
    assert (first.recorded.calls, first.recorded.recorded, first.recorded.played) == (10, 2, 4)
    assert first.recorded.as_code == {"the first step": 2, "the first call of its form": 2}
    assert (second.recorded.calls, second.recorded.recorded, second.recorded.played) == (10, 0, 10)
    assert second.recorded.as_code == {}
    assert second.recorded.tape_bytes > 1000
    assert json.loads(json.dumps(second.to_dict()))["recorded"] == asdict(second.recorded)
    reports = [[first.to_dict()], [second.to_dict()]]
    (total,) = sum_reports(reports)
    outcome = summarize([total])
    (line,) = [line for line in list_outcome_lines(outcome) if line.startswith("recorded steps")]
    assert line == "recorded steps 14 of 20 calls played; 2 ran as code: the first step"
    assert len(line) <= 80
    assert outcome["recorded"][0]["calls"] == 20


def test_a_call_that_makes_the_first_keys_is_not_recorded() -> None:
    """A failure means that later images capture it, and drop the tape."""
    first, second = generate_reports(plan=Plan(patches=2, warmup=2))
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


STEPS = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of(NAMES, tmp_path_factory)


def test_the_scale_of_a_call_is_seen(folders: dict[str, Path]) -> None:
    """diffusers multiplies the scales of the layers within each forward, and divides them by it after it."""
    pictures: list[list[Tensor]] = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            pipe = MAKE["flux"]()
            load("one")(pipe, folders["flux"])
            pipe.set_adapters("one", 0.3)
            runner = ditile.parallelize(pipe, Plan(), cuda_graphs=recorded)
            drawn = []
            for scale in (1.0, 0.7, 0.7, 0.35, 0.0, 1.0):
                call = {"joint_attention_kwargs": {"scale": scale}, "num_inference_steps": STEPS}
                drawn.append(run(runner, "flux", **call))
            pictures.append(drawn)
    assert all(map(torch.equal, *pictures))
    assert not torch.equal(pictures[0][1], pictures[0][3])
    assert recorders[0].num_played > recorders[0].num_recorded


def draw_quantized(quant_type: str, recorded: bool) -> tuple[list[Tensor], list[RecordedSteps]]:
    """Three pictures, and one after a weight was replaced by another quantized one."""
    with record_on_cpu() as recorders:
        pipe = ditile.quantize(MAKE["flux"](), quant_type, group_size=32)
        runner = ditile.parallelize(pipe, Plan(patches=2, warmup=1), cuda_graphs=recorded)
        pictures = [run(runner, "flux", num_inference_steps=STEPS) for _ in range(3)]
        # The layers are alike, so that the shapes of the numbers tell nothing.
        first, second = pipe.transformer.transformer_blocks[:2]
        first.ff.net[2].weight = second.ff.net[2].weight
        pictures.append(run(runner, "flux", num_inference_steps=STEPS))
    return pictures, recorders


@pytest.mark.parametrize("quant_type", ["int8", "float8_weight_only"])
def test_quantized_weights_are_recorded(quant_type: str) -> None:
    """A failure means that the watch does not see what quantized layers compute, or where their numbers are."""
    plain, _ = draw_quantized(quant_type, False)
    pictures, recorders = draw_quantized(quant_type, True)
    assert all(map(torch.equal, plain, pictures))
    assert not torch.equal(plain[2], plain[3])
    assert recorders[0].num_played > recorders[0].num_recorded, recorders[0].problems


class CountingModel(torch.nn.Linear):
    """A model whose result depends on how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@torch.no_grad()
def test_a_model_that_changes_its_settings_runs_its_code() -> None:
    recorder = RecordedSteps(OperatorSegments)
    generation = Generation(calls=1, micro_step=MicroStep(1, None))
    model = CountingModel(2, 2)
    x = torch.ones(1, 2)
    for number in range(1, 6):
        result = recorder.run_call(generation, model, model, (x,), {})
        assert torch.equal(result, torch.nn.functional.linear(x, model.weight, model.bias) * number)
    assert recorder.problems == {"it changes its own settings": 4}

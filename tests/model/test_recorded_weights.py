"""Recorded calls of models with LoRAs and with quantized weights: recorded again when they change, never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import ditile
from ditile.model.hooks.generation import Generation
from ditile.model.recording.recorded_steps import RecordedSteps
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep
from tests.pool import Pool
from tests.recorded_calls import OperatorSegments, record_on_cpu
from tests.runner.cases import MAKE, run
from tests.runner.loras import NAMES, edits, folders_of, load

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of(NAMES, tmp_path_factory)


def draw_every_state(name: str, folder: Path, plan: Plan, recorded: bool) -> tuple[list[Tensor], list[int]]:
    """Two pictures in every state of the LoRAs, and how many calls were played in each."""
    pictures: list[Tensor] = []
    played: list[int] = []
    with record_on_cpu() as recorders:
        pipe = MAKE[name]()
        runner = ditile.parallelize(pipe, plan, cuda_graphs=recorded)
        for edit in (lambda *_: None, *edits(name).values()):
            edit(pipe, folder)
            before = recorders[0].num_played if recorded else 0
            pictures += [run(runner, name, num_inference_steps=STEPS), run(runner, name, num_inference_steps=STEPS)]
            played.append(recorders[0].num_played - before if recorded else 0)
    return pictures, played


def compare_every_state(name: str, folder: Path, plan: Plan) -> tuple[list[bool], list[int]]:
    """Whether each picture is that without tapes, and how many calls were played in each state."""
    plain, _ = draw_every_state(name, folder, plan, False)
    pictures, played = draw_every_state(name, folder, plan, True)
    return list(map(torch.equal, plain, pictures)), played


@pytest.mark.parametrize(
    ("name", "axis"),
    [("flux", "patches=2 warmup=1"), ("pixart sigma", "patches=1"), ("sd3.5 medium", "patches=1")],
)  # fmt: skip
def test_every_state_of_loras_is_recorded(folders: dict[str, Path], name: str, axis: str) -> None:
    """A failure means that a tape has a scale or an adapter that is not the one that is set."""
    equal, played = compare_every_state(name, folders[name], Plan.parse(axis))
    assert all(equal)
    assert all(played)


@pytest.mark.parametrize("axis", ["ulysses=2", "pipefusion=2 patches=2 warmup=1"])
def test_every_state_of_loras_on_two_ranks(pool: Pool, folders: dict[str, Path], axis: str) -> None:
    plan = Plan.parse(axis)
    for equal, played in pool.run(compare_every_state, plan.world, "sd3.5 medium", folders["sd3.5 medium"], plan):
        assert all(equal)
        assert all(played)


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


@pytest.mark.parametrize("quant_type", ["int8_weight_only", "int8", "float8_weight_only"])
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

"""What changes between recorded calls is seen: callbacks, previews, LoRAs, attributes, prompts, an interrupted call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import ditile
from ditile.model.recording.kept_tapes import StaticInput
from ditile.model.recording.survey import survey_model
from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from ditile.runner.callbacks import StepWatch
from ditile.runner.lora import select_loras
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")

AXES = [
    "pipefusion=2 patches=2 warmup=1",
    "pipefusion=3 patches=2 warmup=1",
    "ulysses=2",
    "ring=2",
    "tensor=2",
    "distrifusion=2 warmup=1",
    "cfg=2",
    "patches=2 warmup=1",
]
STEPS = 6


def leave_as_it_is(tensors: dict[str, Tensor]) -> None:
    """Write nothing: the usual form of a callback."""


def write_in_place(tensors: dict[str, Tensor]) -> None:
    tensors["latents"].add_(0.1)
    tensors["prompt_embeds"].mul_(1.1)


def write_data(tensors: dict[str, Tensor]) -> None:
    tensors["latents"].data.mul_(1.1)
    tensors["prompt_embeds"].data.mul_(1.1)


def write_numpy(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        view = tensor.detach().numpy()
        view *= 1.1


def replace_tensors(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor * 1.1


FORMS = (leave_as_it_is, write_in_place, write_data, write_numpy, replace_tensors)


def make_callback(change: Callable[[dict[str, Tensor]], None]) -> Callable[..., dict[str, Tensor]]:
    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if step in (2, 3):
            change(tensors)
        return tensors

    return callback


def interrupt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    pipe._interrupt = step >= 3
    return tensors


def list_calls(seen: list[Tensor]) -> list[Mapping[str, Any]]:
    """Return the arguments of calls, one after the other."""
    calls: list[Mapping[str, Any]] = [{}, {}]
    for change in FORMS:
        inputs = ["latents", "prompt_embeds"]
        calls.append({"callback_on_step_end": make_callback(change), "callback_on_step_end_tensor_inputs": inputs})
    watch = StepWatch(on_latents=lambda step, latents: seen.append(latents.clone()), latents_at={1, 3})
    calls.append({"watch": watch})
    calls.append(ZOO["flux"].other_prompt())
    calls.append({"callback_on_step_end": interrupt})
    calls.append({})
    return calls


def compare_changed_calls(plan: Plan) -> tuple[list[bool], bool, int, int]:
    """Return which images are those without tapes, whether previews are, calls played, and images that differ."""
    images: list[list[Tensor]] = []
    previews: list[list[Tensor]] = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            runner = ditile.parallelize(ZOO["flux"].make(), plan, cuda_graphs=recorded)
            previews.append([])
            images.append([])
            for more in list_calls(previews[-1]):
                call = ZOO["flux"].call() | {"num_inference_steps": STEPS} | more
                for name in ("prompt_embeds", "negative_prompt_embeds"):
                    if isinstance(call.get(name), Tensor):
                        # Some callbacks write into it.
                        call[name] = call[name].clone()
                generator = torch.Generator().manual_seed(0)
                images[-1].append(list_tensors(runner(**call | {"generator": generator}))[0].clone())
    equal = list(map(torch.equal, *images))
    same_previews = len(previews[0]) == len(previews[1]) and all(map(torch.equal, *previews))
    num_different = sum(not torch.equal(images[0][0], image) for image in images[0])
    return equal, same_previews, recorders[0].num_played, num_different


@pytest.mark.nightly
@pytest.mark.parametrize("axis", AXES)
def test_what_changes_between_steps_and_calls_is_seen(pool: Pool, axis: str) -> None:
    """A failure means a wrong image: a step was played with numbers of an earlier one."""
    plan = Plan.parse(axis)
    outcomes = [compare_changed_calls(plan)] if plan.world == 1 else pool.run(compare_changed_calls, plan.world, plan)
    for equal, same_previews, played, num_different in outcomes:
        assert all(equal), equal
        assert same_previews
        assert played
        assert num_different >= 5


def make_factors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a LoRA of a file with alphas, whose scales are tensors in peft's layers."""
    generator = torch.Generator().manual_seed(3)
    factors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(("to_q", "proj_mlp")):
            factors[f"transformer.{name}.lora_A.weight"] = torch.randn(4, layer.in_features, generator=generator)
            factors[f"transformer.{name}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=generator)
            factors[f"transformer.{name}.alpha"] = torch.tensor(2.0)
    return factors


def stretch_table(pipe: Any) -> None:
    table = pipe.transformer.time_embeddings
    table.freqs = table.freqs * 3


LORA_CHANGES: list[Callable[[Any], object]] = [
    lambda pipe: ditile.load_lora(pipe, make_factors(pipe.transformer), adapter_name="a"),
    lambda pipe: pipe.set_adapters("a", 0.3),
    lambda pipe: select_loras(pipe, {"a": 2.0}),
    lambda pipe: select_loras(pipe, {}),
]


@pytest.mark.parametrize(
    ("name", "plan", "changes"),
    [("flux", "patches=2 warmup=1", LORA_CHANGES), ("kandinsky-5-image", "data=1", [stretch_table])],
    ids=["scales of a LoRA with alphas", "a table that is replaced"],
)
def test_tensors_that_modules_keep_elsewhere_are_seen(name: str, plan: str, changes: list[Any]) -> None:
    """A failure means that a tape goes on with the old numbers."""
    images: list[list[Tensor]] = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            runner = ditile.parallelize(ZOO[name].make(), Plan.parse(plan), cuda_graphs=recorded)
            images.append([])
            for change in (lambda pipe: None, *changes):
                change(runner.pipe)
                for _ in range(2):
                    call = ZOO[name].call() | {"num_inference_steps": STEPS}
                    generator = torch.Generator().manual_seed(0)
                    images[-1].append(list_tensors(runner(**call | {"generator": generator}))[0].clone())
    assert all(map(torch.equal, *images))
    assert not torch.equal(images[0][0], images[0][2])
    assert recorders[0].num_played


@pytest.mark.parametrize("place", ["attribute", "list", "table", "nested", "number"])
def test_a_survey_sees_a_tensor_that_is_replaced_or_written(place: str) -> None:
    """Wherever a module keeps it. A number of the host counts by its value alone."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layer: Any = model[0]

    def keep(tensor: Tensor) -> None:
        kept = {"attribute": tensor, "list": [1, tensor], "table": {"a": tensor}, "nested": ({"a": [tensor]},)}
        layer.kept = kept.get(place, {"scale": tensor})

    def make() -> Tensor:
        return torch.tensor(1.0) if place == "number" else torch.ones(3)

    first = make()
    keep(first)
    before = survey_model(model)
    assert survey_model(model) == before
    keep(make())
    assert (survey_model(model) == before) == (place == "number")
    keep(first)
    assert survey_model(model) == before
    first.add_(1)
    assert survey_model(model) != before


def test_an_input_is_copied_once_in_each_step() -> None:
    """A write through `.data` has no version: between steps it is heard, and within one a check sees it."""
    source = torch.zeros(3)
    static = StaticInput(source)
    for step in range(3):
        source.data.fill_(step)
        static.fill(source, step, checks=True)
        assert torch.equal(static.tensor, source)
    static.fill(source, 2, checks=True)
    source.data.fill_(7)
    with pytest.raises(StateError, match="was changed within a step"):
        static.fill(source, 2, checks=True)

"""What changes between recorded calls is seen: callbacks, previews, LoRAs, attributes, prompts, an interrupted call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ditile
from ditile.model.recording.kept_tapes import StaticInput
from ditile.model.recording.recorded_steps import NO_ROOM, RecordedSteps
from ditile.model.recording.survey import survey_model
from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from ditile.runner.callbacks import StepWatch
from ditile.runner.graph_segments import has_room_to_capture
from ditile.runner.lora import select_loras
from tests.pool import Pool
from tests.recorded_calls import OperatorSegments, draw_both_ways, generate, run_step
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")

AXES = [
    "pipefusion=3 patches=2 warmup=1",
    "ulysses=2",
    "distrifusion=2 warmup=1",
    "patches=2 warmup=1",
]


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


def draw_changed_calls(plan: Plan) -> tuple[int, int]:
    """Return how many calls are played, and how many images differ from the first."""
    previews: list[list[Tensor]] = []

    def draw(runner: Any) -> list[Tensor]:
        previews.append([])
        images = []
        for more in list_calls(previews[-1]):
            call = ZOO["flux"].call() | more
            for name in ("prompt_embeds", "negative_prompt_embeds"):
                if isinstance(call.get(name), Tensor):
                    # Some callbacks write into it.
                    call[name] = call[name].clone()
            images += generate(runner, "flux", **call | {"num_inference_steps": 6})
        return images

    images, recorder = draw_both_ways(ZOO["flux"].make, plan, draw)
    assert all(map(torch.equal, *previews))
    return recorder.num_played, sum(not torch.equal(images[0], image) for image in images)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", AXES)
def test_what_changes_between_steps_and_calls_is_seen(pool: Pool, axis: str) -> None:
    """A failure means a wrong image: a step was played with numbers of an earlier one."""
    plan = Plan.parse(axis)
    outcomes = [draw_changed_calls(plan)] if plan.world == 1 else pool.run(draw_changed_calls, plan.world, plan)
    for played, num_different in outcomes:
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


def replace_quantized_weight(pipe: Any) -> None:
    # The layers are alike, so that the shapes of the numbers tell nothing.
    first, second = pipe.transformer.transformer_blocks[:2]
    first.ff.net[2].weight = second.ff.net[2].weight


LORA_CHANGES: list[Callable[[Any], object] | dict[str, Any]] = [
    lambda pipe: ditile.load_lora(pipe, make_factors(pipe.transformer), adapter_name="a"),
    lambda pipe: pipe.set_adapters("a", 0.3),
    # diffusers multiplies the scales of the layers within each forward, and divides them by it after it.
    *({"joint_attention_kwargs": {"scale": scale}} for scale in (0.7, 0.35, 0.0)),
    lambda pipe: select_loras(pipe, {"a": 2.0}),
    lambda pipe: select_loras(pipe, {}),
]
"""Changes of a pipeline, or arguments of its calls."""


@pytest.mark.parametrize(
    ("name", "quant_type", "plan", "changes"),
    [
        ("flux", "", "patches=2 warmup=1", LORA_CHANGES),
        ("kandinsky-5-image", "", "data=1", [stretch_table]),
        ("flux", "int8", "patches=2 warmup=1", [replace_quantized_weight]),
        ("flux", "float8_weight_only", "patches=2 warmup=1", [replace_quantized_weight]),
    ],
    ids=["scales of a LoRA with alphas", "a table that is replaced", "int8", "float8"],
)
def test_numbers_that_modules_keep_are_seen(name: str, quant_type: str, plan: str, changes: list[Any]) -> None:
    """A failure means that a tape goes on with the old numbers, or that quantized layers are not recorded."""

    def make() -> Any:
        pipe = ZOO[name].make()
        return ditile.quantize(pipe, quant_type, group_size=32) if quant_type else pipe

    def draw(runner: Any) -> list[Tensor]:
        images = []
        for change in ({}, *changes):
            call = change if isinstance(change, dict) else {}
            if callable(change):
                change(runner.pipe)
            for _ in range(2):
                images += generate(runner, name, **call)
        return images

    images, recorder = draw_both_ways(make, Plan.parse(plan), draw)
    for before, after in itertools.pairwise(images[::2]):
        assert not torch.equal(before, after)
    assert recorder.num_played > recorder.num_recorded, recorder.problems


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


GB = 10**9


@pytest.mark.parametrize(
    ("free", "cached", "own_pool", "fits", "empties"),
    [
        (30, 0, 0, True, False),
        # A capture takes 10, and the code of later calls its own 10.
        (19, 0, 0, False, False),
        # What torch's allocator holds must go back to the driver first.
        (5, 20, 0, True, True),
        (5, 10, 0, False, True),
        # The pool of this size has what the capture takes.
        (1, 10, 10, True, False),
    ],
)
def test_a_capture_leaves_room_for_code(free: int, cached: int, own_pool: int, fits: bool, empties: bool) -> None:
    """On a card with 40 GB in use, where code has needed 10 GB more. A failure is an error where code would run."""
    numbers = {"memory_allocated": 40, "max_memory_allocated": 50, "memory_reserved": 40 + cached + own_pool}
    emptied: list[bool] = []
    replacements: dict[str, Callable[..., object]] = {
        "mem_get_info": lambda device: (free * GB, 80 * GB),
        "empty_cache": lambda: emptied.append(True),
    }
    for name, number in numbers.items():
        replacements[name] = lambda device, number=number: number * GB
    with mock.patch.multiple(torch.cuda, **replacements):
        assert has_room_to_capture(torch.device("cuda:0"), own_pool * GB, own_pool * GB) == fits
    assert bool(emptied) == empties


@torch.no_grad()
def make_images(recorder: RecordedSteps, model: torch.nn.Module, width: int) -> None:
    """Three steps after the first one of an image, which are looked at, recorded and played where that is allowed."""
    recorder.begin_generation()
    for step in range(1, 4):
        x = torch.full((width, 2), float(step))
        assert torch.equal(run_step(recorder, model, model.forward, x, step), model(x))
    recorder.end_generation()


def test_a_call_that_has_no_room_runs_as_code() -> None:
    recorder = RecordedSteps(OperatorSegments, has_room=lambda all_bytes, own_bytes: False)
    make_images(recorder, torch.nn.Linear(2, 2), 3)
    assert (recorder.num_recorded, recorder.num_played) == (0, 0)
    assert recorder.problems == {NO_ROOM: 2}


def test_older_tapes_make_room() -> None:
    """A failure means that a server never records another size once its card is full."""
    model = torch.nn.Linear(2, 2)
    recorder = RecordedSteps(OperatorSegments, has_room=lambda all_bytes, own_bytes: all_bytes == own_bytes)
    for width in (3, 5):
        make_images(recorder, model, width)
    assert (recorder.num_recorded, recorder.num_played) == (2, 2)
    assert [*recorder._tapes._segments] == [(5, 2)]


def test_other_weights_in_the_same_memory_are_seen() -> None:
    """The weight is transposed where it is. A failure means that a tape computes with the old strides."""
    model = torch.nn.Linear(2, 2)
    recorder = RecordedSteps(OperatorSegments)
    make_images(recorder, model, 3)
    address = model.weight.data_ptr()
    model.weight.data = model.weight.data.t()
    assert model.weight.data_ptr() == address
    make_images(recorder, model, 3)
    assert recorder.num_recorded == 2


def test_the_order_of_settings_is_no_setting() -> None:
    """A failure means that calls run as code, at random, as hooks of a call were among a module's attributes."""
    model = torch.nn.Linear(2, 2)
    names = [f"number_{index}" for index in range(100)]
    for name in names:
        setattr(model, name, 1)
    before = survey_model(model)
    for name in reversed(names):
        delattr(model, name)
        setattr(model, name, 1)
    assert survey_model(model) == before


def test_a_tensor_that_graphs_write_is_copied_each_time() -> None:
    """As a ControlNet with compile(mode="reduce-overhead") returns: one tensor, whose version does not change."""
    source = torch.zeros(2)
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(source)
    try:
        static = StaticInput(source)
        static.fill(source, 0)
        source.numpy()[:] = 1
        static.fill(source, 0)
    finally:
        torch._C._remove_cached_tensor(source)
        torch._C._set_cached_tensors_enabled(False)
    assert static.tensor.tolist() == [1, 1]

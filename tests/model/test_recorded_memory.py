"""The memory that recorded calls need: room to capture, pools, and addresses that are used again."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from ditile.model.hooks.generation import Generation
from ditile.model.recording.kept_tapes import StaticInput
from ditile.model.recording.recorded_steps import NO_ROOM, RecordedSteps
from ditile.model.recording.survey import survey_model
from ditile.plan.schedule import MicroStep
from ditile.runner.graph_segments import has_room_to_capture
from tests.recorded_calls import OperatorSegments

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
    numbers = {
        "memory_allocated": 40,
        "max_memory_allocated": 50,
        "memory_reserved": 40 + cached + own_pool,
    }
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


def make_images(recorder: RecordedSteps, model: torch.nn.Module, width: int) -> None:
    """Three steps after the first one of an image, which are looked at, recorded and played where that is allowed."""
    generation = Generation(calls=1, micro_step=MicroStep(1, None))
    recorder.begin_generation()
    with torch.no_grad():
        for step in range(1, 4):
            generation.micro_step = MicroStep(step, None)
            x = torch.full((width, 2), float(step))
            assert torch.equal(recorder.run_call(generation, model, model.forward, (x,), {}), model(x))
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


class AskingModel(torch.nn.Module):
    """A model that asks a recorder for room in its calls."""

    def __init__(self, recorder: RecordedSteps) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self._make_room = recorder._tapes.make_room
        self.asked_bytes = 0

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        self._make_room(self.asked_bytes)
        output: Tensor = self.layer(x)
        return output


def test_the_memory_of_a_call_that_is_recorded_stays_known() -> None:
    """Room is made while the first call of a size is recorded. A failure means a pool that no limit counts."""
    recorder = RecordedSteps(OperatorSegments, limit_bytes=10_000)
    model = AskingModel(recorder)
    make_images(recorder, model, 3)
    model.asked_bytes = 10_000
    make_images(recorder, model, 5)
    (segments,) = recorder._tapes._segments.values()
    assert recorder._tapes.num_bytes >= segments.num_bytes > 0


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

"""What patches share in recorded steps, and how long the memory of it is kept."""

from __future__ import annotations

import gc
import sys
from weakref import ref

import pytest
import torch
from torch import Tensor

from ditile.distributed.recording.tape import Tape
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import RememberedOutput
from ditile.model.recording.recorded_steps import RecordedSteps
from ditile.plan.schedule import MicroStep
from tests.recorded_calls import OperatorSegments


def record_first_patch(recorder: RecordedSteps) -> ref[Tape] | None:
    """The tape of a first patch, if there is room for it; what it computes would be read by other patches."""
    generation = Generation(calls=1, micro_step=MicroStep(1, 0))
    model = torch.nn.Linear(2, 2)

    def forward(x: Tensor) -> Tensor:
        output = model(x)
        generation.memory.outputs["module"] = RememberedOutput(output, None)
        return output + 1

    recorder.begin_generation()
    with torch.no_grad():
        for _ in range(2):
            recorder.run_call(generation, model, forward, (torch.ones(2, 2),), {})
    assert recorder.num_recorded == 1
    (call,) = recorder._tapes._calls.values()
    return None if call.tape is None else ref(call.tape)


@pytest.mark.parametrize(("limit_bytes", "fits"), [(1, False), (sys.maxsize, True)])
def test_a_tape_that_does_not_fit_shares_nothing(limit_bytes: int, *, fits: bool) -> None:
    """A failure means that the tapes of other patches wait for one that is never played."""
    recorder = RecordedSteps(OperatorSegments, limit_bytes=limit_bytes)
    tape = record_first_patch(recorder)
    assert (tape is not None) == fits
    assert bool(recorder._shared.tapes) == fits


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


def test_a_tape_that_goes_frees_its_memory() -> None:
    """A failure means that memory is not there for the call for which older tapes have gone."""
    recorder = RecordedSteps(OperatorSegments, limit_bytes=10_000)
    tape = record_first_patch(recorder)
    assert tape is not None
    assert tape() is not None
    recorder.end_generation()
    recorder.begin_generation()
    assert recorder._tapes.make_room(10_000)
    assert tape() is None

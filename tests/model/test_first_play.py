"""The first play of a tape is compared with the code; a capture that fails costs a tape and nothing else."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ditile
from ditile.distributed.recording.tape import Action, Message, Recording, exchange_tensors
from ditile.model.recording import recorded_steps
from ditile.model.recording.first_play import TensorKeeper, has_same_bits
from ditile.model.recording.recorded_steps import UNEQUAL, RecordedSteps
from ditile.plan.errors import PlanError, StateError
from ditile.plan.plan import Plan
from tests.recorded_calls import OperatorSegments, run_step
from tests.zoo import ZOO

WORLD = 2.0
"""What all ranks of a pretended group have added."""


class OtherConstant(OperatorSegments):
    """Segments of which one number is off by a bit."""

    def close(self) -> Action | None:
        replay = super().close()
        for _, args, _, _ in self._calls:
            for argument in args:
                if isinstance(argument, Tensor) and argument.numel() == 1:
                    argument.view(torch.int32).add_(1)
        return replay


class LateMessage(Recording):
    """A tape whose messages stand before the segment that computes them."""

    def _add_message(self, action: Action, message: Message) -> None:
        super()._add_message(action, message)
        actions = self.tape.actions
        actions[-2:] = reversed(actions[-2:])
        self.messages[len(actions) - 2] = self.messages.pop(len(actions) - 1)


def sum_over_ranks(x: Tensor, _: Tensor) -> None:
    x.mul_(WORLD)


def make_forward(model: torch.nn.Module, kept: Tensor) -> Any:
    """Return a call that computes, sends, and writes into memory that stays."""
    factor = torch.full((1,), 1.5)

    def forward(x: Tensor) -> Tensor:
        summed = model(x) * factor
        exchange_tensors(sum_over_ranks, [summed], [summed])
        kept.add_(summed)
        return summed + kept

    return forward


def run_calls(recorder: RecordedSteps, number: int) -> list[Tensor]:
    """Return what some calls give, each of which adds to memory that stays."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    forward = make_forward(model, torch.zeros(1, 2))
    results = []
    for step in range(1, number + 1):
        results.append(run_step(recorder, model, forward, torch.ones(1, 2), step).clone())
    return results


@pytest.mark.parametrize("fault", ["", "a constant", "a message"])
def test_a_wrong_tape_is_dropped(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that a graph which a card captured wrongly makes wrong images."""
    recorder = RecordedSteps(OtherConstant if fault == "a constant" else OperatorSegments)
    expected = run_calls(RecordedSteps(OperatorSegments), 1)
    recording = LateMessage if fault == "a message" else Recording
    with mock.patch.object(recorded_steps, "Recording", recording), caplog.at_level(logging.WARNING):
        results = run_calls(recorder, 6)
    assert torch.equal(results[0], expected[0])
    # Each call adds the same to the memory, whatever was compared meanwhile.
    step = results[1] - results[0]
    for before, after in zip(results, results[1:], strict=False):
        assert torch.allclose(after - before, step)
    assert bool(recorder.num_played) == (not fault)
    assert recorder.problems == ({UNEQUAL: 5} if fault else {})
    assert [record.getMessage() for record in caplog.records if "Linear, branch 0" in record.getMessage()] == [
        *(record.getMessage() for record in caplog.records)
    ]
    assert bool(caplog.records) == bool(fault)


def test_bits_are_compared() -> None:
    nan = torch.tensor([torch.nan, 0.0])
    assert has_same_bits(nan, nan.clone())
    assert not has_same_bits(torch.zeros(2), -torch.zeros(2))
    assert not has_same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        assert has_same_bits(torch.ones(2, 3).to(dtype).T, torch.ones(3, 2).to(dtype))
    assert has_same_bits(torch.ones(()), torch.ones(()))
    assert has_same_bits(torch.ones((), dtype=torch.int64).expand(1), torch.ones(1, dtype=torch.int64))


def test_what_is_kept_of_large_calls_is_on_the_host() -> None:
    keeper = TensorKeeper()
    tensor = torch.ones(4)
    with mock.patch("ditile.model.recording.first_play.DEVICE_BYTES", 20):
        copies = [keeper.copy_tensor(tensor) for _ in range(2)]
    assert all(torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr() for copy in copies)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_no_error_of_a_capture_reaches_a_call(error: type[Exception]) -> None:
    """Also after a message was sent. A failure means that an image dies, and under NCCL all ranks."""

    class Failing(OperatorSegments):
        def close(self) -> Action | None:
            super().close()
            raise error("while a call is captured")

    recorder = RecordedSteps(Failing)
    assert all(map(torch.equal, run_calls(recorder, 4), run_calls(RecordedSteps(OperatorSegments), 4)))
    assert not recorder.num_played
    assert recorder.failure == f"a recording failed: {error.__name__}"


def test_the_environment_switches_recorded_steps_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ZOO["flux"].make()
    with pytest.raises(PlanError, match="needs a GPU"):
        ditile.parallelize(pipe, Plan(), cuda_graphs=True)
    monkeypatch.setenv("DITILE_CUDA_GRAPHS", "off")
    with pytest.raises(StateError, match="DITILE_CUDA_GRAPHS='off'"):
        ditile.parallelize(pipe, Plan(), cuda_graphs=True)
    monkeypatch.setenv("DITILE_CUDA_GRAPHS", "0")
    assert ditile.parallelize(pipe, Plan(), cuda_graphs=True).report is None
    with pytest.raises(PlanError, match="cuda_graphs='auto' should be a valid boolean"):
        ditile.parallelize(pipe, Plan(), cuda_graphs="auto")

"""Calls are recorded where the host limits them, which is known from events that are read without a wait."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ditile
from ditile.model.recording.host_limit import CudaEvents, HostLimit, Pace
from ditile.model.recording.recorded_steps import GPU_LIMITED
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.requests.options import EngineOptions
from ditile.runner.runner import build_recorder
from tests.model.test_recorded_steps import generate
from tests.recorded_calls import record_on_cpu
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.messages import simulate_gpu
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")

QUEUE = 0.03
"""Seconds of work that the queue of the scripted GPU holds before the host has to wait."""


class ScriptedDevice:
    """A GPU whose calls take scripted seconds; its clock began at another time than the host's."""

    def __init__(self) -> None:
        self._host = 1000.0
        self._free_at = 0.0

    def run_call(self, host: float, gpu: float) -> None:
        begun = max(self._free_at, self._host)
        self._host += host
        self._free_at = max(begun + gpu, self._host)
        self._host = max(self._host, self._free_at - QUEUE)

    def record_event(self) -> float:
        return max(self._host, self._free_at)

    def read_seconds(self, event: Any) -> float | None:
        if event > self._host:
            return None
        return float(event) - 123.0

    def read_host_seconds(self) -> float:
        return self._host


@pytest.mark.parametrize(
    ("host", "gpu", "is_limit"), [(0.1, 0.02, True), (0.1, 0.1, True), (0.07, 0.1, False), (0.001, 0.1, False)]
)
@pytest.mark.parametrize("work_before", [0.0, 0.02])
def test_the_limit_is_found(host: float, gpu: float, work_before: float, *, is_limit: bool) -> None:
    """A failure of a fast host means that it was taken for a slow one when it waited for a full queue."""
    device = ScriptedDevice()
    limit = HostLimit(lambda: device)
    pace = Pace()
    for _ in range(2):
        limit.begin_generation()
        device.run_call(0.0, work_before)
        for _ in range(6):
            limit.measure_call(pace, device.run_call, (host, gpu), {})
        device.run_call(1.0, 0.0)
        limit.read_passed_events()
        assert pace.num_measured
        assert pace.is_host_limited == is_limit


def test_one_slow_call_is_no_limit() -> None:
    device = ScriptedDevice()
    limit = HostLimit(lambda: device)
    limit.begin_generation()
    pace = Pace()
    for host in (0.01, 0.01, 1.0, 0.01, 0.01, 0.01):
        limit.measure_call(pace, device.run_call, (host, 0.1), {})
    device.run_call(1.0, 0.0)
    limit.read_passed_events()
    assert pace.num_measured == 6
    assert not pace.is_host_limited


def test_events_are_read_without_a_wait() -> None:
    gpu = SimulatedGpu()
    with torch.no_grad(), simulate_gpu(gpu):
        limit = HostLimit(lambda: CudaEvents(gpu.device))
        limit.begin_generation()
        pace = Pace()
        for _ in range(3):
            limit.measure_call(pace, torch.ones, (2,), {})
        limit.read_passed_events()
    assert pace.num_measured == 3
    assert not gpu.record.syncs


class CountingClock:
    """Counts marks; the device takes some of its seconds from each to the next one.

    Args:
        seconds: of the device; the host takes one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks = itertools.count(1)
        self._last = 0

    def record_event(self) -> int:
        self._last = next(self._marks)
        return self._last

    def read_seconds(self, event: int) -> float | None:
        # Events are passed one step later.
        if event == self._last:
            return None
        return event * self._seconds

    def read_host_seconds(self) -> float:
        return float(self._last)


@pytest.mark.parametrize("plan", [Plan(), Plan(patches=2, warmup=1)], ids=str)
def test_auto_records_where_the_host_is_the_limit(plan: Plan) -> None:
    images = []
    made = []
    for seconds in (1.0, 3.0, None):
        make_events = None if seconds is None else lambda seconds=seconds: CountingClock(seconds)
        with record_on_cpu(make_events=make_events) as recorders:
            runner = ditile.parallelize(ZOO["flux"].make(), plan)
        images.append([generate(runner, "flux", seed, num_inference_steps=8)[0] for seed in range(2)])
        made.append(recorders)
    assert all(map(torch.equal, images[0], images[2]))
    assert all(map(torch.equal, images[1], images[2]))
    host_limited, gpu_limited, none = made
    assert host_limited[0].num_played >= 8
    # It is known from the first steps of the first image.
    assert GPU_LIMITED not in host_limited[0].problems
    assert not gpu_limited[0].num_recorded
    assert gpu_limited[0].problems[GPU_LIMITED] >= 8
    assert not none


def test_memory_that_runs_out_ends_auto_for_good() -> None:
    """A failure means that each image records again what the one before had no room for."""

    def run_out(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 7:
            raise torch.OutOfMemoryError
        return kwargs

    with record_on_cpu(make_events=lambda: CountingClock(1.0)) as recorders:
        runner = ditile.parallelize(ZOO["flux"].make(), Plan(), keep_weights=True)
    with pytest.raises(torch.OutOfMemoryError):
        generate(runner, "flux", num_inference_steps=8, callback_on_step_end=run_out)
    recorded = recorders[0].num_recorded
    assert recorded
    generate(runner, "flux", num_inference_steps=8)
    assert recorders[0].num_recorded == recorded
    runner.forget_recorded_steps()
    generate(runner, "flux", num_inference_steps=8)
    assert recorders[0].num_recorded > recorded


def test_auto_is_off_on_a_cpu_and_where_weights_come_and_go() -> None:
    assert build_recorder("auto", Plan(), torch.device("cpu")) is None
    assert build_recorder("auto", Plan(offload="blocks"), torch.device("cuda")) is None
    # What changes in each step is measured within the calls.
    assert build_recorder("auto", Plan(patches=2, warmup="auto"), torch.device("cuda")) is None
    assert build_recorder(False, Plan(), torch.device("cuda")) is None
    with simulate_gpu(SimulatedGpu()):
        recorder = build_recorder("auto", Plan(), torch.device("cuda", 0))
    assert recorder is not None
    assert recorder.is_auto
    with pytest.raises(ModelError, match="cuda_graphs='on' is not known; try True, False or 'auto'"):
        build_recorder("on", Plan(), torch.device("cpu"))
    assert EngineOptions().cuda_graphs == "auto"

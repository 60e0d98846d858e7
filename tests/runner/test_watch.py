"""What a call took: by the clock of its device, which is behind what was launched."""

from __future__ import annotations

import time

import pytest
import torch

from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import Traffic
from ditile.runner.report import CallMeter


class Machine:
    """A host that launches work and a GPU that does it later.

    Attributes:
        host: its time, in seconds.
        done: when the GPU will have done what was launched.
        waits: how often the host waited for it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host = self.done = 100.0
        self.waits = 0
        machine = self

        class Event:
            """Stands for `torch.cuda.Event`."""

            at = 0.0

            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at = max(machine.done, machine.host)

            def synchronize(self) -> None:
                machine.wait(self.at)

            def elapsed_time(self, later: Event) -> float:
                return 1e3 * (later.at - self.at)

        patch.setattr(time, "perf_counter", lambda: self.host)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda device: self.wait(self.done))
        patch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)

    def launch(self, seconds: float) -> None:
        """Work of so many seconds; to launch it takes the host a tenth of one."""
        self.done = max(self.done, self.host) + seconds
        self.host += 0.1

    def wait(self, until: float) -> None:
        """The host waits."""
        self.waits += 1
        self.host = max(self.host, until)


@pytest.mark.parametrize("traced", [False, True])
def test_seconds_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch, traced: bool) -> None:
    """A failure means that a report has the times of launches, and `ditile calibrate` fits links to them, or that the
    host waits for the GPU in mid-picture."""
    machine, traffic, trace = Machine(monkeypatch), Traffic(), GenerationTrace()
    watch = CallMeter(torch.device("cuda", 1), trace, traffic, traced=traced)
    machine.launch(2.0)
    watch.mark_loop_begin()
    for _ in range(3):
        machine.launch(4.0)
        watch.record_step_end(5, None)
    machine.launch(1.0)
    assert machine.waits == 0
    report = watch.build_report([0], "serial", cache_bytes=3)
    assert report.seconds == pytest.approx({"total": 15.0, "text": 2.0, "denoise": 12.0, "decode": 1.0})
    assert report.step_seconds == pytest.approx([4.0] * 3 if traced else [])
    assert (report.steps, report.key_bytes, report.cache_bytes, report.peak_memory_bytes) == (3, 5, 3, 7)

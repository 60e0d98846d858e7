"""`StepWatch`: rank 0 sees each step, and whole latents where it asks, and the picture stays the same by every bit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import Traffic
from ditile.plan.errors import ModelError, StateError
from ditile.runner.callbacks import StepWatch
from ditile.runner.report import CallMeter
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, divided, same

STEPS = 4
AT = frozenset({0, 2})


def watch_call(runner: Any, call: dict[str, Any], at: frozenset[int] = AT) -> tuple[Any, list[Any], dict[int, Tensor]]:
    """The picture, the steps and the latents that a watcher gets."""
    steps: list[Any] = []
    latents: dict[int, Tensor] = {}

    def keep_latents(step: int, whole: Tensor) -> None:
        latents[step] = whole.clone()

    watch = StepWatch(on_step=lambda *step: steps.append(step), on_latents=keep_latents, latents_at=at)
    return runner(**call, watch=watch)[0], steps, latents


def watched(name: str, plan: dict[str, Any]) -> dict[int, Tensor]:
    """On a rank: asserts that a watcher changes nothing, and sees what a callback sees that asks for latents."""
    pipe = MAKE[name]()
    with divided(pipe, **plan) as runner:
        wanted = runner(**call_of(name))[0]
        sent = dict(runner.report.sent) if runner.report else {}
        picture, steps, latents = watch_call(runner, call_of(name))
        same(picture, wanted, f"{name} {plan}: watched")
        assert steps == [(step, STEPS) for step in range(STEPS)]
        assert latents.keys() == (AT if dist.get_rank() == 0 else set())
        picture, steps, none = watch_call(runner, call_of(name), frozenset())
        same(picture, wanted, f"{name} {plan}: watched without latents")
        assert len(steps) == STEPS and not none
        assert runner.report is not None and dict(runner.report.sent) == sent, "messages for progress alone"
        seen: dict[int, Tensor] = {}

        def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen[step] = tensors["latents"].clone()
            return {}

        runner(**call_of(name), callback_on_step_end=callback)
        for step, whole in latents.items():
            same(whole, seen[step], f"{name} {plan}: latents of step {step}")
    return latents


PLANS: list[dict[str, Any]] = [
    {"pipefusion": 2, "patches": 3, "warmup": 1},
    {"ulysses": 2},
    {"cfg": 2},
    {"data": 2},
    {"distrifusion": 2, "warmup": 1},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_watcher_changes_nothing(pool: Pool, plan: dict[str, Any]) -> None:
    """A failure means that previews change the picture, or show patches of several steps."""
    pool.run(watched, 2, "flux true cfg" if "cfg" in plan else "flux", plan)
    if plan == PLANS[0]:
        pool.run(watched, 2, "sd3", plan)


def unlike() -> None:
    with divided(MAKE["flux"](), pipefusion=2, warmup=1) as runner:
        watch = StepWatch(latents_at=AT if dist.get_rank() == 0 else frozenset())
        with pytest.raises(StateError, match=r"rank 1 was called with latents_at=None and rank 0 with \[0, 2\]"):
            runner(**call_of("flux"), watch=watch)


def test_ranks_ask_for_the_same_latents(pool: Pool) -> None:
    """A failure means that one rank waits for latents that no other sends."""
    pool.run(unlike, 2)
    with pytest.raises(ModelError, match="latents_at={-1} should be"):
        StepWatch(latents_at={-1})


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

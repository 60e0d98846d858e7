"""`StepWatch`: rank 0 sees each step, and whole latents where it asks, and the picture stays the same by every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ditile.plan.errors import ModelError, StateError
from ditile.runner.callbacks import StepWatch
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

"""Callbacks, interrupts and watchers: once per step, whatever the patches, and alike on every rank.

xDiT crashes on callbacks or calls them once per patch with old latents, and an interrupt on one rank hangs the others.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ditile.plan.errors import StateError
from ditile.runner.callbacks import StepWatch
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, call_of, different, divided, run, same

STEPS = 4
EXACT = {"pipefusion": 2, "patches": 3, "warmup": STEPS}
STALE = EXACT | {"warmup": 1}
NAMES = ("flux true cfg", "flux", "sd3")


class Notes:
    """A callback that notes what it sees and may change it."""

    def __init__(self, change: str = "") -> None:
        self.seen: list[tuple[int, float]] = []
        self.latents: list[Any] = []
        self.change = change

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((step, float(timestep)))
        if "latents" in tensors:
            self.latents.append(tensors["latents"].clone())
        if self.change == "latents" and step == 1:
            return {"latents": tensors["latents"] * 0.5}
        if self.change == "prompt" and step == 1:
            return {"prompt_embeds": tensors["prompt_embeds"] * 0.5}
        if self.change == "prompt in place" and step == 1:
            tensors["prompt_embeds"].mul_(0.5)
        return {}


def observed(pipe: Any, name: str, tensors: list[str], change: str = "") -> list[Any]:
    notes = Notes(change)
    call = {"callback_on_step_end": notes, "callback_on_step_end_tensor_inputs": tensors}
    picture = run(pipe, name, **call)
    return [picture, notes.seen, *notes.latents]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_once_per_step_and_as_the_plain_pipeline(name: str) -> None:
    """A failure means that a callback sees patches instead of steps, or what it returns is lost on some rank."""
    pipe = MAKE[name]()
    wishes = [([], ""), (["latents"], ""), (["latents"], "latents"), (["latents", "prompt_embeds"], "prompt")]
    wishes.append((["latents", "prompt_embeds"], "prompt in place"))
    wanted = [observed(pipe, name, *wish) for wish in wishes]
    different(wanted[2][0], wanted[1][0], "changed latents")
    same(wanted[4][0], wanted[3][0], "a prompt that is changed in its place")
    different(wanted[3][0], wanted[1][0], "a changed prompt")
    for plan in (EXACT, STALE):
        with divided(pipe, **plan) as runner:
            for wish, want in zip(wishes, wanted, strict=True):
                got = observed(runner, name, *wish)
                assert got[1] == want[1], f"{name} {plan} {wish}: called at {got[1]}"
                sent = runner.report.sent.get("callback", 0) if runner.report else 0
                assert bool(sent) <= bool(wish[0]), f"{wish}: {sent} bytes sent for callbacks"
                if plan is EXACT:
                    same(got[0], want[0], f"{name} {wish}")
                    same(got[2:], want[2:], f"latents given to the callback, {name} {wish}")


def changed(name: str, stages: int) -> list[Any]:
    with divided(MAKE[name](), **STALE | {"pipefusion": stages}) as runner:
        return [observed(runner, name, ["latents"], "latents"), observed(runner, name, ["prompt_embeds"], "prompt")]


@pytest.mark.parametrize("name", NAMES)
def test_changes_under_stale_keys(pool: Pool, name: str) -> None:
    """A failure means that stages go on with other latents or another prompt after a callback changed them."""
    wanted = pool.run(changed, 1, name, 1)[0]
    for ranks in (2, 3):
        for got in pool.run(changed, ranks, name, ranks):
            for one, other in zip(got, wanted, strict=True):
                assert one[1] == other[1]
                same([one[0], *one[2:]], [other[0], *other[2:]], name)


def interrupted(name: str, plan: dict[str, Any], rank: int, stop: int) -> list[Any]:
    pipe, seen = MAKE[name](), []

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        if step == stop and dist.get_rank() == rank:
            pipe._interrupt = True
        return {}

    call = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": [], "num_inference_steps": 8}
    with divided(pipe, **plan) as runner:
        picture = run(runner, name, **call)
        again = run(runner, name)
    same(again, run(pipe, name), "the call after an interrupt") if plan["warmup"] == 8 else None
    return [picture, seen]


@pytest.mark.parametrize("warmup", [8, 1])
def test_an_interrupt_on_any_rank(pool: Pool, warmup: int) -> None:
    """A failure means that ranks stop at different steps, with different pictures, or hang."""
    plan = {"pipefusion": 3, "patches": 2, "warmup": warmup}
    for rank in range(3):
        actual = pool.run(interrupted, 3, "flux", plan, rank, 2)
        for picture, seen in actual:
            assert seen == actual[0][1] and 4 <= len(seen) <= 6, f"rank {rank} interrupted, steps {seen}"
            same(picture, actual[0][0], "after an interrupt")


@on_ranks(2)
def test_one_call_at_a_time() -> None:
    """A failure means that two threads of a server spoil each other's pictures."""
    pipe, errors = MAKE["flux"](), list[StateError]()
    wanted = run(pipe, "flux")

    def call_too() -> None:
        try:
            run(runner, "flux")
        except StateError as error:
            errors.append(error)

    def callback(*_: Any) -> dict[str, Any]:
        thread = threading.Thread(target=call_too)
        thread.start()
        thread.join()
        return {}

    with divided(pipe, **EXACT) as runner:
        call = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": []}
        same(run(runner, "flux", **call), wanted, "the call that was under way")
        assert len(errors) == STEPS and all("one at a time" in str(error) for error in errors), errors
        same(run(runner, "flux"), wanted, "the call after it")


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

"""`Runner.stop`: the call ends within two steps on every rank without a picture, and the next one is right.

A server whose client leaves would else compute pictures for nobody, or end its ranks to be rid of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import PixArtSigmaPAGPipeline

import ditile
from ditile.cache.config import DBCacheConfig
from ditile.distributed.launch import launch
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.plan.errors import StoppedError
from ditile.plan.plan import Plan
from ditile.runner.compose import find_loop_models
from ditile.runner.runner import Runner, parallelize
from tests import tiny
from tests.parallel.sequence.planned import wan_pipeline
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, divided, run, same

STEPS = 8
BEFORE, DECODING = "encode_prompt", "decode"
"""Moments of a stop that are not steps."""


def perturbed() -> Any:
    """It puts processors of its own into the model, and takes them out at its end."""
    parts = {name: part for name, part in tiny.pixart().components.items() if part is not None}
    return tiny.quiet(PixArtSigmaPAGPipeline(**parts, pag_applied_layers=["blocks.1"]))


def make_pipeline(name: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A pipeline, and what makes its arguments."""
    if name == "wan":
        pipe, call = wan_pipeline()
        return pipe, lambda: call | {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(3)}
    if name == "unet":
        return (
            tiny.stable_diffusion(),
            lambda: call_of("sd3", num_inference_steps=STEPS) | {"max_sequence_length": None},
        )
    if name == "perturbed":
        return perturbed(), lambda: call_of("pixart sigma", num_inference_steps=STEPS)
    pipe = MAKE[name.removesuffix(" with a cache")]()
    if name.endswith(" with a cache"):
        cache = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.9)
        ditile.enable_cache(pipe, cache)
    return pipe, lambda: call_of(name.removesuffix(" with a cache"), num_inference_steps=STEPS)


def call_before(owner: Any, method: str, action: Callable[[], None]) -> None:
    """Calls `action` before each call of a method of an instance."""
    stock = getattr(owner, method)

    def act_and_call(*args: Any, **kwargs: Any) -> Any:
        action()
        return stock(*args, **kwargs)

    setattr(owner, method, act_and_call)


def stop_at(name: str, plan: dict[str, Any], rank: int, moment: Any) -> tuple[bool, list[int]]:
    """On a rank: whether the call raised `StoppedError`, and the steps that this rank saw. The next call is checked."""
    (pipe, arguments), seen = make_pipeline(name), []
    with divided(pipe, **plan) as runner:
        wanted = draw(runner, arguments())
        processors = list(map(id, list_processors(pipe)))
        decodes: list[int] = []
        call_before(pipe.vae, "decode", lambda: decodes.append(1))

        def stop_now() -> None:
            if dist.get_rank() == rank and not seen:
                thread = threading.Thread(target=runner.stop)
                thread.start()
                thread.join()

        if isinstance(moment, str):
            call_before(pipe if moment == BEFORE else pipe.vae, moment, stop_now)
            changes: dict[str, Any] = {"output_type": "pt"} if moment == DECODING else {}
        else:
            changes = {"callback_on_step_end": note_steps(seen, moment, rank, runner)}
            changes |= {"callback_on_step_end_tensor_inputs": []}
        if "pixart" in name or name == "perturbed":
            changes = {"callback": changes["callback_on_step_end"]} if not isinstance(moment, str) else changes
        try:
            picture = draw(runner, arguments() | changes)
            is_stopped = False
            assert torch.isfinite(torch.as_tensor(picture)).all()
        except StoppedError as error:
            is_stopped = True
            assert "runner.stop()" in str(error) and not decodes
        seen.append(STEPS)
        runner.stop()  # there is no call
        assert not runner.is_running and list(map(id, list_processors(pipe))) == processors
        same(draw(runner, arguments()), wanted, f"{name} {plan}: the call after a stop")
    return is_stopped, seen[:-1]


def list_processors(pipe: Any) -> list[Any]:
    return [each for model in find_loop_models(pipe) for *_, each in find_attention_processors(model)]


def note_steps(seen: list[int], moment: int, rank: int, runner: Runner) -> Callable[..., dict[str, Any]]:
    """A callback, new or legacy, which notes steps and stops after one of them."""

    def note(*args: Any) -> dict[str, Any]:
        step = next(each for each in args if isinstance(each, int))
        seen.append(step)
        if step == moment and dist.get_rank() == rank:
            runner.stop()
        return {}

    return note


def draw(runner: Any, call: dict[str, Any]) -> Any:
    """The picture or the frames."""
    return runner(**{name: value for name, value in call.items() if value is not None})[0]


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("flux", {}),
    "pipefusion": ("flux", {"pipefusion": 3, "patches": 2, "warmup": 1}),
    "ulysses": ("flux", {"ulysses": 2}),
    "cfg": ("sd3", {"cfg": 2}),
    "data": ("flux", {"data": 2}),
    "two transformers": ("wan", {"pipefusion": 2, "warmup": 2}),
    "U-Net": ("unet", {"data": 2}),
    "perturbed": ("perturbed", {"data": 2}),
    "cache": ("flux with a cache", {"pipefusion": 2, "warmup": 1}),
}
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {"pipefusion, pixart": ("pixart sigma", {"pipefusion": 2, "warmup": 1})}
"""Of another model."""


@pytest.mark.parametrize("case", [*PLANS, *ALIKE])
def test_a_stop_on_one_rank_ends_all(pool: Pool, case: str) -> None:
    """A failure means that ranks hang, end at different steps, decode for nobody, or that the next picture is wrong."""
    name, plan = (PLANS | ALIKE)[case]
    ranks = Plan(**plan).world
    for rank in {0, ranks - 1}:
        answers = pool.run(stop_at, ranks, name, plan, rank, 2)
        assert all(is_stopped for is_stopped, _ in answers)
        for _, steps in answers:
            assert steps == answers[0][1] == list(range(len(steps))) and 4 <= len(steps) <= 5, steps


@pytest.mark.parametrize("plan", [{"pipefusion": 2, "warmup": 1}, {"data": 2}, {"cfg": 2}])
def test_a_stop_outside_of_the_steps(pool: Pool, plan: dict[str, Any]) -> None:
    """While text is encoded it counts from the first step; while a picture is decoded it comes too late, for all."""
    assert pool.run(stop_at, 2, "sd3", plan, 1, BEFORE) == [(True, [])] * 2
    assert pool.run(stop_at, 2, "sd3", plan, 1, DECODING) == [(False, [])] * 2


def stop_and_draw() -> None:
    """On a launched rank: it catches the stop, and draws on."""
    runner = parallelize(MAKE["flux"](), Plan(pipefusion=2, warmup=1), device="cpu")

    def stop_first(*_: Any) -> dict[str, Any]:
        if dist.get_rank() == 0:
            runner.stop()
        return {}

    with pytest.raises(StoppedError):
        run(runner, "flux", callback_on_step_end=stop_first, callback_on_step_end_tensor_inputs=[])
    run(runner, "flux")


def leave_by_stop() -> None:
    runner = parallelize(MAKE["flux"](), device="cpu")
    run(
        runner, "flux", callback_on_step_end=lambda *_: runner.stop() or {}, callback_on_step_end_tensor_inputs=[]
    )  # fmt: skip


def test_a_stop_is_no_failure_of_a_rank(forked_ranks: None) -> None:
    """A failure means that whoever watches the ranks ends them all because a picture was not wanted any more."""
    launch(stop_and_draw, 2)
    with pytest.raises(ditile.StoppedError, match=r"runner\.stop"):
        launch(leave_by_stop, 1)

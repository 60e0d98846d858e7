"""`Runner.stop`: the call ends within two steps on every rank without a picture, and the next one is right.

A server whose client leaves would else compute pictures for nobody, or end its ranks to be rid of one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditile
from ditile.cache.config import DBCacheConfig
from ditile.distributed import backend
from ditile.distributed.launch import launch
from ditile.distributed.mesh import BROKEN_WORLDS
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.plan.errors import RankError, StateError, StoppedError
from ditile.plan.plan import Plan
from ditile.runner.compose import find_loop_models
from ditile.runner.runner import Runner, parallelize
from tests.parallel.sequence.planned import wan_pipeline
from tests.pool import Pool, fork_ranks, on_ranks
from tests.runner.cases import MAKE, call_of, divided, draw_plain, run, same

STEPS = 8
BEFORE, DECODING = "encode_prompt", "decode"
"""Moments of a stop that are not steps."""


def make_pipeline(name: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A pipeline, and what makes its arguments."""
    if name == "wan":
        pipe, call = wan_pipeline()
        return pipe, lambda: call | {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(3)}
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
        if "pixart" in name:
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
    "cache": ("flux with a cache", {"pipefusion": 2, "warmup": 1}),
    "pixart": ("pixart sigma", {"pipefusion": 2, "warmup": 1}),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_stop_on_one_rank_ends_all(pool: Pool, case: str) -> None:
    """A failure means that ranks hang, end at different steps, decode for nobody, or that the next picture is wrong."""
    name, plan = PLANS[case]
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


NAME, FAILED_STEPS, LAST = "flux true cfg", 6, 3
CALL = {"num_inference_steps": FAILED_STEPS}
NEXT = ("pipefusion", "distrifusion", "ulysses", "ring", "tensor", "cfg", "data")
"""The axes of the runners that come after the one whose call has failed."""


class StopEverything(BaseException):
    """As a KeyboardInterrupt: nothing in ditile may take it for an error of the pipeline."""


def raise_in_callback(kind: type[BaseException], runner: Runner) -> None:
    def raise_at_step(_pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == LAST:
            raise kind("by the test")
        return {}

    run(runner, NAME, callback_on_step_end=raise_at_step, **CALL)


def run_out_of_memory(runner: Runner) -> None:
    """In one of the micro-steps, before the first block, where no stage waits for another one yet."""
    calls: list[None] = []

    def count_calls(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 12:
            raise RuntimeError("not enough memory, says the test")

    hook = runner.pipe.transformer.time_text_embed.register_forward_pre_hook(count_calls)
    try:
        run(runner, NAME, **CALL)
    finally:
        hook.remove()


WAYS: dict[str, Callable[[Runner], None]] = {
    "callback": lambda runner: raise_in_callback(ValueError, runner),
    "interrupt": lambda runner: raise_in_callback(StopEverything, runner),
    "memory": run_out_of_memory,
}
ERRORS = (ValueError, StopEverything, RuntimeError)


def fail_and_go_on(values: dict[str, Any], way: str, axes: tuple[str, ...]) -> None:
    cache = values.pop("cache", False)
    pipe, ranks = MAKE[NAME](), dist.get_world_size()
    if cache:
        ditile.enable_cache(pipe, DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.2))
    runner = parallelize(pipe, Plan(**values), keep_weights=True, trust_code=True)
    wanted = run(runner, NAME, **CALL)
    for _ in range(2):
        with pytest.raises(ERRORS, match="the test"):
            WAYS[way](runner)
    same(run(runner, NAME, **CALL), wanted, "the same runner")
    with pytest.raises(ERRORS, match="the test"):
        WAYS[way](runner)
    for axis in axes:
        call = CALL | ({"num_images_per_prompt": ranks} if axis == "data" else {})
        warmup = {"warmup": FAILED_STEPS} if axis in ("pipefusion", "distrifusion") else {}
        other = parallelize(MAKE[NAME](), Plan(**{axis: ranks} | warmup))
        drawn, plain = run(other, NAME, **call), draw_plain(NAME, **call)
        assert abs(drawn - plain).max() < 1e-4, axis
        other.mesh.close_groups()
    same(run(runner, NAME, **CALL), wanted, "the same runner at last")
    with pytest.raises(ERRORS, match="the test"):
        WAYS[way](runner)
    runner.restore()
    if not cache:
        same(run(pipe, NAME, **CALL), draw_plain(NAME, **CALL), "restored")


CASES: list[tuple[dict[str, Any], str, int, tuple[str, ...]]] = [
    ({"pipefusion": 2, "warmup": 1, "warmup_mode": "serial"}, "callback", 2, NEXT),
    ({"distrifusion": 2, "warmup": 1}, "interrupt", 2, NEXT),
    ({"pipefusion": 2, "warmup": 1, "warmup_mode": "serial"}, "memory", 2, ("pipefusion", "ulysses")),
    ({"ulysses": 2, "text": "split", "vae": "rows"}, "callback", 2, ("ring",)),
    ({"tensor": 2, "split_scheme": "sequence"}, "callback", 2, ("tensor",)),
    ({"pipefusion": 2, "warmup": 1, "cache": True}, "callback", 2, ("pipefusion",)),
    ({"pipefusion": 3, "warmup": 1}, "callback", 3, ("ring", "distrifusion", "data")),
]


@pytest.mark.parametrize(("plan", "way", "ranks", "axes"), CASES, ids=str)
def test_after_an_error_of_all_ranks(
    pool: Pool, plan: dict[str, Any], way: str, ranks: int, axes: tuple[str, ...]
) -> None:
    """A failure means that a picture is drawn from messages of another one, or that the next call hangs."""
    pool.run(fail_and_go_on, ranks, plan, way, axes)


def fail_on_one(rank: int) -> None:
    """One rank raises in the middle of a picture, raises again, and starts anew."""
    runner = parallelize(MAKE[NAME](), Plan(pipefusion=2, warmup=1))

    def fail(_pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if dist.get_rank() == rank and step == LAST:
            raise ValueError(f"{time.monotonic()} is when the test raised")
        return {}

    with contextlib.suppress(ValueError):
        run(runner, NAME, callback_on_step_end=fail, **CALL)
    with contextlib.suppress(StateError):
        runner.reports()
    parallelize(MAKE[NAME](), Plan(ulysses=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_the_run(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script catches it and goes on. A failure means that the others wait until the stall limit, or for ever."""
    fork_ranks(monkeypatch)
    with pytest.raises(RankError, match=f"rank {rank}: left a call with an error.*when the test raised") as caught:
        launch(fail_on_one, 2, (rank,))
    assert "in fail" in caught.value.traceback
    # Some seconds without a sign of work, and some to be sure of it.
    assert time.monotonic() - float(caught.value.message.split("ValueError: ")[1].split()[0]) < 10


@on_ranks(2)
def test_receives_on_a_gpu_cannot_be_taken_back() -> None:
    """A failure means that a new runner's kernels wait behind receives of NCCL that wait for ever."""
    runner = parallelize(MAKE[NAME](), Plan(pipefusion=2, warmup=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "has_nccl", lambda _: True)
        with pytest.raises(ValueError, match="by the test"):
            raise_in_callback(ValueError, runner)
    try:
        assert runner.is_broken
        for again in (lambda: run(runner, NAME, **CALL), lambda: parallelize(MAKE[NAME](), Plan(ulysses=2))):
            with pytest.raises(StateError, match="messages are still under way; start the ranks again"):
                again()
    finally:
        BROKEN_WORLDS.clear()

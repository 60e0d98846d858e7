"""A call that raises in the middle of a picture leaves messages under way: none of them reaches a later call.

Where all ranks raise alike, the same runner and every new one draw what they would have drawn. Where one rank raises,
the others wait for it, and the run ends in seconds with its error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import ditile
from ditile.cache.config import DBCacheConfig
from ditile.distributed import backend
from ditile.distributed.launch import launch
from ditile.distributed.mesh import BROKEN_WORLDS
from ditile.plan.errors import RankError, StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import Runner, parallelize
from tests.pool import Pool, fork_ranks, on_ranks
from tests.runner.cases import MAKE, draw_plain, run, same

NAME, STEPS, LAST = "flux true cfg", 6, 3
CALL = {"num_inference_steps": STEPS}
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


def change_batch(runner: Runner) -> None:
    """ditile refuses it in the middle of a picture: the guidance ends, and with it a half of the batch."""

    def drop_guidance(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == LAST:
            raise StateError("refused by the test")
        return {}

    run(runner, NAME, callback_on_step_end=drop_guidance, **CALL)


WAYS: dict[str, Callable[[Runner], None]] = {
    "callback": lambda runner: raise_in_callback(ValueError, runner),
    "interrupt": lambda runner: raise_in_callback(StopEverything, runner),
    "memory": run_out_of_memory,
    "refusal": change_batch,
}
ERRORS = (ValueError, StopEverything, RuntimeError, StateError)


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
        warmup = {"warmup": STEPS} if axis in ("pipefusion", "distrifusion") else {}
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
    ({"pipefusion": 2, "warmup": 2, "warmup_mode": "sequence"}, "refusal", 2, ("pipefusion", "cfg")),
    ({"ulysses": 2, "text": "split", "vae": "rows"}, "callback", 2, ("ring",)),
    ({"tensor": 2, "split_scheme": "sequence"}, "callback", 2, ("tensor",)),
    ({"pipefusion": 2, "warmup": 1, "cache": True}, "callback", 2, ("pipefusion",)),
]
ALIKE: list[tuple[dict[str, Any], str, int, tuple[str, ...]]] = [
    ({"ring": 2}, "callback", 2, ("ring",)),
    ({"pipefusion": 3, "warmup": 1}, "callback", 3, ("ring", "distrifusion", "data")),
]
"""Of another axis, and on more ranks."""


@pytest.mark.parametrize(("plan", "way", "ranks", "axes"), [*CASES, *ALIKE], ids=str)
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

"""What a call says of itself: latents that are no numbers any more, and what must wait until it is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ditile
from ditile.errors import ModelError, StateError
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run, same

STEPS = 4


class Spoil:
    """A callback that makes the latents infinite after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] / 0} if step == self.step else {}


def spoil_and_go_on(name: str, plan: dict[str, Any]) -> None:
    """The error comes on every rank, with the step; the next picture is as if nothing had been."""
    pipe = MAKE[name]()
    with divided(pipe, **plan) as runner:
        wanted = run(runner, name)
        with pytest.raises(ModelError, match=f"NaN or infinite numbers since step 2 of {STEPS}; lower the guidance"):
            run(runner, name, callback_on_step_end=Spoil(0))
        same(run(runner, name), wanted)


@pytest.mark.parametrize("plan", [{}, {"patches": 3, "warmup": 1}], ids=str)
def test_latents_that_are_no_numbers(plan: dict[str, Any]) -> None:
    """A failure means a black picture, and no word of why."""
    spoil_and_go_on("flux", plan)


@pytest.mark.parametrize("plan", [{"pipefusion": 2, "patches": 2, "warmup": 1}, {"data": 2}, {"cfg": 2}], ids=str)
def test_on_every_rank(pool: Pool, plan: dict[str, Any]) -> None:
    """A failure means that one rank raises, and the others wait for it."""
    pool.run(spoil_and_go_on, 2, "flux true cfg", plan)


def refuse_within_a_call(plan: dict[str, Any]) -> None:
    pipe = MAKE["flux"]()
    runner = ditile.parallelize(pipe, ditile.Plan(**plan), keep_weights=True)
    ditile.enable_cache(runner, ditile.DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1))
    refused: list[str] = []

    def interfere(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        for change in (runner.restore, lambda: ditile.disable_cache(pipe), lambda: ditile.enable_cache(runner)):
            with pytest.raises(StateError, match="in the middle of a call"):
                change()
            refused.append(str(step))
        return {}

    interfered = run(runner, "flux", callback_on_step_end=interfere, callback_on_step_end_tensor_inputs=[])
    assert len(refused) == 3 * STEPS
    same(interfered, run(runner, "flux"))
    ditile.disable_cache(runner)
    runner.restore()


def test_what_must_wait_for_the_end(pool: Pool) -> None:
    """A failure means that a callback takes away what the next step needs, and a rank dies of an inner error."""
    refuse_within_a_call({})
    pool.run(refuse_within_a_call, 2, {"pipefusion": 2})


def test_a_cache_without_a_runner() -> None:
    """The same of a pipeline that is its own."""
    pipe = MAKE["flux"]()
    ditile.enable_cache(pipe, ditile.DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1))

    def interfere(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        with pytest.raises(StateError, match="in the middle of a call"):
            ditile.disable_cache(pipe)
        return {}

    same(run(pipe, "flux", callback_on_step_end=interfere), run(pipe, "flux"))
    ditile.disable_cache(pipe)
    assert torch.is_tensor(next(pipe.transformer.parameters())) and "forward" not in vars(pipe.transformer)

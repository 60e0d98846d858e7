"""What a call says of itself: latents or images that are not numbers any more, and what must wait until it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ditile
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import Plan
from ditile.runner.requests.prepare import warm_runner
from ditile.runner.runner import Runner, parallelize
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, divided, run, same

STEPS = 4


def spoil_and_go_on(name: str, plan: dict[str, Any]) -> None:
    """The error comes on every rank, with the step; the next picture is as if nothing had been."""

    def spoil(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] / 0} if step == 0 else {}

    with divided(MAKE[name](), **plan) as runner:
        wanted = run(runner, name)
        with pytest.raises(ModelError, match=f"NaN or infinite values since step 2 of {STEPS}; lower the guidance"):
            run(runner, name, callback_on_step_end=spoil)
        same(run(runner, name), wanted)


@pytest.mark.parametrize(
    "plan",
    [{}, {"patches": 3, "warmup": 1}, {"pipefusion": 2, "patches": 2, "warmup": 1}, {"data": 2}, {"cfg": 2}],
    ids=str,
)
def test_latents_that_are_no_numbers(pool: Pool, plan: dict[str, Any]) -> None:
    """A failure means a black picture, and no word of why; or that one rank raises, and the others wait for it."""
    pool.run(spoil_and_go_on, Plan(**plan).world, "flux true cfg", plan)


def decode_with_damage(plan: dict[str, Any], damaged: int, raising: int) -> None:
    """The VAE of one rank makes NaN: so many of the first ranks raise; the next picture is as if nothing had been."""
    pipe = MAKE["flux"]()
    rank = dist.get_rank() if dist.is_initialized() else 0
    weight = pipe.vae.decoder.conv_out.weight.data
    seeds = [0, 1][: plan.get("data", 1)]
    prompts = ["a circle"] * len(seeds)
    for output in ("all", "first"):
        for kind in ("pil", "np", "pt"):
            call: dict[str, Any] = {"prompt": prompts, "seeds": seeds, "output_type": kind, "output": output}
            with divided(pipe, **plan) as runner:
                wanted = runner(**call_of("flux", **call))
                sound = weight.clone()
                if rank == damaged:
                    weight.fill_(torch.nan)
                if output == "all" or rank < raising:
                    with pytest.raises(ModelError, match=r"AutoencoderKL decoded .* NaN .* torch.float32; decode in"):
                        runner(**call_of("flux", **call))
                else:
                    assert runner(**call_of("flux", **call)) is None
                weight.copy_(sound)
                got = runner(**call_of("flux", **call))
            if got is not None:
                same(got.images, wanted.images)


@pytest.mark.filterwarnings("error")
def test_pictures_that_are_no_numbers() -> None:
    """A failure means a black picture, and no word of why."""
    decode_with_damage({}, 0, 1)


@pytest.mark.parametrize(
    ("plan", "damaged"), [({"pipefusion": 2}, 0), ({"pipefusion": 2, "vae": "rows"}, 1), ({"data": 2}, 1)], ids=str
)
def test_pictures_on_every_rank(pool: Pool, plan: dict[str, Any], damaged: int) -> None:
    """A failure means that one rank raises, and the others wait for it."""
    pool.run(decode_with_damage, 2, plan, damaged, 2)


def refuse_within_a_call(plan: dict[str, Any]) -> None:
    pipe = MAKE["flux"]()
    runner = ditile.parallelize(pipe, ditile.Plan(**plan), keep_weights=True)
    ditile.enable_cache(runner, ditile.DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1))
    refused: list[str] = []

    def interfere(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        changes: list[Callable[[], object]] = [runner.restore]
        changes += [lambda: ditile.disable_cache(pipe), lambda: ditile.enable_cache(runner)]
        changes += [lambda: ditile.refresh_context(pipe), lambda: ditile.refresh_context(runner.pipe.transformer)]
        for change in changes:
            with pytest.raises(StateError, match="in the middle of a call"):
                change()
            refused.append(str(step))
        return {}

    interfered = run(runner, "flux", callback_on_step_end=interfere, callback_on_step_end_tensor_inputs=[])
    assert len(refused) == 5 * STEPS
    same(interfered, run(runner, "flux"))
    ditile.disable_cache(runner)
    runner.restore()


def test_what_must_wait_for_the_end(pool: Pool) -> None:
    """A failure means that a callback takes away what the next step needs, and a rank dies of an inner error."""
    refuse_within_a_call({})
    pool.run(refuse_within_a_call, 2, {"pipefusion": 2})


@pytest.mark.parametrize("cached", [False, True])
def test_patches_in_inference_mode(cached: bool) -> None:
    """A failure means an error about versions, which its tensors do not have, or another image."""
    images = []
    for mode in (torch.no_grad, torch.inference_mode):
        pipe = MAKE["pixart sigma"]()
        if cached:
            cache = ditile.DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=1.0, max_warmup_steps=1)
            ditile.enable_cache(pipe, cache)
        with mode():
            images.append(run(parallelize(pipe, Plan(patches=2, warmup=1)), "pixart sigma", output_type="pt"))
    assert torch.equal(*images)


WARM_STEPS = 9


def draw_warm_and_cold(name: str, plan: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, int]]:
    """On a rank: the steps of the call that nobody sees, and the bytes that each picture sent."""
    more = {"num_inference_steps": WARM_STEPS}
    with divided(MAKE[name](), **plan) as runner:
        cold, sent = run(runner, name, **more), runner.report.bytes_sent
    with divided(MAKE[name](), **plan) as runner:
        with mock.patch.object(Runner, "__call__", autospec=True, side_effect=Runner.__call__) as calls:
            warm_runner(runner, call_of(name, **more), is_cached=False)
        same(run(runner, name, **more), cold)
        return calls.call_args.kwargs["num_inference_steps"], runner.report.bytes_sent, sent


@pytest.mark.parametrize("name", ["flux", "sd3.5 medium"])
def test_nothing_remains_of_a_call_that_nobody_sees(pool: Pool, name: str) -> None:
    """A failure means that keys, or states of a scheduler, are those of the call before."""
    plan, steps = {"pipefusion": 2, "patches": 2, "warmup": 5}, 7
    for taken, warm, cold in pool.run(draw_warm_and_cold, 2, name, plan):
        assert taken == steps and warm == cold

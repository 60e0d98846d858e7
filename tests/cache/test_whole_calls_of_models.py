"""Steps without a call of the model where there is more than one plain transformer: U-Nets, two models in turns,
schedulers that draw random numbers, recorded calls; and that nothing is kept after a generation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

import ditile
from ditile import FittedScheduleConfig, Plan
from ditile.cache.cached import find_model_cache
from ditile.cache.calls.call_cache import CallCache
from ditile.cache.calls.scheduled import ScheduledSteps, weigh_by_reach
from ditile.runner import caching
from tests import tiny
from tests.parallel.pipefusion.simulated import distance
from tests.parallel.sequence import planned
from tests.pool import Pool
from tests.runner.cases import different, same

STEPS = 10


def draw_unet(plan: Plan | None, steps: int | None) -> Tensor:
    pipe = tiny.stable_diffusion()
    if steps is not None:
        caching.enable_cache(pipe, FittedScheduleConfig(steps=steps))
    target = pipe if plan is None else ditile.parallelize(pipe, plan)
    call = {"prompt": ["a red circle", "a blue square"], "num_inference_steps": STEPS, "height": 32, "width": 32}
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    image: Tensor = target(**call, generator=generators, guidance_scale=3.0, output_type="latent").images
    return image


def test_a_unet_needs_no_known_block(pool: Pool) -> None:
    """A failure means that a block must be known, or that a rank forecasts rows that it does not have."""
    plain = draw_unet(None, None)
    # PNDM steps twice in the first step.
    same(draw_unet(None, STEPS + 1), plain)
    alone = draw_unet(None, 6)
    different(alone, plain)
    for axis in ("cfg=2", "data=2"):
        for image in pool.run(draw_unet, 2, Plan.parse(axis), 6):
            assert distance(image, alone) < 2e-5, axis


def draw_two_models(plan: Plan | None, steps: int | None) -> tuple[Tensor, list[list[int]]]:
    pipe, call = planned.wan_pipeline()
    if steps is not None:
        caching.enable_cache(pipe, FittedScheduleConfig(steps=steps))
    target = pipe if plan is None else ditile.parallelize(pipe, plan)
    frames = target(**call | {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0)}).frames
    skipped = []
    if steps is not None:
        for report in caching.summary(target, logging=False):
            skipped.append(report.decisions[0].skipped)
    return frames, skipped


AXES = ("ulysses=2", "cfg=2", f"pipefusion=2 patches=2 warmup={STEPS}")


def test_two_models_in_turns_forecast_themselves(pool: Pool) -> None:
    """The first step of the second model computes, whatever the schedule says, on every plan alike."""
    plain, _ = draw_two_models(None, None)
    same(draw_two_models(None, STEPS)[0], plain)
    alone, skipped = draw_two_models(None, 4)
    different(alone, plain)
    assert len(skipped) == 2 and all(skipped)
    for axis in AXES:
        for frames, own in pool.run(draw_two_models, 2, Plan.parse(axis), 4):
            assert distance(torch.as_tensor(frames), torch.as_tensor(alone)) < 1e-4, axis
            # Each stage reports.
            assert own[:2] == own[-2:] == skipped, axis


COMPUTED = (0, 1, 2, 5, 6, 8)


def draw_noisy(plan: Plan | None, watched: bool) -> Tensor:
    """SD3 with a scheduler that draws random numbers in each step."""
    pipe = tiny.sd3()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=len(COMPUTED)))
    cache = find_model_cache(pipe.transformer)
    assert isinstance(cache, CallCache)
    cache._make_policy = lambda config, steps: ScheduledSteps(COMPUTED, weigh_by_reach(COMPUTED, STEPS))
    target = pipe if plan is None else ditile.parallelize(pipe, plan)
    call = tiny.arguments("sd3", num_inference_steps=STEPS, generator=torch.Generator().manual_seed(0))
    if watched:
        call["callback_on_step_end"] = lambda pipe, step, timestep, tensors: {}
    image: Tensor = target(**call).images
    return image


def test_random_numbers_are_those_of_each_step(pool: Pool) -> None:
    """A patch that goes some steps ahead takes the numbers of those steps, and the others take the same later."""
    alone = draw_noisy(None, False)
    synchronous = Plan(pipefusion=2, patches=2, warmup=STEPS)
    for image in pool.run(draw_noisy, 2, synchronous, False):
        assert distance(image, alone) < 1e-5
    stale = Plan(pipefusion=2, patches=3, warmup=1)
    for ahead, together in zip(
        pool.run(draw_noisy, 2, stale, False), pool.run(draw_noisy, 2, stale, True), strict=True
    ):
        same(ahead, together, "patch by patch, and step by step")
        different(ahead, alone)


def test_outputs_die_with_the_generation_and_with_errors() -> None:
    pipe = tiny.flux()
    caching.enable_cache(pipe, FittedScheduleConfig(steps=6))
    cache = find_model_cache(pipe.transformer)
    assert isinstance(cache, CallCache)
    kept: list[weakref.ref[Tensor]] = []

    def look(fails: bool) -> Any:
        def callback(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
            if step == 4:
                assert cache.forecasts is not None and cache.memory_bytes > 0
                kept.extend(weakref.ref(x) for x in cache.forecasts._branches[0].outputs[0].tensors)
                if fails:
                    raise ValueError("the callback fails")
            return {}

        return callback

    call = tiny.arguments("flux", num_inference_steps=STEPS)
    pipe(**call, callback_on_step_end=look(False))
    assert cache.memory_bytes == 0 and cache.kept_bytes > 0
    with pytest.raises(ValueError, match="the callback fails"):
        pipe(**call, callback_on_step_end=look(True))
    gc.collect()
    assert cache.memory_bytes == 0 and kept and all(reference() is None for reference in kept)

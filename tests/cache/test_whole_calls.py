"""Steps in which the model, or blocks of a patch, are not called: exact limits, ranks against one process, bytes."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

import ditile
from ditile import FittedScheduleConfig, Plan
from ditile.cache.cached import find_model_cache
from ditile.cache.calls.call_cache import CallCache
from ditile.cache.calls.policy import ComputedOutput, ModelCall
from ditile.cache.calls.scheduled import ScheduledSteps, weigh_by_reach
from ditile.cache.config import DBCacheConfig
from ditile.runner import caching
from tests import tiny
from tests.parallel.pipefusion.simulated import TWO_CALLS, Case, arguments, distance, pipeline
from tests.parallel.pipefusion.simulation import Simulation
from tests.parallel.sequence import planned
from tests.pool import Pool
from tests.runner.cases import different, same

STEPS = 10
COMPUTED = (0, 1, 2, 5, 6, 8)
WEIGHTS = weigh_by_reach(COMPUTED, STEPS)


CASES = {
    "pixart": Case("pixart", 2, 1, STEPS, ranks=(2,)),
    "pixart-four": Case("pixart", 5, 1, STEPS, ranks=(4,)),
    "pixart-synchronous": Case("pixart", 2, 4, STEPS, ranks=(2,)),
    "flux": Case("flux", 3, 1, STEPS, ranks=(2,)),
    "flux-two-calls": Case("flux", 4, 1, STEPS, changes=TWO_CALLS, ranks=(2,)),
    "sd3": Case("sd3", 2, 1, STEPS, ranks=(2,)),
    "distrifusion-pixart": Case("pixart", 3, 1, STEPS, ranks=(3,), method="distrifusion"),
    "distrifusion-flux": Case("flux", 2, 1, STEPS, ranks=(2,), method="distrifusion"),
}
"""Each schedule, and both ways of stale keys with a callback."""


def draw_case(name: str, world: int, watched: bool) -> tuple[Tensor, dict[str, int]]:
    """The latents of a rank, and the bytes that it sent; `watched`: a callback gets the latents of every step."""
    case = CASES[name]
    pipe = pipeline(case)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=len(COMPUTED)))
    [cache] = [cache for cache in [vars(pipe.transformer)["_cached_by_ditile"]] if isinstance(cache, CallCache)]
    cache._make_policy = lambda config, steps: ScheduledSteps(COMPUTED, WEIGHTS)
    runner = ditile.parallelize(pipe, case.plan(world))
    call = arguments(case)
    if watched:
        call["callback_on_step_end"] = lambda pipe, step, timestep, tensors: {}
    return runner(**call).images, runner.report.sent


@pytest.mark.parametrize(("name", "watched"), list(itertools.product(CASES, [False, True])))
def test_stale_ranks_equal_the_simulation(pool: Pool, name: str, watched: bool) -> None:
    """Latents are those of a simulation without ditile that leaves out the same steps. A failure means that keys are
    not those of the last computed step, or that a forecast was made of another patch's predictions."""
    case = CASES[name]
    wanted = Simulation(pipeline(case), arguments(case), **case.simulation, left_out=WEIGHTS).draw()
    [world] = case.ranks
    for rank, (latents, _) in enumerate(pool.run(draw_case, world, name, world, watched)):
        assert distance(latents, wanted) < 1e-6, f"rank {rank}"


def count_bytes(plan: Plan, steps: int | None) -> dict[str, int]:
    """What a rank sends in 20 steps."""
    pipe = tiny.pixart()
    if steps is not None:
        caching.enable_cache(pipe, FittedScheduleConfig(steps=steps))
    runner = ditile.parallelize(pipe, plan)
    runner(**tiny.arguments("pixart") | {"num_inference_steps": 20, "output_type": "latent"})
    return dict(runner.report.sent)


@pytest.mark.parametrize("axis", ["pipefusion=2 patches=2 warmup=1", "distrifusion=2 warmup=1", "ulysses=2", "cfg=2"])
def test_half_of_the_steps_sends_half(pool: Pool, axis: str) -> None:
    """A step that is left out sends nothing. Keys and latents that no later step reads are not sent either, so a
    generation of 10 computed steps of 20 sends what one of 10 steps does, whatever lies between them."""
    plan = Plan.parse(axis)
    for all_steps, half in zip(
        pool.run(count_bytes, plan.world, plan, None), pool.run(count_bytes, plan.world, plan, 10), strict=True
    ):
        for kind in ("activations", "latents", "keys", "ulysses", "cfg"):
            if kind not in all_steps:
                continue
            # The last step sends no keys, and returns no latents.
            steps_of_kind = 19 if kind in ("latents", "keys") else 20
            assert half.get(kind, 0) * steps_of_kind == all_steps[kind] * (steps_of_kind - 10), (kind, all_steps, half)


def test_weights_are_of_the_steps_that_they_were_fitted_to() -> None:
    """A failure: where a plan computes more steps, outputs are summed with the weights of others."""
    policy = ScheduledSteps((0, 1, 2, 5), {6: (3.0, -2.0)})

    def forecast(*steps: int) -> float:
        kept = [ComputedOutput(ModelCall(step, 0, None), [torch.tensor([float(step)])]) for step in steps]
        return float(policy.forecast(ModelCall(6, 0, None), kept)[0])

    assert forecast(5, 2) == 3 * 5 - 2 * 2
    # A step that the plan added: a line through 4 and 5, which ends after half a gap.
    assert forecast(5, 4) == 5.5
    assert forecast(4, 2) == 5.0
    assert forecast(5) == 5.0


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


AXES_OF_MODELS = ("ulysses=2", "cfg=2", f"pipefusion=2 patches=2 warmup={STEPS}")


def test_two_models_in_turns_forecast_themselves(pool: Pool) -> None:
    """The first step of the second model computes, whatever the schedule says, on every plan alike."""
    plain, _ = draw_two_models(None, None)
    same(draw_two_models(None, STEPS)[0], plain)
    alone, skipped = draw_two_models(None, 4)
    different(alone, plain)
    assert len(skipped) == 2 and all(skipped)
    for axis in AXES_OF_MODELS:
        for frames, own in pool.run(draw_two_models, 2, Plan.parse(axis), 4):
            assert distance(torch.as_tensor(frames), torch.as_tensor(alone)) < 1e-4, axis
            # Each stage reports.
            assert own[:2] == own[-2:] == skipped, axis


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
                kept.extend(weakref.ref(x) for x in cache.forecasts.branches[0].outputs[0].tensors)
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


class Cached(NamedTuple):
    """A case, the blocks of the probe and of the tail, and steps that are computed anyhow."""

    case: Case
    first: int = 1
    last: int = 0
    spare: int = 2


CACHED_STEPS = 9
CACHED_CASES = {
    "pixart": Cached(Case("pixart", 2, 1, CACHED_STEPS, ranks=(2,))),
    "pixart-long-probe": Cached(Case("pixart", 3, 1, CACHED_STEPS, ranks=(4,)), first=2),
    "pixart-synchronous": Cached(Case("pixart", 2, 6, CACHED_STEPS, ranks=(2,))),
    "pixart-no-probe": Cached(Case("pixart", 3, 1, CACHED_STEPS, ranks=(2,)), first=0),
    "flux-tail": Cached(Case("flux", 2, 1, CACHED_STEPS, ranks=(3,)), last=1),
    "flux-two-calls": Cached(Case("flux", 3, 1, CACHED_STEPS, changes=TWO_CALLS, ranks=(2,))),
    "sd3": Cached(Case("sd3", 2, 1, CACHED_STEPS, ranks=(2,))),
    "distrifusion-pixart": Cached(Case("pixart", 3, 1, CACHED_STEPS, ranks=(3,), method="distrifusion")),
    "distrifusion-flux": Cached(Case("flux", 2, 1, CACHED_STEPS, ranks=(2,), method="distrifusion")),
    "distrifusion-sd3": Cached(Case("sd3", 2, 2, CACHED_STEPS, ranks=(2,), method="distrifusion")),
}


def draw_cached(name: str, threshold: float, world: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """What a rank gets, and what was decided on its stage."""
    case, first, last, spare = CACHED_CASES[name]
    pipe = pipeline(case)
    config = DBCacheConfig(
        Fn_compute_blocks=first, Bn_compute_blocks=last, max_warmup_steps=spare, residual_diff_threshold=threshold
    )
    caching.enable_cache(pipe, config)
    runner = ditile.parallelize(pipe, case.plan(world))
    latents = runner(**arguments(case)).images
    return latents, [report.to_dict() for report in caching.summary(pipe, logging=False)]


@pytest.mark.parametrize("name", CACHED_CASES)
def test_ranks_equal_the_simulation(pool: Pool, name: str) -> None:
    """Latents and left out patches are the simulation's. A failure means that patches were decided on together, or by
    two stages differently; that a residual was another patch's; or that keys of a left out patch were renewed."""
    case, first, last, spare = CACHED_CASES[name]
    for threshold in (0.55, 0.4, 0.7, 0.3, 0.9) if first else (0.15, 0.1, 0.2, 0.05, 0.3):
        how = {"first": first, "last": last, "threshold": threshold, "spare": spare}
        simulation = Simulation(pipeline(case), arguments(case), **case.simulation, cache=how)
        wanted = simulation.draw()
        differences = [d for hand in simulation.hands for d in hand.differences]
        skipped = {(k, p): steps for k, hand in enumerate(simulation.hands) for p, steps in hand.left_out.items()}
        margin = min((abs(d - threshold) for d in differences), default=0.0)
        if any(skipped.values()) and any(d > threshold for d in differences) and margin > 1e-3:
            break
    else:
        pytest.fail(f"no threshold tells the steps apart: {differences}")
    [world] = case.ranks
    seen = set()
    for rank, (latents, [report]) in enumerate(pool.run(draw_cached, world, name, threshold, world)):
        assert distance(latents, wanted) < 1e-6, f"rank {rank}"
        for each in report["decisions"]:
            key = (each["branch"], each["patch"])
            assert each["skipped"] == skipped[key], f"rank {rank}, {key}"
            seen.add(key)
    if case.method == "pipefusion":
        assert seen == set(skipped)

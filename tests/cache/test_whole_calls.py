"""Steps in which the model is not called: exact limits, ranks against one process, bytes, and calls of the host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ditile
from ditile import FittedScheduleConfig, Plan
from ditile.cache.calls.call_cache import CallCache
from ditile.cache.calls.policy import ComputedOutput, ModelCall
from ditile.cache.calls.scheduled import ScheduledSteps, weigh_by_reach
from ditile.runner import caching
from tests import tiny
from tests.parallel.pipefusion.simulated import TWO_CALLS, Case, arguments, distance, pipeline
from tests.parallel.pipefusion.simulation import simulate
from tests.pool import Pool
from tests.runner.cases import MAKE, different, run, same

STEPS = 10
COMPUTED = (0, 1, 2, 5, 6, 8)
WEIGHTS = weigh_by_reach(COMPUTED, STEPS)


def draw_with_steps(
    name: str, plan: Plan | None, steps: int | None, changes: dict[str, Any] | None = None
) -> tuple[Tensor, list[list[int]]]:
    """An image, and the steps that were left out; of one process without a plan."""
    pipe = MAKE[name]()
    if steps is not None:
        caching.enable_cache(pipe, FittedScheduleConfig(steps=steps))
    target = pipe if plan is None else ditile.parallelize(pipe, plan, keep_weights=True)
    image = run(target, name, num_inference_steps=STEPS, **changes or {})
    skipped = []
    if steps is not None:
        reports = caching.summary(target, logging=False)
        skipped = [decision.skipped for report in reports for decision in report.decisions]
    return image, skipped


@pytest.mark.parametrize("name", ["flux true cfg", "flux", "pixart sigma", "sd3"])
def test_all_steps_computed_is_the_plain_image(name: str) -> None:
    """A failure means that a call that is made is not the pipeline's own, or that a kept output was written into."""
    plain, _ = draw_with_steps(name, None, None)
    every, skipped = draw_with_steps(name, None, STEPS)
    same(every, plain, "all steps compute")
    assert not any(skipped)
    half, skipped = draw_with_steps(name, None, 5)
    different(half, plain)
    assert skipped and all(steps == [3, 4, 6, 8, 9] or len(steps) == 5 for steps in skipped)


AXES = ["patches=1", "ulysses=2", "ring=2", "tensor=2", "cfg=2", "data=2"]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["flux true cfg", "pixart sigma"])
def test_two_ranks_equal_one(pool: Pool, axis: str, name: str) -> None:
    """Which steps compute is known beforehand, so every exact axis gives the image of one process with the same steps.

    A failure means that a forecast took rows or branches that this rank has not, or that ranks left out other steps."""
    plan = Plan.parse(axis)
    changes: dict[str, Any] = {"num_images_per_prompt": 2} if axis == "data=2" else {}
    alone, skipped = draw_with_steps(name, None, 6, changes)
    results = pool.run(draw_with_steps, plan.world, name, plan, 6, changes)
    for image, own in results:
        assert distance(torch.as_tensor(image), torch.as_tensor(alone)) < 2e-5
        assert all(steps == skipped[0] for steps in own)
    if axis == "patches=1":
        same(results[0][0], alone, axis)


CASES = {
    "pixart": Case("pixart", 2, 1, STEPS, ranks=(2,)),
    "pixart-alone": Case("pixart", 3, 2, STEPS, ranks=(1,)),
    "pixart-four": Case("pixart", 5, 1, STEPS, ranks=(4,)),
    "pixart-synchronous": Case("pixart", 2, 4, STEPS, ranks=(2,)),
    "flux": Case("flux", 3, 1, STEPS, ranks=(2,)),
    "flux-two-calls": Case("flux", 4, 1, STEPS, changes=TWO_CALLS, ranks=(2,)),
    "sd3": Case("sd3", 2, 1, STEPS, ranks=(2,)),
    "distrifusion-pixart": Case("pixart", 3, 1, STEPS, ranks=(3,), method="distrifusion"),
    "distrifusion-flux": Case("flux", 2, 1, STEPS, ranks=(2,), method="distrifusion"),
}

ONCE = [(name, False) for name in CASES if name not in ("sd3", "flux", "distrifusion-flux")]
ONCE += [("pixart", True), ("distrifusion-pixart", True)]
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
    how: dict[str, Any] = {"method": case.method, "warmup": case.warmup, "patches": case.patches, "left_out": WEIGHTS}
    wanted = simulate(family=case.family, pipe=pipeline(case), call=arguments(case), **how)
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

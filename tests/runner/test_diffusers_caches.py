"""Caches of diffusers' own under plans: where they are right they stay, elsewhere a line says what to use instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import (
    ContextParallelConfig,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.smoothed_energy_guidance_utils import SmoothedEnergyGuidanceHook
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

import ditile
from ditile.model.step_memory import explain_hook_refusal
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.diffusers_configs import convert_config
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import on_ranks
from tests.runner.cases import MAKE, draw_plain, run, same

STEPS = 8
ALWAYS = (-1, 2000)
"""Timesteps in which attention may be left out: all."""


class Counted(ModelHook):  # type: ignore[misc]
    """A user's, which counts calls."""

    _is_stateful = True


def _enable(model: Any, kind: str) -> None:
    mag = {"threshold": 0.9, "max_skip_steps": 2, "retention_ratio": 0.2, "num_inference_steps": STEPS}
    configs: dict[str, Any] = {
        "first": lambda: FirstBlockCacheConfig(threshold=10.0),
        "mag": lambda: MagCacheConfig(**mag, mag_ratios=[1 - 0.01 * k for k in range(STEPS)]),
        "taylor": lambda: TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, max_order=1),
        "pab": lambda: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=ALWAYS,
            current_timestep_callback=lambda: 500,
        ),
        "faster": lambda: FasterCacheConfig(
            spatial_attention_timestep_skip_range=ALWAYS,
            current_timestep_callback=lambda: 500,
            is_guidance_distilled=True,
        ),
    }
    if kind in configs:
        model.enable_cache(configs[kind]())
    elif kind == "energy":
        queries = model.transformer_blocks[0].attn.to_q
        HookRegistry.check_if_exists_or_initialize(queries).register_hook(SmoothedEnergyGuidanceHook(), "energy")
    else:
        HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[0]).register_hook(Counted(), "mine")


WHOLE = [{"data": 2}, {"cfg": 2}, {"tensor": 2}, {"cfg": 2, "tensor": 2}]
FRESH = [{"ulysses": 2}, {"ring": 2}, {"tensor": 2, "split_scheme": "sequence"}]
STAGES = [{"pipefusion": 2, "patches": 1}]
SYNCHRONOUS = [{"pipefusion": 2, "warmup": STEPS}, {"distrifusion": 2, "warmup": STEPS}]
PATCHES = [{"pipefusion": 2}, {"patches": 2}, {"distrifusion": 2}, {"pipefusion": 2, "ulysses": 2}]
PLANS = WHOLE + FRESH + STAGES + SYNCHRONOUS + PATCHES
FITTING: dict[str, list[dict[str, Any]]] = {
    "first": WHOLE,
    "faster": WHOLE,
    "energy": WHOLE,
    "mine": WHOLE,
    "mag": [*WHOLE, *FRESH, SYNCHRONOUS[1]],
    "taylor": WHOLE + FRESH + STAGES + SYNCHRONOUS,
    "pab": WHOLE + FRESH + STAGES + SYNCHRONOUS,
}
"""The plans that each may run under."""


@pytest.mark.parametrize("kind", FITTING)
def test_which_plans_a_cache_fits(kind: str) -> None:
    """A failure means a hang or another picture in silence, or that a cache which was right is refused."""
    model = tiny.flux().transformer
    for plan in PLANS:
        assert explain_hook_refusal([model], Plan(**plan), STEPS) is None
    _enable(model, kind)
    for plan in PLANS:
        reason = explain_hook_refusal([model], Plan(**plan), STEPS)
        assert (reason is None) == (plan in FITTING[kind]), f"{kind} under {plan}: {reason}"
        assert reason is None or ("ditile.enable_cache(pipe)" in reason and len(reason) < 400)


@on_ranks(2)
def test_a_cache_that_is_enabled_between_calls() -> None:
    """A failure means that ranks wait for each other as soon as one of them leaves blocks out."""
    pipe = tiny.flux()
    runner = parallelize(pipe, Plan(ulysses=2))
    wanted = run(runner, "flux")
    if dist.get_rank() == 1:  # what one rank refuses, all refuse
        _enable(pipe.transformer, "first")
    with pytest.raises(ModelError, match="has diffusers' FBC.*HeadBlockHook.*'ulysses=2' .*disable_cache"):
        run(runner, "flux")
    if dist.get_rank() == 1:
        pipe.transformer.disable_cache()
    same(run(runner, "flux"), wanted, "without the cache")


@on_ranks(2)
def test_caches_that_do_not_tell_branches_apart() -> None:
    """A failure means another picture in silence: attention of one branch was used again for the other."""
    pipe = tiny.flux()
    _enable(pipe.transformer, "taylor")
    wanted = run(pipe, "flux true cfg", num_inference_steps=STEPS)
    runner = parallelize(pipe, Plan(cfg=2))
    same(run(runner, "flux true cfg", num_inference_steps=STEPS), wanted, "one memory for each branch")
    pipe.transformer.disable_cache()
    _enable(pipe.transformer, "pab")
    with pytest.raises(ModelError, match="PyramidAttentionBroadcastHook, which counts the calls of all branches"):
        run(runner, "flux true cfg")


@pytest.mark.parametrize(("kind", "plan"), [("pab", FRESH[0]), ("taylor", FRESH[1]), ("first", WHOLE[2])])
@on_ranks(2)
def test_caches_that_stay_are_right(kind: str, plan: dict[str, Any]) -> None:
    """1e-4 relative: rounding, of sums in another order. A failure means that a cache is let through and is wrong."""
    plain, pipe = tiny.flux(), tiny.flux()
    without = run(plain, "flux", num_inference_steps=STEPS)
    _enable(plain.transformer, kind)
    _enable(pipe.transformer, kind)
    wanted = run(plain, "flux", num_inference_steps=STEPS)
    got = run(parallelize(pipe, Plan(**plan)), "flux", num_inference_steps=STEPS)
    near, far = (float((picture - wanted).abs().max() / wanted.abs().max()) for picture in (got, without))
    assert near < 1e-4 < far, f"{kind} under {plan}: {near}, and the cache does {far}"


TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (ContextParallelConfig(ring_degree=2, ulysses_degree=4), Plan(ring=2, ulysses=4)),
        (TensorParallelConfig(tp_degree=2), Plan(tensor=2)),
        (ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=3)), Plan(ring=3)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_stands_for_a_plan(config: Any, plan: Plan) -> None:
    assert convert_config(config) == plan


@on_ranks(2)
def test_images_are_those_of_diffusers_own_division() -> None:
    """Up to rounding: sums of attention are made in the same order, products of other shapes."""
    name = "flux"
    config = ContextParallelConfig(ulysses_degree=2)
    pipe = MAKE[name]()
    with pytest.MonkeyPatch.context() as patch:
        # diffusers looks for an accelerator, and divides by the number of them.
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        pipe.transformer.enable_parallelism(config=config)
    theirs = run(pipe, name)
    ours, plain = run(ditile.enable_parallelism(MAKE[name](), config), name), draw_plain(name)
    scale = plain.abs().max()
    assert float((theirs - ours).abs().max() / scale) < TOLERANCE
    assert float((plain - ours).abs().max() / scale) < TOLERANCE

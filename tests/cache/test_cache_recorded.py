"""Recorded calls of models with caches: a tape for each decision that is known before the call; images are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import ditile
from ditile import DBCacheConfig, DBPruneConfig, DMDCalibratorConfig, FoCaCalibratorConfig, TaylorSeerCalibratorConfig
from ditile.model.hooks.kv_store import AgeChecks
from ditile.plan.plan import Plan
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 10
MASK = [1, 1, 0, 1, 0, 0, 1, 0, 0, 1]
STATIC = DBCacheConfig(
    Fn_compute_blocks=1, max_warmup_steps=1, steps_computation_mask=MASK, steps_computation_policy="static"
)
NO_BLOCKS = STATIC.reset(Fn_compute_blocks=0)
LIMITED = DBCacheConfig(
    Fn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=1.0, max_continuous_cached_steps=2
)
THRESHOLD = DBCacheConfig(
    Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.99, max_continuous_cached_steps=2
)
TAYLOR = TaylorSeerCalibratorConfig(taylorseer_order=2)

KNOWN: dict[str, tuple[DBCacheConfig, Any]] = {
    "mask": (STATIC, None),
    "mask, last block": (STATIC.reset(Bn_compute_blocks=1), None),
    "mask, no blocks": (NO_BLOCKS, None),
    "limits": (LIMITED, None),
    "taylor": (LIMITED, TAYLOR),
    "taylor in half precision": (LIMITED.reset(store_dtype="bfloat16"), TAYLOR),
    "foca": (STATIC, FoCaCalibratorConfig()),
    "hidden": (NO_BLOCKS.reset(store="hidden"), None),
}
"""Decisions that are known before a call."""

UNKNOWN: dict[str, tuple[DBCacheConfig, Any]] = {
    "threshold": (THRESHOLD, None),
    "prune": (DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.5), None),
    "dmd": (LIMITED.reset(max_warmup_steps=5), DMDCalibratorConfig()),
}
"""Numbers of the call decide, so it runs its code."""


def generate(runner: Any, name: str, seed: int, **more: Any) -> list[Tensor]:
    call = ZOO[name].call() | {"num_inference_steps": STEPS} | more
    return [x.clone() for x in list_tensors(runner(**call | {"generator": torch.Generator().manual_seed(seed)}))]


def generate_with_and_without(
    name: str, plan: Plan, config: DBCacheConfig, calibrator: Any
) -> tuple[list[bool], bool, int, Mapping[str, int]]:
    """Whether images are those without tapes, and skips and messages too; the calls that were played, and problems."""
    images: list[list[list[Tensor]]] = []
    reports: list[Any] = []
    with record_on_cpu() as recorders:
        for recorded in (False, True):
            checks = AgeChecks()
            pipe = ZOO[name].make()
            ditile.enable_cache(pipe, cache_config=config, calibrator_config=calibrator)
            runner = ditile.parallelize(pipe, plan, cuda_graphs=recorded, checks=checks)
            made = []
            told: list[Any] = []
            for seed in range(3):
                made.append(generate(runner, name, seed))
                told.append(ditile.summary(pipe, logging=False))
            if ZOO[name].other_prompt is not None:
                made.append(generate(runner, name, 0, **ZOO[name].other_prompt()))
            ditile.disable_cache(pipe)
            made.append(generate(runner, name, 0))
            traffic = runner.mesh.traffic
            told += [dict(traffic.bytes), dict(traffic.calls), checks.passed]
            images.append(made)
            reports.append(repr(told))
    equal = [all(map(torch.equal, image, other)) for image, other in zip(*images, strict=True)]
    # Something was left out: with all blocks the image is another one.
    assert not all(map(torch.equal, images[0][0], images[0][-1]))
    return equal, reports[0] == reports[1], recorders[0].num_played, recorders[0].problems


@pytest.mark.parametrize(
    ("name", "axis", "case"),
    [
        ("flux", "patches=1", "mask, last block"),
        ("flux", "patches=1", "taylor in half precision"),
        ("flux", "patches=1", "hidden"),
        ("flux", "patches=2 warmup=1", "taylor"),
        ("flux", "ulysses=2", "mask"),
        ("flux", "pipefusion=2 patches=2 warmup=1", "taylor"),
        ("flux", "distrifusion=2 warmup=1", "limits"),
        ("flux", "tensor=2", "mask, no blocks"),
        ("qwen-image", "cfg=2", "foca"),
        ("wan-2.2", "patches=2 warmup=1", "limits"),
    ],
)
def test_decisions_that_are_known_have_tapes(pool: Pool, name: str, axis: str, case: str) -> None:
    """A failure means that a tape computes what is to be left out, or reads what another image has left."""
    plan = Plan.parse(axis)
    for equal, is_told_alike, played, problems in pool.run(
        generate_with_and_without, plan.world, name, plan, *KNOWN[case]
    ):
        assert all(equal)
        assert is_told_alike
        # Not the first calls, and those whose other patches have another decision than when they were recorded.
        assert played > sum(problems.values())


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_numbers_of_the_call_decide_runs_its_code(case: str) -> None:
    """A failure means that a tape has the decision, or the weights of a forecast, of the step that was recorded."""
    equal, is_told_alike, _, problems = generate_with_and_without("flux", Plan(), *UNKNOWN[case])
    assert all(equal)
    assert is_told_alike
    assert problems["a cache decides by numbers of the call, or has none yet"]


def test_a_stage_that_is_told_what_to_leave_out_is_recorded(pool: Pool) -> None:
    """The first stage measures in its calls, and the second one has the decision before it computes."""
    plan = Plan(pipefusion=2, patches=2, warmup=1)
    first, second = pool.run(generate_with_and_without, 2, "flux", plan, *UNKNOWN["threshold"])
    for equal, is_told_alike, _, _ in (first, second):
        assert all(equal)
        assert is_told_alike
    assert second[2] > first[2]

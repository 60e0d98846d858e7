"""Caches with stale keys, on real ranks and through the unmodified pipelines, against a simulation without ditile.

A patch that is left out sends what it would have sent and leaves its keys as they were; the others attend to these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from torch import Tensor

import ditile
from ditile.cache.config import DBCacheConfig
from ditile.runner import caching
from tests.cache.hand_cache import HandCache
from tests.parallel.pipefusion.simulated import TWO_CALLS, Case, arguments, distance, pipeline
from tests.parallel.pipefusion.simulation import simulate
from tests.pool import Pool


class Cached(NamedTuple):
    """A case, the blocks of the probe and of the tail, and steps that are computed anyhow."""

    case: Case
    first: int = 1
    last: int = 0
    spare: int = 2
    changes: dict[str, Any] = {}


STEPS = 9
CASES = {
    "pixart": Cached(Case("pixart", 2, 1, STEPS, ranks=(2,))),
    "pixart-alone": Cached(Case("pixart", 3, 1, STEPS, ranks=(1,)), last=1),
    "pixart-long-probe": Cached(Case("pixart", 3, 1, STEPS, ranks=(4,)), first=2),
    "pixart-synchronous": Cached(Case("pixart", 2, 6, STEPS, ranks=(2,))),
    "pixart-no-probe": Cached(Case("pixart", 3, 1, STEPS, ranks=(2,)), first=0),
    "flux": Cached(Case("flux", 3, 1, STEPS, ranks=(2,)), first=1),
    "flux-tail": Cached(Case("flux", 2, 1, STEPS, ranks=(3,)), last=1),
    "flux-two-calls": Cached(Case("flux", 3, 1, STEPS, changes=TWO_CALLS, ranks=(2,))),
    "flux-no-probe": Cached(Case("flux", 2, 1, STEPS, ranks=(3,)), first=0, last=1),
    "sd3": Cached(Case("sd3", 2, 1, STEPS, ranks=(2,))),
    "distrifusion-pixart": Cached(Case("pixart", 3, 1, STEPS, ranks=(3,), method="distrifusion")),
    "distrifusion-flux": Cached(Case("flux", 2, 1, STEPS, ranks=(2,), method="distrifusion")),
    "distrifusion-sd3": Cached(Case("sd3", 2, 2, STEPS, ranks=(2,), method="distrifusion")),
}


def simulated(name: str, threshold: float) -> tuple[Tensor, HandCache]:
    case, first, last, spare, _ = CASES[name]
    cache = HandCache(first, last, threshold, spare, case.warmup, case.steps)
    how = {"method": case.method, "warmup": case.warmup, "patches": case.patches, "cache": cache}
    return simulate(family=case.family, pipe=pipeline(case), call=arguments(case), **how), cache


def draw(name: str, threshold: float, world: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """What a rank gets, and what was decided on its stage."""
    case, first, last, spare, _ = CASES[name]
    pipe = pipeline(case)
    config = DBCacheConfig(
        Fn_compute_blocks=first, Bn_compute_blocks=last, max_warmup_steps=spare, residual_diff_threshold=threshold
    )
    caching.enable_cache(pipe, config)
    runner = ditile.parallelize(pipe, case.plan(world))
    latents = runner(**arguments(case)).images
    return latents, [report.to_dict() for report in caching.summary(pipe, logging=False)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_simulation(pool: Pool, name: str) -> None:
    """Latents and left out patches are the simulation's. A failure means that patches were decided on together, or by
    two stages differently; that a residual was another patch's; or that keys of a left out patch were renewed."""
    for threshold in (0.55, 0.4, 0.7, 0.3, 0.9) if CASES[name].first else (0.15, 0.1, 0.2, 0.05, 0.3):
        wanted, cache = simulated(name, threshold)
        margin = min((abs(d - threshold) for d in cache.differences), default=0.0)
        if any(cache.skipped.values()) and any(d > threshold for d in cache.differences) and margin > 1e-3:
            break
    else:
        pytest.fail(f"no threshold tells the steps apart: {cache.differences}")
    [world] = CASES[name].case.ranks
    seen = set()
    for rank, (latents, [report]) in enumerate(pool.run(draw, world, name, threshold, world)):
        assert distance(latents, wanted) < 1e-6, f"rank {rank}"
        for each in report["decisions"]:
            key = (each["branch"], each["patch"])
            assert each["skipped"] == cache.skipped[key], f"rank {rank}, {key}"
            seen.add(key)
    if CASES[name].case.method == "pipefusion":
        assert seen == set(cache.skipped)

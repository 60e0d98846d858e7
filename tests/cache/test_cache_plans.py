"""A cache under every exact plan leaves out the steps that one process leaves out, on every rank, and draws the same.

In float64, with a threshold in a gap of the differences that one process measured, so that rounding decides nothing.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile
from ditile.cache.cached import find_model_cache
from ditile.cache.config import DBCacheConfig, DBPruneConfig, TaylorSeerCalibratorConfig
from ditile.model.hooks.kv_store import KeyStore
from ditile.plan.plan import Plan
from ditile.runner import caching
from ditile.runner.runner import parallelize
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, call_of, divided, make_double, run
from tests.zoo import ZOO

TOLERANCE = 1e-6
STEPS = 8


class Case(NamedTuple):
    """A pipeline of `MAKE`, a plan, the cache, and changes of the call."""

    name: str
    plan: str
    config: Any = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2, max_continuous_cached_steps=2)
    calibrator: Any = None
    changes: dict[str, Any] = {}


PRUNE = DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=2)
NO_PROBE = DBCacheConfig(Fn_compute_blocks=0, max_warmup_steps=2)
TAYLOR = TaylorSeerCalibratorConfig()
TWO = {"num_images_per_prompt": 2}
MECHANISMS = [
    Case("pixart sigma", "ulysses=2"),
    Case("pixart sigma", "ring=2", PRUNE),
    Case("pixart sigma", "cfg=2"),
    Case("pixart sigma", "data=2", changes=TWO),
    Case("pixart sigma", "tensor=2 split_scheme=sequence"),
    Case("pixart sigma", "pipefusion=2 patches=1", calibrator=TAYLOR),
]
"""An axis each."""
CASES = [
    Case("pixart sigma", "pipefusion=2 warmup=99"),
    Case("pixart sigma", "pipefusion=4 patches=1", PRUNE),
    Case("flux true cfg", "cfg=2"),
    Case("flux", "pipefusion=3 patches=1", NO_PROBE),
    Case("pixart sigma", "ulysses=2 cfg=2", NO_PROBE, TAYLOR),
    Case("flux", "ulysses=3 uaa=true", calibrator=TAYLOR),
    Case("flux", "tensor=2"),
    Case(
        "flux",
        "pipefusion=3 patches=2 warmup=99",
        DBCacheConfig(Fn_compute_blocks=2, Bn_compute_blocks=1, max_warmup_steps=2),
    ),
    Case("sd3", "distrifusion=2 warmup=99"),
    Case("sd3.5 medium", "pipefusion=2 patches=1 ulysses=2", PRUNE),
]


def draw(case: Case, threshold: float, plan: str | None) -> tuple[Tensor, list[dict[str, Any]]]:
    """Latents, and what was decided here, alone or on a rank."""
    pipe = MAKE[case.name]()
    make_double(pipe)
    caching.enable_cache(pipe, case.config.reset(residual_diff_threshold=threshold), case.calibrator)
    call = call_of(case.name, num_inference_steps=STEPS, **case.changes)
    runner = pipe if plan is None else parallelize(pipe, Plan.parse(plan))
    latents = runner(**call).images
    return latents, [report.to_dict() for report in caching.summary(pipe, logging=False)]


def safe(case: Case) -> tuple[float, Tensor, list[dict[str, Any]]]:
    """A threshold that leaves steps out and computes others, with no difference near it; and what it gives."""
    for threshold in (0.55, 0.35, 0.7, 0.25, 0.45, 0.9, 0.15, 0.1, 0.05):
        latents, reports = draw(case, threshold, None)
        differences = [d for r in reports for each in r["decisions"] for _, d in each["differences"]]
        skipped = sum(len(each["skipped"]) for r in reports for each in r["decisions"])
        margin = min((abs(d - threshold) for d in differences), default=0.0)
        if skipped and any(d >= threshold for d in differences) and margin > 1e-3:
            return threshold, latents, reports
    raise AssertionError(f"no threshold tells the steps of {case.name} apart")


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*MECHANISMS, *CASES], ids=lambda case: f"{case.name}, {case.plan}, {case.config}")
def test_ranks_skip_what_one_process_skips(pool: Pool, case: Case) -> None:
    """Decisions and latents are those of one process. A failure of decisions means that ranks decided on a part of
    the image, or on another's; of latents alone, that what is remembered belongs to other tokens or rows."""
    threshold, wanted, reports = safe(case)
    plan = Plan.parse(case.plan)
    skipped = {(e["branch"], e["unit"]): e["skipped"] for e in reports[0]["decisions"]}
    seen = set()
    for rank, (latents, found) in enumerate(pool.run(draw, plan.world, case, threshold, case.plan)):
        assert float((latents - wanted).abs().max() / wanted.std()) < TOLERANCE, f"rank {rank}"
        if isinstance(case.config, DBPruneConfig) or plan.data > 1:
            continue
        for each in found[0]["decisions"]:
            key, steps = (each["branch"], each["unit"]), each["skipped"]
            assert steps == skipped[key] or (plan.cfg > 1 and not steps), f"rank {rank}, {key}"
            seen |= {key} if steps else set()
    assert seen or isinstance(case.config, DBPruneConfig) or plan.data > 1


@on_ranks(2)
def test_nothing_is_remembered_while_the_picture_is_decoded() -> None:
    """A failure means that keys of all layers are in memory where it is needed most."""
    pipe, held = MAKE["flux"](), []
    caching.enable_cache(pipe, DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2))
    decode = pipe.vae.decode

    def seen(*args: Any, **kwargs: Any) -> Any:
        alive = [one for one in gc.get_objects() if isinstance(one, KeyStore)]
        held.append((len(alive), find_model_cache(pipe.transformer).memory_bytes))
        return decode(*args, **kwargs)

    pipe.vae.decode = seen
    runner = parallelize(pipe, Plan(pipefusion=2, patches=2))
    runner(**call_of("flux", output_type="pt"))
    assert held == [(0, 0)]
    assert all(report.kept_bytes for report in caching.summary(pipe, logging=False)), "and what it was is still told"


@on_ranks(4)
def test_restore_gives_the_groups_of_caches_back() -> None:
    """A failure means that each runner leaves threads behind, and communicators on GPUs."""
    pipe, groups = MAKE["pixart sigma"](), dist.distributed_c10d._world.pg_map
    caching.enable_cache(pipe, NO_PROBE)
    before = len(groups)
    runner = parallelize(pipe, Plan(pipefusion=2, ulysses=2), keep_weights=True)
    runner(**call_of("pixart sigma"))
    during = len(groups)
    runner.restore()
    assert during > before == len(groups)


@pytest.mark.filterwarnings("ignore")
def test_a_second_transformer_in_the_loop_is_cached_too() -> None:
    """Regression: a runner knew the caches of those models alone that it divides, and another one left out nothing."""
    one, steps = ZOO["ideogram-4"], {"num_inference_steps": 4}
    pipe = one.make()
    ditile.enable_cache(pipe, DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=9.0))
    wanted = pipe(**one.call() | steps)[0]
    runner = parallelize(pipe, Plan(), keep_weights=True)
    assert torch.equal(runner(**one.call() | steps)[0], wanted)
    reports = caching.summary(pipe, logging=False)
    assert [each.decisions[0].skipped for each in reports] == [[1, 2, 3]] * 2


def draw_with_a_probe(wire_dtype: str | None) -> dict[str, int]:
    """On a rank: bytes by kind of a call whose first three blocks, which a probe compares, are of two stages."""
    cache = DBCacheConfig(Fn_compute_blocks=3, max_warmup_steps=1, residual_diff_threshold=0.9)
    pipe = ditile.enable_cache(MAKE["pixart sigma"](), cache_config=cache)
    with divided(pipe, pipefusion=2, patches=2, warmup=1, wire_dtype=wire_dtype) as runner:
        run(runner, "pixart sigma", num_inference_steps=5)
        return dict(runner.mesh.traffic.bytes)


def test_the_input_of_a_probe_is_not_packed(pool: Pool) -> None:
    """A failure: the change of tokens is measured between numbers that were rounded and numbers that were not."""
    exact, packed = (pool.run(draw_with_a_probe, 2, wire_dtype)[0] for wire_dtype in (None, "int8"))
    assert packed["probe"] == exact["probe"] > 0
    assert packed["activations"] < exact["activations"] / 3

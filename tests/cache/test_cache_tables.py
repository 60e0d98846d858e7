"""Caches where tokens are split as a table says: the hooks lie inside the splits, and ranks decide on all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ditile.cache.config import DBCacheConfig, DBPruneConfig
from ditile.plan.plan import Plan
from ditile.runner import caching
from ditile.runner.runner import parallelize
from tests.parallel.sequence.planned import denoising, wan_pipeline
from tests.parallel.sequence.test_tokens import close
from tests.pool import Pool

CONFIG = {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "max_continuous_cached_steps": 2}
STEPS = 7
STATIC = {"steps_computation_mask": (1, 1, 0, 1, 0, 0, 1), "steps_computation_policy": "static"}


def made(name: str) -> tuple[Any, dict[str, Any]]:
    pipe, call = wan_pipeline() if name == "wan 2.2" else denoising(name, 3, 5, 7)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, torch.float64)
    return pipe, _double(call) | {"num_inference_steps": STEPS}


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _double(part) for name, part in value.items()}
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def draw(name: str, config: DBCacheConfig, plan: Plan | None) -> tuple[Tensor, list[Any], list[float]]:
    """Latents, what was left out by every transformer, and all differences."""
    pipe, call = made(name)
    caching.enable_cache(pipe, config)
    runner = pipe if plan is None else parallelize(pipe, plan)
    result = runner(**call, generator=torch.Generator().manual_seed(3))
    reports = caching.summary(pipe, logging=False)
    skipped = [(each.branch, each.skipped) for report in reports for each in report.decisions]
    found = result.frames if hasattr(result, "frames") else result.images
    return found, skipped, [d for report in reports for d in report.differences]


@pytest.mark.parametrize("config", [DBCacheConfig(**CONFIG), DBPruneConfig(**CONFIG)], ids=["dbcache", "dbprune"])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("wan 2.2", "ulysses=2"),
        ("qwen", "ring=2"),
        ("flux2", "ulysses=2"),
        ("lumina2", "ulysses=2"),
        ("ltx", "ulysses=3"),
    ],
)
def test_ranks_skip_what_one_process_skips(pool: Pool, name: str, plan: str, config: DBCacheConfig) -> None:
    """A failure of what was left out means that a rank decided on its own tokens; of latents alone, that what was
    remembered was added to other tokens than it belongs to."""
    if (name, type(config)) == ("flux2", DBCacheConfig):  # its first block changes by more than itself in every step
        config = config.reset(**STATIC)
    static = config.steps_computation_policy == "static"
    for threshold in (0.06, 0.2, 0.03, 0.1, 0.015, 0.45, 0.3, 0.6, 0.8, 0.15, 0.045, 0.02, 0.01, 0.005, 0.95):
        chosen = config.reset(residual_diff_threshold=threshold)
        wanted, expected, differences = draw(name, chosen, None)
        margin = min((abs(d - threshold) / threshold for d in differences), default=float(static))
        mixed = any(steps for _, steps in expected) and (static or any(d > threshold for d in differences))
        if mixed and margin > 1e-3:
            break
    else:
        pytest.fail(f"no threshold tells the steps of {name} apart")
    for rank, (latents, skipped, _) in enumerate(
        pool.run(draw, Plan.parse(plan).world, name, chosen, Plan.parse(plan))
    ):
        assert skipped == expected, f"rank {rank}"
        close(latents, wanted, f"rank {rank}")

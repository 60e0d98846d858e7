"""examples/mini: each method makes what ditile makes, and what one device makes where it is exact."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ditile
from tests.pool import Pool

FOLDER = Path(__file__).parents[2] / "examples" / "mini"
PROMPT = "a large red circle on the left on a gray background"
STEPS = 6
SCHEDULE = FOLDER.parents[1] / "src/ditile/model/assets/schedules/shapes-flux-20.json"
OPTIONS = SimpleNamespace(patches=4, warmup=1, threshold=0.2, computed=10, schedule=str(SCHEDULE))


@contextmanager
def import_mini() -> Iterator[Any]:
    """Import the modules of the example, whose names are short, and forget them afterwards."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    sys.path.insert(0, str(FOLDER))
    try:
        yield __import__("generate")
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


def run_both(method: str, cfg: int, plan: ditile.Plan, cache: Any = None, steps: int = STEPS) -> list[Tensor]:
    """Return the latents of the example, of ditile under a plan, and of one device."""
    pipe = ditile.load("shapes-flux")
    pipe.set_progress_bar_config(disable=True)
    defaults = {**ditile.defaults("shapes-flux"), "num_inference_steps": steps, "output_type": "latent"}

    def generate(call: Any) -> Tensor:
        return call(PROMPT, generator=torch.Generator().manual_seed(0), **defaults).images

    alone = generate(pipe)
    if cache is not None:
        ditile.enable_cache(pipe, cache)
    runner = ditile.parallelize(pipe, plan)
    ours = generate(runner)
    # Stages have freed the weights of the others.
    pipe = ditile.load("shapes-flux")
    with import_mini() as mini:
        size = {"steps": steps, "height": 128, "width": 128, "seed": 0, "text": defaults["max_sequence_length"]}
        request = mini.Request(pipe, PROMPT, "", **size)
        mesh = mini.make_mesh(cfg, plan.world // cfg) if plan.world > 1 else mini.Mesh()
        latents = mini.run_method(pipe, request, method, mesh, defaults["true_cfg_scale"], OPTIONS)
    return [latents, ours, alone]


@pytest.mark.parametrize(
    ("method", "cfg", "plan"),
    [
        ("plain", 2, ditile.Plan(cfg=2)),
        ("ulysses", 1, ditile.Plan(ulysses=2)),
        ("ring", 1, ditile.Plan(ring=2)),
        ("ulysses", 2, ditile.Plan(cfg=2, ulysses=2)),
    ],
    ids=["cfg", "ulysses", "ring", "cfg and ulysses"],
)
def test_an_exact_method_makes_the_image_of_one_device(pool: Pool, method: str, cfg: int, plan: ditile.Plan) -> None:
    for latents, ours, alone in pool.run(run_both, plan.world, method, cfg, plan):
        torch.testing.assert_close(latents, ours, rtol=0, atol=2e-5)
        torch.testing.assert_close(latents, alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("stages", [1, 2])
def test_patches_attend_to_keys_of_the_same_age(pool: Pool, stages: int) -> None:
    plan = ditile.Plan(pipefusion=stages, patches=4, warmup=1)
    # Of the example's stages only the last one has the latents.
    latents, ours, alone = pool.run(run_both, stages, "pipefusion", 1, plan)[-1]
    torch.testing.assert_close(latents, ours, rtol=0, atol=2e-5)
    # Stale keys are seen: what both have in common is more than the plain image.
    assert float((latents - alone).abs().max()) > 1e-3


DBCACHE = ditile.DBCacheConfig(
    Fn_compute_blocks=1, residual_diff_threshold=OPTIONS.threshold, max_warmup_steps=OPTIONS.warmup
)


@pytest.mark.parametrize(
    ("method", "config", "steps"),
    [("dbcache", DBCACHE, STEPS), ("fitted", ditile.FittedScheduleConfig(steps=OPTIONS.computed), 20)],
    ids=["dbcache", "fitted"],
)
def test_work_is_left_out_in_the_same_steps(pool: Pool, method: str, config: Any, steps: int) -> None:
    ((latents, ours, alone),) = pool.run(run_both, 1, method, 1, ditile.Plan(), config, steps)
    torch.testing.assert_close(latents, ours, rtol=0, atol=2e-5)
    assert float((latents - alone).abs().max()) > 1e-3

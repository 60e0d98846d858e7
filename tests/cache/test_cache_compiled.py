"""Caches and torch.compile: a block is one graph whatever is left out, and the hooks around it are in none."""

from __future__ import annotations

import pytest
import torch

from ditile.cache.config import DBCacheConfig
from ditile.plan.plan import Plan
from ditile.runner import caching
from ditile.runner.runner import parallelize
from tests.model.hooks.compiling import MAKE, WAYS, Counting
from tests.runner.cases import run, same

CONFIG = DBCacheConfig(
    Fn_compute_blocks=1, max_warmup_steps=2, residual_diff_threshold=0.5, steps_computation_policy="static",
    steps_computation_mask=(1, 1, 0, 1, 0, 1),
)  # fmt: skip
STEPS = {"num_inference_steps": 6}
MOST = 6
"""Graphs of a class of blocks under PipeFusion; 4 without."""


@pytest.mark.parametrize(
    ("way", "order", "patches"),
    [
        ("whole", "compiled first", 1),
        ("in place", "compiled first", 3),
        ("blocks", "cached first", 1),
        ("blocks", "compiled first", 3),
        ("whole", "cached first", 3),
        ("in place", "cached first", 1),
    ],
)
def test_compiled_and_cached_equal_cached(way: str, order: str, patches: int) -> None:
    """The picture is that of the cache alone, steps were left out, and the second picture makes no graph.

    A failure of equality means that dynamo traced a hook, so that what it decided once was taken for ever; of the
    second picture, that a step, patch or decision was guarded.
    """
    name = "pixart sigma" if way == "in place" else "flux"
    plan = Plan(patches=patches, warmup=1)
    pipe = MAKE[name]()
    caching.enable_cache(pipe, CONFIG)
    wanted = run(pipe if patches == 1 else parallelize(pipe, plan), name, **STEPS)
    torch._dynamo.reset()
    pipe, count = MAKE[name](), Counting()
    steps = [lambda: WAYS[way](pipe, backend=count), lambda: caching.enable_cache(pipe, CONFIG)]
    for step in steps if order == "compiled first" else reversed(steps):
        step()
    runner = pipe if patches == 1 else parallelize(pipe, plan)
    same(run(runner, name, **STEPS), wanted, way)
    assert all(caching.summary(pipe, logging=False)[0].decisions[0].skipped), "nothing was left out"
    graphs = count.take()
    assert graphs and max(graphs.values()) <= (4 if patches == 1 else MOST), graphs
    same(run(runner, name, **STEPS), wanted, way)
    assert not count.take()
    caching.disable_cache(pipe)

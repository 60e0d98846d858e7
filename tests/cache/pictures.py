"""What tests of caches on pipelines have in common: settings that cache all they may, drawing, and what was cached."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import ditile
from ditile import DBCacheConfig, DBPruneConfig
from ditile.runner import caching
from tests.runner.cases import different, run, same


class Settings(NamedTuple):
    """Settings that cache whatever they may (`exact`: measure each step and cache none), the steps that they cache, and
    what draws a picture of a pipeline of `MAKE`: (pipe, name, **changes of the call)."""

    cache: DBCacheConfig
    exact: DBCacheConfig
    prune: DBPruneConfig
    rest: list[int]
    draw: Callable[..., Any]


def settings_for(steps: int, spare: int) -> Settings:
    """Of pictures of so many steps, of which the first `spare` compute."""
    how: dict[str, Any] = {"Fn_compute_blocks": 1, "max_warmup_steps": spare, "residual_diff_threshold": 1.0}
    exact = DBCacheConfig(**how | {"residual_diff_threshold": 1e-12})
    draw = partial(run, num_inference_steps=steps)
    return Settings(DBCacheConfig(**how), exact, DBPruneConfig(**how), list(range(spare, steps)), draw)


def draw_plain_and_cached(pipe: Any, settings: Settings, picture: Callable[[], Any]) -> tuple[Any, Any]:
    """A picture without a cache, and with one, which stays on; a cache that caches no step changes nothing."""
    plain = picture()
    ditile.enable_cache(pipe, settings.exact)
    same(picture(), plain, "no step is cached")
    ditile.enable_cache(pipe, settings.cache)
    cached = picture()
    different(cached, plain)
    return plain, cached


def skipped(target: Any) -> list[list[int]]:
    """The steps that were cached, of each context and branch (and block)."""
    return [each.skipped for report in caching.summary(target, logging=False) for each in report.decisions]


def live() -> set[int]:
    """All tensors."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}

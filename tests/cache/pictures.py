"""What tests of caches on pipelines have in common: settings that cache all they may, drawing, and what was cached."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ditile
from ditile.cache.config import Calibration, DBCacheConfig, DBPruneConfig
from ditile.model.block_table import read_transformer_table
from ditile.runner import caching
from tests.families import EVERY
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


REFUSED = {name for name, entry in read_transformer_table().items() if entry.refusal}
RUN = [name for name, family in EVERY.items() if family.inputs and name not in REFUSED]
Moves = Sequence[tuple[int, float]]
MOVES: Moves = ((0, 1.0), (0, 1.02), (1, 1.0), (1, 1.02), (2, 1.0))
"""The input of each step: which, and times what."""
STEPS = len(MOVES)


def moved(inputs: dict[str, Any], which: int, times: float) -> dict[str, Any]:
    """The same call with another noisy input: the first of its arguments with numbers."""
    for name, value in inputs.items():
        if isinstance(value, list) and value or (isinstance(value, Tensor) and value.is_floating_point()):
            each = value if isinstance(value, list) else [value]
            now = [x.flatten(1).roll(7 * which, -1).view_as(x) * (-times if which == 1 else times) for x in each]
            return inputs | {name: now if isinstance(value, list) else now[0]}
    raise AssertionError("nothing to move")


def calls(name: str, moves: Moves = MOVES) -> Iterator[dict[str, Any]]:
    """The arguments of each step."""
    inputs = EVERY[name].inputs
    assert inputs is not None
    return (moved(inputs(), *move) for move in moves)


def tensors(out: Any) -> list[Tensor]:
    """All that a model returns."""
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@torch.no_grad()
def outputs(name: str, model: Callable[..., Any], moves: Moves = MOVES) -> list[list[Tensor]]:
    """What each step returns."""
    return [tensors(model(**call)) for call in calls(name, moves)]


def enable(model: Any, config: DBCacheConfig, calibrator: Calibration | None = None) -> Any:
    return caching.enable_cache(
        model, config.reset(num_inference_steps=config.num_inference_steps or STEPS), calibrator
    )


def untouched(model: nn.Module) -> None:
    """Nothing of a cache is left on any module."""
    for path, module in model.named_modules():
        left = [key for key in vars(module) if key == "forward" or "ditile" in key]
        assert not left, f"{path}: {left}"

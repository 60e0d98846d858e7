"""One line that makes a pipeline do less: enable_cache, disable_cache, refresh_context, summary.

    ditile.enable_cache(pipe)
    image = pipe(prompt).images[0]
    ditile.summary(pipe)
    ditile.disable_cache(pipe)

The pipeline stays what it is: a cache lies on the instances that it was given and is gone when it is disabled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from torch import nn

from ditile.errors import ModelError, StateError
from ditile.models.block_lists import block_lists
from ditile.models.source import inner
from ditile.steps.build import cached_transformer
from ditile.steps.cached import Cached, cached
from ditile.steps.clock import CallClock, SchedulerClock
from ditile.steps.config import Calibration, DBCacheConfig, ParamsModifier
from ditile.steps.report import ContextReport, table
from ditile.transport import gather_json

TRANSFORMERS = ("transformer", "transformer_2", "prior")
"""The components of a pipeline whose blocks may be left out."""


def enable_cache(
    target: Any,
    cache_config: DBCacheConfig | None = None,
    calibrator_config: Calibration | None = None,
    params_modifiers: Sequence[ParamsModifier] | ParamsModifier | None = None,
) -> Any:
    """Leaves out blocks whose work hardly changed since the last step that was computed (DBCache, DBPrune).

    Args:
        target: a pipeline, a runner, or a transformer. One that has a cache gets the new one in its place.
        cache_config: when, and which blocks; by default `default_config` for the number of blocks.
        calibrator_config: forecasts what was left out; None takes what was computed last.
        params_modifiers: what is different in some lists of blocks.

    Returns:
        The target.

    Raises:
        ModelError: if the blocks are not known and cannot be found, or a setting does not fit them.
    """
    pipe = getattr(target, "pipe", target)
    modifiers = [params_modifiers] if isinstance(params_modifiers, ParamsModifier) else list(params_modifiers or [])
    transformers = _transformers(pipe)
    if not transformers:
        raise ModelError(f"{type(pipe).__name__} has no transformer whose blocks could be left out")
    made = []
    for transformer in transformers:
        lists = block_lists(transformer)
        config = cache_config or default_config(sum(len(found.blocks) for found in lists))
        made.append(cached_transformer(transformer, lists, config, calibrator_config, modifiers))
    disable_cache(pipe)

    def begun(steps: int) -> None:
        for each in made:
            each.begin(steps)

    def ended() -> None:
        for each in made:
            each.end()

    steps = None if cache_config is None else cache_config.num_inference_steps
    clock = CallClock(begun, ended, steps) if isinstance(pipe, nn.Module) else SchedulerClock(pipe, begun, ended)
    clock.install()
    for each in made:
        each.install(clock)
    return target


def default_config(blocks: int) -> DBCacheConfig:
    """What `enable_cache` takes where nothing was said, for so many blocks."""
    return DBCacheConfig(Fn_compute_blocks=max(1, round(blocks / 8)))


def disable_cache(target: Any) -> Any:
    """Takes the cache away; the pipeline is bit for bit what it was. Returns the target."""
    for each in _caches(target):
        each.remove()
    return target


def refresh_context(target: Any, num_inference_steps: int) -> None:
    """A transformer without a pipeline is about to be called for so many steps, for a new picture.

    Raises:
        StateError: if it has no cache.
    """
    caches = list(_caches(target))
    if not caches:
        raise StateError(f"{type(target).__name__} has no cache; call ditile.enable_cache first")
    for each in caches:
        each.refresh(num_inference_steps)


def summary(target: Any, details: bool = False, logging: bool = True) -> list[ContextReport]:
    """What was left out in the last generation, one report for each context (of a runner: and stage).

    Args:
        target: what `enable_cache` was given, or a runner, whose ranks must all call it.
        details: print each image, branch and patch, with percentiles of the differences.
        logging: print a table; a runner does on rank 0 alone.

    Raises:
        StateError: if it has no cache.
    """
    caches = list(_caches(target))
    if not caches:
        raise StateError(f"{type(target).__name__} has no cache; call ditile.enable_cache first")
    reports = [ContextReport.of(trace, each.kept_bytes) for each in caches for trace in each.traces]
    if hasattr(target, "mesh"):
        mesh = target.mesh
        mine = [replace(report, stage=mesh.stage).to_dict() for report in reports]
        everyone = gather_json([mine, mesh.stage], mesh.everyone)
        seen: dict[int, Any] = {}
        for of_rank, stage in everyone:
            seen.setdefault(stage, of_rank)
        reports = [ContextReport.from_dict(found) for _, of_rank in sorted(seen.items()) for found in of_rank]
        logging = logging and mesh.rank == 0
    if logging:
        Console().print(table(reports, details=details))
    return reports


def _transformers(pipe: Any) -> list[nn.Module]:
    if isinstance(pipe, nn.Module):
        return [inner(pipe)]
    found = (getattr(pipe, name, None) for name in TRANSFORMERS)
    return [inner(model) for model in found if isinstance(model, nn.Module)]


def _caches(target: Any) -> Iterator[Cached]:
    for transformer in _transformers(getattr(target, "pipe", target)):
        if (found := cached(transformer)) is not None:
            yield found

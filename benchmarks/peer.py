"""cache-dit, with which ditile's caches are compared. It is not a dependency: this module alone imports it, if there.

pip install cache-dit==1.5.3
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import Any

from torch import nn

from ditile.cache.config import Calibration, DBCacheConfig, FoCaCalibratorConfig, TaylorSeerCalibratorConfig
from ditile.plan.errors import ModelError


def is_installed() -> bool:
    """Whether there is a cache-dit to measure."""
    return importlib.util.find_spec("cache_dit") is not None


def cache_dit() -> ModuleType:
    """The module, quiet.

    Raises:
        ModelError: if it is not installed.
    """
    if not is_installed():
        raise ModelError("cache-dit is not installed, and is measured only where it is; pip install cache-dit==1.5.3")
    module = importlib.import_module("cache_dit")
    for name in list(logging.root.manager.loggerDict):
        if name.lower().startswith("cache_dit"):
            logging.getLogger(name).setLevel(logging.ERROR)
    return module


def config_of(ours: DBCacheConfig, *, separate: bool | None = None) -> Any:
    """cache-dit's config, with the fields of a config of ditile that are not at ditile's defaults.

    Raises:
        ModelError: if a field was set that cache-dit does not have.
    """
    cls = cache_dit().DBCacheConfig
    known = {field.name for field in dataclasses.fields(cls)}
    plain = DBCacheConfig()
    given = {f.name: getattr(ours, f.name) for f in dataclasses.fields(DBCacheConfig)}
    set_here = {name: value for name, value in given.items() if value != getattr(plain, name)}
    if missing := sorted(set(set_here) - known):
        raise ModelError(f"cache-dit has no {', '.join(missing)}")
    if isinstance(mask := set_here.get("steps_computation_mask"), tuple):
        set_here["steps_computation_mask"] = list(mask)
    return cls(**set_here, enable_separate_cfg=separate)


def calibrator_of(ours: Calibration | None) -> Any:
    """cache-dit's calibrator of the same kind."""
    module = cache_dit()
    if ours is None:
        return None
    if isinstance(ours, TaylorSeerCalibratorConfig):
        return module.TaylorSeerCalibratorConfig(taylorseer_order=ours.taylorseer_order)
    if isinstance(ours, FoCaCalibratorConfig):
        return module.FoCaCalibratorConfig()
    return module.DMDCalibratorConfig()


def enable_on_transformer(transformer: nn.Module, blocks: nn.ModuleList, config: DBCacheConfig, steps: int) -> None:
    """Caches a transformer of two streams without a pipeline, for one generation of so many steps."""
    module = cache_dit()
    adapter = module.BlockAdapter(
        transformer=transformer, blocks=blocks, forward_pattern=module.ForwardPattern.Pattern_0, has_separate_cfg=False
    )
    module.enable_cache(adapter, cache_config=config_of(config))
    module.refresh_context(transformer, num_inference_steps=steps)


def keep_apart(pipe: Any) -> None:
    """Gives a pipeline and its transformer classes of their own, of the same names: cache-dit patches classes."""
    for each in (pipe, pipe.transformer):
        cls = type(each)
        each.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})


def enable_for(pipe: Any, config: DBCacheConfig, calibrator: Calibration | None, steps: int, separate: bool) -> None:
    """Caches a pipeline for which `keep_apart` was called.

    Args:
        separate: whether a step has a call of the transformer for each branch of guidance.
    """
    module = cache_dit()
    if isinstance(config.steps_computation_mask, str):
        mask = module.steps_mask(mask_policy=config.steps_computation_mask, total_steps=steps)
        config = config.reset(steps_computation_mask=tuple(mask))
    module.enable_cache(
        pipe, cache_config=config_of(config, separate=separate), calibrator_config=calibrator_of(calibrator)
    )


def left_out(pipe: Any) -> float:
    """Cached steps of the last picture, a mean over branches."""
    of_branches = [
        steps
        for found in cache_dit().summary(pipe, logging=False)
        for steps in (found.cached_steps, found.cfg_cached_steps)
        if found.residual_diffs or steps
    ]
    counts = [len(steps) for steps in of_branches if steps] or [0]
    return sum(counts) / len(counts)


def blocks_of(pipe: Any) -> list[nn.ModuleList]:
    """The lists of blocks of a transformer."""
    return [child for child in pipe.transformer.children() if isinstance(child, nn.ModuleList)]

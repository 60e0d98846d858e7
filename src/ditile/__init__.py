"""ditile: diffusion transformers over many devices, with images that look the same.

Importing this package does not import torch: names that need it are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ditile.distributed import env
from ditile.distributed.launch import launch
from ditile.plan.errors import (
    DitileError,
    JoinError,
    LoadError,
    ModelError,
    PlanError,
    RankError,
    StateError,
    StoppedError,
)
from ditile.plan.plan import Plan
from ditile.plan.version import __version__
from ditile.runner.model_files import defaults

if TYPE_CHECKING:
    from ditile.cache.cache_dit import ParallelismBackend, ParallelismConfig, QuantizeConfig
    from ditile.cache.cached import IdleCacheWarning
    from ditile.cache.config import (
        BasicCacheConfig,
        CalibratorConfig,
        DBCacheConfig,
        DBPruneConfig,
        DMDCalibratorConfig,
        FittedScheduleConfig,
        FoCaCalibratorConfig,
        ParamsModifier,
        TaylorSeerCalibratorConfig,
    )
    from ditile.cache.config_text import (
        load_attn_backend_config,
        load_cache_config,
        load_configs,
        load_parallelism_config,
        load_quantize_config,
    )
    from ditile.cache.fitted.schedule import Schedule
    from ditile.cache.methods.easycache import EasyCacheConfig
    from ditile.cache.methods.gating import GuidanceGateConfig
    from ditile.cache.methods.magcache import MagCacheConfig
    from ditile.cache.methods.seacache import SeaCacheConfig
    from ditile.cache.methods.spectrum import SpectrumConfig
    from ditile.cache.step_mask import steps_mask
    from ditile.model.adapter import (
        BlockAdapter,
        ForwardPattern,
        PatchFunctor,
        Pattern_0,
        Pattern_1,
        Pattern_2,
        Pattern_3,
        Pattern_4,
        Pattern_5,
    )
    from ditile.model.block_lists import supported_pipelines
    from ditile.model.hooks.compile import set_compile_configs
    from ditile.planner.choose import plan_for
    from ditile.runner.caching import disable_cache, enable_cache, refresh_context, strify, summary
    from ditile.runner.callbacks import StepWatch
    from ditile.runner.diffusers_configs import enable_parallelism
    from ditile.runner.load import load
    from ditile.runner.lora import load_lora
    from ditile.runner.report import Report
    from ditile.runner.runner import Runner, parallelize
    from ditile.runner.weights.quantize import quantize

__all__ = [
    "BasicCacheConfig", "BlockAdapter", "CalibratorConfig", "DBCacheConfig", "DBPruneConfig",
    "DMDCalibratorConfig", "DitileError", "EasyCacheConfig", "FittedScheduleConfig", "FoCaCalibratorConfig",
    "ForwardPattern", "GuidanceGateConfig", "IdleCacheWarning", "JoinError", "LoadError", "MagCacheConfig",
    "ModelError", "ParallelismBackend", "ParallelismConfig", "ParamsModifier", "PatchFunctor",
    "Pattern_0", "Pattern_1", "Pattern_2", "Pattern_3", "Pattern_4", "Pattern_5", "Plan", "PlanError",
    "QuantizeConfig", "RankError", "Report", "Runner", "Schedule", "SeaCacheConfig", "SpectrumConfig", "StateError",
    "StepWatch", "StoppedError", "TaylorSeerCalibratorConfig",
    "__version__", "defaults", "disable_cache", "enable_cache", "enable_parallelism", "launch", "load",
    "load_attn_backend_config", "load_cache_config", "load_configs", "load_lora", "load_parallelism_config",
    "load_quantize_config", "parallelize", "plan_for", "quantize", "refresh_context", "set_compile_configs",
    "steps_mask", "strify", "summary", "supported_pipelines",
]  # fmt: skip

_LAZY = {
    name: module
    for module, names in {
        "ditile.cache.cache_dit": "ParallelismBackend ParallelismConfig QuantizeConfig",
        "ditile.cache.cached": "IdleCacheWarning",
        "ditile.cache.config": (
            "BasicCacheConfig CalibratorConfig DBCacheConfig DBPruneConfig DMDCalibratorConfig FittedScheduleConfig "
            "FoCaCalibratorConfig ParamsModifier TaylorSeerCalibratorConfig"
        ),
        "ditile.cache.config_text": (
            "load_attn_backend_config load_cache_config load_configs load_parallelism_config load_quantize_config"
        ),
        "ditile.cache.fitted.schedule": "Schedule",
        "ditile.cache.methods.easycache": "EasyCacheConfig",
        "ditile.cache.methods.gating": "GuidanceGateConfig",
        "ditile.cache.methods.magcache": "MagCacheConfig",
        "ditile.cache.methods.seacache": "SeaCacheConfig",
        "ditile.cache.methods.spectrum": "SpectrumConfig",
        "ditile.cache.step_mask": "steps_mask",
        "ditile.model.hooks.compile": "set_compile_configs",
        "ditile.model.adapter": (
            "BlockAdapter ForwardPattern PatchFunctor Pattern_0 Pattern_1 Pattern_2 Pattern_3 Pattern_4 Pattern_5"
        ),
        "ditile.model.block_lists": "supported_pipelines",
        "ditile.planner.choose": "plan_for",
        "ditile.runner.caching": "disable_cache enable_cache refresh_context strify summary",
        "ditile.runner.callbacks": "StepWatch",
        "ditile.runner.diffusers_configs": "enable_parallelism",
        "ditile.runner.load": "load",
        "ditile.runner.lora": "load_lora",
        "ditile.runner.weights.quantize": "quantize",
        "ditile.runner.report": "Report",
        "ditile.runner.runner": "Runner parallelize",
    }.items()
    for name in names.split()
}

# A script may import diffusers itself, which imports torchao.
env.drop_import_complaints()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from ditile.cache.cache_dit import INSTEAD

        hint = ""
        if name in INSTEAD:
            hint = f", a name of cache-dit; use {INSTEAD[name]}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__

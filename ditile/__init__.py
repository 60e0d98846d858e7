"""ditile: diffusion transformers over many devices, unchanged to the eye.

Importing this package does not import torch: what needs it is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ditile.errors import DitileError, JoinError, LoadError, ModelError, PlanError, RankError, StateError

# Two functions share their module's name. Python binds a submodule to its package when it is first imported, which is
# here, and these lines then bind the function: whoever imports the module later finds the function in its place.
from ditile.launch import launch
from ditile.load import load
from ditile.plan import Plan

if TYPE_CHECKING:
    from ditile.answer import plan_for
    from ditile.caching import disable_cache, enable_cache, refresh_context, strify, summary
    from ditile.compile_configs import set_compile_configs
    from ditile.lora import load_lora
    from ditile.models import ModelSpec, register
    from ditile.models.adapter import BlockAdapter, PatchFunctor
    from ditile.models.block_lists import supported_pipelines
    from ditile.models.patterns import ForwardPattern
    from ditile.quantization import quantize
    from ditile.report import Report
    from ditile.runner import Runner, parallelize
    from ditile.steps.cached import IdleCacheWarning
    from ditile.steps.config import (
        DBCacheConfig,
        DBPruneConfig,
        DMDCalibratorConfig,
        FoCaCalibratorConfig,
        ParamsModifier,
        TaylorSeerCalibratorConfig,
    )
    from ditile.steps.config_file import load_configs
    from ditile.steps.parallelism import ParallelismConfig
    from ditile.steps.step_mask import steps_mask

__version__ = "0.1.0"

__all__ = [
    "BlockAdapter",
    "DBCacheConfig",
    "DBPruneConfig",
    "DMDCalibratorConfig",
    "DitileError",
    "FoCaCalibratorConfig",
    "ForwardPattern",
    "IdleCacheWarning",
    "JoinError",
    "LoadError",
    "ModelError",
    "ModelSpec",
    "ParallelismConfig",
    "ParamsModifier",
    "PatchFunctor",
    "Plan",
    "PlanError",
    "RankError",
    "Report",
    "Runner",
    "StateError",
    "TaylorSeerCalibratorConfig",
    "__version__",
    "disable_cache",
    "enable_cache",
    "launch",
    "load",
    "load_configs",
    "load_lora",
    "parallelize",
    "plan_for",
    "quantize",
    "refresh_context",
    "register",
    "set_compile_configs",
    "steps_mask",
    "strify",
    "summary",
    "supported_pipelines",
]

_LAZY = {
    "BlockAdapter": "ditile.models.adapter",
    "DBCacheConfig": "ditile.steps.config",
    "DBPruneConfig": "ditile.steps.config",
    "DMDCalibratorConfig": "ditile.steps.config",
    "FoCaCalibratorConfig": "ditile.steps.config",
    "ForwardPattern": "ditile.models.patterns",
    "IdleCacheWarning": "ditile.steps.cached",
    "ModelSpec": "ditile.models",
    "ParallelismConfig": "ditile.steps.parallelism",
    "ParamsModifier": "ditile.steps.config",
    "PatchFunctor": "ditile.models.adapter",
    "Report": "ditile.report",
    "Runner": "ditile.runner",
    "TaylorSeerCalibratorConfig": "ditile.steps.config",
    "disable_cache": "ditile.caching",
    "enable_cache": "ditile.caching",
    "load_configs": "ditile.steps.config_file",
    "load_lora": "ditile.lora",
    "parallelize": "ditile.runner",
    "plan_for": "ditile.answer",
    "quantize": "ditile.quantization",
    "refresh_context": "ditile.caching",
    "register": "ditile.models",
    "set_compile_configs": "ditile.compile_configs",
    "steps_mask": "ditile.steps.step_mask",
    "strify": "ditile.caching",
    "summary": "ditile.caching",
    "supported_pipelines": "ditile.models.block_lists",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__

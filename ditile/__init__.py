"""ditile: diffusion transformers over many devices, unchanged to the eye.

Importing this package does not import torch: what needs it is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ditile.errors import DitileError, LoadError, ModelError, PlanError, RankError, StateError

# Two functions share their module's name. Python binds a submodule to its package when it is first imported, which is
# here, and these lines then bind the function: whoever imports the module later finds the function in its place.
from ditile.launch import launch
from ditile.load import load
from ditile.plan import Plan

if TYPE_CHECKING:
    from ditile.compile_configs import set_compile_configs
    from ditile.lora import load_lora
    from ditile.models import ModelSpec, register
    from ditile.runner import Runner, parallelize
    from ditile.weights.quantize import quantize

__version__ = "0.1.0"

__all__ = [
    "DitileError",
    "LoadError",
    "ModelError",
    "ModelSpec",
    "Plan",
    "PlanError",
    "RankError",
    "Runner",
    "StateError",
    "__version__",
    "launch",
    "load",
    "load_lora",
    "parallelize",
    "quantize",
    "register",
    "set_compile_configs",
]

_LAZY = {
    "ModelSpec": "ditile.models",
    "Runner": "ditile.runner",
    "load_lora": "ditile.lora",
    "parallelize": "ditile.runner",
    "quantize": "ditile.weights.quantize",
    "register": "ditile.models",
    "set_compile_configs": "ditile.compile_configs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__

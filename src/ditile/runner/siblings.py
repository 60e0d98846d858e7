"""Pipelines of several classes on one model, such as the text-to-image and the image-to-image pipelines of FLUX.

diffusers' `from_pipe` makes such pipelines too, but converts all modules to one dtype, float32 by default, and leaves
out unsuitable components with a warning. Here modules stay unchanged, and unsuitable ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.pipeline_calls import find_denoisers
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments


def build_sibling_pipeline(kind: type[Any], pipe: Any, components: Mapping[str, Any]) -> Any:
    """Build a pipeline of another class on the same modules, without changing them.

    Args:
        pipe: the pipeline with the settings to copy.
        components: the available components, by name.

    Raises:
        ModelError: if the class is not a pipeline, needs a missing component, or calls other models in its loop.
    """
    if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
        raise ModelError(f"{kind!r} is not a class of pipelines; give one of diffusers, such as FluxImg2ImgPipeline")
    builder: Any = kind
    name = kind.__name__
    needed, settings = builder._get_signature_keys(builder)
    types = builder._get_signature_types()
    shared = {key: components[key] for key in needed if key in components}
    for key, part in shared.items():
        allowed = tuple(cls for cls in types.get(key, ()) if isinstance(cls, type) and issubclass(cls, nn.Module))
        if isinstance(part, nn.Module) and allowed and not isinstance(unwrap_compiled(part), allowed):
            names = " or ".join(cls.__name__ for cls in allowed)
            raise ModelError(f"{name} takes {names} for its {key}, and there is {type(unwrap_compiled(part)).__name__}")
    arguments: CallArguments = dict.fromkeys(set(needed) & set(builder._optional_components))
    arguments |= {key: pipe.config[key] for key in settings if key in pipe.config} | shared
    missing = sorted(set(needed) - arguments.keys())
    if missing:
        raise ModelError(f"{name} needs {' and '.join(missing)}, which {type(pipe).__name__} has not; load that class")
    sibling = builder(**arguments)
    sibling.register_to_config(_name_or_path=pipe.config.get("_name_or_path"))
    share_settings(pipe, sibling, shared)
    models = find_denoisers(pipe)
    models_of_sibling = find_denoisers(sibling)
    if models != models_of_sibling:
        unlike = {model_name for model_name, _ in models.items() ^ models_of_sibling.items()}
        raise ModelError(
            f"{name} and {type(pipe).__name__} do not call the same models ({min(unlike)}); load {name} instead"
        )
    return sibling


def share_settings(pipe: Any, sibling: Any, components: Mapping[str, Any]) -> None:
    """Give a sibling the present parts and progress bar of a pipeline."""
    for name, part in components.items():
        if name in sibling.components and getattr(sibling, name, None) is not part:
            sibling.register_modules(**{name: part})
    if hasattr(pipe, "_progress_bar_config"):
        sibling.set_progress_bar_config(**pipe._progress_bar_config)

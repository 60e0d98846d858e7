"""Pipelines of several classes on one model, such as the text-to-image and the image-to-image pipelines of FLUX.

diffusers' `from_pipe` makes such pipelines too, but converts all modules to one dtype, float32 unless it is told, and
leaves out what does not fit with a warning. Here modules stay as they are, and what does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.pipeline_calls import find_denoisers
from ditile.plan.errors import ModelError


def build_sibling_pipeline(kind: type[Any], pipe: Any, components: Mapping[str, Any]) -> Any:
    """A pipeline of another class on the same modules, which stay as they are.

    Args:
        kind: the class.
        pipe: the pipeline whose settings it gets.
        components: what it may consist of, by name.

    Raises:
        ModelError: if the class is none of pipelines, needs what is not there, or calls other models in its loop.
    """
    if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
        raise ModelError(f"{kind!r} is no class of pipelines; give one of diffusers, such as FluxImg2ImgPipeline")
    builder: Any = kind
    needed, settings = builder._get_signature_keys(builder)
    types = builder._get_signature_types()
    name = kind.__name__
    given = {each: components[each] for each in needed if each in components}
    lacking = sorted(set(needed) - set(given) - set(settings) - set(builder._optional_components))
    if lacking:
        raise ModelError(f"{name} needs {' and '.join(lacking)}, which {type(pipe).__name__} has not; load that class")
    for each, part in given.items():
        _check_part_type(name, each, part, types.get(each, ()))
    absent = dict.fromkeys(set(needed) - set(given) - set(settings))
    config = {each: pipe.config[each] for each in settings if each in pipe.config and each not in given}
    sibling = builder(**absent, **given, **config)
    sibling.register_to_config(_name_or_path=pipe.config.get("_name_or_path"))
    share_settings(pipe, sibling, given)
    mine = find_denoisers(pipe)
    theirs = find_denoisers(sibling)
    if mine != theirs:
        odd = sorted(mine.items() ^ theirs.items(), key=lambda item: item[0])[0][0]
        raise ModelError(f"{name} and {type(pipe).__name__} do not call the same models ({odd}); load {name} instead")
    return sibling


def share_settings(pipe: Any, sibling: Any, components: Mapping[str, Any]) -> None:
    """Gives a pipeline the parts and the progress bar that another has now."""
    changed = {name: part for name, part in components.items() if getattr(sibling, name, None) is not part}
    sibling.register_modules(**{name: part for name, part in changed.items() if name in sibling.components})
    if hasattr(pipe, "_progress_bar_config"):
        sibling.set_progress_bar_config(**pipe._progress_bar_config)


def _check_part_type(name: str, part_name: str, part: Any, types: tuple[Any, ...]) -> None:
    """Raises `ModelError` if the class of a model is not one that a pipeline's signature names."""
    model = unwrap_compiled(part) if isinstance(part, nn.Module) else part
    wanted = [each for each in types if isinstance(each, type) and issubclass(each, nn.Module)]
    if isinstance(model, nn.Module) and wanted and not isinstance(model, tuple(wanted)):
        known = " or ".join(each.__name__ for each in wanted)
        raise ModelError(f"{name} takes {known} for its {part_name}, and there is {type(model).__name__}")

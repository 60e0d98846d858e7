"""Chooses the class of pipelines that runs a request: the model's own, or another of its family for the same weights.

diffusers has a class for each task of a family, such as FluxPipeline, FluxImg2ImgPipeline and
FluxControlNetInpaintPipeline. Their names differ only in the words of the task. `read_call_conditions` reads what each
class takes; `JOINING` lists what only its source says. Nothing here imports torch by itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Any

from ditile.plan.errors import ModelError
from ditile.plan.flag_parser import format_flag
from ditile.plan.option_classes import JsonObject
from ditile.runner.requests.conditions import ARGUMENTS, read_call_conditions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import name_pipeline

JOINING = frozenset(
    {
        "ChronoEditPipeline",
        "CogVideoXFunControlPipeline",
        "CogVideoXImageToVideoPipeline",
        "HunyuanSkyreelsImageToVideoPipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "HunyuanVideo15Pipeline",
        "Kandinsky6SRPipeline",
        "LucyEditPipeline",
        "MotifVideoImage2VideoPipeline",
        "MotifVideoPipeline",
        "SkyReelsV2ImageToVideoPipeline",
        "WanAnimatePipeline",
        "WanImageToVideoPipeline",
    }
)
"""Classes of videos whose call joins a condition to the channels of the latents: their transformers have more input
channels, so that other weights of the family do not work there. A test compares this with their source."""
_NOT_JOINING_IF = "expand_timesteps"
"""The switch of a pipeline's config with which WanImageToVideoPipeline joins nothing."""
_TASK = re.compile("ControlNet|Condition|Img2Img|ImageToVideo|Image2Video|VideoToVideo|Inpaint(ing)?")
"""The words of a task in the name of a class."""


def choose_pipeline_class(
    pipeline: Any, conditions: Collection[str], config: JsonObject, *, has_controlnet: bool = False
) -> Any:
    """Choose the class that runs with some conditions: this one if it takes them, otherwise one of its family.

    Args:
        pipeline: the model's own class; or a modular pipeline, which has no relatives.
        conditions: what the call starts from.
        config: the config of its pipeline, as in model_index.json.
        has_controlnet: whether there is a ControlNet in addition to the model's own parts.

    Raises:
        ModelError: if diffusers has no such class for the same models.
    """
    if not conditions:
        return pipeline
    candidates = []
    for cls in (pipeline, *_list_relatives(pipeline)):
        takes_all = set(conditions) <= read_call_conditions(cls).arguments.keys()
        # A class that joins channels calls a transformer with more input channels.
        shares_weights = cls is pipeline or not _joins_channels(cls, config) or _joins_channels(pipeline, config)
        if takes_all and shares_weights and _has_parts(cls, pipeline, has_controlnet):
            candidates.append(cls)
    if not candidates:
        flags = _join_flags(conditions)
        refusal = f"{name_pipeline(pipeline)} takes no {flags}, nor does a class that works with its weights"
        if not has_controlnet and find_pipeline_class_for(pipeline, conditions, config, has_controlnet=True):
            refusal += "; add --controlnet FOLDER"
        raise ModelError(refusal)

    def rank_class(cls: Any) -> tuple[bool, bool, int, str]:
        taken = read_call_conditions(cls)
        lacks_some = not set(taken.needed) <= set(conditions)
        return lacks_some, cls is not pipeline, len(taken.arguments), name_pipeline(cls)

    best = min(candidates, key=rank_class)
    missing = [name for name in read_call_conditions(best).needed if name not in conditions]
    # The model's own class reports by itself what it lacks.
    if missing and best is not pipeline:
        raise ModelError(f"{best.__name__}, which takes {_join_flags(conditions)}, needs {_join_flags(missing)} too")
    return best


def choose_requested_class(request: GenerateOptions) -> tuple[Any, JsonObject]:
    """Choose the class that runs a request by the files of its model, and return the config in these files too.

    Returns:
        None for the class if the model's files name no pipeline of diffusers.

    Raises:
        LoadError, ModelError: if the files cannot be read, or no class takes the conditions.
    """
    from ditile.runner.load import find_pipeline_kind, read_model_index
    from ditile.runner.model_files import find_model_source

    source = find_model_source(request.model, weights=False)
    own_class = find_pipeline_kind(source)
    if own_class is None:
        return None, {}
    config = read_model_index(source)
    has_controlnet = request.controlnet is not None
    return choose_pipeline_class(own_class, [*request.conditions], config, has_controlnet=has_controlnet), config


def find_pipeline_class_for(
    pipeline: Any, conditions: Collection[str], config: JsonObject, *, has_controlnet: bool = False
) -> Any:
    """Choose a class like `choose_pipeline_class`. None if diffusers has none."""
    try:
        return choose_pipeline_class(pipeline, conditions, config, has_controlnet=has_controlnet)
    except ModelError:
        return None


def _list_relatives(pipeline: Any) -> Iterator[type]:
    """Yield the classes of diffusers whose names differ from this one only in the words of the task."""
    import diffusers

    # A modular pipeline has no relatives.
    if not isinstance(pipeline, type):
        return
    stem = _TASK.sub("", pipeline.__name__)
    for name in dir(diffusers):
        if name.endswith("Pipeline") and name != pipeline.__name__ and _TASK.sub("", name) == stem:
            yield getattr(diffusers, name)


def _has_parts(cls: Any, pipeline: Any, has_controlnet: bool) -> bool:
    """Return whether a class can be made of another class's parts, and uses a ControlNet if there is one."""
    if hasattr(cls, "component_names"):  # a modular pipeline
        return not has_controlnet or "controlnet" in cls.component_names
    parts = {*inspect.signature(pipeline.__init__).parameters, *cls._optional_components}
    parameters = inspect.signature(cls.__init__).parameters
    if has_controlnet:
        if "controlnet" not in parameters:
            return False
        parts.add("controlnet")
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    return parts.issuperset(required)


def _joins_channels(pipeline: type, config: JsonObject) -> bool:
    if pipeline.__name__ not in JOINING:
        return False
    return not (pipeline.__name__ == "WanImageToVideoPipeline" and config.get(_NOT_JOINING_IF))


def _join_flags(names: Collection[str]) -> str:
    """Join the flags of conditions in words: --image, --mask and --video."""
    flags = [format_flag(name) for name in ARGUMENTS if name in names]
    if len(flags) == 1:
        return flags[0]
    return f"{', '.join(flags[:-1])} and {flags[-1]}"

"""Chooses the class of pipelines that runs a request: the model's own, or another of its family for the same weights.

diffusers has a class for each task of a family, such as FluxPipeline, FluxImg2ImgPipeline and
FluxControlNetInpaintPipeline. Their names differ only in the words of the task. `read_call_conditions` reads what each
class takes; `JOINING` lists what only its source says. Nothing here imports torch by itself.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ditile.model.known import ASSETS
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
        config: of its pipeline, as in model_index.json.
        has_controlnet: whether there is a ControlNet in addition to the model's own parts.

    Raises:
        ModelError: if diffusers has none on the same models.
    """
    if not conditions:
        return pipeline
    candidates = []
    for cls in (pipeline, *_list_relatives(pipeline)):
        takes_all = set(conditions) <= read_call_conditions(cls).arguments.keys()
        # A class that joins channels calls a transformer with more of them.
        shares_weights = cls is pipeline or not _joins_channels(cls, config) or _joins_channels(pipeline, config)
        if takes_all and shares_weights and _has_parts(cls, pipeline, has_controlnet):
            candidates.append(cls)
    if not candidates:
        raise ModelError(_explain_refusal(pipeline, conditions, config, has_controlnet))

    def rank_class(cls: Any) -> tuple[bool, bool, int, str]:
        call = read_call_conditions(cls)
        lacks_some = not set(call.needed) <= set(conditions)
        return lacks_some, cls is not pipeline, len(call.arguments), name_pipeline(cls)

    best = min(candidates, key=rank_class)
    missing = [name for name in read_call_conditions(best).needed if name not in conditions]
    # The model's own class reports by itself what it lacks.
    if missing and best is not pipeline:
        raise ModelError(f"{best.__name__}, which takes {_join_flags(conditions)}, needs {_join_flags(missing)} too")
    return best


def choose_requested_class(request: GenerateOptions) -> tuple[Any, Any, JsonObject]:
    """Choose the class that runs a request, only by the files of its model. The model's own class and its config are
    returned too.

    Returns:
        None for both classes if the model's files name no pipeline of diffusers.

    Raises:
        LoadError, ModelError: if the files cannot be read, or no class takes the conditions.
    """
    from ditile.runner.load import find_pipeline_kind, read_model_index
    from ditile.runner.model_files import find_model_source

    source = find_model_source(request.model, weights=False)
    own = find_pipeline_kind(source)
    if own is None:
        return None, None, {}
    config = read_model_index(source)
    has_controlnet = request.controlnet is not None
    chosen = choose_pipeline_class(own, [*request.conditions], config, has_controlnet=has_controlnet)
    return chosen, own, config


def find_pipeline_class_for(
    pipeline: Any, conditions: Collection[str], config: JsonObject, *, has_controlnet: bool = False
) -> Any:
    """Choose a class like `choose_pipeline_class`. None if diffusers has none."""
    try:
        return choose_pipeline_class(pipeline, conditions, config, has_controlnet=has_controlnet)
    except ModelError:
        return None


def describe_choice(chosen: Any, own: Any, conditions: Collection[str]) -> str:
    """Explain in one line why a class runs with some conditions."""
    if name_pipeline(chosen) == name_pipeline(own):
        return f"{name_pipeline(chosen)}, the model's own, takes {_join_flags(conditions)}"
    own_arguments = read_call_conditions(own).arguments
    missing = [name for name in conditions if name not in own_arguments]
    reason = f"needs no more than {_join_flags(conditions)}"
    if missing:
        reason = f"takes {_join_flags(missing)}"
    return f"{chosen.__name__} {reason}, unlike the model's own {own.__name__}"


def find_transformer_class(pipeline: Any) -> type | None:
    """Find the class of a pipeline's transformer in its signature, or in the blocks of a modular pipeline."""
    if not hasattr(pipeline, "_get_signature_types"):
        specs = getattr(pipeline, "_component_specs", {})  # of a modular pipeline
        return getattr(specs.get("transformer"), "type_hint", None)
    kinds = pipeline._get_signature_types().get("transformer", ())
    return next((kind for kind in kinds if isinstance(kind, type)), None)


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
    """Return whether a class can be made of another one's parts, and uses a ControlNet if there is one."""
    if hasattr(cls, "component_names"):  # a modular pipeline
        return not has_controlnet or "controlnet" in cls.component_names
    parts = {*inspect.signature(pipeline.__init__).parameters, *cls._optional_components}
    parameters = inspect.signature(cls.__init__).parameters
    if has_controlnet:
        if "controlnet" not in parameters:
            return False
        parts.add("controlnet")
    required = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    return parts.issuperset(required)


def _joins_channels(pipeline: type, config: JsonObject) -> bool:
    if pipeline.__name__ not in JOINING:
        return False
    return not (pipeline.__name__ == "WanImageToVideoPipeline" and config.get(_NOT_JOINING_IF))


@lru_cache(maxsize=1)
def read_class_conditions() -> Mapping[str, Mapping[str, Any]]:
    """Read the inputs besides words of diffusers' pipeline classes, by class; see `build_matrix`."""
    matrix: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads((ASSETS / "matrix.json").read_text("utf-8"))
    return matrix["conditions"]


def _explain_refusal(pipeline: Any, conditions: Collection[str], config: JsonObject, has_controlnet: bool) -> str:
    """Explain a refusal of conditions by a family, and name the classes with the same transformer that take them."""
    flags = _join_flags(conditions)
    name = name_pipeline(pipeline)
    if not has_controlnet and "control_image" in conditions:
        takes_control = any("control_image" in read_call_conditions(cls).arguments for cls in _list_relatives(pipeline))
        if takes_control and find_pipeline_class_for(pipeline, conditions, {}, has_controlnet=True):
            return f"{name} takes {flags} with a ControlNet alone; add --controlnet FOLDER"
    refusal = f"{name} takes no {flags}, nor does a class that works with its weights"
    alternatives = _list_alternatives(pipeline, conditions)
    if alternatives:
        return f"{refusal}; take a model of {' or '.join(alternatives[:6])}"
    remedy = _find_superfluous_condition(pipeline, conditions, config, has_controlnet)
    return f"{refusal}; {remedy or 'leave it out'}"


def _list_alternatives(pipeline: Any, conditions: Collection[str]) -> list[str]:
    """List the classes for the same transformer that take some conditions. Modular ones only if there are no others."""
    transformer = find_transformer_class(pipeline)
    if transformer is None:
        return []
    names = []
    for name, row in read_class_conditions().items():
        is_same = row["transformer"] == transformer.__name__ and name != name_pipeline(pipeline)
        if is_same and set(conditions) <= set(row["options"]):
            names.append(name)
    return [name for name in names if "Modular" not in name] or names


def _find_superfluous_condition(
    pipeline: Any, conditions: Collection[str], config: JsonObject, has_controlnet: bool
) -> str | None:
    """Find a condition to leave out so that a class takes the others. None if there is none."""
    if len(conditions) == 1:
        return None
    for name in reversed(ARGUMENTS):
        if name not in conditions:
            continue
        rest = [other for other in conditions if other != name]
        cls = find_pipeline_class_for(pipeline, rest, config, has_controlnet=has_controlnet)
        if cls is not None:
            return f"leave {_join_flags([name])} out: {name_pipeline(cls)} takes {_join_flags(rest)}"
    return None


def _join_flags(names: Collection[str]) -> str:
    """Join the flags of conditions in words: --image, --mask and --video."""
    flags = [format_flag(name) for name in ARGUMENTS if name in names]
    if len(flags) == 1:
        return flags[0]
    return f"{', '.join(flags[:-1])} and {flags[-1]}"

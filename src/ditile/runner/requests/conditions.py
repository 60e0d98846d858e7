"""What a call starts from besides words: images, a mask, a video; and the class of pipelines that takes it.

diffusers has a class for each task of a family, such as FluxPipeline, FluxImg2ImgPipeline and
FluxControlNetInpaintPipeline. Their names differ only in the words of the task. What each takes is read off the
parameters of its call; `COMPOSING` and `JOINING` list what only its source says. Nothing here imports torch by itself.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, cast, get_args

from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError
from ditile.plan.flag_parser import format_flag
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pictures import read_picture
from ditile.runner.requests.pipelines import name_pipeline, returns_videos

ARGUMENTS = {
    "image": ("image", "images", "input_images", "reference_images"),
    "mask": ("mask_image", "mask"),
    "control_image": ("control_image",),
    "video": ("video",),
    "last_image": ("last_image",),
}
"""Condition, as the option of a request -> the names that calls of diffusers have for it."""
COMPOSING = frozenset(
    {
        "BriaFibo2Pipeline",
        "Flux2KleinKVPipeline",
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "QwenImage21Pipeline",
        "QwenImageEditPlusPipeline",
        "ZImageOmniPipeline",
    }
)
"""Classes whose call puts `image` into a list: several images are references of one result. Elsewhere they are a batch.
A test compares this with the source of all classes."""
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
"""Switch of a pipeline's config with which WanImageToVideoPipeline joins nothing."""
_REFERENCE = "image_reference"
_CONTROL_MASK = "control_mask"
_KEYFRAMES = "conditions"
_REFERENCES = "references"
MOST_PICTURES = 16
"""Images of one edit, where a class composes several."""
_TASK = re.compile("ControlNet|Condition|Img2Img|ImageToVideo|Image2Video|VideoToVideo|Inpaint(ing)?")
"""The words of a task in the name of a class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallConditions:
    """What the call of a class starts from.

    Attributes:
        arguments: condition -> the name of its argument.
        needed: the conditions without which it cannot run.
        max_pictures: how many images it takes at most.
        keyframe: the class in which it takes frames and the place of the first of them, in a list; None if in none.
        reference: the class in which it takes each of several images, in its argument `references`; None if in none.
    """

    arguments: Mapping[str, str]
    needed: tuple[str, ...] = ()
    max_pictures: int = 0
    keyframe: type | None = None
    reference: type | None = None


def read_call_conditions(pipeline: Any) -> CallConditions:
    """What the call of a class of pipelines, or of a modular pipeline, starts from."""
    if isinstance(pipeline, type):
        return _read_class_call(pipeline)
    return _read_modular_call(pipeline)


def _read_modular_call(pipe: Any) -> CallConditions:
    """What a modular pipeline starts from: its blocks choose by what is there, so most of it is not needed."""
    from ditile.model.pipeline_calls import list_call_parameters, list_required_inputs

    parameters = list_call_parameters(pipe)
    arguments = _find_arguments(parameters)
    required = list_required_inputs(pipe)
    reference = _find_reference_class(parameters)
    max_pictures = 0
    if "image" in arguments:
        image = parameters[arguments["image"]]
        # What noise is added to, and the first frame of a video, is a single image.
        is_start = "strength" in parameters or (returns_videos(pipe) and image.name == "image")
        takes_list = "list" in str(image.annotation) and not is_start
        max_pictures = MOST_PICTURES if takes_list or reference is not None else 1
    return CallConditions(
        arguments=arguments,
        needed=tuple(name for name, argument in arguments.items() if argument in required),
        max_pictures=max_pictures,
        reference=reference,
    )


def _find_arguments(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Condition -> the name of its argument, for the conditions that a call takes."""
    arguments = {}
    for condition, names in ARGUMENTS.items():
        for name in names:
            if name in parameters:
                arguments[condition] = name
                break
    # Without an image, a mask is laid over something else.
    if "image" not in parameters:
        arguments.pop("mask", None)
    return arguments


def _find_reference_class(parameters: Mapping[str, inspect.Parameter]) -> type | None:
    """The class of an image among a call's references, which is a list of any of their classes (MiniMax-H3)."""
    if _REFERENCES not in parameters:
        return None
    for base in get_args(parameters[_REFERENCES].annotation):
        for cls in base.__subclasses__():
            if is_dataclass(cls) and [field.name for field in fields(cls)] == ["image"]:
                return cast(type, cls)
    return None


@lru_cache(maxsize=256)
def _read_class_call(pipeline: type) -> CallConditions:
    parameters = inspect.signature(pipeline.__call__).parameters
    keyframe = _find_keyframe_class(parameters)
    if keyframe is not None:
        arguments = dict.fromkeys(("image", "video", "last_image"), _KEYFRAMES)
        return CallConditions(arguments=arguments, max_pictures=1, keyframe=keyframe)
    arguments = _find_arguments(parameters)
    if _CONTROL_MASK in parameters and "image" not in parameters:
        # A ControlNet that fills in: the image that it is shown is the one to fill.
        arguments |= {"image": arguments.pop("control_image"), "mask": _CONTROL_MASK}
    required = {"control_image"}
    for name, argument in arguments.items():
        if parameters[argument].default is inspect.Parameter.empty:
            required.add(name)
    if arguments.get("mask") in ("mask_image", _CONTROL_MASK):
        required |= {"image", "mask"}
    start = [name for name in ("image", "video") if name in arguments]
    # `strength` says how far the result may depart from the input, so there has to be one.
    if "strength" in parameters and len(start) == 1:
        required.add(start[0])
    return CallConditions(
        arguments=arguments,
        needed=tuple(name for name in arguments if name in required),
        max_pictures=_count_pictures(pipeline, arguments.get("image")),
    )


def _find_keyframe_class(parameters: Mapping[str, inspect.Parameter]) -> type | None:
    """The class of a call's keyframes, if it has frames and the index, in latent frames, of the first of them."""
    if _KEYFRAMES not in parameters:
        return None
    for cls in get_args(parameters[_KEYFRAMES].annotation):
        if is_dataclass(cls) and {"frames", "index"} <= {field.name for field in fields(cls)}:
            return cls  # type: ignore[return-value]
    return None


def _count_pictures(pipeline: type, argument: str | None) -> int:
    """How many images a call takes at most."""
    if argument is None:
        return 0
    if argument.endswith("s") or pipeline.__name__ in COMPOSING:
        return MOST_PICTURES
    if _REFERENCE in inspect.signature(pipeline.__call__).parameters:
        return 2
    return 1


def choose_pipeline_class(
    pipeline: Any, conditions: Collection[str], config: Mapping[str, Any], *, has_controlnet: bool = False
) -> Any:
    """The class that runs with some conditions: this one if it takes them, otherwise one of its family.

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
        if takes_all and _has_parts(cls, pipeline, has_controlnet) and _shares_weights(cls, pipeline, config):
            candidates.append(cls)
    if not candidates:
        raise ModelError(_explain_refusal(pipeline, conditions, config, has_controlnet))

    def rank_class(cls: Any) -> tuple[bool, bool, int, str]:
        call = read_call_conditions(cls)
        lacks_some = not set(call.needed) <= set(conditions)
        return lacks_some, cls is not pipeline, len(call.arguments), name_pipeline(cls)

    best = min(candidates, key=rank_class)
    missing = [name for name in read_call_conditions(best).needed if name not in conditions]
    # The model's own class says itself what it lacks.
    if missing and best is not pipeline:
        raise ModelError(f"{best.__name__}, which takes {_join_flags(conditions)}, needs {_join_flags(missing)} too")
    return best


def choose_requested_class(request: GenerateOptions) -> tuple[Any, Any]:
    """The class that runs a request, by the files of its model alone, and the model's own.

    Returns:
        None twice if the model's files name no pipeline of diffusers.

    Raises:
        LoadError, ModelError: if the files cannot be read, or no class takes the conditions.
    """
    from ditile.runner.load import find_pipeline_kind, read_model_index
    from ditile.runner.model_files import find_model_source

    source = find_model_source(request.model, weights=False)
    own = find_pipeline_kind(source)
    if own is None:
        return None, None
    config = read_model_index(source)
    has_controlnet = request.controlnet is not None
    return choose_pipeline_class(own, [*request.conditions], config, has_controlnet=has_controlnet), own


def find_pipeline_class_for(
    pipeline: Any, conditions: Collection[str], config: Mapping[str, Any], *, has_controlnet: bool = False
) -> Any:
    """As `choose_pipeline_class`; None if diffusers has none."""
    try:
        return choose_pipeline_class(pipeline, conditions, config, has_controlnet=has_controlnet)
    except ModelError:
        return None


def describe_choice(chosen: Any, own: Any, conditions: Collection[str]) -> str:
    """Why a class runs with some conditions, on one line."""
    if name_pipeline(chosen) == name_pipeline(own):
        return f"{name_pipeline(chosen)}, the model's own, takes {_join_flags(conditions)}"
    own_arguments = read_call_conditions(own).arguments
    missing = [name for name in conditions if name not in own_arguments]
    reason = f"needs no more than {_join_flags(conditions)}"
    if missing:
        reason = f"takes {_join_flags(missing)}"
    return f"{chosen.__name__} {reason}, unlike the model's own {own.__name__}"


def read_condition_files(request: GenerateOptions) -> dict[str, Any]:
    """What a request starts from: condition -> an image; of `image` all images, of `video` its frames.

    Raises:
        LoadError, ModelError: if a file is no image or video, or the mask has another size than its image; if no
            class of the model's takes them, that is what is said of their sizes.
    """
    # It needs numpy, which the process of a server does without.
    from ditile.runner.requests.videos import read_video

    contents: dict[str, Any] = {}
    for name, value in request.conditions.items():
        if name == "image":
            contents[name] = [read_picture(path, name) for path in value]
        elif name == "video":
            contents[name] = read_video(value, name, request.frames)
        else:
            contents[name] = read_picture(value, name, is_mask=name == "mask")
    if "mask" in contents:
        mask = contents["mask"]
        image = contents["image"][0]
        if mask.size != image.size:
            # A model that takes no mask at all is the more useful refusal.
            choose_requested_class(request)
            raise ModelError(
                f"mask={request.mask!r} is {mask.width}x{mask.height}, and its image {image.width}x{image.height}; "
                "give both in one size"
            )
    return contents


def bind_conditions(call: CallConditions, contents: Mapping[str, Any], copies: int | None = None) -> dict[str, Any]:
    """The arguments of a call for what it starts from.

    Args:
        call: what the class takes.
        contents: condition -> an image; of `image` all images, of `video` its frames.
        copies: how many generators the call has, if it has a list of them: noise is added to as many images.

    Raises:
        ModelError: if a class whose several images are references gets a last frame too.
    """
    if call.keyframe is not None:
        return {_KEYFRAMES: [_make_keyframe(call.keyframe, name, value) for name, value in contents.items()]}
    arguments: dict[str, Any] = {}
    for name, value in contents.items():
        if name == "image":
            arguments |= _bind_images(call, value, copies, has_last_image="last_image" in contents)
        elif name == "mask":
            arguments[call.arguments[name]] = _repeat(call, value, copies)
        else:
            arguments[call.arguments[name]] = value
    return arguments


def _make_keyframe(keyframe: Any, name: str, value: Any) -> Any:
    if name == "image":
        return keyframe(frames=value[0], index=0)
    return keyframe(frames=value, index=-1 if name == "last_image" else 0)


def _bind_images(
    call: CallConditions, images: Sequence[Any], copies: int | None, *, has_last_image: bool
) -> dict[str, Any]:
    """The arguments for the images of a call."""
    argument = call.arguments["image"]
    if len(images) > 1 and call.reference is not None:
        if has_last_image:
            raise ModelError(f"{len(images)} images are references, and last_image goes with one, the first frame")
        return {_REFERENCES: [call.reference(image) for image in images]}
    if len(images) == 1 and not argument.endswith("s"):
        return {argument: _repeat(call, images[0], copies)}
    if call.max_pictures == 2:
        return {argument: images[0], _REFERENCE: images[1]}
    return {argument: images}


def _repeat(call: CallConditions, image: Any, copies: int | None) -> Any:
    """An image once for each generator of a call, where a list of images is a batch."""
    if copies is None or call.max_pictures != 1:
        return image
    return [image] * copies


def check_picture_count(pipeline: str, most: int, count: int) -> None:
    """Raises `ModelError` for more images than a class takes at most; one is left to the class."""
    if count > max(1, most):
        raise ModelError(f"{pipeline} starts from {max(1, most)} at most, and not from {count} images")


def find_transformer_class(pipeline: Any) -> type | None:
    """The class of a pipeline's transformer, as its signature says, or the blocks of a modular pipeline."""
    if not hasattr(pipeline, "_get_signature_types"):
        specs = getattr(pipeline, "_component_specs", {})  # of a modular pipeline
        return getattr(specs.get("transformer"), "type_hint", None)
    kinds = pipeline._get_signature_types().get("transformer", ())
    return next((kind for kind in kinds if isinstance(kind, type)), None)


def _list_relatives(pipeline: Any) -> Iterator[type]:
    """The classes of diffusers whose names differ from this one only in the words of the task."""
    import diffusers

    # A modular pipeline has none.
    if not isinstance(pipeline, type):
        return
    stem = _TASK.sub("", pipeline.__name__)
    for name in dir(diffusers):
        if name.endswith("Pipeline") and name != pipeline.__name__ and _TASK.sub("", name) == stem:
            yield getattr(diffusers, name)


def _has_parts(cls: Any, pipeline: Any, has_controlnet: bool) -> bool:
    """Whether a class can be made of what another one has, and uses a ControlNet if there is one."""
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


def _shares_weights(cls: Any, pipeline: Any, config: Mapping[str, Any]) -> bool:
    """Whether a class calls the transformer of another one with as many channels."""
    return cls is pipeline or not _joins_channels(cls, config) or _joins_channels(pipeline, config)


def _joins_channels(pipeline: type, config: Mapping[str, Any]) -> bool:
    if pipeline.__name__ not in JOINING:
        return False
    return not (pipeline.__name__ == "WanImageToVideoPipeline" and config.get(_NOT_JOINING_IF))


@lru_cache(maxsize=1)
def read_class_conditions() -> Mapping[str, Mapping[str, Any]]:
    """Class of pipelines of diffusers -> what it starts from besides words; see `build_matrix`."""
    classes: Mapping[str, Mapping[str, Any]] = json.loads((ASSETS / "matrix.json").read_text("utf-8"))["conditions"]
    return classes


def _explain_refusal(
    pipeline: Any, conditions: Collection[str], config: Mapping[str, Any], has_controlnet: bool
) -> str:
    """What a family does not take, and which classes with the same transformer do."""
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
    """Classes for the same transformer that take some conditions; modular ones only if there are no others."""
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
    pipeline: Any, conditions: Collection[str], config: Mapping[str, Any], has_controlnet: bool
) -> str | None:
    """Which one of several conditions to leave out, so that a class takes the others; None if there is none."""
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
    """Flags of conditions as a list in words: --image, --mask and --video."""
    flags = [format_flag(name) for name in ARGUMENTS if name in names]
    if len(flags) == 1:
        return flags[0]
    return f"{', '.join(flags[:-1])} and {flags[-1]}"

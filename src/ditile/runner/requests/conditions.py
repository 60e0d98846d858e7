"""Conditions: the inputs of a call besides words, such as images, a mask or a video.

What a class takes is read from the parameters of its call; `COMPOSING` lists what only the source of a class says.
Importing this file does not import torch, because the server never does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast, get_args

from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.runner.requests.pipelines import find_output_kind

ARGUMENTS = {
    "image": ("image", "images", "input_images", "reference_images"),
    "mask": ("mask_image", "mask"),
    "control_image": ("control_image",),
    "video": ("video",),
    "last_image": ("last_image",),
}
"""Condition, by the name of its option -> the possible names of its argument in diffusers."""
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
_SECOND_IMAGE = "image_reference"
_CONTROL_MASK = "control_mask"
_KEYFRAMES = "conditions"
_REFERENCES = "references"
MOST_PICTURES = 16
"""The most images of one edit, where a class composes several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallConditions:
    """The inputs that the call of a class starts from.

    Attributes:
        arguments: condition -> the name of its argument.
        needed: the conditions without which the call cannot run.
        max_pictures: how many images the call takes at most.
        keyframe: the class of a keyframe, if the call takes a list of keyframes instead of images.
        reference: the class of a reference, if the call takes several images as its argument `references`.
    """

    arguments: Mapping[str, str]
    needed: tuple[str, ...] = ()
    max_pictures: int = 0
    keyframe: type | None = None
    reference: type | None = None


def read_call_conditions(pipeline: Any) -> CallConditions:
    """Read which conditions a call takes. The pipeline is a class, or a modular pipeline itself."""
    from ditile.model.pipeline_calls import list_call_parameters, list_required_inputs

    is_modular = not isinstance(pipeline, type)
    parameters = list_call_parameters(pipeline)
    without_default = list_required_inputs(pipeline)
    keyframe = _find_keyframe_class(parameters)
    if keyframe is not None and not is_modular:
        arguments = dict.fromkeys(("image", "video", "last_image"), _KEYFRAMES)
        return CallConditions(arguments=arguments, max_pictures=1, keyframe=keyframe)
    arguments = {}
    for condition, names in ARGUMENTS.items():
        for name in names:
            if name in parameters:
                arguments[condition] = name
                break
    # Without an image, the mask is for something else.
    if "image" not in parameters:
        arguments.pop("mask", None)
    if _CONTROL_MASK in parameters and "image" not in parameters:
        # This ControlNet inpaints: its control image is the image to fill in.
        arguments |= {"image": arguments.pop("control_image"), "mask": _CONTROL_MASK}
    required = {name for name, argument in arguments.items() if argument in without_default}
    # A modular pipeline runs the blocks for the inputs that it gets, so few inputs are needed.
    if not is_modular:
        required.add("control_image")
        if arguments.get("mask") in ("mask_image", _CONTROL_MASK):
            required |= {"image", "mask"}
        start = [name for name in ("image", "video") if name in arguments]
        # `strength` says how far the result may depart from the input, so an input is needed.
        if "strength" in parameters and len(start) == 1:
            required.add(start[0])
    reference = _find_reference_class(parameters)
    max_pictures = 0
    if "image" in arguments:
        max_pictures = 1
        if _SECOND_IMAGE in parameters:
            max_pictures = 2
        if reference is not None or _composes_images(pipeline, parameters, arguments["image"]):
            max_pictures = MOST_PICTURES
    return CallConditions(
        arguments=arguments,
        needed=tuple(name for name in arguments if name in required),
        max_pictures=max_pictures,
        reference=reference,
    )


def _composes_images(pipeline: Any, parameters: Mapping[str, Any], argument: str) -> bool:
    """Return whether a call makes one result of several images."""
    if isinstance(pipeline, type):
        return argument.endswith("s") or pipeline.__name__ in COMPOSING
    # An image that noise is added to, or that is the first frame of a video, is a single one.
    is_start = "strength" in parameters or (argument == "image" and find_output_kind(pipeline) == "video")
    return "list" in str(parameters[argument].annotation) and not is_start


def _find_reference_class(parameters: Mapping[str, inspect.Parameter]) -> type | None:
    """Find the class of a reference that is an image. Other references may be videos or sounds (MiniMax-H3)."""
    if _REFERENCES not in parameters:
        return None
    for base in get_args(parameters[_REFERENCES].annotation):
        for cls in base.__subclasses__():
            if is_dataclass(cls) and [field.name for field in fields(cls)] == ["image"]:
                return cast(type, cls)
    return None


def _find_keyframe_class(parameters: Mapping[str, inspect.Parameter]) -> type | None:
    """Find the class of a call's keyframes: it has frames, and the index of the first one, in latent frames."""
    if _KEYFRAMES not in parameters:
        return None
    for cls in get_args(parameters[_KEYFRAMES].annotation):
        if is_dataclass(cls) and {"frames", "index"} <= {field.name for field in fields(cls)}:
            return cls  # type: ignore[return-value]
    return None


def bind_conditions(taken: CallConditions, contents: CallArguments, copies: int | None = None) -> CallArguments:
    """Build the arguments of a call for its conditions.

    Args:
        taken: what the class takes.
        contents: condition -> its image; a list of images for `image`, of frames for `video`.
        copies: the number of generators, if the call has a list of them: it then makes as many images.

    Raises:
        ModelError: if several images, which are references, come with a last frame.
    """
    if taken.keyframe is not None:
        keyframe: Any = taken.keyframe
        keyframes = []
        for name, value in contents.items():
            if name == "image":
                value = value[0]
            index = -1 if name == "last_image" else 0
            keyframes.append(keyframe(frames=value, index=index))
        return {_KEYFRAMES: keyframes}
    arguments: CallArguments = {}
    for name, value in contents.items():
        if name == "image":
            arguments |= _bind_images(taken, value, copies, has_last_image="last_image" in contents)
        elif name == "mask":
            arguments[taken.arguments[name]] = _repeat(taken, value, copies)
        else:
            arguments[taken.arguments[name]] = value
    return arguments


def _bind_images(
    taken: CallConditions, images: Sequence[Any], copies: int | None, *, has_last_image: bool
) -> CallArguments:
    """Build the arguments for the images of a call."""
    argument = taken.arguments["image"]
    if len(images) > 1 and taken.reference is not None:
        if has_last_image:
            raise ModelError(f"{len(images)} images are references, and last_image goes with one, the first frame")
        return {_REFERENCES: [taken.reference(image) for image in images]}
    if len(images) == 1 and not argument.endswith("s"):
        return {argument: _repeat(taken, images[0], copies)}
    if taken.max_pictures == 2:
        return {argument: images[0], _SECOND_IMAGE: images[1]}
    return {argument: images}


def _repeat(taken: CallConditions, image: Any, copies: int | None) -> Any:
    """Repeat an image for each generator of a call, unless the call composes a list into one image."""
    if copies is None or taken.max_pictures != 1:
        return image
    return [image] * copies


def check_picture_count(pipeline: str, max_count: int, count: int) -> None:
    """Raise `ModelError` for more images than a class takes. A single one is checked with the other arguments."""
    if count > max(1, max_count):
        raise ModelError(f"{pipeline} starts from {max(1, max_count)} at most, and not from {count} images")

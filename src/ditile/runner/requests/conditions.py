"""What a call starts from besides words: pictures, a mask, a video; and the class of pipelines that takes it.

diffusers has a class for each task of a family, such as FluxPipeline, FluxImg2ImgPipeline and
FluxControlNetInpaintPipeline. Their names are one but for the words of the task, and what each takes is read off its
call: the names of its arguments, and whether it makes a list of one picture. Nothing here imports torch by itself.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_args

from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError
from ditile.plan.flags import format_flag
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
_REFERENCE = "image_reference"
_CONTROL_MASK = "control_mask"
_KEYFRAMES = "conditions"
_REFERENCES = "references"
MOST_PICTURES = 16
"""Pictures of one edit, where a class composes several."""
_TASK = re.compile("ControlNet|Condition|Img2Img|ImageToVideo|Image2Video|VideoToVideo|Inpaint(ing)?")
"""The words of a task in the name of a class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallConditions:
    """What the call of a class starts from.

    Attributes:
        arguments: condition -> the name of its argument.
        needed: the conditions without which it cannot draw.
        max_pictures: how many pictures it takes at most.
        keyframe: the class in which it takes frames and the place of the first of them, in a list; None if in none.
        reference: the class in which it takes each of several pictures, in its argument `references`; None if in none.
    """

    arguments: Mapping[str, str]
    needed: tuple[str, ...] = ()
    max_pictures: int = 0
    keyframe: type | None = None
    reference: type | None = None


def read_call_conditions(pipeline: Any) -> CallConditions:
    """What the call of a class of pipelines, or of a modular pipeline, starts from."""
    return _read_class_call(pipeline) if isinstance(pipeline, type) else _read_modular_call(pipeline)


def _read_modular_call(pipe: Any) -> CallConditions:
    """What a modular pipeline starts from: its blocks choose by what is given, so most of it is not needed."""
    from ditile.model.pipeline_calls import list_call_parameters, list_required_inputs

    parameters = list_call_parameters(pipe)
    arguments = {
        name: found for name, known in ARGUMENTS.items() if (found := next(filter(parameters.get, known), None))
    }
    needed = list_required_inputs(pipe)
    image = parameters.get(arguments.get("image", ""))
    if "image" not in parameters:  # else a mask lies on other things than a picture
        arguments.pop("mask", None)
    # What noise is added to, and the first frame of a video, is one picture.
    is_start = "strength" in parameters or (returns_videos(pipe) and image is not None and image.name == "image")
    is_reference = not is_start and "list" in str(image and image.annotation)
    reference = _find_reference_class(parameters)
    several = is_reference or reference is not None
    return CallConditions(
        arguments=arguments,
        needed=tuple(name for name, argument in arguments.items() if argument in needed),
        max_pictures=0 if image is None else MOST_PICTURES if several else 1,
        reference=reference,
    )


def _find_reference_class(parameters: Mapping[str, inspect.Parameter]) -> type | None:
    """The class of a picture among a call's references, which is a list of any kind of them (MiniMax-H3)."""
    if _REFERENCES not in parameters:
        return None
    bases: Any = get_args(parameters[_REFERENCES].annotation)
    kinds: Any = (kind for base in bases for kind in base.__subclasses__() if is_dataclass(kind))
    return next((kind for kind in kinds if [each.name for each in fields(kind)] == ["image"]), None)


@lru_cache(maxsize=256)
def _read_class_call(pipeline: type) -> CallConditions:
    parameters = inspect.signature(pipeline.__call__).parameters
    if (keyframe := _find_keyframe_class(parameters)) is not None:
        frames = dict.fromkeys(("image", "video", "last_image"), _KEYFRAMES)
        return CallConditions(arguments=frames, max_pictures=1, keyframe=keyframe)
    arguments = {
        name: found for name, known in ARGUMENTS.items() if (found := next(filter(parameters.get, known), None))
    }
    if "image" not in parameters:  # else a mask lies on other things than a picture
        arguments.pop("mask", None)
    if _CONTROL_MASK in parameters and "image" not in parameters:
        # A ControlNet that fills in: what it is shown is the picture.
        arguments |= {"image": arguments.pop("control_image"), "mask": _CONTROL_MASK}
    needed = {name for name, found in arguments.items() if parameters[found].default is inspect.Parameter.empty}
    needed |= {"control_image"} & set(arguments)
    if arguments.get("mask") in ("mask_image", _CONTROL_MASK):
        needed |= {"image", "mask"}
    if "strength" in parameters:  # how far to leave behind what is started from
        start = [name for name in ("image", "video") if name in arguments]
        needed |= set(start) if len(start) == 1 else set()
    return CallConditions(
        arguments=arguments,
        needed=tuple(name for name in arguments if name in needed),
        max_pictures=_count_pictures(pipeline, arguments.get("image")),
    )


def _find_keyframe_class(parameters: Mapping[str, inspect.Parameter]) -> type | None:
    """The class of a call's keyframes, if it has frames and the index, in latent frames, of the first of them."""
    if _KEYFRAMES not in parameters:
        return None
    kinds: Any = (each for each in get_args(parameters[_KEYFRAMES].annotation) if is_dataclass(each))
    return next((kind for kind in kinds if {"frames", "index"} <= {each.name for each in fields(kind)}), None)


def _count_pictures(pipeline: type, argument: str | None) -> int:
    """How many pictures a call takes at most: of most classes, a list of pictures is a batch."""
    if argument is None:
        return 0
    parameters = inspect.signature(pipeline.__call__).parameters
    if argument.endswith("s"):
        return MOST_PICTURES
    if _REFERENCE in parameters:
        return 2
    # A picture that has to be there is the first frame of a video, or what noise is added to.
    is_reference = parameters[argument].default is None and parameters.keys().isdisjoint(("strength", "video"))
    return MOST_PICTURES if is_reference and _makes_a_list_of(pipeline, argument) else 1


def _makes_a_list_of(pipeline: type, argument: str) -> bool:
    """Whether a call puts what it is given for an argument into a list, unless it is one."""
    for node in ast.walk(_parse_call(pipeline)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == argument:
            values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            if f"[{argument}]" in map(ast.unparse, values):
                return True
    return False


def choose_pipeline_class(
    pipeline: Any, given: Collection[str], config: Mapping[str, Any], *, has_controlnet: bool = False
) -> Any:
    """The class that draws from what is given: this one if it takes it, else one of its family on the same models.

    Args:
        pipeline: the model's own class; or a modular pipeline, which has no relatives.
        given: the conditions.
        config: of its pipeline, as in model_index.json.
        has_controlnet: whether there is a ControlNet beside the model's own parts.

    Raises:
        ModelError: if diffusers has none.
    """
    if not given:
        return pipeline
    fitting = [
        kind
        for kind in (pipeline, *_list_relatives(pipeline))
        if set(given) <= set(read_call_conditions(kind).arguments)
        and _has_parts(kind, pipeline, has_controlnet)
        and (kind is pipeline or not _joins_more_channels(kind, pipeline, config))
    ]
    if not fitting:
        raise ModelError(_explain_refusal(pipeline, given, config, has_controlnet))

    def rank_class(kind: Any) -> tuple[bool, bool, int, str]:
        taken = read_call_conditions(kind)
        lacks = not set(taken.needed) <= set(given)
        return lacks, kind is not pipeline, len(taken.arguments), name_pipeline(kind)

    best = min(fitting, key=rank_class)
    # The model's own class says itself what it lacks.
    lacking = [name for name in read_call_conditions(best).needed if name not in given]
    if best is not pipeline and lacking:
        raise ModelError(f"{best.__name__}, which takes {_join_flags(given)}, needs {_join_flags(lacking)} too")
    return best


def choose_requested_class(wanted: GenerateOptions) -> tuple[Any, Any]:
    """The class that draws from the conditions of a request, by the files of its model alone, and the model's own.

    Returns:
        None twice if the model's files name no pipeline of diffusers.

    Raises:
        LoadError, ModelError: if the files cannot be read, or no class takes the conditions.
    """
    from ditile.runner.load import find_pipeline_kind, read_model_index
    from ditile.runner.model_files import find_model_source

    source = find_model_source(wanted.model, weights=False)
    own = find_pipeline_kind(source)
    if own is None:
        return None, None
    config = read_model_index(source)
    has_controlnet = wanted.controlnet is not None
    return choose_pipeline_class(own, [*wanted.conditions], config, has_controlnet=has_controlnet), own


def find_pipeline_class_for(
    pipeline: Any, given: Collection[str], config: Mapping[str, Any], *, has_controlnet: bool = False
) -> Any:
    """The same; None if diffusers has none."""
    try:
        return choose_pipeline_class(pipeline, given, config, has_controlnet=has_controlnet)
    except ModelError:
        return None


def describe_choice(chosen: Any, own: Any, given: Collection[str]) -> str:
    """Why a class draws what is given, on one line."""
    if name_pipeline(chosen) == name_pipeline(own):
        return f"{name_pipeline(chosen)}, the model's own, takes {_join_flags(given)}"
    lacking = [name for name in given if name not in read_call_conditions(own).arguments]
    why = f"takes {_join_flags(lacking)}" if lacking else f"needs no more than {_join_flags(given)}"
    return f"{chosen.__name__} {why}, unlike the model's own {own.__name__}"


def read_condition_files(wanted: GenerateOptions) -> dict[str, Any]:
    """What a request starts from: condition -> a picture; of `image` all pictures, of `video` its frames.

    Raises:
        LoadError, ModelError: if a file is no picture or video, or the mask has another size than its picture; if no
            class of the model's takes them, that is what is said of their sizes.
    """
    from ditile.runner.requests.videos import read_video  # needs numpy, which a server's process does without

    read: dict[str, Any] = {}
    for name, value in wanted.conditions.items():
        if name == "image":
            read[name] = [read_picture(path, name) for path in value]
        elif name == "video":
            read[name] = read_video(value, name, wanted.frames)
        else:
            read[name] = read_picture(value, name, is_mask=name == "mask")
    if "mask" in read and read["mask"].size != read["image"][0].size:
        choose_requested_class(wanted)
        sizes = [f"{one.width}x{one.height}" for one in (read["mask"], read["image"][0])]
        raise ModelError(f"mask={wanted.mask!r} is {sizes[0]}, and its picture {sizes[1]}; give both in one size")
    return read


def bind_conditions(taken: CallConditions, given: Mapping[str, Any], copies: int | None = None) -> dict[str, Any]:
    """The arguments of a call for what is given.

    Args:
        taken: what the class takes.
        given: condition -> a picture; of `image` all pictures, of `video` its frames.
        copies: how many generators the call has, if it has a list of them: noise is added to as many pictures.

    Raises:
        ModelError: if a class whose several pictures are references is given a last frame too.
    """
    bound: dict[str, Any] = {}
    if taken.keyframe is not None:
        values = {name: value[0] if name == "image" else value for name, value in given.items()}
        places = {name: -1 if name == "last_image" else 0 for name in given}
        return {_KEYFRAMES: [taken.keyframe(frames=values[name], index=places[name]) for name in given]}
    for name, value in given.items():
        argument = taken.arguments[name]
        if name == "image" and len(value) > 1 and taken.reference is not None:
            if "last_image" in given:
                raise ModelError(f"{len(value)} pictures are references, and last_image goes with one, the first frame")
            bound[_REFERENCES] = [taken.reference(picture) for picture in value]
        elif name == "image" and (len(value) > 1 or argument.endswith("s")):
            is_pair = taken.max_pictures == 2
            bound |= {argument: value[0], _REFERENCE: value[1]} if is_pair else {argument: value}
        elif name in ("image", "mask"):
            one = value[0] if name == "image" else value
            repeats = copies is not None and taken.max_pictures == 1
            bound[argument] = [one] * (copies or 1) if repeats else one
        else:
            bound[argument] = value
    return bound


def check_picture_count(pipeline: str, most: int, count: int) -> None:
    """Raises `ModelError` for more pictures than a class takes at most, which one says of which nothing is known."""
    if count > max(1, most):
        raise ModelError(f"{pipeline} starts from {max(1, most)} at most, and not from {count} pictures")


def describe_condition(taken: CallConditions, name: str) -> str:
    """What a class takes for an option, for people; with a star if it cannot draw without."""
    words = {"image": "pictures" if taken.max_pictures > 1 else "picture", "control_image": "control picture"}
    return words.get(name, name.replace("last_image", "last frame")) + ("*" if name in taken.needed else "")


def find_transformer_class(pipeline: Any) -> type | None:
    """The class of a pipeline's transformer, as its signature says, or the blocks of a modular pipeline."""
    if not hasattr(pipeline, "_get_signature_types"):
        specs = getattr(pipeline, "_component_specs", {})  # of a modular pipeline
        return getattr(specs.get("transformer"), "type_hint", None)
    kinds = pipeline._get_signature_types().get("transformer", ())
    return next((kind for kind in kinds if isinstance(kind, type)), None)


def _list_relatives(pipeline: Any) -> Iterator[type]:
    """The classes of diffusers whose name is this one's but for the words of the task; none of a modular pipeline."""
    import diffusers

    if not isinstance(pipeline, type):
        return
    stem = _TASK.sub("", pipeline.__name__)
    for name in dir(diffusers):
        if name.endswith("Pipeline") and name != pipeline.__name__ and _TASK.sub("", name) == stem:
            yield getattr(diffusers, name)


def _has_parts(kind: Any, pipeline: Any, has_controlnet: bool) -> bool:
    """Whether a class can be made of what another one has, and uses a ControlNet if there is one."""
    if hasattr(kind, "component_names"):  # a modular pipeline
        return not has_controlnet or "controlnet" in kind.component_names
    own, needed = (inspect.signature(each.__init__).parameters for each in (pipeline, kind))
    if has_controlnet and "controlnet" not in needed:
        return False
    there = {*own, *kind._optional_components, *(("controlnet",) if has_controlnet else ())}
    return all(name in there or each.default is not inspect.Parameter.empty for name, each in needed.items())


def _joins_more_channels(kind: type, pipeline: type, config: Mapping[str, Any]) -> bool:
    """Whether a class joins more to the latents' channels than another: its transformer has other weights then.

    Of pictures none does whose name has the words of a task alone; what is joined there are tokens.
    """
    return returns_videos(kind) and _joins_channels(kind, config) and not _joins_channels(pipeline, config)


def _joins_channels(pipeline: type, config: Mapping[str, Any]) -> bool:
    """Whether every call concatenates latents and something else, for the transformer."""
    tree = _LiveBranches(pipeline, config).visit(_parse_call(pipeline))
    inputs = {
        ast.unparse(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "hidden_states"
    }
    return any(
        len({ast.unparse(each) for each in joined.args[0].elts}) > 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in inputs
        for joined in ast.walk(node.value)
        if isinstance(joined, ast.Call) and ast.unparse(joined.func) == "torch.cat"
        if joined.args and isinstance(joined.args[0], ast.List)
    )


class _LiveBranches(ast.NodeTransformer):
    """Keeps what a call runs in any case: of `if self.config.NAME` the branch that a config says, of others none."""

    def __init__(self, pipeline: Any, config: Mapping[str, Any]) -> None:
        own = inspect.signature(pipeline.__init__).parameters.items()
        self._config = {name: each.default for name, each in own} | dict(config)

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802 - the name that ast asks for
        self.generic_visit(node)
        name = ast.unparse(node.test).removeprefix("self.config.")
        if name not in self._config:
            return None
        return node.body if self._config[name] else node.orelse


def _parse_call(pipeline: type) -> ast.Module:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(pipeline.__call__))))
    except (OSError, TypeError, SyntaxError):  # a class that was made at run time
        return ast.Module([], [])


@lru_cache(maxsize=1)
def read_class_conditions() -> Mapping[str, Mapping[str, Any]]:
    """Class of pipelines of diffusers -> what it starts from besides words; see `build_matrix`."""
    classes: Mapping[str, Mapping[str, Any]] = json.loads((ASSETS / "matrix.json").read_text("utf-8"))["conditions"]
    return classes


def _explain_refusal(pipeline: Any, given: Collection[str], config: Mapping[str, Any], has_controlnet: bool) -> str:
    """What a family does not take, and which classes with the same transformer do."""
    flags = _join_flags(given)
    if not has_controlnet and "control_image" in given:
        kinds = [kind for kind in _list_relatives(pipeline) if "control_image" in read_call_conditions(kind).arguments]
        if kinds and find_pipeline_class_for(pipeline, given, {}, has_controlnet=True):
            return f"{name_pipeline(pipeline)} takes {flags} with a ControlNet alone; add --controlnet FOLDER"
    transformer = find_transformer_class(pipeline)
    others = [
        name
        for name, each in read_class_conditions().items()
        if transformer is not None and each["transformer"] == transformer.__name__
        if set(given) <= set(each["options"]) and name != name_pipeline(pipeline)
    ]
    what = f"{name_pipeline(pipeline)} takes no {flags}, nor does a class that draws with its weights"
    if not others:
        return f"{what}; {_find_what_is_taken(pipeline, given, config, has_controlnet) or 'leave it out'}"
    ordinary = [name for name in others if "Modular" not in name]
    return f"{what}; take a model of {' or '.join((ordinary or others)[:6])}"


def _find_what_is_taken(
    pipeline: Any, given: Collection[str], config: Mapping[str, Any], has_controlnet: bool
) -> str | None:
    """Which one of several conditions to leave out, so that a class takes the others; None if there is none."""
    for name in (*ARGUMENTS,)[::-1]:
        rest = [other for other in given if other != name]
        if not rest or len(rest) == len(given):
            continue
        kind = find_pipeline_class_for(pipeline, rest, config, has_controlnet=has_controlnet)
        if kind is not None:
            return f"leave {_join_flags([name])} out: {name_pipeline(kind)} takes {_join_flags(rest)}"
    return None


def _join_flags(names: Sequence[str] | Collection[str]) -> str:
    flags = [format_flag(name) for name in ARGUMENTS if name in names]
    return " and ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))

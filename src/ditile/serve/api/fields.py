"""The fields of requests: their types, what they become of a job's request, and the limits that they are held to."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import Request as HttpRequest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ditile.plan.checks import is_whole_number, suggest_nearest
from ditile.plan.errors import ModelError
from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.requests.facts import ModelFacts
from ditile.runner.requests.options import GIF_MOST_FPS, LEAST_FPS, MOST_FPS, GenerateOptions
from ditile.serve.api.answers import RequestError, convert_error, find_owner, find_served_name, find_service
from ditile.serve.api.uploads import Body, Picture, decode_pictures
from ditile.serve.jobs import INPUT_IMAGE, INPUT_MASK, Job, Kind, Request
from ditile.serve.options import ServeOptions

if TYPE_CHECKING:
    from ditile.serve.service import Service

VENDOR_MODELS = ("dall-e", "gpt-image", "chatgpt-image", "sora")
"""How names of models begin that old clients send by default; what is served answers to them without a warning."""
MOST = 2**31
"""No count is larger, before the limits of the server are asked."""
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs, which tokenizers do not take."""
_SIZE = re.compile(r"(\d{1,6})\s*[xX×*]\s*(\d{1,6})", re.ASCII)
_SHOWN_WARNINGS = 16
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "style": ("vivid",),
    "input_fidelity": ("low",),
}
"""Fields of OpenAI that have no meaning for an open model -> its defaults, which ask for nothing."""
_KNOWN_PARAMETERS = ("api-version",)
"""Parameters of an address that clients of Azure send."""
FieldsT = TypeVar("FieldsT", bound="RequestFields")


def _refuse_no_text(text: str) -> str:
    if found := _NO_TEXT.search(text):
        raise ValueError(f"holds U+{ord(found[0]):04X}, which is no text; leave it out")
    return text


Text = Annotated[str, AfterValidator(_refuse_no_text)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Scale = Annotated[float, Field(allow_inf_nan=False)]


class LoraField(BaseModel):
    """A LoRA as some clients name it."""

    name: Text
    scale: Scale = 1.0


class RequestFields(BaseModel):
    """Fields of pictures and videos. Numbers may be texts, as forms have them; unknown fields get a warning."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    prompt: Text = Field(description="what to draw", examples=["a large red circle on the left on a gray background"])
    model: Text | None = Field(None, description="any name; the served model draws", examples=["dall-e-3"])
    size: Text | None = Field(None, description="WxH in pixels, or auto: the model's own", examples=["1024x1024"])
    width: Count | None = Field(None, description="pixels, instead of size", examples=[1024])
    height: Count | None = Field(None, description="pixels, instead of size", examples=[1024])
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = Field(
        None, description="of the first picture; random by default, and answered", examples=[7]
    )
    num_inference_steps: Count | None = Field(None, description="denoising steps", examples=[28])
    guidance_scale: Scale | None = Field(None, description="how strongly the prompt guides", examples=[3.5])
    true_cfg_scale: Scale | None = Field(None, description="the same by a second branch", examples=[4.0])
    negative_prompt: Text | None = Field(None, description="what to keep out", examples=["blurry"])
    strength: Scale | None = Field(None, description="how far to leave the picture behind", examples=[0.6])
    lora: Text | LoraField | dict[Text, Scale] | None = Field(
        None, description="a LoRA of the server, or name: scale of several", examples=[{"style": 0.8}]
    )
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="seconds after which the job is ended", examples=[60]
    )
    user: Any = None
    safety_identifier: Any = None


class ImageFields(RequestFields):
    """Fields of pictures: OpenAI's, and those that say more of a diffusion model."""

    n: Count = Field(1, description="pictures, with seeds that count up", examples=[1])
    output_format: Literal["png", "jpeg", "webp"] = Field("png", examples=["png"])
    output_compression: Annotated[int, Field(ge=0, le=100)] = Field(
        100, description="quality of jpeg and webp", examples=[90]
    )
    response_format: Literal["b64_json", "url"] = Field("b64_json", examples=["b64_json"])
    stream: bool = Field(False, description="answer as server-sent events", examples=[True])
    partial_images: Annotated[int, Field(ge=0, le=3)] = Field(0, description="previews of a stream", examples=[2])
    # Taken and not heeded: they have no meaning for an open model. `list_warnings` names them.
    quality: Any = None
    background: Any = None
    style: Any = None
    moderation: Any = None
    input_fidelity: Any = None


class VideoFields(RequestFields):
    """Fields of videos: OpenAI's, and those that say more of a diffusion model."""

    seconds: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="length; the nearest that the model can make", examples=["4"]
    )
    num_frames: Count | None = Field(None, description="frames, instead of seconds", examples=[81])
    fps: Annotated[float, Field(ge=LEAST_FPS, le=MOST_FPS)] | None = Field(
        None, description="frames a second", examples=[16]
    )
    output_format: Literal["mp4", "gif"] = Field("mp4", examples=["mp4"])
    quality: Any = None


class RemixFields(BaseModel):
    """Fields of a remix."""

    model_config = ConfigDict(extra="allow")

    prompt: Text = Field(description="what to draw instead", examples=["the same at night"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request as the service takes it.

    Attributes:
        request: what to draw.
        inputs: name of an input file -> its bytes.
        warnings: what of it was not heeded.
    """

    request: Request
    inputs: dict[str, bytes] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def parse_fields(kind: type[FieldsT], values: Mapping[str, Any], facts: ModelFacts) -> FieldsT:
    """The fields of a body. What is null or an empty text is as if it were not there.

    Args:
        kind: of the fields.
        values: as they came.
        facts: of the served model, whose own values an error proposes.

    Raises:
        RequestError: if one has not its type, or is missing.
    """
    given = {name: value for name, value in values.items() if value is not None and (value != "" or name == "prompt")}
    return validate_fields(kind, given, list_own_values(facts))


AnyFieldsT = TypeVar("AnyFieldsT", bound=BaseModel)


def list_own_values(facts: ModelFacts) -> dict[str, Any]:
    """The model's own values of fields, which an error proposes."""
    names = ("num_inference_steps", "guidance_scale", "true_cfg_scale")
    own = {name: facts.find_default(name) for name in names}
    if facts.edit is not None:
        own["strength"] = facts.edit.defaults.get("strength")
    if facts.is_video:
        own |= {"num_frames": facts.find_default(*FRAME_COUNTS), "fps": facts.fps}
    if facts.size:
        width, height = facts.size
        own |= {"width": width, "height": height, "size": f"{width}x{height}"}
    return {name: value for name, value in own.items() if value is not None}


def validate_fields(
    kind: type[AnyFieldsT], given: Mapping[str, Any], own_values: Mapping[str, Any] | None = None
) -> AnyFieldsT:
    """The fields of a body as they are.

    Args:
        kind: of the fields.
        given: as they came.
        own_values: what an error proposes; of others the example of the field.

    Raises:
        RequestError: if one has not its type, or is missing; it says what would work.
    """
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
    if not wrong["loc"]:
        raise RequestError("a field's name is no text of Unicode; leave it out", code="bad_json")
    name = str(wrong["loc"][0])
    known = kind.model_fields.get(name)
    examples = [] if known is None else list(known.examples or [])
    if own_values is not None and name in own_values:
        examples = [own_values[name]]
    example = f"; try {name}={examples[0]!r}" if examples else ""
    what = wrong["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if wrong["type"] == "missing":
        raise RequestError(f"{name} is missing{example}", param=name, code="missing_required_parameter")
    raise RequestError(f"{name}={shorten_value(given.get(name))} {what}{example}", param=name)


async def submit_order(
    http: HttpRequest, fields: ImageFields | VideoFields, body: Body, *, resize_mask: bool = False
) -> tuple[Job, Order]:
    """Reads what a request asks for, and has the service take it.

    Args:
        http: the request.
        fields: of it.
        body: with its pictures.
        resize_mask: whether a mask of another size is brought to that of the first picture.

    Raises:
        DitileError: if it cannot be drawn, or not now.
    """
    service = find_service(http)
    order = await read_order(service, fields, body, resize_mask=resize_mask)
    order.warnings.extend(
        f"parameter {name[:60]!r} of the address was not heeded; send it in the body"
        for name in sorted({*http.query_params} - {*_KNOWN_PARAMETERS})[:_SHOWN_WARNINGS]
    )
    kind: Kind = "video" if isinstance(fields, VideoFields) else "image"
    job = await service.submit(kind, find_owner(http), order.request, order.inputs)
    http.state.job = job.id
    return job, order


async def read_order(
    service: Service, fields: ImageFields | VideoFields, body: Body, *, resize_mask: bool = False
) -> Order:
    """What a service is asked to draw; the arguments and errors are those of `submit_order`."""
    facts, options = service.facts, service.options
    pictures, mask = await decode_pictures(body, options.max_pixels, facts.max_pictures, resize_mask=resize_mask)
    # It reads the folder of LoRAs.
    return await asyncio.to_thread(build_order, fields, facts, options, pictures, mask)


def build_order(
    fields: ImageFields | VideoFields,
    facts: ModelFacts,
    options: ServeOptions,
    pictures: list[Picture],
    mask: bytes | None = None,
) -> Order:
    """What the service is asked to draw.

    Args:
        fields: of the request.
        facts: of the served model.
        options: of the server, with its limits.
        pictures: to start from.
        mask: as PNG, white where the first picture is drawn anew.

    Raises:
        RequestError: if a field is beyond a limit of the server, or the model cannot draw it.
    """
    warnings = list_warnings(fields, facts, options)
    width, height = parse_size(fields, facts, options, pictures)
    frames, fps = _count_frames(fields, facts) if isinstance(fields, VideoFields) else (None, None)
    num_images = fields.n if isinstance(fields, ImageFields) else 1
    sent_names = _list_sent_names(fields)
    _check_limits(fields, options, num_images, frames, sent_names)
    inputs = {INPUT_IMAGE if k == 0 else f"{INPUT_IMAGE}-{k}": one.png for k, one in enumerate(pictures)}
    wanted = GenerateOptions(
        model=facts.name,
        prompt=fields.prompt,
        steps=_choose_steps(fields, facts, options),
        height=height,
        width=width,
        guidance=fields.guidance_scale,
        true_cfg=fields.true_cfg_scale,
        negative_prompt=fields.negative_prompt,
        seed=secrets.randbelow(2**31) if fields.seed in (None, -1) else fields.seed,
        num_images=num_images,
        frames=frames,
        fps=fps,
        image=tuple(inputs) if inputs else None,
        mask=None if mask is None else INPUT_MASK,
        strength=fields.strength,
    )
    with _name_sent_fields(sent_names):
        facts.check_options(wanted)
    inputs |= {} if mask is None else {INPUT_MASK: mask}
    request = Request(
        options=wanted,
        output_format=fields.output_format,
        output_compression=getattr(fields, "output_compression", 100),
        num_previews=fields.partial_images if isinstance(fields, ImageFields) and fields.stream else 0,
        loras=choose_loras(fields.lora, options),
        timeout=None if fields.timeout is None else min(fields.timeout, options.timeout),
        client={
            "model": fields.model or find_served_name(facts.name),
            "warnings": warnings,
            "inputs": sorted(inputs),
            **foresee_shape(wanted, facts),
        },
    )
    return Order(request=request, inputs=inputs, warnings=warnings)


def foresee_shape(wanted: GenerateOptions, facts: ModelFacts) -> dict[str, Any]:
    """The size that a picture or a video will have, and a video's length, for those who ask before it is drawn."""
    sides = [side or own for side, own in zip((wanted.width, wanted.height), facts.size or (0, 0), strict=True)]
    shape: dict[str, Any] = {"size": "{}x{}".format(*sides) if all(sides) else "auto"}
    if facts.is_video:
        fps = wanted.fps or facts.fps
        shape |= {"frames": wanted.frames or facts.find_default(*FRAME_COUNTS) or 0, "fps": fps}
    return shape


def list_warnings(fields: RequestFields, facts: ModelFacts, options: ServeOptions) -> list[str]:
    """What of a request is not heeded."""
    warnings = []
    served, asked = find_served_name(facts.name), fields.model
    if asked is not None and asked not in (served, facts.name) and not asked.lower().startswith(VENDOR_MODELS):
        warnings.append(f"model {asked[:60]!r} is not served; {served} draws")
    given = fields.model_fields_set
    if _has_size(fields):
        warnings += [f"{name} was not heeded, as size says it" for name in ("width", "height") if name in given]
    if isinstance(fields, VideoFields) and fields.num_frames is not None and fields.seconds is not None:
        warnings.append("seconds was not heeded, as num_frames says it")
    if isinstance(fields, ImageFields) and fields.output_format == "png" and "output_compression" in given:
        warnings.append("output_compression was not heeded: it is for jpeg and webp, and png loses nothing")
    if isinstance(fields, ImageFields) and fields.partial_images and not fields.stream:
        warnings.append("partial_images was not heeded: previews come with stream=true")
    if fields.timeout is not None and fields.timeout > options.timeout:
        warnings.append(f"timeout is {options.timeout:g}, the most of this server")
    steps = _choose_steps(fields, facts, options)
    if steps != fields.num_inference_steps:
        own = facts.find_default("num_inference_steps")
        warnings.append(f"num_inference_steps is {steps}, the most of this server; the model's own is {own}")
    for name, defaults in _DEFAULTS.items():
        value = getattr(fields, name, None)
        if value is not None and value not in defaults:
            warnings.append(f"{name}={shorten_value(value)} was not heeded: it has no meaning for an open model")
    return warnings + list_unknown_fields(fields)


def list_unknown_fields(fields: BaseModel) -> list[str]:
    """Warnings of fields that are not known."""
    return shorten_warnings([warn_of_unknown_field(name) for name in sorted(fields.model_extra or {})])


def warn_of_unknown_field(name: str) -> str:
    """The warning of a field that is not known."""
    return f"{name[:60]!r} is not known here, and was not heeded"


def shorten_warnings(warnings: list[str]) -> list[str]:
    """Warnings of fields, of which the last are counted where there are many."""
    shown = warnings[:_SHOWN_WARNINGS]
    if len(warnings) > len(shown):
        shown.append(f"nor were {len(warnings) - len(shown)} other fields")
    return shown


def parse_size(
    fields: RequestFields, facts: ModelFacts, options: ServeOptions, pictures: list[Picture]
) -> tuple[int | None, int | None]:
    """Width and height of a request; None is the model's own. Of an edit it is the picture's form at the model's area.

    Raises:
        RequestError: if they are no size, or have more pixels than the server draws.
    """
    width, height = fields.width, fields.height
    if fields.size is not None and _has_size(fields):
        found = _SIZE.fullmatch(fields.size.strip())
        if found is None:
            example = list_own_values(facts).get("size", "1024x1024")
            raise RequestError(f"size={fields.size[:40]!r} is no size; try size={example!r} or 'auto'", param="size")
        width, height = int(found[1]), int(found[2])
    elif width is None and height is None and pictures and facts.size:
        width, height = _fit_picture(pictures[0], facts)
    sides = [side or own for side, own in zip((width, height), facts.size or (0, 0), strict=True)]
    if sides[0] * sides[1] > options.max_pixels or max(sides) > options.max_pixels:
        most = int(options.max_pixels**0.5)
        raise RequestError(
            f"size={sides[0]}x{sides[1]} has more than the {options.max_pixels} pixels that this server draws; "
            f"try size={most}x{most} or less",
            status=422,
            param="size" if _has_size(fields) else "width",
        )
    return width, height


def choose_loras(wanted: str | LoraField | dict[str, float] | None, options: ServeOptions) -> dict[str, float]:
    """The LoRAs of a request: name -> scale.

    Raises:
        RequestError: if one is none of the server's, or there are too many.
    """
    if wanted is None:
        return {}
    if isinstance(wanted, LoraField):
        wanted = {wanted.name: wanted.scale}
    loras = {wanted: 1.0} if isinstance(wanted, str) else dict(wanted)
    known = options.find_lora_files()
    for name in loras:
        if name not in known:
            hint = suggest_nearest(name[:60], sorted(known)) if known else "this server has none"
            raise RequestError(f"lora={name[:60]!r} is not known; {hint}", status=422, param="lora")
    if len(loras) > options.max_loras:
        raise RequestError(
            f"lora names {len(loras)}, and this server takes {options.max_loras} at once", status=422, param="lora"
        )
    return loras


def _count_frames(fields: VideoFields, facts: ModelFacts) -> tuple[int | None, float | None]:
    """Frames and rate of a video; None is the model's own."""
    if fields.num_frames is not None:
        return fields.num_frames, fields.fps
    return (None if fields.seconds is None else facts.count_frames(fields.seconds, fields.fps)), fields.fps


def _choose_steps(fields: RequestFields, facts: ModelFacts, options: ServeOptions) -> int | None:
    """The steps of a request; None is the model's own number, if that is within the limit of the server."""
    own = facts.find_default("num_inference_steps")
    if fields.num_inference_steps is None and is_whole_number(own) and own > options.max_steps:
        return options.max_steps
    return fields.num_inference_steps


def check_prompt(prompt: str, options: ServeOptions) -> None:
    """Raises `RequestError` for a prompt that is empty or too long."""
    if not prompt.strip():
        raise RequestError("prompt is empty; say what to draw", param="prompt")
    _check_length(prompt, "prompt", options)


def _check_length(text: str, name: str, options: ServeOptions) -> None:
    if len(text) > options.max_prompt:
        raise RequestError(
            f"{name} has {len(text)} letters, and this server takes {options.max_prompt}; shorten it",
            status=422,
            param=name,
        )


def _has_size(fields: RequestFields) -> bool:
    """Whether `size` says the size; "auto" leaves it to width and height, or to the model."""
    return fields.size is not None and fields.size.strip().lower() != "auto"


@contextlib.contextmanager
def _name_sent_fields(sent_names: Mapping[str, str]) -> Iterator[None]:
    """Turns a `ModelError` into a `RequestError` about the field that was sent."""
    try:
        yield
    except ModelError as error:
        wrong = convert_error(error)
        wrong.param = sent_names.get(wrong.param or "", wrong.param)
        raise wrong from None


def _list_sent_names(fields: RequestFields) -> dict[str, str]:
    """The names of values that a client gave by another field."""
    names = {"width": "size", "height": "size"} if _has_size(fields) else {}
    if isinstance(fields, VideoFields) and fields.num_frames is None and fields.seconds is not None:
        names["num_frames"] = "seconds"
    return names


def _check_limits(
    fields: RequestFields,
    options: ServeOptions,
    num_images: int,
    frames: int | None,
    sent_names: Mapping[str, str],
) -> None:
    """Raises `RequestError` for what is more than the server allows."""
    check_prompt(fields.prompt, options)
    _check_length(fields.negative_prompt or "", "negative_prompt", options)
    if isinstance(fields, VideoFields) and fields.output_format == "gif" and (fields.fps or 0) > GIF_MOST_FPS:
        raise RequestError(
            f"fps={fields.fps:g}: a GIF shows {GIF_MOST_FPS} frames a second at most; try output_format=mp4",
            status=422,
            param="fps",
        )
    most = {"num_inference_steps": options.max_steps, "n": options.max_images, "num_frames": options.max_frames}
    counts = {"num_inference_steps": fields.num_inference_steps, "n": num_images, "num_frames": frames}
    for name, value in counts.items():
        if value is not None and value > most[name]:
            raise RequestError(
                f"{name}={value} is more than this server's {most[name]}; try {name}={most[name]} or less",
                status=422,
                param=sent_names.get(name, name),
            )


def _fit_picture(picture: Picture, facts: ModelFacts) -> tuple[int, int]:
    """The size of a picture's form that has about the model's own number of pixels."""
    scale = (facts.size[0] * facts.size[1] / (picture.width * picture.height)) ** 0.5
    sides = (
        max(1, round(side * scale / facts.size_multiple)) * facts.size_multiple
        for side in (picture.width, picture.height)
    )
    width, height = sides
    return width, height


def shorten_value(value: Any) -> str:
    """A value as an error shows it: not all of a long one."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a number of many digits"
    text = (
        ascii(value[:40]) if isinstance(value, str) else ascii(value) if not isinstance(value, list | dict) else "..."
    )
    return text[:60]

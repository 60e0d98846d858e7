"""The fields of requests: their types, and the parsing of a body into them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ditile.plan.option_classes import JsonObject, drop_missing
from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.requests.facts import ModelFacts
from ditile.runner.requests.options import LEAST_FPS, MOST_FPS
from ditile.serve.api.answers import RequestError

# An upper bound of every count, before the limits of the server are checked.
MOST = 2**31
# Control characters, and halves of surrogate pairs, which tokenizers reject.
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
FieldsT = TypeVar("FieldsT", bound=BaseModel)


def _refuse_control_characters(text: str) -> str:
    match = _NOT_TEXT.search(text)
    if match:
        raise ValueError(f"holds U+{ord(match[0]):04X}, which is not text; leave it out")
    return text


def _refuse_bool(value: Any) -> Any:
    # pydantic would accept true as 1.
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Text = Annotated[str, AfterValidator(_refuse_control_characters)]
Whole = Annotated[int, BeforeValidator(_refuse_bool)]
Real = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Count = Annotated[Whole, Field(ge=1, le=MOST)]
# -1 asks for a random seed; torch accepts at most 63 bits.
Seed = Annotated[Whole, Field(ge=-1, lt=2**63)]


class LoraField(BaseModel):
    """A LoRA as some clients name it."""

    name: Text
    scale: Real = 1.0


class RequestFields(BaseModel):
    """Fields of images and videos. Numbers may be texts, as forms have them; unknown fields get a warning."""

    model_config = ConfigDict(extra="allow")

    prompt: Text = Field(
        description="what to generate", examples=["a large red circle on the left on a gray background"]
    )
    model: Text | None = Field(None, description="any name; the served model answers", examples=["dall-e-3"])
    size: Text | None = Field(None, description="WxH in pixels, or auto: the model's own", examples=["1024x1024"])
    width: Count | None = Field(None, description="pixels, instead of size", examples=[1024])
    height: Count | None = Field(None, description="pixels, instead of size", examples=[1024])
    seed: Seed | None = Field(
        None, description="of the first image; random by default, and in the answer", examples=[7]
    )
    num_inference_steps: Count | None = Field(None, description="denoising steps", examples=[28])
    guidance_scale: Real | None = Field(None, description="how strongly the prompt guides", examples=[3.5])
    true_cfg_scale: Real | None = Field(None, description="how strongly, by a second call of the model", examples=[4.0])
    negative_prompt: Text | None = Field(None, description="what to keep out", examples=["blurry"])
    strength: Real | None = Field(None, description="how far the result may depart from the image", examples=[0.6])
    lora: Text | LoraField | dict[Text, Real] | None = Field(
        None, description="a LoRA of the server, or an object of name: scale", examples=[{"style": 0.8}]
    )
    computed_steps: Count | None = Field(
        None, description="steps that call the model; the others are forecast", examples=[10]
    )
    within_seconds: Annotated[Real, Field(gt=0)] | None = Field(
        None, description="seconds; compute as many steps as fit", examples=[4]
    )
    min_psnr: Annotated[Real, Field(gt=0)] | None = Field(
        None, description="dB; compute the fewest steps with this mean PSNR to the image of all", examples=[45]
    )
    timeout: Annotated[Real, Field(gt=0)] | None = Field(
        None, description="seconds after which the job is ended", examples=[60]
    )
    user: Any = None
    safety_identifier: Any = None


class ImageFields(RequestFields):
    """Fields of images: OpenAI's, and more for diffusion models."""

    n: Count = Field(1, description="images, with seeds that count up", examples=[1])
    output_format: Literal["png", "jpeg", "webp"] = Field("png", examples=["png"])
    output_compression: Annotated[Whole, Field(ge=0, le=100)] = Field(
        100, description="quality of jpeg and webp", examples=[90]
    )
    response_format: Literal["b64_json", "url"] = Field("b64_json", examples=["b64_json"])
    stream: bool = Field(False, description="answer as server-sent events", examples=[True])
    partial_images: Annotated[Whole, Field(ge=0, le=3)] = Field(0, description="previews of a stream", examples=[2])
    # Accepted and ignored: they have no meaning for an open model. `list_warnings` names them.
    quality: Any = None
    background: Any = None
    style: Any = None
    moderation: Any = None
    input_fidelity: Any = None


class VideoFields(RequestFields):
    """Fields of videos: OpenAI's, and more for diffusion models."""

    seconds: Annotated[Real, Field(gt=0, le=1e6)] | None = Field(
        None, description="length; the nearest that the model can make", examples=["4"]
    )
    num_frames: Count | None = Field(None, description="frames, instead of seconds", examples=[81])
    fps: Annotated[Real, Field(ge=LEAST_FPS, le=MOST_FPS)] | None = Field(
        None, description="frames a second", examples=[16]
    )
    output_format: Literal["mp4", "gif"] = Field("mp4", examples=["mp4"])
    quality: Any = None


class RemixFields(BaseModel):
    """Fields of a remix."""

    model_config = ConfigDict(extra="allow")

    prompt: Text = Field(description="what to generate instead", examples=["the same at night"])


def parse_fields(fields_class: type[FieldsT], values: JsonObject, facts: ModelFacts) -> FieldsT:
    """Parse the fields of a body. A null or an empty text counts as missing, but an empty prompt has its own error.

    Raises `RequestError` if a field has the wrong type or is missing; the message suggests the model's own value.
    """
    sent = {}
    for name, value in values.items():
        if value is not None and (value != "" or name == "prompt"):
            sent[name] = value
    return validate_fields(fields_class, sent, list_own_values(facts))


def list_own_values(facts: ModelFacts) -> JsonObject:
    """Return the model's own values for fields, for an error to suggest."""
    names = ("num_inference_steps", "guidance_scale", "true_cfg_scale")
    own = {name: facts.find_default(name) for name in names}
    if facts.edit is not None:
        own["strength"] = facts.edit.defaults.get("strength")
    if facts.is_video:
        own |= {"num_frames": facts.find_default(*FRAME_COUNTS), "fps": facts.fps}
    if facts.size:
        width, height = facts.size
        own |= {"width": width, "height": height, "size": f"{width}x{height}"}
    return drop_missing(own)


def validate_fields(fields_class: type[FieldsT], values: JsonObject, own_values: JsonObject | None = None) -> FieldsT:
    """Validate the fields of a body as they are.

    Args:
        own_values: values for an error to suggest; for other fields it suggests their example.

    Raises:
        RequestError: if a field has the wrong type or is missing; the message suggests a value.
    """
    try:
        return fields_class.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    if not problem["loc"]:
        raise RequestError("a field's name is not Unicode text; leave it out", code="bad_json")
    name = str(problem["loc"][0])
    hint = ""
    known = fields_class.model_fields.get(name)
    if own_values is not None and name in own_values:
        hint = f"; try {name}={own_values[name]!r}"
    elif known is not None and known.examples:
        hint = f"; try {name}={known.examples[0]!r}"
    if problem["type"] == "missing":
        raise RequestError(f"{name} is missing{hint}", param=name, code="missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = shorten_value(values.get(name))
    raise RequestError(f"{name}={value} {message}{hint}", param=name)


def shorten_value(value: Any) -> str:
    """Return a value for an error message, with long values cut."""
    # A number with many digits takes long to format.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a number of many digits"
    if isinstance(value, list | dict):
        return "..."
    if isinstance(value, str):
        value = value[:40]
    return ascii(value)[:60]

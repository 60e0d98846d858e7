"""Builds a job from the fields of a request, within the limits of the server, and submits it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from fastapi import Request as HttpRequest
from pydantic import BaseModel

from ditile.model.known import find_known_model
from ditile.plan.errors import ModelError, suggest_nearest
from ditile.plan.numbers import is_whole_number
from ditile.plan.option_classes import JsonObject
from ditile.plan.shape import FRAME_COUNTS
from ditile.planner.promise import Bounds
from ditile.runner.requests.cache_options import LoraChoice
from ditile.runner.requests.facts import ModelFacts
from ditile.runner.requests.options import GIF_MOST_FPS, GenerateOptions
from ditile.runner.requests.seeds import choose_random_seed
from ditile.serve.api.answers import (
    NAMES_OF_OPTIONS,
    RequestError,
    convert_error,
    find_owner,
    find_served_name,
    find_service,
)
from ditile.serve.api.fields import ImageFields, LoraField, RequestFields, VideoFields, list_own_values, shorten_value
from ditile.serve.api.uploads import Body, Upload, decode_uploads
from ditile.serve.jobs import INPUT_IMAGE, INPUT_MASK, Files, Job, Kind, Request
from ditile.serve.options import ServeOptions

# Old clients send models with these prefixes by default; they get no warning.
VENDOR_MODELS = ("dall-e", "gpt-image", "chatgpt-image", "sora")
_SIZE = re.compile(r"(\d{1,6})\s*[xX×*]\s*(\d{1,6})", re.ASCII)
_SHOWN_WARNINGS = 16
_SHOWN_CHARACTERS = 500
# OpenAI's fields without a meaning for an open model -> their defaults, which need no warning.
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "style": ("vivid",),
    "input_fidelity": ("low",),
}
# Options of `ditile generate` that fields of a request set.
_OPTIONS = (
    *("prompt", "negative_prompt", "seed", "steps", "guidance", "true_cfg", "strength"),
    *("num_images", "frames", "fps"),
)


async def submit_request(http: HttpRequest, fields: ImageFields | VideoFields, body: Body) -> Job:
    """Submit the job of a request to the service.

    Raises `DitileError` if it cannot be generated, or the service is not ready.
    """
    service = find_service(http)
    options = service.options
    images, mask = await decode_uploads(body, options.max_upload_pixels, service.facts.max_pictures)
    # This reads the folder of LoRAs, so it runs in a thread.
    request, inputs = await asyncio.to_thread(build_request, fields, service.facts, options, images, mask)
    # Clients of Azure send `api-version`.
    unknown = sorted(set(http.query_params) - {"api-version"})
    for name in unknown[:_SHOWN_WARNINGS]:
        request.client["warnings"].append(f"parameter {name[:60]!r} of the address was ignored; send it in the body")
    kind: Kind = "video" if isinstance(fields, VideoFields) else "image"
    job = await service.submit(kind, find_owner(http), request, inputs)
    http.state.job = job.id
    return job


def build_request(
    fields: ImageFields | VideoFields,
    facts: ModelFacts,
    options: ServeOptions,
    images: list[Upload],
    mask: bytes | None = None,
) -> tuple[Request, Files]:
    """Build the job's request, and return it with its input files by name.

    Args:
        mask: the mask as PNG, white where the first image is generated again.

    Raises:
        RequestError: if a field is beyond a limit of the server, or the model cannot generate it.
    """
    warnings = list_warnings(fields, facts, options)
    inputs = {}
    for index, image in enumerate(images):
        name = INPUT_IMAGE if index == 0 else f"{INPUT_IMAGE}-{index}"
        inputs[name] = image.png
    if mask is not None:
        inputs[INPUT_MASK] = mask
    width, height = parse_size(fields, facts, options, images)
    generate_options = _build_options(fields, facts, options, list(inputs), width, height)
    num_previews = 0
    if isinstance(fields, ImageFields) and fields.stream:
        num_previews = fields.partial_images
    client = {
        "model": fields.model or find_served_name(facts.name),
        "warnings": warnings,
        "inputs": sorted(inputs),
        **predict_shape(generate_options, facts),
    }
    request = Request(
        options=generate_options,
        output_format=fields.output_format,
        output_compression=getattr(fields, "output_compression", 100),
        num_previews=num_previews,
        loras=choose_loras(fields.lora, facts, options),
        computed_steps=fields.computed_steps,
        bounds=Bounds(seconds=fields.within_seconds, min_psnr=fields.min_psnr),
        timeout=fields.timeout,
        client=client,
    )
    return request, inputs


def _build_options(
    fields: ImageFields | VideoFields,
    facts: ModelFacts,
    options: ServeOptions,
    inputs: list[str],
    width: int | None,
    height: int | None,
) -> GenerateOptions:
    """Build the options of `ditile generate` from a request. Raises `RequestError`, which names the client's field."""
    values: JsonObject = {}
    for option in _OPTIONS:
        name = NAMES_OF_OPTIONS.get(option, option)
        # Unknown fields of a request are attributes too.
        if name in type(fields).model_fields and getattr(fields, name) is not None:
            values[option] = getattr(fields, name)
    # Name of a field -> the field that the client sent in its place.
    sent_names: dict[str, str] = {}
    if _has_size(fields):
        sent_names = {"width": "size", "height": "size"}
    if isinstance(fields, VideoFields) and fields.num_frames is None and fields.seconds is not None:
        values["frames"] = facts.count_frames(fields.seconds, fields.fps)
        sent_names["num_frames"] = "seconds"
    _check_limits(fields, options, values, sent_names)
    if fields.seed in (None, -1):
        values["seed"] = choose_random_seed()
    images = tuple(name for name in inputs if name != INPUT_MASK)
    values |= {
        "width": width,
        "height": height,
        "steps": _choose_steps(fields, facts, options),
        "image": images or None,
    }
    if INPUT_MASK in inputs:
        values["mask"] = INPUT_MASK
    try:
        generate_options = GenerateOptions(model=facts.name, **values)
        facts.check_options(generate_options)
    except ModelError as error:
        refusal = convert_error(error)
        refusal.param = sent_names.get(refusal.param or "", refusal.param)
        raise refusal from None
    return generate_options


def predict_shape(options: GenerateOptions, facts: ModelFacts) -> JsonObject:
    """Predict the size, and for a video also the length, for clients that ask before the job is done."""
    own_width, own_height = facts.size or (0, 0)
    width = options.width or own_width
    height = options.height or own_height
    shape: JsonObject = {"size": "auto"}
    if width and height:
        shape["size"] = f"{width}x{height}"
    if facts.is_video:
        shape["frames"] = options.frames or facts.find_default(*FRAME_COUNTS) or 0
        shape["fps"] = options.fps or facts.fps
    return shape


def list_warnings(fields: ImageFields | VideoFields, facts: ModelFacts, options: ServeOptions) -> list[str]:
    """Return warnings about the parts of a request that are ignored."""
    warnings = []
    served = find_served_name(facts.name)
    model = fields.model
    is_served = model is None or model in (served, facts.name)
    if model is not None and not is_served and not model.lower().startswith(VENDOR_MODELS):
        warnings.append(f"model {model[:60]!r} is not served; {served} answers")
    sent = fields.model_fields_set
    if _has_size(fields):
        warnings += [f"{name} was ignored, as size says it" for name in ("width", "height") if name in sent]
    if isinstance(fields, VideoFields):
        if fields.num_frames is not None and fields.seconds is not None:
            warnings.append("seconds was ignored, as num_frames says it")
    else:
        if fields.output_format == "png" and "output_compression" in sent:
            warnings.append("output_compression was ignored: it is for jpeg and webp, and png loses nothing")
        if fields.partial_images and not fields.stream:
            warnings.append("partial_images was ignored: previews come with stream=true")
    if fields.timeout is not None and fields.timeout > options.timeout:
        warnings.append(f"timeout is {options.timeout:g}, the most of this server")
    if fields.computed_steps is not None and (fields.within_seconds, fields.min_psnr) != (None, None):
        warnings.append("within_seconds and min_psnr were ignored, as computed_steps says the steps")
    steps = _choose_steps(fields, facts, options)
    if steps != fields.num_inference_steps:
        own = facts.find_default("num_inference_steps")
        warnings.append(f"num_inference_steps is {steps}, the most of this server; the model's own is {own}")
    for name, defaults in _DEFAULTS.items():
        value = getattr(fields, name, None)
        if value is not None and value not in defaults:
            warnings.append(f"{name}={shorten_value(value)} was ignored: it has no meaning for an open model")
    return warnings + list_prompt_warnings(fields.prompt, facts) + list_unknown_fields(fields)


def list_prompt_warnings(prompt: str, facts: ModelFacts) -> list[str]:
    """Return warnings about words of a prompt that a bundled model does not know."""
    known = find_known_model(facts.name)
    note = None if known is None else known.explain_unknown_prompt(prompt[:_SHOWN_CHARACTERS])
    return [] if note is None else [note]


def list_unknown_fields(fields: BaseModel) -> list[str]:
    """Return warnings about unknown fields."""
    names = sorted(fields.model_extra or {})
    warnings = [f"{name[:60]!r} is not known here, and was ignored" for name in names[:_SHOWN_WARNINGS]]
    num_more = len(names) - _SHOWN_WARNINGS
    if num_more > 0:
        warnings.append(f"nor were {num_more} other fields")
    return warnings


def parse_size(
    fields: RequestFields, facts: ModelFacts, options: ServeOptions, images: list[Upload]
) -> tuple[int | None, int | None]:
    """Return width and height; None is the model's own. An edit has its image's aspect ratio and the model's area.

    Raises `RequestError` if they are not a size, or have more pixels than the server allows.
    """
    width = fields.width
    height = fields.height
    own_width, own_height = facts.size or (0, 0)
    if fields.size is not None and _has_size(fields):
        match = _SIZE.fullmatch(fields.size.strip())
        if match is None:
            example = list_own_values(facts).get("size", "1024x1024")
            raise RequestError(f"size={fields.size[:40]!r} is not a size; try size={example!r} or 'auto'", param="size")
        width = int(match[1])
        height = int(match[2])
    elif width is None and height is None and images and facts.size:
        image = images[0]
        scale = (own_width * own_height / (image.width * image.height)) ** 0.5
        multiple = facts.size_multiple
        width = max(1, round(image.width * scale / multiple)) * multiple
        height = max(1, round(image.height * scale / multiple)) * multiple
    final_width = width or own_width
    final_height = height or own_height
    max_pixels = options.max_upload_pixels
    if options.max_pixels is None and facts.size:
        max_pixels = 4 * own_width * own_height
    # Each side is checked as well, since a side of 0 would hide a long one.
    if max(final_width * final_height, final_width, final_height) > max_pixels:
        max_side = int(max_pixels**0.5)
        param = "size" if _has_size(fields) else "width"
        raise RequestError(
            f"size={final_width}x{final_height} has more than the {max_pixels} pixels that this server "
            f"generates; try size={max_side}x{max_side} or less",
            status=422,
            param=param,
        )
    return width, height


def choose_loras(
    lora: str | LoraField | dict[str, float] | None, facts: ModelFacts, options: ServeOptions
) -> dict[str, float]:
    """Return the LoRAs of a request: name -> scale. A text may have the scale after a colon, as on the command line.

    Raises:
        RequestError, ModelError: if one is not on the server, its scale is not a number, or there are too many.
    """
    if lora is None:
        return {}
    known = options.list_lora_names(facts)
    if isinstance(lora, LoraField):
        loras = {lora.name: lora.scale}
    elif isinstance(lora, str):
        choice = LoraChoice.parse(lora, known)
        # `describe` leaves out a scale of 1, so this gives the name of the LoRA as it is in `known`.
        loras = {choice._replace(scale=1.0).describe(): choice.scale}
    else:
        loras = dict(lora)
    for name in loras:
        if name not in known:
            hint = suggest_nearest(name[:60], known) if known else "this server has none"
            raise RequestError(f"lora={name[:60]!r} is not known; {hint}", status=422, param="lora")
    if len(loras) > options.max_loras:
        raise RequestError(
            f"lora names {len(loras)}, and this server takes {options.max_loras} at once", status=422, param="lora"
        )
    return loras


def _choose_steps(fields: RequestFields, facts: ModelFacts, options: ServeOptions) -> int | None:
    """Return the steps of a request; None is the model's own number, which the limit replaces if it is larger."""
    own = facts.find_default("num_inference_steps")
    if fields.num_inference_steps is None and is_whole_number(own) and own > options.max_steps:
        return options.max_steps
    return fields.num_inference_steps


def check_prompt(prompt: str, options: ServeOptions, name: str = "prompt") -> None:
    """Check that a prompt is not empty or too long. Raises `RequestError` if it is."""
    if not prompt.strip():
        raise RequestError(f"{name} is empty; say what to generate", param=name)
    if len(prompt) > options.max_prompt:
        raise RequestError(
            f"{name} has {len(prompt)} characters, and this server takes {options.max_prompt}; shorten it",
            status=422,
            param=name,
        )


def _has_size(fields: RequestFields) -> bool:
    """Return whether `size` sets the size. "auto" leaves it to width and height, or to the model."""
    return fields.size is not None and fields.size.strip().lower() != "auto"


def _check_limits(
    fields: RequestFields, options: ServeOptions, values: JsonObject, sent_names: Mapping[str, str]
) -> None:
    """Check a request against the limits of the server. Raises `RequestError` for what is above them."""
    check_prompt(fields.prompt, options)
    if fields.negative_prompt and fields.negative_prompt.strip():
        check_prompt(fields.negative_prompt, options, "negative_prompt")
    if isinstance(fields, VideoFields) and fields.output_format == "gif" and values.get("fps", 0) > GIF_MOST_FPS:
        raise RequestError(
            f"fps={fields.fps:g}: a GIF shows {GIF_MOST_FPS} frames a second at most; try output_format=mp4",
            status=422,
            param="fps",
        )
    limits = {"steps": options.max_steps, "num_images": options.max_images, "frames": options.max_frames}
    for option, limit in limits.items():
        name = NAMES_OF_OPTIONS[option]
        value = values.get(option, 0)
        if value > limit:
            raise RequestError(
                f"{name}={value} is more than this server's {limit}; try {name}={limit} or less",
                status=422,
                param=sent_names.get(name, name),
            )

"""Bodies of requests: JSON, forms and the images in them, read within limits and checked by their content."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from fastapi import Request as HttpRequest
from PIL import Image, ImageOps
from starlette.datastructures import UploadFile

from ditile.plan.option_classes import JsonObject
from ditile.runner.requests.pictures import DECODE_ERRORS, convert_mask
from ditile.serve.api.answers import RequestError
from ditile.serve.jobs import shorten_line

# Of images; of a moving one the first frame counts.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FIELDS = 256
# Fields that hold images to start from, and masks; any of them may end in [].
IMAGE_FIELDS = ("image", "images", "url", "image_url", "input_reference")
MASK_FIELDS = ("mask", "mask_image")
# How a form names the scale of a LoRA: lora[style]=0.8.
_LORA_FIELD = re.compile(r"lora\[([^\[\]]+)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A request's body: field -> value (in a form all are texts), and apart from them its images and masks as sent."""

    values: JsonObject = field(default_factory=dict)
    images: list[bytes] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """An image that was decoded, in RGB (a mask in gray), as PNG."""

    png: bytes
    width: int
    height: int


async def read_body(http: HttpRequest) -> Body:
    """The body of a request, as JSON or as a form, whichever it is.

    Raises:
        RequestError: if it is neither, or an image is an address or no base64.
    """
    media_type, _, _ = http.headers.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    if media_type == "multipart/form-data":
        return await _read_form(http)
    content = await http.body()
    # What curl calls a form by default is often JSON.
    if media_type == "application/x-www-form-urlencoded" and not content.lstrip().startswith(b"{"):
        return await _read_form(http)
    # Bodies have tens of MB, for which the event loop does not wait.
    return await asyncio.to_thread(lambda: take_images(parse_json_object(content)))


async def read_json_object(http: HttpRequest) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises `RequestError` as `parse_json_object` does."""
    return await asyncio.to_thread(parse_json_object, await http.body())


def parse_json_object(content: bytes) -> JsonObject:
    """The JSON object in a body. Of a key that is there twice, the last one counts.

    Raises:
        RequestError: if there is none, or it holds NaN or infinity, or lists in lists without end.
    """
    try:
        values = json.loads(content, parse_constant=_refuse_constant, parse_float=_parse_finite_number)
    except RecursionError:
        raise RequestError("the JSON is nested too deep; send one object of plain fields", code="bad_json") from None
    except ValueError as error:
        reason = shorten_line(error, 200)
        raise RequestError(f'the body is no JSON ({reason}); try {{"prompt": "..."}}', code="bad_json") from None
    if not isinstance(values, dict):
        raise RequestError('the JSON is no object; try {"prompt": "..."}', code="bad_json")
    return values


def take_images(values: JsonObject) -> Body:
    """A body of its fields, with the images taken out of them: bytes, data URLs, base64, objects, or lists of these."""
    body = Body()
    for name, value in values.items():
        plain_name = name.removesuffix("[]")
        if plain_name in IMAGE_FIELDS:
            body.images.extend(_collect_images(value, plain_name))
        elif plain_name in MASK_FIELDS:
            body.masks.extend(_collect_images(value, plain_name))
        else:
            body.values[name] = value
    return body


def decode_base64(text: str, param: str) -> bytes:
    """The bytes of a data URL or of base64.

    Raises:
        RequestError: if it is neither; also for an address on another server, which is never fetched.
    """
    if re.match(r"\s*(https?|ftp|file):", text, re.IGNORECASE):
        raise RequestError(
            f"{param} is an address, and this server fetches none; send the file itself, or "
            "data:image/png;base64,... with its content",
            param=param,
        )
    if text.lstrip().startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            f"{param} is no base64; send the file itself, or data:image/png;base64,... with its content", param=param
        ) from None


async def decode_uploads(body: Body, max_pixels: int, max_images: int) -> tuple[list[Upload], bytes | None]:
    """The images of a body, and its mask as PNG, which is white where the image is generated again.

    Args:
        body: as it was read.
        max_images: from which the model can start.

    Raises:
        RequestError: if one of them is no image, or too large, or the mask's size is not the image's.
    """
    # Before any is decoded: each may have as many pixels as are allowed.
    most = max(1, max_images)
    count = len(body.images)
    if count > most:
        raise RequestError(f"there are {count} images; send {most}", status=422, param="image")
    images = []
    for content in body.images:
        images.append(await asyncio.to_thread(decode_upload, content, "image", max_pixels))
    if not body.masks:
        return images, None
    if not images:
        raise RequestError("mask needs an image; add image", param="mask")
    if len(body.masks) > 1:
        raise RequestError("there are several masks; send one", param="mask")
    width = images[0].width
    height = images[0].height
    mask = await asyncio.to_thread(decode_upload, body.masks[0], "mask", max_pixels)
    if (mask.width, mask.height) != (width, height):
        raise RequestError(
            f"mask is {mask.width}x{mask.height}, the image {width}x{height}; send both in one size",
            status=422,
            param="mask",
        )
    return images, mask.png


def decode_upload(content: bytes, param: Literal["image", "mask"], max_pixels: int) -> Upload:
    """One image or mask, decoded after a look at the size in its header.

    Raises:
        RequestError: if it is no image, or has more than `max_pixels`.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise RequestError(
                    f"{param} has {width}x{height} pixels, and this server takes {max_pixels} at most; send it smaller",
                    status=422,
                    param=param,
                )
            image.load()
            upright = ImageOps.exif_transpose(image)
            decoded = convert_mask(upright) if param == "mask" else upright.convert("RGB")
    except RequestError:
        raise
    except DECODE_ERRORS:
        raise RequestError(
            f"{param} cannot be read as an image; send a whole file of {', '.join(FORMATS)}", param=param
        ) from None
    # A new image of the pixels alone, without the texts and profiles of the file.
    clean = Image.frombytes(decoded.mode, decoded.size, decoded.tobytes())
    encoded = io.BytesIO()
    clean.save(encoded, format="PNG", compress_level=1)
    return Upload(png=encoded.getvalue(), width=clean.width, height=clean.height)


def convert_png(png: bytes, output_format: str, compression: int) -> bytes:
    """A PNG of this server in another image format; of a video's formats it stays PNG."""
    if output_format not in ("jpeg", "webp"):
        return png
    encoded = io.BytesIO()
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        image.convert("RGB").save(encoded, format=output_format, quality=compression)
    return encoded.getvalue()


async def _read_form(http: HttpRequest) -> Body:
    """A form. Its files stay in memory or in files without a name."""
    max_body = http.app.state.service.options.max_body
    try:
        form = await http.form(max_files=MAX_FIELDS, max_fields=MAX_FIELDS, max_part_size=max_body)
    # A boundary or a charset that is none.
    except (ValueError, LookupError) as error:
        raise RequestError(f"the form cannot be read: {shorten_line(error, 200)}", code="bad_form") from None
    values: JsonObject = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(form.close)
        for name, value in form.multi_items():
            lora = _LORA_FIELD.fullmatch(name)
            if name.removesuffix("[]") in (*IMAGE_FIELDS, *MASK_FIELDS):
                content = await value.read() if isinstance(value, UploadFile) else value
                values.setdefault(name, []).append(content)
            elif isinstance(value, UploadFile):
                raise RequestError(f"{name[:40]!r} is a file; send images as image or mask", param=name[:40])
            elif lora is not None and isinstance(values.setdefault("lora", {}), dict):
                values["lora"][lora[1]] = value
            else:
                values[name] = value
    return await asyncio.to_thread(take_images, values)


def _collect_images(value: Any, param: str) -> list[bytes]:
    """The images in the value of a field."""
    if value is None or value == "":
        return []
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, str):
        return [decode_base64(value, param)]
    # Lists in lists could be nested without end.
    is_flat_list = isinstance(value, list) and not any(isinstance(item, list) for item in value)
    if is_flat_list and len(value) <= MAX_FIELDS:
        images = []
        for item in value:
            images += _collect_images(item, param)
        return images
    if isinstance(value, dict):
        # OpenAI has {"image_url": "..."}, and in chats {"image_url": {"url": "..."}}.
        for name in ("image_url", "url"):
            text = value.get(name)
            if isinstance(text, dict):
                text = text.get("url")
            if isinstance(text, str):
                return [decode_base64(text, param)]
    raise RequestError(f"{param} is no image; send a file, or a text data:image/png;base64,...", param=param)


def _parse_finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")

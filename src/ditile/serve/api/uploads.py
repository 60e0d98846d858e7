"""Bodies of requests: JSON, forms and the images in them, read within limits and checked by their content."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

from fastapi import Request as HttpRequest
from PIL import Image
from python_multipart.multipart import File, FormParser, parse_options_header
from starlette.datastructures import Headers

from ditile.plan.option_classes import JsonObject
from ditile.runner.requests.pictures import DECODE_ERRORS, convert_picture
from ditile.serve.api.answers import RequestError
from ditile.serve.jobs import shorten_line

# Accepted image formats. Of an animation only the first frame counts.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FIELDS = 256
# The most names and values in a whole body of JSON.
MAX_VALUES = 2**16
# The most bytes of a body without files, and the most letters of all fields besides images.
MAX_TEXT = 2**20
MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
# Fields with input images and masks; any of them may end in [].
IMAGE_FIELDS = ("image", "images", "url", "image_url", "input_reference")
MASK_FIELDS = ("mask", "mask_image")
# A form sends the scale of a LoRA as lora[style]=0.8.
_LORA_FIELD = re.compile(r"lora\[([^\[\]]+)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A request's body: its fields (in a form every value is a text), and its images and masks as they were sent."""

    values: JsonObject = field(default_factory=dict)
    images: list[bytes] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A decoded image, in RGB (a mask in gray), encoded again as PNG."""

    png: bytes
    width: int
    height: int


def read_media_type(headers: Headers) -> str:
    """Return the media type of a body, without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(http: HttpRequest) -> Body:
    """Return the body of a request, sent as JSON or a form.

    Raises `RequestError` if it is neither, or if an image is the URL of another server, or not base64.
    """
    # Bodies have tens of MB, and parsing them would block the event loop.
    return await asyncio.to_thread(parse_body, await http.body(), http.headers)


def parse_body(content: bytes, headers: Headers) -> Body:
    """Return the contents of a body. Raises the errors of `read_body`."""
    media_type = read_media_type(headers)
    is_multipart = media_type == MULTIPART
    # curl labels its data as a form by default, even if it is JSON.
    is_urlencoded = media_type == URLENCODED and not content.lstrip().startswith(b"{")
    if not is_multipart and not is_urlencoded:
        return take_images(parse_json_object(content))
    try:
        fields: Sequence[tuple[str, str | bytes]]
        if is_multipart:
            fields = _parse_multipart(content, headers["content-type"])
        else:
            fields = parse_qsl(content.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    # For instance a boundary is missing, or a text is not UTF-8.
    except ValueError as error:
        raise RequestError(f"the form cannot be read: {shorten_line(error, 200)}", code="bad_form") from None
    values: JsonObject = {}
    for name, value in fields:
        lora = _LORA_FIELD.fullmatch(name)
        if name.removesuffix("[]") in (*IMAGE_FIELDS, *MASK_FIELDS):
            values.setdefault(name, []).append(value)
        elif isinstance(value, bytes):
            raise RequestError(f"{name[:40]!r} is a file; send images as image or mask", param=name[:40])
        # After a plain `lora`, a text, lora[style] stays a field of its own, which is ignored as unknown.
        elif lora is not None and isinstance(values.setdefault("lora", {}), dict):
            values["lora"][lora[1]] = value
        else:
            values[name] = value
    return take_images(values)


def parse_json_object(content: bytes) -> JsonObject:
    """Return the JSON object in a body. Of a key that is there twice, the last one counts.

    Raises `RequestError` if there is no object, or it has NaN or infinity, too many values, or too deeply nested lists.
    """
    # Python's parser blocks all other threads, so values are counted first: each follows one of these characters.
    num_values = sum(map(content.count, (b",", b":", b"[", b"{")))
    if num_values > MAX_VALUES:
        raise RequestError(f"the JSON has more than {MAX_VALUES} values; send fewer", code="bad_json")
    try:
        # Python refuses to read thousands of digits. The first 400 make a number that the field's own limit refuses.
        values = json.loads(
            content,
            parse_constant=_parse_finite_number,
            parse_float=_parse_finite_number,
            parse_int=lambda text: int(text[:400]),
        )
    except RecursionError:
        raise RequestError("the JSON is nested too deep; send one object of plain fields", code="bad_json") from None
    except ValueError as error:
        reason = shorten_line(error, 200)
        raise RequestError(f'the body is not JSON ({reason}); try {{"prompt": "..."}}', code="bad_json") from None
    if not isinstance(values, dict):
        raise RequestError('the JSON is not an object; try {"prompt": "..."}', code="bad_json")
    if len(values) > MAX_FIELDS:
        raise RequestError(f"there are {len(values)} fields; send {MAX_FIELDS} at most", code="bad_json")
    return values


def take_images(values: JsonObject) -> Body:
    """Build a body from its fields, and take the images out: bytes, data URLs, base64, objects, or lists of these."""
    body = Body()
    num_letters = 0
    for name, value in values.items():
        plain_name = name.removesuffix("[]")
        if plain_name in IMAGE_FIELDS:
            body.images.extend(_collect_images(value, plain_name))
        elif plain_name in MASK_FIELDS:
            body.masks.extend(_collect_images(value, plain_name))
        else:
            body.values[name] = value
            num_letters += len(name) + len(str(value))
    if num_letters > MAX_TEXT:
        message = f"the fields besides images have more than {MAX_TEXT} letters; shorten them"
        raise RequestError(message, status=413, code="body_too_large")
    return body


def decode_base64(text: str, param: str) -> bytes:
    """Decode the bytes of a data URL or of base64.

    Raises `RequestError` if it is neither; also for an address on another server, which is never fetched.
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
            f"{param} is not base64; send the file itself, or data:image/png;base64,... with its content", param=param
        ) from None


async def decode_uploads(body: Body, max_pixels: int, max_images: int) -> tuple[list[Upload], bytes | None]:
    """Decode the images of a body, and its mask. The mask is returned as PNG, white where the image is generated again.

    Args:
        max_images: the number of images that the model can start from.

    Raises:
        RequestError: if one is not an image, or is too large, or the mask and the image differ in size.
    """
    # Counted before decoding, since each image may have the allowed number of pixels. One image is taken even for a
    # model that starts from none: the model's facts then refuse it by name.
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
    image = images[0]
    mask = await asyncio.to_thread(decode_upload, body.masks[0], "mask", max_pixels)
    if (mask.width, mask.height) != (image.width, image.height):
        raise RequestError(
            f"mask is {mask.width}x{mask.height}, the image {image.width}x{image.height}; send both in one size",
            status=422,
            param="mask",
        )
    return images, mask.png


def decode_upload(content: bytes, param: Literal["image", "mask"], max_pixels: int) -> Upload:
    """Decode one image or mask, after checking the size in its header.

    Raises `RequestError` if it is not an image, or has more than `max_pixels`.
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
            decoded = convert_picture(image, is_mask=param == "mask")
    except DECODE_ERRORS:
        raise RequestError(
            f"{param} cannot be read as an image; send a whole file of {', '.join(FORMATS)}", param=param
        ) from None
    # A new image with only the pixels, without the texts and profiles of the file.
    clean = Image.frombytes(decoded.mode, decoded.size, decoded.tobytes())
    encoded = io.BytesIO()
    clean.save(encoded, format="PNG", compress_level=1)
    return Upload(png=encoded.getvalue(), width=clean.width, height=clean.height)


def convert_png(png: bytes, output_format: str, compression: int) -> bytes:
    """Convert a PNG of this server to JPEG or WebP. For any other format it is returned as it is."""
    if output_format not in ("jpeg", "webp"):
        return png
    encoded = io.BytesIO()
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        image.convert("RGB").save(encoded, format=output_format, quality=compression)
    return encoded.getvalue()


def _parse_multipart(content: bytes, content_type: str) -> list[tuple[str, str | bytes]]:
    """Return the names and values of a form's fields; a file is bytes. Raises `ValueError` if it is not a form."""
    items: list[tuple[str, str | bytes]] = []

    def add_item(name: bytes | None, value: str | bytes) -> None:
        if len(items) == MAX_FIELDS:
            raise ValueError(f"it has more than {MAX_FIELDS} fields")
        items.append(((name or b"").decode(), value))

    def add_file(file: File) -> None:
        file.file_object.seek(0)
        add_item(file.field_name, file.file_object.read())

    boundary = parse_options_header(content_type)[1].get(b"boundary")
    # Files stay in memory, since the whole body is there already.
    parser = FormParser(
        MULTIPART,
        lambda field: add_item(field.field_name, (field.value or b"").decode()),
        add_file,
        boundary=boundary,
        config={"MAX_MEMORY_FILE_SIZE": math.inf},
    )
    parser.write(content)
    parser.finalize()
    return items


def _collect_images(value: Any, param: str) -> list[bytes]:
    """Return the images in the value of a field."""
    if value is None or value == "":
        return []
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, str):
        return [decode_base64(value, param)]
    # Nested lists are refused, since their depth would have no limit.
    is_flat_list = isinstance(value, list) and not any(isinstance(item, list) for item in value)
    if is_flat_list and len(value) <= MAX_FIELDS:
        images = []
        for item in value:
            images += _collect_images(item, param)
        return images
    if isinstance(value, dict):
        # OpenAI's images have {"image_url": "..."}, and its chats {"image_url": {"url": "..."}}.
        for name in ("image_url", "url"):
            text = value.get(name)
            if isinstance(text, dict):
                text = text.get("url")
            if isinstance(text, str):
                return [decode_base64(text, param)]
    raise RequestError(f"{param} is not an image; send a file, or a text data:image/png;base64,...", param=param)


def _parse_finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number

"""Bodies of requests: JSON, forms and the pictures in them, read within limits and checked by what they hold."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fastapi import Request as HttpRequest
from PIL import Image, ImageOps
from starlette.datastructures import UploadFile

from ditile.runner.requests.pictures import DECODE_ERRORS, convert_mask
from ditile.serve.api.answers import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of pictures; of a moving one the first is taken."""
MAX_FIELDS = 256
PICTURE_FIELDS = ("image", "images", "url", "image_url", "input_reference")
"""Fields that hold pictures to start from; any of them may end in []."""
MASK_FIELDS = ("mask", "mask_image")
_LORA_FIELD = re.compile(r"lora\[([^\[\]]+)\]")
"""How a form names the scale of a LoRA: lora[style]=0.8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A request's body.

    Attributes:
        values: field -> value; in a form all values are texts.
        pictures: the pictures to start from, as they came.
        masks: likewise.
    """

    values: dict[str, Any]
    pictures: list[bytes] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture that was decoded, in RGB (a mask in gray), as PNG."""

    png: bytes
    width: int
    height: int


async def read_body(http: HttpRequest) -> Body:
    """The body of a request, as JSON or as a form, whichever it is.

    Raises:
        RequestError: if it is neither, or a picture is an address or no base64.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _read_form(http)
    content = await http.body()
    # What curl calls a form by default is often JSON.
    if kind == "application/x-www-form-urlencoded" and not content.lstrip().startswith(b"{"):
        return await _read_form(http)
    return await asyncio.to_thread(lambda: take_pictures(parse_json_object(content)))


async def read_json_object(http: HttpRequest) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises `RequestError` as `parse_json_object` does."""
    # Bodies have tens of MB, which the event loop is not to wait for.
    return await asyncio.to_thread(parse_json_object, await http.body())


def parse_json_object(content: bytes) -> dict[str, Any]:
    """The JSON object in a body. Of a key that is there twice, the last one counts.

    Raises:
        RequestError: if it is none, or holds NaN or infinity, or lists in lists without end.
    """
    try:
        values = json.loads(content, parse_constant=_refuse_constant, parse_float=_parse_finite_number)
    except RecursionError:
        raise RequestError("the JSON is nested too deep; send one object of plain fields", code="bad_json") from None
    except ValueError as error:
        what = " ".join(str(error).split())[:200]
        raise RequestError(f'the body is no JSON ({what}); try {{"prompt": "..."}}', code="bad_json") from None
    if not isinstance(values, dict):
        raise RequestError('the JSON is no object; try {"prompt": "..."}', code="bad_json")
    return values


def take_pictures(values: Mapping[str, Any], files: Mapping[str, list[bytes]] | None = None) -> Body:
    """A body of its fields, with the pictures taken out of them.

    Args:
        values: the fields; pictures are data URLs, base64, or objects with an `image_url`, or lists of these.
        files: field -> pictures that came as files.
    """
    found: dict[bool, list[bytes]] = {False: [], True: []}
    rest = dict(values)
    for name in [*(files or {}), *values]:
        plain = name.removesuffix("[]")
        if plain not in (*PICTURE_FIELDS, *MASK_FIELDS):
            continue
        target = found[plain in MASK_FIELDS]
        target += (files or {}).get(name, [])
        target += [decode_base64(text, plain) for text in _list_picture_texts(rest.pop(name, None), plain)]
        files = {key: content for key, content in (files or {}).items() if key != name}
    return Body(values=rest, pictures=found[False], masks=found[True])


def decode_base64(text: str, param: str) -> bytes:
    """The bytes of a data URL or of base64.

    Raises:
        RequestError: if it is neither; also for an address of another server, which is never asked.
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


async def decode_pictures(
    body: Body, max_pixels: int, most: int, *, resize_mask: bool = False
) -> tuple[list[Picture], bytes | None]:
    """The pictures of a body, and its mask as PNG, which is white where the picture is drawn anew.

    Args:
        body: as it was read.
        max_pixels: of a picture.
        most: pictures that the model starts from at most.
        resize_mask: whether a mask of another size is brought to that of the first picture.

    Raises:
        RequestError: if one of them is no picture, or too large, or the mask's size is not the picture's.
    """
    # Before work: each may be of as many pixels as are allowed.
    if len(body.pictures) > max(1, most):
        raise RequestError(f"there are {len(body.pictures)} pictures; send {max(1, most)}", status=422, param="image")
    pictures = [await asyncio.to_thread(_decode_picture, content, "image", max_pixels) for content in body.pictures]
    if not body.masks:
        return pictures, None
    if not pictures:
        raise RequestError("mask needs a picture; add image", param="mask")
    if len(body.masks) > 1:
        raise RequestError("there are several masks; send one", param="mask")
    mask = await asyncio.to_thread(_decode_picture, body.masks[0], "mask", max_pixels, of_mask=True)
    first = pictures[0]
    if (mask.width, mask.height) != (first.width, first.height):
        if not resize_mask:
            raise RequestError(
                f"mask is {mask.width}x{mask.height}, the picture {first.width}x{first.height}; send both in one size",
                status=422,
                param="mask",
            )
        return pictures, await asyncio.to_thread(_resize_png, mask.png, (first.width, first.height))
    return pictures, mask.png


def convert_png(png: bytes, output_format: str, compression: int) -> bytes:
    """A PNG of this server in another format of pictures."""
    if output_format not in ("jpeg", "webp"):
        return png
    encoded = io.BytesIO()
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        image.convert("RGB").save(encoded, format=output_format, quality=compression)
    return encoded.getvalue()


def _decode_picture(content: bytes, param: str, max_pixels: int, *, of_mask: bool = False) -> Picture:
    """Decodes one picture, after a look at the size that its head says."""
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
            decoded = convert_mask(upright) if of_mask else upright.convert("RGB")
    except RequestError:
        raise
    except DECODE_ERRORS:
        raise RequestError(
            f"{param} cannot be read as a picture; send a whole file of {', '.join(FORMATS)}", param=param
        ) from None
    encoded = io.BytesIO()
    # A new picture of the pixels alone, without the texts and profiles of the file.
    clean = Image.frombytes(decoded.mode, decoded.size, decoded.tobytes())
    clean.save(encoded, format="PNG", compress_level=1)
    return Picture(png=encoded.getvalue(), width=clean.width, height=clean.height)


def _resize_png(png: bytes, size: tuple[int, int]) -> bytes:
    encoded = io.BytesIO()
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        image.resize(size).save(encoded, format="PNG")
    return encoded.getvalue()


async def _read_form(http: HttpRequest) -> Body:
    """A form. Its files stay in memory or in files without a name."""
    values: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    size = http.app.state.service.options.max_body
    try:
        form = await http.form(max_files=MAX_FIELDS, max_fields=MAX_FIELDS, max_part_size=size)
    except (ValueError, LookupError) as error:  # a boundary or a charset that is none
        raise RequestError(f"the form cannot be read: {' '.join(str(error).split())[:200]}", code="bad_form") from None
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(form.close)
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name.removesuffix("[]") not in (*PICTURE_FIELDS, *MASK_FIELDS):
                    raise RequestError(f"{name[:40]!r} is a file; send pictures as image or mask", param=name[:40])
                files.setdefault(name, []).append(await value.read())
            elif name.removesuffix("[]") in PICTURE_FIELDS:
                values.setdefault(name, []).append(value)
            elif (found := _LORA_FIELD.fullmatch(name)) and isinstance(values.setdefault("lora", {}), dict):
                values["lora"][found[1]] = value
            else:
                values[name] = value
    return await asyncio.to_thread(take_pictures, values, files)


def _list_picture_texts(value: Any, param: str) -> list[str]:
    """The texts of a field that holds pictures."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) <= MAX_FIELDS and not any(isinstance(item, list) for item in value):
        return [text for item in value for text in _list_picture_texts(item, param)]
    if isinstance(value, dict):
        for name in ("image_url", "url"):
            if isinstance(text := value.get(name), str):
                return [text]
            if isinstance(text, dict) and isinstance(text.get("url"), str):
                return [text["url"]]
    raise RequestError(f"{param} is no picture; send a file, or a text data:image/png;base64,...", param=param)


def _parse_finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")

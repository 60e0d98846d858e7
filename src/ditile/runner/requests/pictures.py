"""Reads and writes images as files, with texts about how they were made: in a PNG's text chunks, or in the EXIF of a
JPEG or WebP.

Only decoding all of a file shows whether it is an image: it may be cut short, or claim a billion pixels.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile, PngInfo

from ditile.distributed import files
from ditile.plan.errors import ModelError

PARAMETERS = "parameters"
"""The key of AUTOMATIC1111's text, which other programs read."""
# Tags of EXIF.
IMAGE_DESCRIPTION = 0x010E
EXIF_IFD = 0x8769
USER_COMMENT = 0x9286
MAX_EXIF_BYTES = 2**16 - 64
"""The most bytes of EXIF: a segment of a JPEG has no room for more."""
MAX_PICTURE_BYTES = 2**30
PICTURE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""Ending of a file -> the format in which an image is written."""
FILE_QUALITY = 95
"""The quality of JPEG and WebP files of the command line: a loss is hardly seen."""
DECODE_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError),
    Image.DecompressionBombWarning,  # where warnings are errors
)
"""The errors of Pillow's decoders for data that is not an image, or an image of too many pixels."""


def read_picture(path: str | Path, option: str, *, is_mask: bool = False) -> Image.Image:
    """Read the image in a file that an option names. It is converted by `convert_picture`.

    Raises:
        ModelError: if it cannot be read, is cut short, or has more pixels than Pillow decodes.
    """
    try:
        with Image.open(io.BytesIO(files.read_file(path, MAX_PICTURE_BYTES))) as image:
            return convert_picture(image, is_mask=is_mask)
    except UnidentifiedImageError:
        raise ModelError(f"{option}={str(path)!r} cannot be read as an image: no format that Pillow knows") from None
    except DECODE_ERRORS as error:
        raise ModelError(f"{option}={str(path)!r} cannot be read as an image: {files.describe_error(error)}") from error


def convert_picture(image: Image.Image, *, is_mask: bool) -> Image.Image:
    """Convert an image to upright RGB, or a mask to upright gray.

    A mask is white where the image is generated again: where it was white, or its alpha channel transparent.

    Raises:
        ValueError: if its numbers are floating-point, for which files do not say what is white.
    """
    # Cameras keep the orientation in the EXIF.
    upright = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("its numbers are floating-point; save it with 8 or 16 bits")
    # Pillow would keep numbers of 16 bits up to 255 and make all others white. The high bytes are the 8-bit image.
    if upright.mode.startswith("I"):
        upright = upright.point(lambda value: value / 256)
    if not is_mask:
        return upright.convert("RGB")
    if "A" in upright.getbands() or "transparency" in upright.info:
        return ImageOps.invert(upright.convert("RGBA").getchannel("A"))
    return upright.convert("L")


def encode_png(image: Image.Image, texts: Mapping[str, str]) -> bytes:
    """Encode an image into the bytes of a PNG, with texts in its text chunks."""
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", pnginfo=info)
    return encoded.getvalue()


def encode_picture(image: Image.Image, format: str, quality: int, texts: Mapping[str, str]) -> bytes:
    """Encode an image into the bytes of a file.

    Args:
        image: the image in RGB.
        format: "png", "jpeg" or "webp".
        quality: the quality for jpeg and webp, 0 to 100.
        texts: how it was made. The EXIF of a JPEG or a WebP has all of them in JSON, and AUTOMATIC1111's in the
            comment; nothing if they are too long.
    """
    if format == "png":
        return encode_png(image, texts)
    exif = Image.Exif()
    exif[IMAGE_DESCRIPTION] = json.dumps(dict(texts))
    if PARAMETERS in texts:
        comment = texts[PARAMETERS].encode("utf-16-be", "replace")
        exif[EXIF_IFD] = {USER_COMMENT: b"UNICODE\0" + comment}
    exif_bytes = exif.tobytes()
    if len(exif_bytes) > MAX_EXIF_BYTES:
        exif_bytes = b""
    encoded = io.BytesIO()
    image.save(encoded, format=format, quality=quality, exif=exif_bytes)
    return encoded.getvalue()


def read_picture_texts(path: Path) -> dict[str, str]:
    """Read the texts about how an image was made. Empty if there is no such file, or its data or checksums are
    wrong."""
    formats = sorted({format.upper() for format in PICTURE_FORMATS.values()})
    try:
        content = files.read_file(path, MAX_PICTURE_BYTES)
        # `verify` checks the checksums of a PNG; an image must be opened again after it.
        with Image.open(io.BytesIO(content), formats=formats) as image:
            image.verify()
        with Image.open(io.BytesIO(content), formats=formats) as image:
            image.load()
            if isinstance(image, PngImageFile):
                return dict(image.text)
            return dict(json.loads(image.getexif().get(IMAGE_DESCRIPTION, "{}")))
    except DECODE_ERRORS:
        return {}


def describe_weight_files(components: Mapping[str, str]) -> dict[str, str]:
    """Describe the weight files of components in the form that images keep. A file may be larger than the memory, so
    its time stands for its content.

    Raises:
        OSError: if there is no such file.
    """
    described = {}
    for name, path in components.items():
        stat = os.stat(path)
        changed = datetime.datetime.fromtimestamp(stat.st_mtime, datetime.timezone.utc)
        described[name] = (
            f"{hide_local_path(path)}: {stat.st_size} bytes of {changed.isoformat(timespec='milliseconds')}"
        )
    return described


def hide_local_path(name: str) -> str:
    """Return a name in the form that images keep. For a local path it is the last part, with a digest that tells it
    from others.

    Images are sent to other people, and a path says names of users and projects.
    """
    if not os.path.exists(name) or Path(name).parent == Path():
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{Path(name).resolve().name} ({digest[:8]})"

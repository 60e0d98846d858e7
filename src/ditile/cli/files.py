"""Writes files atomically: a file gets its name when it is whole, and a failure leaves no part of it.

PNG files keep in their text chunks how they were made.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file in place of one that is there. Links stay links; a pipe or another special file is written to.

    Raises:
        OSError: if it cannot be written; the error names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary_path = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")  # of this writer alone
    try:
        with temporary_path.open("xb") as file:  # "x" never opens a link that another process made
            file.write(data)
        os.replace(temporary_path, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # and not the name of the temporary file
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or never made
            temporary_path.unlink()


def write_json_file(path: Path, value: Any) -> None:
    """Writes an indented file of JSON.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def save_png_with_texts(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Writes a picture as PNG, with texts in its text chunks.

    Raises:
        OSError: if the file cannot be written.
    """
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", pnginfo=info)
    write_atomically(path, encoded.getvalue())


def read_png_texts(path: Path) -> dict[str, str]:
    """The texts of a PNG; empty if there is no such file, or its data or checksums are wrong."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.verify()
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            return dict(image.text) if isinstance(image, PngImageFile) else {}
    except (OSError, SyntaxError, ValueError, EOFError):
        return {}

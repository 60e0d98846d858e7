"""Files that get their names when they are whole: nobody ever sees half of one, and none is left where that failed.

PNG files that say how they were made, in their text chunks.
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
    """Writes a file, in place of one that is there; a link stays one. What is no file, such as a pipe, is written to.

    Raises:
        OSError: if it cannot be written; it names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary_path = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")  # no other writer has it
    try:
        with temporary_path.open("xb") as file:  # never through a link that somebody has put there
            file.write(data)
        os.replace(temporary_path, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # of the part nobody knows
    finally:
        with contextlib.suppress(OSError):  # it has got its name, or was never made
            temporary_path.unlink()


def write_json_file(path: Path, value: Any) -> None:
    """Writes a file of JSON, for people to read too.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def save_png_with_texts(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Writes a picture with its texts.

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
    """The texts of a whole PNG; empty if there is none, or its data or checksums are not right."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.verify()
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            return dict(image.text) if isinstance(image, PngImageFile) else {}
    except (OSError, SyntaxError, ValueError, EOFError):
        return {}

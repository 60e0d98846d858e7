"""PNG files that say how they were made, in their text chunks."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo


def save(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Writes a picture with its texts. It gets its name when it is whole: nobody ever sees half a file.

    Raises:
        OSError: if the file cannot be written.
    """
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", pnginfo=info)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(encoded.getvalue())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def texts(path: Path) -> dict[str, str]:
    """The texts of a whole PNG; empty if there is none, or its data or checksums are not right."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.verify()
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            return dict(image.text) if isinstance(image, PngImageFile) else {}
    except (OSError, SyntaxError, ValueError, EOFError):
        return {}

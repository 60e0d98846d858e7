"""PNG files that say how they were made, in their text chunks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from ditile.cli import files


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
    files.write_atomically(path, encoded.getvalue())


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

"""PNG files that say how they were made, in their text chunks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo


def save(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Writes a picture with its texts. It is encoded first, so that an error leaves no half file.

    Raises:
        OSError: if the file cannot be written.
    """
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", pnginfo=info)
    path.write_bytes(encoded.getvalue())

"""Which rows which families cannot hold, and why."""

from __future__ import annotations

from tests.zoo.own import OWN
from tests.zoo.rows import EVERY

FAST = (
    "stable-diffusion-3",
    "qwen-image-edit",
    "chroma",
    "pixart-sigma",
    "wan-2.1-image-to-video",
    "flux-2-klein",
    "qwen-image-2.1",
    "prx",
)
HYBRIDS = (
    "ltx-2", "qwen-image-2.1", "z-image", "wan-2.2", "krea-2", "qwen-image", "qwen-image-edit", "flux-2", "wan-2.1",
    "flux",
)  # fmt: skip
"""An entry of each of the ten families that are used most."""

HOLES: dict[tuple[str, str], str] = {}


def has_row(name: str, row: str) -> bool:
    """Whether a row is asked of an entry."""
    if row == "hybrid":
        return name in HYBRIDS or name in OWN
    return row != "data" or EVERY[name].two_images is not None


def find_hole(name: str, row: str) -> str | None:
    """Why an entry cannot hold a row; None if it can."""
    return HOLES.get((name, row))

"""The share of images that show their captions, by what is judged; textures too, which `evaluate` does not judge."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ditile_lab.quality.caption_check import (
    BACKDROP,
    STRIPES,
    Image,
    Mask,
    judge_image,
    make_pixel_grid,
    parse_caption,
    segment_colors,
)

THING_ITEMS = ("color", "position", "shape", "size")
VERDICT_ITEMS = (*THING_ITEMS, "background", "clean", "all_right", "texture")


def score_images(images: Sequence[Image], captions: Sequence[str]) -> dict[str, float]:
    """Per cent right of each of `VERDICT_ITEMS`, averaged over images."""
    shares = [compute_item_shares(image, caption) for image, caption in zip(images, captions, strict=True)]
    scores = {}
    for item in VERDICT_ITEMS:
        scores[item] = round(100 * float(np.mean([image_shares[item] for image_shares in shares])), 1)
    return scores


def compute_item_shares(image: Image, caption: str) -> dict[str, float]:
    """The share, 0 to 1, of each of `VERDICT_ITEMS`: the mean over things, or that of the whole image."""
    verdict = judge_image(image, caption)
    shares = {}
    for item in THING_ITEMS:
        shares[item] = float(np.mean([getattr(thing, item) for thing in verdict.things]))
    for item in ("background", "clean", "all_right"):
        shares[item] = float(getattr(verdict, item))
    backdrop = segment_colors(image) >= BACKDROP
    shares["texture"] = float(classify_texture(image, backdrop) == parse_caption(caption).texture)
    return shares


def classify_texture(image: Image, backdrop: Mask) -> str:
    """The texture of the pixels of the background, by the brightness along rows and columns."""
    if not backdrop.any():
        return "none"
    x, y = make_pixel_grid(*image.shape[:2])
    light = image.mean(2)
    wave = np.sin(x * (2 * np.pi * STRIPES))
    if _compute_mean(light, backdrop & (wave > 0)) - _compute_mean(light, backdrop & (wave < 0)) > 15:
        return "striped"
    if _compute_mean(light, backdrop & (y > 0.7)) - _compute_mean(light, backdrop & (y < 0.3)) > 20:
        return "gradient"
    return "plain"


def _compute_mean(values: NDArray[np.float64], mask: Mask) -> float:
    if not mask.any():
        return 0.0
    return float(values[mask].mean())

"""Does a picture show its caption? Colour segmentation and template overlap, in numpy, for any size and
aspect ratio.

Every pixel is given to the nearest colour of the vocabulary (with its shades). Each thing named in the
caption is then looked for among the pixels of its colour: enough of them (colour), their centroid near the
place asked for (position), the best of the shape templates by intersection over union (shape), and the area
(size). The background is the most frequent background colour. A picture is all right if all of this holds for
every thing and no other colour of the vocabulary takes up a visible area. The texture is judged too and
reported beside, not within, "all right".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ditile.cli.evaluate.scenes import (
    BACKGROUNDS,
    COLORS,
    GRADIENT_DEPTH,
    SHAPES,
    SIZES,
    STRIPES,
    Image,
    Mask,
    Thing,
    compute_signed_distance,
    make_pixel_grid,
    parse_caption,
)

SHADES = (0.7, 0.85, 1.0, 1.15, 1.3)  # the light on a thing
OFFSETS = (
    -GRADIENT_DEPTH,
    -GRADIENT_DEPTH / 2,
    0.0,
    GRADIENT_DEPTH / 2,
    GRADIENT_DEPTH,
)  # a background's textures
MIN_PART = 0.35  # of the area of a small thing: less of a colour is not a thing
MAX_OFF = 0.13  # of width and height, between the centroid and the place asked for
MIN_OVERLAP = 0.6  # intersection over union with the best template
FOREIGN = 0.006  # of the picture: more of an unnamed colour is an error
BACKDROP = len(COLORS)  # labels from here on are backgrounds
LARGE = float(np.sqrt(SIZES["large"] * SIZES["small"]))
VERDICT_ITEMS = ("color", "position", "shape", "size", "background", "clean", "all_right", "texture")


@dataclass(frozen=True, kw_only=True, slots=True)
class ThingVerdict:
    """What is right about one thing."""

    color: bool
    position: bool = False
    shape: bool = False
    size: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureVerdict:
    """What is right about one picture."""

    things: tuple[ThingVerdict, ...]
    background: bool
    clean: bool
    texture: bool

    @property
    def all_right(self) -> bool:
        """Every thing, the background's colour, and nothing besides."""
        things = all(t.color and t.position and t.shape and t.size for t in self.things)
        return things and self.background and self.clean

    def compute_item_share(self, item: str) -> float:
        """The share, 0 to 1, of one of ITEMS: over the things where it is theirs, else over the one picture."""
        if item in ("background", "clean", "all_right", "texture"):
            return float(getattr(self, item))
        return float(np.mean([getattr(thing, item) for thing in self.things]))


def judge_picture(image: Image, caption: str) -> PictureVerdict:
    """Judge one uint8 picture [H, W, 3]; ValueError if the caption is not of the grammar."""
    scene = parse_caption(caption)
    labels = segment_colors(image)
    masks = {color: _filter_by_majority(labels == i) for i, color in enumerate(COLORS)}
    named_colors = {thing.color for thing in scene.things}
    return PictureVerdict(
        things=tuple(_judge_thing(masks[thing.color], thing) for thing in scene.things),
        background=_classify_background(labels) == scene.background,
        clean=all(mask.mean() <= FOREIGN for color, mask in masks.items() if color not in named_colors),
        texture=classify_texture(image, labels >= BACKDROP) == scene.texture,
    )


def score_pictures(images: Sequence[Image], captions: Sequence[str]) -> dict[str, float]:
    """Per cent right of each of ITEMS, averaged over pictures."""
    verdicts = [judge_picture(image, caption) for image, caption in zip(images, captions, strict=True)]
    return {
        item: round(100 * float(np.mean([v.compute_item_share(item) for v in verdicts])), 1) for item in VERDICT_ITEMS
    }


def segment_colors(image: Image) -> NDArray[np.int64]:
    """The nearest colour of every pixel [H, W]: an index into COLORS, or BACKDROP + one into BACKGROUNDS."""
    palette, labels = _build_palette()
    x = image.reshape(-1, 3).astype(np.float32)
    distance = (palette**2).sum(1) - 2 * x @ palette.T
    nearest: NDArray[np.int64] = labels[distance.argmin(1)]
    return nearest.reshape(image.shape[:2])


def classify_texture(image: Image, backdrop: Mask) -> str:
    """The texture of the pixels of the background, by the brightness along rows and columns."""
    if not backdrop.any():
        return "none"
    x, y = make_pixel_grid(*image.shape[:2])
    light = image.mean(2)
    wave = np.sin(x * (2 * np.pi * STRIPES))
    if _mean_within_mask(light, backdrop & (wave > 0)) - _mean_within_mask(light, backdrop & (wave < 0)) > 15:
        return "striped"
    return (
        "gradient"
        if _mean_within_mask(light, backdrop & (y > 0.7)) - _mean_within_mask(light, backdrop & (y < 0.3)) > 20
        else "plain"
    )


def _judge_thing(mask: Mask, thing: Thing) -> ThingVerdict:
    height, width = mask.shape
    short = min(height, width)
    area = float(mask.sum()) / short**2
    if area < MIN_PART * _measure_template(thing.shape)[0] * SIZES["small"] ** 2:
        return ThingVerdict(color=False)
    x, y = make_pixel_grid(height, width)
    center_x, center_y = float(x[mask].mean()), float(y[mask].mean())
    overlap = {shape: _compute_overlap(mask, shape, area, center_x, center_y) for shape in SHAPES}
    best = max(overlap, key=lambda shape: overlap[shape])
    radius = np.sqrt(area / _measure_template(thing.shape)[0])
    return ThingVerdict(
        color=True,
        position=bool(np.hypot(center_x - thing.x, center_y - thing.y) < MAX_OFF),
        shape=best == thing.shape and overlap[best] > MIN_OVERLAP,
        size=bool(radius > LARGE) == (thing.size == "large"),
    )


def _compute_overlap(mask: Mask, shape: str, area: float, center_x: float, center_y: float) -> float:
    """Intersection over union of a mask with the shape of the same area and centroid."""
    height, width = mask.shape
    short = min(height, width)
    unit_area, unit_x, unit_y = _measure_template(shape)
    radius = float(np.sqrt(area / unit_area))
    x, y = make_pixel_grid(height, width)
    dx = (x - center_x) * (width / short) + unit_x * radius
    dy = (y - center_y) * (height / short) + unit_y * radius
    template_mask = compute_signed_distance(shape, dx, dy, radius) < 0
    return float((template_mask & mask).sum() / max(1, (template_mask | mask).sum()))


def _classify_background(labels: NDArray[np.int64]) -> str:
    backdrop = labels[labels >= BACKDROP] - BACKDROP
    return (
        list(BACKGROUNDS)[int(np.bincount(backdrop, minlength=len(BACKGROUNDS)).argmax())] if backdrop.size else "none"
    )


def _filter_by_majority(mask: Mask) -> Mask:
    """3 x 3 majority: removes the one-pixel mixtures of colours along outlines."""
    height, width = mask.shape
    padded = np.pad(mask.astype(np.int8), 1)
    neighbor_counts = sum(padded[i : i + height, j : j + width] for i in range(3) for j in range(3))
    return np.asarray(neighbor_counts >= 5)


def _mean_within_mask(values: NDArray[np.float64], mask: Mask) -> float:
    return float(values[mask].mean()) if mask.any() else 0.0


@cache
def _measure_template(shape: str) -> tuple[float, float, float]:
    """Area, and centroid x and y, of a shape of radius 1."""
    x, y = (3 * v - 1.5 for v in make_pixel_grid(256, 256))
    inside = compute_signed_distance(shape, x, y, 1.0) < 0
    return float(inside.mean() * 9), float(x[inside].mean()), float(y[inside].mean())


@cache
def _build_palette() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    things = [np.array(rgb) * shade for rgb in COLORS.values() for shade in SHADES]
    backdrops = [np.array(rgb) + offset for rgb in BACKGROUNDS.values() for offset in OFFSETS]
    labels = [i for i in range(len(COLORS)) for _ in SHADES] + [
        BACKDROP + i for i in range(len(BACKGROUNDS)) for _ in OFFSETS
    ]
    return np.clip(np.array(things + backdrops), 0, 255).astype(np.float32), np.array(labels)

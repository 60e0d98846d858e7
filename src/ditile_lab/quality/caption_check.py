"""Checks whether an image shows its caption: the grammar of captions, and a check by colours and templates.

A caption of the bundled models names everything in a scene of one or two coloured shapes. Properties that it does not
name (the direction and phase of stripes, the direction of a gradient, the light) are the same in every image, except
for a small jitter of place and size. Coordinates are fractions of the width (x) and of the height (y); radii are
fractions of the shorter side. `training/scenes.py` samples scenes and renders them; `training/caption_scores.py` also
judges textures.

Every pixel gets the nearest colour of the vocabulary (with its shades). Each thing in the caption is then searched
among the pixels of its colour. There must be enough of them (colour), their centroid must be near the place in the
caption (position), the best of the shape templates by intersection over union must be its shape (shape), and the area
must fit (size). The background is the most frequent background colour. An image is all right if all of this holds for
every thing and no other colour of the vocabulary takes up a visible area.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # [H, W, 3]
Mask = NDArray[np.bool_]  # [H, W]
Field = NDArray[np.float32]  # [H, W]
Rgb = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "ring")
COLORS: dict[str, Rgb] = {
    "red": (215, 35, 35),
    "green": (40, 165, 60),
    "blue": (40, 70, 215),
    "yellow": (240, 215, 40),
    "orange": (245, 125, 20),
    "purple": (135, 45, 175),
    "cyan": (40, 200, 215),
    "pink": (245, 135, 190),
}
BACKGROUNDS: dict[str, Rgb] = {
    "white": (235, 235, 235),
    "gray": (135, 135, 135),
    "black": (30, 30, 30),
    "brown": (105, 72, 45),
}
TEXTURES = ("plain", "gradient", "striped")
SIZES = {"large": 0.225, "small": 0.14}
PLACES = {
    "on the left": (0.26, 0.5),
    "on the right": (0.74, 0.5),
    "at the top": (0.5, 0.26),
    "at the bottom": (0.5, 0.74),
    "in the center": (0.5, 0.5),
}
RELATIONS = {
    "above": ((0.5, 0.27), (0.5, 0.73)),
    "below": ((0.5, 0.73), (0.5, 0.27)),
    "to the left of": ((0.27, 0.5), (0.73, 0.5)),
    "to the right of": ((0.73, 0.5), (0.27, 0.5)),
}
STRIPES = 4  # dark and light pairs over the width
GRADIENT_DEPTH = 45.0  # of 255, either way

# The pixels of a colour vary: these are factors for the light on a thing, and offsets for a background's gradient.
SHADES = (0.7, 0.85, 1.0, 1.15, 1.3)
OFFSETS = [share * GRADIENT_DEPTH for share in (-1.0, -0.5, 0.0, 0.5, 1.0)]
# This is a share of a small thing's area: a colour with less area is not a thing.
MIN_PART = 0.35
# This is a share of width and height, between the centroid of a thing and its place in the caption.
MAX_OFF = 0.13
# This is the least intersection over union with the best template.
MIN_OVERLAP = 0.6
# This is a share of the image: an unnamed colour with more is an error.
FOREIGN = 0.006
# Labels from this number on are backgrounds.
BACKDROP = len(COLORS)
# This radius lies between a small and a large thing.
LARGE = float(np.sqrt(SIZES["large"] * SIZES["small"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """An object of a scene; its place is in fractions of width and height, its radius in those of the shorter side."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The content of a caption: one or two things, `where` they are (a place or a relation), and the background."""

    things: tuple[Thing, ...]
    where: str
    background: str
    texture: str


def parse_caption(caption: str) -> Scene:
    """Parse a caption into its scene. Raises `ValueError` if the caption does not follow the grammar."""
    body, separator, backdrop = caption.rpartition(" on a ")
    words = backdrop.split()
    if not separator or len(words) not in (2, 3) or words[-1] != "background":
        raise ValueError(f"no '... on a <colour> [<texture>] background' at the end of {caption!r}")
    background, *textures = words[:-1]
    texture = "".join(textures) or "plain"
    if background not in BACKGROUNDS or texture not in TEXTURES:
        raise ValueError(
            f"background {' '.join(words[:-1])!r} is unknown; colours {list(BACKGROUNDS)}, textures {TEXTURES}"
        )
    for relation, places in RELATIONS.items():
        first, separator, second = body.partition(f" {relation} a ")
        if separator:
            nouns = (first, f"a {second}")
            things = [_parse_noun_phrase(noun, place, caption) for noun, place in zip(nouns, places, strict=True)]
            return Scene(things=tuple(things), where=relation, background=background, texture=texture)
    for where, place in PLACES.items():
        if body.endswith(f" {where}"):
            thing = _parse_noun_phrase(body.removesuffix(f" {where}"), place, caption)
            return Scene(things=(thing,), where=where, background=background, texture=texture)
    raise ValueError(f"no place of {list(PLACES)} and no relation of {list(RELATIONS)} in {caption!r}")


def _parse_noun_phrase(noun: str, place: tuple[float, float], caption: str) -> Thing:
    match noun.split():
        case ["a", size, color, shape] if size in SIZES and color in COLORS and shape in SHAPES:
            x, y = place
            return Thing(shape=shape, color=color, size=size, x=x, y=y, radius=SIZES[size])
    raise ValueError(f"{noun!r} in {caption!r} is not 'a <{'|'.join(SIZES)}> <colour> <{'|'.join(SHAPES)}>'")


def make_pixel_grid(height: int, width: int) -> tuple[Field, Field]:
    """Return x and y of every pixel centre `[H, W]`, in fractions of the width and the height."""
    x = (np.arange(width, dtype=np.float32) + 0.5) / width
    y = (np.arange(height, dtype=np.float32) + 0.5) / height
    grid_x: Field
    grid_y: Field
    grid_x, grid_y = np.meshgrid(x, y)
    return grid_x, grid_y


def compute_signed_distance(shape: str, x: Field, y: Field, radius: float) -> Field:
    """Compute the distance to the outline of a shape with this radius at the origin, negative inside."""
    distance: Field
    if shape == "circle":
        distance = np.hypot(x, y) - np.float32(radius * 0.95)
    elif shape == "ring":
        distance = np.abs(np.hypot(x, y) - np.float32(radius * 0.74)) - np.float32(radius * 0.24)
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - np.float32(radius * 0.85)
    elif shape == "triangle":
        y = y - np.float32(0.2 * radius)
        right = 0.87 * x - 0.5 * y
        left = -0.87 * x - 0.5 * y
        sides = np.maximum(right, left) - np.float32(0.55 * radius)
        distance = np.maximum(y - np.float32(0.6 * radius), sides)
    else:
        raise ValueError(f"shape {shape!r} is unknown; one of {SHAPES}")
    return distance


@dataclass(frozen=True, kw_only=True, slots=True)
class ThingVerdict:
    """The properties of one thing that are right."""

    color: bool
    position: bool = False
    shape: bool = False
    size: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageVerdict:
    """The properties of one image that are right; `clean` means that it has no unnamed colour."""

    things: tuple[ThingVerdict, ...]
    background: bool
    clean: bool

    @property
    def all_right(self) -> bool:
        """Return whether every thing and the background's colour are right, and no other colour is there."""
        verdicts = [self.background, self.clean]
        for thing in self.things:
            verdicts += [thing.color, thing.position, thing.shape, thing.size]
        return all(verdicts)


def judge_image(image: Image, caption: str) -> ImageVerdict:
    """Judge one uint8 image `[H, W, 3]`. Raises `ValueError` if the caption does not follow the grammar."""
    scene = parse_caption(caption)
    labels = segment_colors(image)
    masks = {color: filter_by_majority(labels == index) for index, color in enumerate(COLORS)}
    things = tuple(_judge_thing(masks[thing.color], thing) for thing in scene.things)
    # The remaining colours are those that the caption does not name.
    for thing in scene.things:
        masks.pop(thing.color, None)
    return ImageVerdict(
        things=things,
        background=classify_background(labels) == scene.background,
        clean=all(mask.mean() <= FOREIGN for mask in masks.values()),
    )


def segment_colors(image: Image) -> NDArray[np.int64]:
    """Label every pixel `[H, W]` with its nearest colour: an index into COLORS, or BACKDROP + an index into
    BACKGROUNDS."""
    palette, labels = _build_palette()
    x = image.reshape(-1, 3).astype(np.float32)
    # The square of the pixel itself is the same for every colour of the palette.
    distance = (palette**2).sum(1) - 2 * x @ palette.T
    nearest: NDArray[np.int64] = labels[distance.argmin(1)]
    return nearest.reshape(image.shape[:2])


def _judge_thing(mask: Mask, thing: Thing) -> ThingVerdict:
    height, width = mask.shape
    area = float(mask.sum()) / min(height, width) ** 2
    unit_area = measure_template(thing.shape)[0]
    if area < MIN_PART * unit_area * SIZES["small"] ** 2:
        return ThingVerdict(color=False)
    x, y = make_pixel_grid(height, width)
    center_x = float(x[mask].mean())
    center_y = float(y[mask].mean())
    overlaps = {shape: compute_overlap(mask, shape, area, center_x, center_y) for shape in SHAPES}
    best = max(SHAPES, key=overlaps.__getitem__)
    is_large = bool(np.sqrt(area / unit_area) > LARGE)
    return ThingVerdict(
        color=True,
        position=bool(np.hypot(center_x - thing.x, center_y - thing.y) < MAX_OFF),
        shape=best == thing.shape and overlaps[best] > MIN_OVERLAP,
        size=is_large == (thing.size == "large"),
    )


def compute_overlap(mask: Mask, shape: str, area: float, center_x: float, center_y: float) -> float:
    """Compute the intersection over union of a mask with the shape of the same area and centroid."""
    height, width = mask.shape
    short = min(height, width)
    unit_area, unit_x, unit_y = measure_template(shape)
    radius = float(np.sqrt(area / unit_area))
    x, y = make_pixel_grid(height, width)
    dx = (x - center_x) * (width / short) + unit_x * radius
    dy = (y - center_y) * (height / short) + unit_y * radius
    template_mask = compute_signed_distance(shape, dx, dy, radius) < 0
    return float((template_mask & mask).sum() / max(1, (template_mask | mask).sum()))


def classify_background(labels: NDArray[np.int64]) -> str:
    """Return the most frequent background colour."""
    counts = np.bincount(labels.ravel(), minlength=BACKDROP + len(BACKGROUNDS))[BACKDROP:]
    if not counts.any():
        return "none"
    return list(BACKGROUNDS)[int(counts.argmax())]


def filter_by_majority(mask: Mask) -> Mask:
    """Return the mask after a 3 x 3 majority filter, which removes one-pixel mixtures of colours along outlines."""
    height, width = mask.shape
    padded = np.pad(mask.astype(np.int8), 1)
    neighbors = np.zeros(mask.shape, np.int8)
    for top, left in np.ndindex(3, 3):
        neighbors += padded[top : top + height, left : left + width]
    return np.asarray(neighbors >= 5)


@cache
def measure_template(shape: str) -> tuple[float, float, float]:
    """Measure area, and centroid x and y, of a shape with radius 1."""
    x, y = (3 * axis - 1.5 for axis in make_pixel_grid(256, 256))
    inside = compute_signed_distance(shape, x, y, 1.0) < 0
    return float(inside.mean() * 9), float(x[inside].mean()), float(y[inside].mean())


@cache
def _build_palette() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Build the palette: every colour in every shade, and its label."""
    rows = []
    for rgb in COLORS.values():
        rows += [np.array(rgb) * shade for shade in SHADES]
    for rgb in BACKGROUNDS.values():
        rows += [np.array(rgb) + offset for offset in OFFSETS]
    labels = np.repeat(np.arange(len(COLORS)), len(SHADES)).tolist()
    labels += np.repeat(BACKDROP + np.arange(len(BACKGROUNDS)), len(OFFSETS)).tolist()
    return np.clip(np.array(rows), 0, 255).astype(np.float32), np.array(labels)

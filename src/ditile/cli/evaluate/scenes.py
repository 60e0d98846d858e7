"""Scenes of one or two coloured shapes: the caption grammar, its parser, and the outlines of the shapes.

A caption names everything that a picture shows, so that a picture can be checked against it. What it does not name
(the direction and phase of stripes, the direction of a gradient, the light) is the same in every picture, except for a
small jitter of place and size. Coordinates are fractions of the width (x) and of the height (y); radii are fractions
of the shorter side. `training/scenes.py` samples and draws them.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """One object of a scene: what the caption says of it, and where and how large it is drawn."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a caption says: one or two things, where (`where` is a place or a relation), and the background."""

    things: tuple[Thing, ...]
    where: str
    background: str
    texture: str


def parse_caption(caption: str) -> Scene:
    """The scene a caption describes, things at their nominal places; ValueError if it is not of the grammar."""
    body, separator, backdrop = caption.rpartition(" on a ")
    words = backdrop.split()
    if not separator or len(words) not in (2, 3) or words[-1] != "background":
        raise ValueError(f"no '... on a <colour> [<texture>] background' at the end of {caption!r}")
    texture = words[1] if len(words) == 3 else "plain"
    nouns, where, places = _split_caption_body(body, caption)
    things = tuple(_parse_noun_phrase(noun, place, caption) for noun, place in zip(nouns, places, strict=True))
    if words[0] not in BACKGROUNDS or texture not in TEXTURES:
        raise ValueError(
            f"background {' '.join(words[:-1])!r} is unknown; colours {list(BACKGROUNDS)}, textures {TEXTURES}"
        )
    return Scene(things=things, where=where, background=words[0], texture=texture)


def make_pixel_grid(height: int, width: int) -> tuple[Field, Field]:
    """x and y of every pixel centre, as fractions of the width and of the height."""
    x = (np.arange(width, dtype=np.float32) + 0.5) / width
    y = (np.arange(height, dtype=np.float32) + 0.5) / height
    grid_x: Field
    grid_y: Field
    grid_x, grid_y = np.meshgrid(x, y)
    return grid_x, grid_y


def compute_signed_distance(shape: str, x: Field, y: Field, radius: float) -> Field:
    """Distance to the outline of a shape of this radius at the origin, negative inside."""
    distance: Field
    if shape == "circle":
        distance = np.hypot(x, y) - np.float32(radius * 0.95)
    elif shape == "ring":
        distance = np.abs(np.hypot(x, y) - np.float32(radius * 0.74)) - np.float32(radius * 0.24)
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - np.float32(radius * 0.85)
    elif shape == "triangle":
        y = y - np.float32(0.2 * radius)
        sides = np.maximum(0.87 * x - 0.5 * y, -0.87 * x - 0.5 * y) - np.float32(0.55 * radius)
        distance = np.maximum(y - np.float32(0.6 * radius), sides)
    else:
        raise ValueError(f"shape {shape!r} is unknown; one of {SHAPES}")
    return distance


def _split_caption_body(body: str, caption: str) -> tuple[list[str], str, tuple[tuple[float, float], ...]]:
    for relation, places in RELATIONS.items():
        first, separator, second = body.partition(f" {relation} a ")
        if separator:
            return [first, f"a {second}"], relation, places
    for place, xy in PLACES.items():
        if body.endswith(f" {place}"):
            return [body.removesuffix(f" {place}")], place, (xy,)
    raise ValueError(f"no place of {list(PLACES)} and no relation of {list(RELATIONS)} in {caption!r}")


def _parse_noun_phrase(noun: str, place: tuple[float, float], caption: str) -> Thing:
    match noun.split():
        case ["a", size, color, shape] if size in SIZES and color in COLORS and shape in SHAPES:
            return Thing(shape=shape, color=color, size=size, x=place[0], y=place[1], radius=SIZES[size])
    raise ValueError(f"{noun!r} in {caption!r} is not 'a <{'|'.join(SIZES)}> <colour> <{'|'.join(SHAPES)}>'")

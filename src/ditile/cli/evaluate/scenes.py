"""Scenes of one or two coloured shapes: sampling, the caption grammar, parsing, and a renderer for any
height x width.

A caption names everything that a picture shows, so that a picture can be checked against it; what it does not
name (the direction and phase of stripes, the direction of a gradient, the light) is the same in every
picture, except for a small jitter of place and size. Coordinates are fractions of the width (x) and of the
height (y); radii are fractions of the shorter side.
"""

import hashlib
import random
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
GRADIENT_DEPTH, STRIPE_DEPTH = 45.0, 22.0  # of 255, either way
SHADING = 0.35
HELD_OUT = 13  # of 256 hash values: about 5 % of all captions are never trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """One object of a scene: what the caption says of it, and where and how large it is drawn."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def noun_phrase(self) -> str:
        """The object's words in the caption, with the article."""
        return f"a {self.size} {self.color} {self.shape}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a caption says: one or two things, where (`where` is a place or a relation), and the background."""

    things: tuple[Thing, ...]
    where: str
    background: str
    texture: str

    @property
    def caption_text(self) -> str:
        """The one sentence that says all of it."""
        tail = f" {self.things[1].noun_phrase}" if len(self.things) == 2 else ""
        texture = "" if self.texture == "plain" else f"{self.texture} "
        return f"{self.things[0].noun_phrase} {self.where}{tail} on a {self.background} {texture}background"


def sample_scene(rng: random.Random, *, held_out: bool | None = None) -> Scene:
    """A random scene; with `held_out` given, one whose caption is (True) or is not (False) held out from training."""
    while True:
        scene = _sample_any_scene(rng)
        if held_out is None or is_held_out(scene.caption_text) == held_out:
            return scene


def is_held_out(caption: str) -> bool:
    """Whether training must not see this caption: decided by its hash alone, so that no list has to be kept."""
    return hashlib.sha256(caption.encode()).digest()[0] < HELD_OUT


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


def render_scene(scene: Scene, height: int, width: int) -> Image:
    """Draw the scene anti-aliased at any size."""
    x, y = make_pixel_grid(height, width)
    image = np.array(BACKGROUNDS[scene.background], np.float32) + _shade_background(scene.texture, x, y)[..., None]
    short = min(height, width)
    for thing in scene.things:
        dx, dy = (x - thing.x) * (width / short), (y - thing.y) * (height / short)
        cover = np.clip(0.5 - compute_signed_distance(thing.shape, dx, dy, thing.radius) * short, 0, 1)[..., None]
        light = (1 - SHADING * (dx + dy) / (2 * thing.radius))[..., None]
        image = image * (1 - cover) + np.array(COLORS[thing.color], np.float32) * light * cover
    picture: Image = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return picture


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


def _sample_any_scene(rng: random.Random) -> Scene:
    two = rng.random() < 0.6
    where = rng.choice(list(RELATIONS if two else PLACES))
    places = RELATIONS[where] if two else (PLACES[where],)
    colors = rng.sample(list(COLORS), len(places))
    things = tuple(_sample_thing(rng, color, place) for color, place in zip(colors, places, strict=True))
    return Scene(things=things, where=where, background=rng.choice(list(BACKGROUNDS)), texture=rng.choice(TEXTURES))


def _sample_thing(rng: random.Random, color: str, place: tuple[float, float]) -> Thing:
    size = rng.choice(list(SIZES))
    return Thing(
        shape=rng.choice(SHAPES),
        color=color,
        size=size,
        x=place[0] + rng.uniform(-0.02, 0.02),
        y=place[1] + rng.uniform(-0.02, 0.02),
        radius=SIZES[size] * rng.uniform(0.96, 1.04),
    )


def _shade_background(texture: str, x: Field, y: Field) -> Field:
    shade: Field = np.zeros_like(x)
    if texture == "gradient":  # dark at the top
        shade = (2 * y - 1) * np.float32(GRADIENT_DEPTH)
    elif texture == "striped":  # vertical, light first
        shade = np.clip(np.sin(x * np.float32(2 * np.pi * STRIPES)) * 4, -1, 1) * np.float32(STRIPE_DEPTH)
    return shade


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

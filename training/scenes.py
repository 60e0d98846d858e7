"""Scenes that training learns from: sampling them, their captions, and drawing them at any height and width."""

import hashlib
import random

import numpy as np

from ditile.measure.evaluate.caption_check import (
    BACKGROUNDS,
    COLORS,
    GRADIENT_DEPTH,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    STRIPES,
    TEXTURES,
    Field,
    Image,
    Scene,
    Thing,
    compute_signed_distance,
    make_pixel_grid,
)

STRIPE_DEPTH = 22.0  # of 255, either way
SHADING = 0.35
HELD_OUT = 13  # of 256 hash values: about 5 % of all captions are never trained on


def describe_scene(scene: Scene) -> str:
    """The one sentence that says all of a scene: its caption."""
    tail = f" {name_thing(scene.things[1])}" if len(scene.things) == 2 else ""
    texture = "" if scene.texture == "plain" else f"{scene.texture} "
    return f"{name_thing(scene.things[0])} {scene.where}{tail} on a {scene.background} {texture}background"


def name_thing(thing: Thing) -> str:
    """The words of a thing in the caption, with the article."""
    return f"a {thing.size} {thing.color} {thing.shape}"


def sample_scene(rng: random.Random, *, held_out: bool | None = None) -> Scene:
    """A random scene; with `held_out` given, one whose caption is (True) or is not (False) held out from training."""
    while True:
        scene = _sample_any_scene(rng)
        if held_out is None or is_held_out(describe_scene(scene)) == held_out:
            return scene


def is_held_out(caption: str) -> bool:
    """Whether training must not see this caption: decided by its hash alone, so that no list has to be kept."""
    return hashlib.sha256(caption.encode()).digest()[0] < HELD_OUT


def render_scene(scene: Scene, height: int, width: int) -> Image:
    """Draw the scene anti-aliased at any size."""
    x, y = make_pixel_grid(height, width)
    image = np.array(BACKGROUNDS[scene.background], np.float32) + _shade_background(scene.texture, x, y)[..., None]
    short = min(height, width)
    for thing in scene.things:
        dx = (x - thing.x) * (width / short)
        dy = (y - thing.y) * (height / short)
        cover = np.clip(0.5 - compute_signed_distance(thing.shape, dx, dy, thing.radius) * short, 0, 1)[..., None]
        light = (1 - SHADING * (dx + dy) / (2 * thing.radius))[..., None]
        image = image * (1 - cover) + np.array(COLORS[thing.color], np.float32) * light * cover
    picture: Image = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return picture


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

"""Scenes that training learns from: sampling them, their captions, and rendering them at any height and width."""

import hashlib
import random

import numpy as np

from ditile_lab.quality.caption_check import (
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

# Of 255, either way.
STRIPE_DEPTH = 22.0
# How much darker a thing is from its upper left to its lower right.
SHADING = 0.35
# Of 256 hash values: about 5 % of all captions are never trained on.
HELD_OUT = 13


def describe_scene(scene: Scene) -> str:
    """The one sentence that says all of a scene: its caption."""
    first, *others = map(name_thing, scene.things)
    background = [scene.background, scene.texture, "background"]
    if scene.texture == "plain":
        background.remove("plain")
    return " ".join([first, scene.where, *others, "on a", *background])


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
    """Render the scene anti-aliased at any size."""
    x, y = make_pixel_grid(height, width)
    background = np.array(BACKGROUNDS[scene.background], np.float32)
    image = background + _shade_background(scene.texture, x, y)[..., None]
    # Radii are fractions of the shorter side, so that a circle stays one.
    short = min(height, width)
    for thing in scene.things:
        dx = (x - thing.x) * (width / short)
        dy = (y - thing.y) * (height / short)
        distance = compute_signed_distance(thing.shape, dx, dy, thing.radius)
        # A pixel on the outline is covered by half.
        cover = np.clip(0.5 - distance * short, 0, 1)[..., None]
        light = (1 - SHADING * (dx + dy) / (2 * thing.radius))[..., None]
        image = image * (1 - cover) + np.array(COLORS[thing.color], np.float32) * light * cover
    rendered: Image = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return rendered


def _sample_any_scene(rng: random.Random) -> Scene:
    # The scenes of a seed depend on the order of these calls.
    if rng.random() < 0.6:
        where = rng.choice(list(RELATIONS))
        places = list(RELATIONS[where])
    else:
        where = rng.choice(list(PLACES))
        places = [PLACES[where]]
    colors = rng.sample(list(COLORS), len(places))
    things = [_sample_thing(rng, color, place) for color, place in zip(colors, places, strict=True)]
    background = rng.choice(list(BACKGROUNDS))
    return Scene(things=tuple(things), where=where, background=background, texture=rng.choice(TEXTURES))


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
    if texture == "gradient":
        # Dark at the top.
        shade = (2 * y - 1) * np.float32(GRADIENT_DEPTH)
    elif texture == "striped":
        # Vertical, light first.
        wave = np.sin(x * np.float32(2 * np.pi * STRIPES))
        shade = np.clip(wave * 4, -1, 1) * np.float32(STRIPE_DEPTH)
    return shade

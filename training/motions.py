"""Clips that the video model learns from: sampling their captions, and rendering many at once on any device."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ditile_lab.quality.caption_check import BACKGROUNDS, COLORS, SHAPES
from training.motion_check import LANE_MOVES, LANES, MOVES, RADII, parse_motion_caption
from training.scenes import is_held_out

FRAMES = 9
SIDE = 64
# The share of clips with two things.
TWO = 0.4
# How often a thing moves for each time that it stays.
MOVING = 1.5
PLACE_JITTER = 0.02
SIZE_JITTER = 0.04


def sample_motion_caption(rng: random.Random, *, held_out: bool | None = None, two: float = TWO) -> str:
    """A random caption; with `held_out` given, one that is (True) or is not (False) held out from training."""
    while True:
        caption = _sample_any_caption(rng, two)
        if held_out is None or is_held_out(caption) == held_out:
            return caption


def _sample_any_caption(rng: random.Random, two: float) -> str:
    count = 1
    moves = list(MOVES)
    if rng.random() < two:
        count = 2
        moves = list(LANE_MOVES)
    weights = [1.0] * len(moves)
    for index, move in enumerate(moves):
        if move.startswith("moves"):
            weights[index] = MOVING
    clauses = []
    for color in rng.sample(list(COLORS), count):
        size = rng.choice(list(RADII))
        shape = rng.choice(SHAPES)
        [move] = rng.choices(moves, weights)
        clauses.append(f"a {size} {color} {shape} {move}")
    return f"{' above '.join(clauses)} on a {rng.choice(list(BACKGROUNDS))} background"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipTensors:
    """Clips as tensors of one device: two things for each, of which the second may not be there.

    shape [B, 2] are indices into SHAPES, color [B, 2, 3] and background [B, 3] are in -1..1, radius [B, 2] is 0 for a
    thing that is not there, and start and end [B, 2, 2] are x and y.
    """

    shape: torch.Tensor
    color: torch.Tensor
    radius: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    background: torch.Tensor

    def select(self, index: torch.Tensor) -> "ClipTensors":
        """The clips of an index [N]."""
        return ClipTensors(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def make_clip_tensors(captions: Sequence[str], device: torch.device) -> ClipTensors:
    """What captions describe, without jitter."""
    rows: dict[str, list[object]] = {field.name: [] for field in fields(ClipTensors)}
    for caption in captions:
        clip = parse_motion_caption(caption)
        # A thing that is not there: black, without a size.
        shapes = [0] * len(LANES)
        colors = [[0.0] * 3 for _ in LANES]
        radii = [0.0] * len(LANES)
        starts = [(0.0, 0.0)] * len(LANES)
        ends = [(0.0, 0.0)] * len(LANES)
        for index, mover in enumerate(clip.movers):
            shapes[index] = SHAPES.index(mover.shape)
            colors[index] = _scale_rgb(COLORS[mover.color])
            radii[index] = RADII[mover.size]
            starts[index] = mover.start
            ends[index] = mover.end
        rows["shape"].append(shapes)
        rows["color"].append(colors)
        rows["radius"].append(radii)
        rows["start"].append(starts)
        rows["end"].append(ends)
        rows["background"].append(_scale_rgb(BACKGROUNDS[clip.background]))
    return ClipTensors(**{name: torch.tensor(values, device=device) for name, values in rows.items()})


def jitter_clips(clips: ClipTensors) -> ClipTensors:
    """The clips with every thing moved and scaled a little."""
    shift = (torch.rand_like(clips.start) * 2 - 1) * PLACE_JITTER
    radius = clips.radius * (1 + (torch.rand_like(clips.radius) * 2 - 1) * SIZE_JITTER)
    return ClipTensors(
        shape=clips.shape,
        color=clips.color,
        radius=radius,
        start=clips.start + shift,
        end=clips.end + shift,
        background=clips.background,
    )


def draw_clips(clips: ClipTensors, frames: int, side: int) -> torch.Tensor:
    """Videos [B, F, side, side, 3] in -1..1, anti-aliased; one frame is the first."""
    device = clips.start.device
    centers = (torch.arange(side, device=device) + 0.5) / side
    # For one frame this is its start, 0.
    time = torch.linspace(0, 1, frames, device=device)
    video = clips.background[:, None, None, None].expand(-1, frames, side, side, 3)
    for k in range(len(LANES)):
        middle = torch.lerp(clips.start[:, k, None], clips.end[:, k, None], time[None, :, None])  # [B, F, 2]
        dx = centers - middle[..., 0, None, None]  # [B, F, 1, W]
        dy = centers[:, None] - middle[..., 1, None, None]  # [B, F, H, 1]
        radius = clips.radius[:, k, None, None, None]
        outline = _measure_distance(clips.shape[:, k, None, None, None], dx, dy, radius)
        cover = (0.5 - outline * side).clamp(0, 1) * (radius > 0)
        video = torch.lerp(video, clips.color[:, k, None, None, None], cover[..., None])
    return video


def _measure_distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """`ditile_lab.quality.caption_check.compute_signed_distance` for tensors, of a shape for each clip."""
    length = torch.hypot(x, y)
    low = y - 0.2 * radius
    sides = torch.maximum(0.87 * x - 0.5 * low, -0.87 * x - 0.5 * low) - 0.55 * radius
    distances = {
        "circle": length - 0.95 * radius,
        "square": torch.maximum(x.abs(), y.abs()) - 0.85 * radius,
        "triangle": torch.maximum(low - 0.6 * radius, sides),
        "ring": (length - 0.74 * radius).abs() - 0.24 * radius,
    }
    distance = torch.zeros_like(length)
    for k, name in enumerate(SHAPES):
        distance = torch.where(shape == k, distances[name], distance)
    return distance


def _scale_rgb(rgb: tuple[int, int, int]) -> list[float]:
    return [v / 127.5 - 1 for v in rgb]

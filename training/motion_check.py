"""Checks whether a clip shows its caption: the grammar of captions about motion, and a check of three frames.

A caption of the bundled video model names all of a clip of one or two coloured shapes: what each is, and from where to
where it moves, or where it stays. Things move at constant speed from the first frame to the last. Coordinates are
fractions of the width (x) and of the height (y); radii are fractions of the side. `training/motions.py` samples clips
and draws them.

The first, the middle and the last frame are segmented as `caption_check` does. Each thing in the caption must have
enough pixels of its colour in all three (color); its shape and its size must be right in the first and the last, and
its middle near the places that the caption says (start, end). Its path must be the caption's, and the middle frame must
lie half way (motion). The background must be right in all three frames, and no other colour may take up a visible area
(clean). A clip is all right if all of this holds for every thing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ditile_lab.quality.caption_check import (
    BACKGROUNDS,
    COLORS,
    MIN_OVERLAP,
    MIN_PART,
    SHAPES,
    Mask,
    classify_background,
    compute_overlap,
    filter_by_majority,
    make_pixel_grid,
    measure_template,
    segment_colors,
)

Video = NDArray[np.uint8]  # [F, H, W, 3]

RADII = {"large": 0.24, "small": 0.155}
LOW = 0.26
MIDDLE = 0.5
HIGH = 0.74
Place = tuple[float, float]
MOVES: dict[str, tuple[Place, Place]] = {
    "moves from left to right": ((LOW, MIDDLE), (HIGH, MIDDLE)),
    "moves from right to left": ((HIGH, MIDDLE), (LOW, MIDDLE)),
    "moves from top to bottom": ((MIDDLE, LOW), (MIDDLE, HIGH)),
    "moves from bottom to top": ((MIDDLE, HIGH), (MIDDLE, LOW)),
    "moves from the top left to the bottom right": ((LOW, LOW), (HIGH, HIGH)),
    "moves from the bottom right to the top left": ((HIGH, HIGH), (LOW, LOW)),
    "moves from the top right to the bottom left": ((HIGH, LOW), (LOW, HIGH)),
    "moves from the bottom left to the top right": ((LOW, HIGH), (HIGH, LOW)),
    "stays in the center": ((MIDDLE, MIDDLE), (MIDDLE, MIDDLE)),
    "stays on the left": ((LOW, MIDDLE), (LOW, MIDDLE)),
    "stays on the right": ((HIGH, MIDDLE), (HIGH, MIDDLE)),
    "stays at the top": ((MIDDLE, LOW), (MIDDLE, LOW)),
    "stays at the bottom": ((MIDDLE, HIGH), (MIDDLE, HIGH)),
}
LANE_MOVES = ("moves from left to right", "moves from right to left", "stays in the center")
"""The moves of two things, one above the other."""
LANES = (LOW, HIGH)
"""y of the upper and of the lower of two things."""
MOVER_ITEMS = ("color", "shape", "size", "start", "end", "motion")
CLIP_ITEMS = (*MOVER_ITEMS, "background", "clean", "all_right")
MAX_OFF = 0.13
"""Of the side, between the middle of a thing and the place in the caption."""
MAX_PATH_OFF = 0.15
"""Of the side, between the path of a thing and the caption's."""
MAX_HALFWAY_OFF = 0.12
"""Of the side, between the thing in the middle frame and the middle of its path."""
FOREIGN = 0.008
"""Of a frame: more of an unnamed colour is an error."""
LARGE = float(np.sqrt(RADII["large"] * RADII["small"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mover:
    """One thing of a clip, and the places of its middle in the first and in the last frame."""

    shape: str
    color: str
    size: str
    move: str
    start: Place
    end: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """What a caption describes: one thing, or two of which the first is the upper one, and the background."""

    movers: tuple[Mover, ...]
    background: str


def parse_motion_caption(caption: str) -> Clip:
    """The clip that a caption describes. Raises `ValueError` if the caption is not of the grammar."""
    body, separator, tail = caption.rpartition(" on a ")
    background, _, noun = tail.partition(" ")
    if not separator or noun != "background" or background not in BACKGROUNDS:
        raise ValueError(f"no ' on a <{'|'.join(BACKGROUNDS)}> background' at the end of {caption!r}")
    clauses = body.split(" above ")
    if len(clauses) > len(LANES):
        raise ValueError(f"{len(clauses)} things in {caption!r}; at most {len(LANES)} are known")
    movers = tuple(_parse_clause(clause, lane, len(clauses), caption) for lane, clause in enumerate(clauses))
    return Clip(movers=movers, background=background)


def _parse_clause(clause: str, lane: int, count: int, caption: str) -> Mover:
    known = MOVES if count == 1 else LANE_MOVES
    match clause.split(maxsplit=4):
        case ["a", size, color, shape, move] if size in RADII and color in COLORS and shape in SHAPES and move in known:
            (start_x, start_y), (end_x, end_y) = MOVES[move]
            if count == 2:
                start_y = end_y = LANES[lane]
            return Mover(shape=shape, color=color, size=size, move=move, start=(start_x, start_y), end=(end_x, end_y))
    raise ValueError(
        f"{clause!r} in {caption!r} is not 'a <{'|'.join(RADII)}> <colour> <{'|'.join(SHAPES)}> <move>' "
        f"with a move of {list(known)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipVerdict:
    """Which properties of a clip are right, each for all its things."""

    color: bool
    shape: bool
    size: bool
    start: bool
    end: bool
    motion: bool
    background: bool
    clean: bool

    @property
    def all_right(self) -> bool:
        """Whether everything is."""
        return all(getattr(self, item) for item in CLIP_ITEMS if item != "all_right")


def judge_clip(video: Video, caption: str) -> ClipVerdict:
    """The verdict on one video. Raises `ValueError` if the caption is not of the grammar."""
    clip = parse_motion_caption(caption)
    masks: dict[str, list[Mask]] = {color: [] for color in COLORS}
    background = True
    for frame in (video[0], video[len(video) // 2], video[-1]):
        labels = segment_colors(frame)
        background &= classify_background(labels) == clip.background
        for index, color in enumerate(COLORS):
            masks[color].append(filter_by_majority(labels == index))
    items = dict.fromkeys(MOVER_ITEMS, True)
    for mover in clip.movers:
        verdict = _judge_mover(mover, masks[mover.color])
        for item in MOVER_ITEMS:
            items[item] &= verdict.get(item, False)
    clean = True
    for color in masks.keys() - {mover.color for mover in clip.movers}:
        clean &= all(bool(mask.mean() <= FOREIGN) for mask in masks[color])
    return ClipVerdict(**items, background=background, clean=clean)


def score_clips(videos: Sequence[Video], captions: Sequence[str]) -> dict[str, float]:
    """Per cent of the videos that are right in each of `CLIP_ITEMS`."""
    verdicts = [judge_clip(video, caption) for video, caption in zip(videos, captions, strict=True)]
    scores = {}
    for item in CLIP_ITEMS:
        share = np.mean([getattr(verdict, item) for verdict in verdicts])
        scores[item] = round(100 * float(share), 1)
    return scores


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sight:
    """What is seen of a thing in a frame; `shape` is the best template, or none if nothing is like it."""

    shape: str
    radius: float
    x: float
    y: float


def _judge_mover(mover: Mover, masks: Sequence[Mask]) -> dict[str, bool]:
    """The verdict on a thing, from the pixels of its colour in the first, the middle and the last frame."""
    first, middle, last = map(_look_at_thing, masks)
    if first is None or middle is None or last is None:
        return {"color": False}
    start_off = np.hypot(first.x - mover.start[0], first.y - mover.start[1])
    end_off = np.hypot(last.x - mover.end[0], last.y - mover.end[1])
    way_x = mover.end[0] - mover.start[0]
    way_y = mover.end[1] - mover.start[1]
    path_off = np.hypot(last.x - first.x - way_x, last.y - first.y - way_y)
    halfway_off = np.hypot(middle.x - (first.x + last.x) / 2, middle.y - (first.y + last.y) / 2)
    is_large = mover.size == "large"
    sizes = [_compute_radius(sight, mover.shape) > LARGE for sight in (first, last)]
    return {
        "color": True,
        "shape": first.shape == last.shape == mover.shape,
        "size": sizes == [is_large, is_large],
        "start": bool(start_off < MAX_OFF),
        "end": bool(end_off < MAX_OFF),
        "motion": bool(path_off < MAX_PATH_OFF and halfway_off < MAX_HALFWAY_OFF),
    }


def _look_at_thing(mask: Mask) -> _Sight | None:
    """What the pixels of a colour are; None if there are too few."""
    area = float(mask.mean())
    if area < MIN_PART * measure_template("ring")[0] * RADII["small"] ** 2:
        return None
    x, y = make_pixel_grid(*mask.shape)
    center_x = float(x[mask].mean())
    center_y = float(y[mask].mean())
    overlaps = {shape: compute_overlap(mask, shape, area, center_x, center_y) for shape in SHAPES}
    best = max(SHAPES, key=overlaps.__getitem__)
    unit_area, unit_x, unit_y = measure_template(best)
    radius = float(np.sqrt(area / unit_area))
    shape = "none"
    if overlaps[best] > MIN_OVERLAP:
        shape = best
    # The middle of a triangle is not its centroid.
    return _Sight(shape=shape, radius=radius, x=center_x - unit_x * radius, y=center_y - unit_y * radius)


def _compute_radius(sight: _Sight, shape: str) -> float:
    """The radius of a thing of this shape with as many pixels as were seen."""
    if sight.shape == "none":
        return sight.radius
    ratio = measure_template(sight.shape)[0] / measure_template(shape)[0]
    return float(sight.radius * np.sqrt(ratio))

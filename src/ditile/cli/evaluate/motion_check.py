"""Checks whether a clip shows its caption: the grammar of captions about motion, and a check of three frames.

A caption of the bundled video model names all of a clip of one or two coloured shapes: what each is, and from where to
where it moves, or where it stays. Things move at constant speed from the first frame to the last. Coordinates are
fractions of the width (x) and of the height (y); radii are fractions of the side. `training/motions.py` samples clips
and draws them.
"""

from dataclasses import dataclass

from ditile.cli.evaluate.caption_check import BACKGROUNDS, COLORS, SHAPES

RADII = {"large": 0.24, "small": 0.155}
LOW, MIDDLE, HIGH = 0.26, 0.5, 0.74
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

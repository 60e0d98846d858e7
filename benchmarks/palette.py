"""The names and colours of methods in tables and figures: each method has one colour everywhere; figures as files."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ditile.distributed import files
from ditile.plan.plan import Plan

NAMES = {
    "data": "data",
    "cfg": "cfg",
    "pipefusion": "PipeFusion",
    "ring": "ring",
    "gather": "gather",
    "distrifusion": "DistriFusion",
    "ulysses": "Ulysses",
    "tensor": "tensor",
}
"""Degree of a plan -> its name in its paper."""
COLOURS = {
    "pipefusion": "#4477aa",
    "distrifusion": "#ee6677",
    "ulysses": "#228833",
    "ring": "#ccbb44",
    "gather": "#997700",
    "tensor": "#66ccee",
    "cfg": "#aa3377",
    "data": "#bbbbbb",
}
"""A plan with several methods has the colour of the first of them in this order."""
ONE_RANK_COLOUR = "#777777"
MARKERS = "osD^vP*XhdHp<>8"
SHADES = (0.0, 0.45, 0.7, 0.25)
"""The share of white in the colours of the first and further plans of one method."""


def choose_plan_colour(plan: str) -> str:
    """Return the colour of a plan's method, in the form `#rrggbb`."""
    parsed = Plan.parse(plan)
    for axis, colour in COLOURS.items():
        if getattr(parsed, axis) > 1:
            return colour
    return ONE_RANK_COLOUR


def assign_plan_colours(plans: Iterable[str]) -> dict[str, str]:
    """Return plan -> colour: the colour of its method, lighter for the second and further plans of a method."""
    colours: dict[str, str] = {}
    counts: dict[str, int] = {}
    for plan in dict.fromkeys(plans):
        colour = choose_plan_colour(plan)
        # A lighter colour tells two plans of one method apart.
        count = counts.get(colour, 0)
        lighter = "#"
        for start in (1, 3, 5):
            part = int(colour[start : start + 2], 16)
            lighter += f"{round(part + SHADES[count % len(SHADES)] * (255 - part)):02x}"
        colours[plan] = lighter
        counts[colour] = count + 1
    return colours


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure of matplotlib, in the format of the path's ending. `options` are passed to `savefig`.

    Raises:
        OSError: if the file cannot be written.
    """
    encoded = io.BytesIO()
    figure.savefig(encoded, format=path.suffix.removeprefix("."), **options)
    files.write_atomically(path, encoded.getvalue())

"""What rows of `ditile bench` are called in figures: methods by their names, sizes and machines on one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ditile.cli.bench.cells import ONE_RANK
from ditile.cli.bench.runs import Row
from ditile.plan.plan import WARMUP_MODES, Plan

NAMES = {
    "data": "data", "cfg": "cfg", "pipefusion": "PipeFusion", "ring": "ring", "distrifusion": "DistriFusion",
    "ulysses": "Ulysses", "tensor": "tensor",
}  # fmt: skip
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#777777")
_COLOUR_INDEX_OF_AXIS = {"pipefusion": 0, "distrifusion": 1, "ulysses": 2, "ring": 3, "tensor": 4, "cfg": 5, "data": 6}
"""Of several methods the first here gives its colour."""


def name_plan_methods(plan: str) -> str:
    """The methods of a plan: `cfg x PipeFusion`."""
    plan_object = Plan.parse(plan)
    return " x ".join(name for axis, name in NAMES.items() if getattr(plan_object, axis) > 1) or "one rank"


def describe_row_method(row: Row, *, patches: bool = True, size: bool = False) -> str:
    """A row's plan and cache, in words: `PipeFusion, M = 4, pipelined warmup | F=1 W=4`.

    Args:
        patches: say M and W where they are the plan's own.
        size: say how many pixels.
    """
    if row["plan"] == ONE_RANK:
        return "one rank"
    plan = Plan.parse(row["plan"])
    degrees = [(name, getattr(plan, axis)) for axis, name in NAMES.items() if getattr(plan, axis) > 1]
    several = len(degrees) > 1 and patches
    words = [" x ".join(f"{name} {n}" if several else name for name, n in degrees) or "one rank"]
    if patches and plan.num_patches > 1:
        words.append(f"M = {plan.num_patches}")
    if patches and plan.warmup != 1:
        words.append(f"W = {plan.warmup}")
    if plan.warmup_mode != "serial":
        words.append(f"{plan.warmup_mode} warmup")
    if plan.async_ulysses:
        words.append("overlapped")
    if plan.split_scheme != "row":
        words.append("tokens split")
    if plan.vae != "whole":
        words.append("VAE by rows" + (f" in blocks of {plan.vae_block_size}" if plan.vae_block_size else ""))
    if plan.data > 1 and patches:
        words.append(f"{plan.data} pictures")
    text = ", ".join(words) + (f" | {row['cache']}" if row["cache"] else "")
    return text + (f" | {row['width']}x{row['height']}" if size else "")


def choose_plan_colour(plan: str) -> str:
    """A colour for each method; of several, that of the one that divides most."""
    plan_object = Plan.parse(plan)
    return COLOURS[next((index for axis, index in _COLOUR_INDEX_OF_AXIS.items() if getattr(plan_object, axis) > 1), 7)]


def make_rows_title(rows: Sequence[Row]) -> str:
    """Model, size, steps and machine: what the rows have in common."""
    first = rows[0]
    sizes = {(row["width"], row["height"]) for row in rows}
    size = [] if len(sizes) > 1 or first["height"] is None else [f"{first['width']} x {first['height']} px"]
    steps = [] if first["steps"] is None else [f"{first['steps']} steps"]
    machine = first["machine"]
    gpus = machine["gpus"]
    device = gpus[0] if gpus else f"{first['threads']} thread{'s' * (first['threads'] > 1)} a rank"
    return ", ".join([first["model"], *size, *steps, device])


def tabulate_warmups(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the lines of the table over W: seconds, and how much more than the same without warmup.

    Without warmup all ways are one, which stands where they are serial.
    """
    plans = [(Plan.parse(row["plan"]), row) for row in rows if row["plan"] != ONE_RANK]
    kinds = dict.fromkeys((name_plan_methods(str(plan)), plan.cfg, mode) for plan, _ in plans for mode in WARMUP_MODES)
    seconds: dict[tuple[Any, ...], float] = {
        (name_plan_methods(str(plan)), plan.cfg, plan.warmup_mode, plan.warmup): row["median_s"] for plan, row in plans
    }
    columns = [column for column in kinds if any(key[:3] == column and key[3] != 0 for key in seconds)]
    header = ["W"] + [f"{kind}\n{mode}" for kind, _, mode in columns]
    lines = []
    for w in sorted({plan.warmup for plan, _ in plans}, key=str):
        cells = [str(w)]
        for kind, cfg, mode in columns:
            base = seconds.get((kind, cfg, "serial", 0))
            took = seconds.get((kind, cfg, mode, w))
            more = "" if took is None or base is None or w == 0 else f" ({took / base - 1:+.0%})"
            cells.append("" if took is None else f"{took:.3f} s{more}")
        lines.append(cells)
    return header, lines

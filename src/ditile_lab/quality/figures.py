"""The figures of an evaluation: a sheet of images side by side, and PSNR over latency."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ditile.cache.config_text import NO_CACHE
from ditile.plan.extras import require_extra
from ditile.runner.requests.pictures import read_picture
from ditile_lab.palette import MARKERS, assign_plan_colours, save_figure
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting
from ditile_lab.quality.store import select_pareto_front
from ditile_lab.rows import Row, list_values

SHEET_ROWS = 8
"""The most captions on the sheet."""
AMPLIFIED = 4
# These are pixels of an image's longer side on the sheet, of a gap, of the text, of a line, and of a wide letter.
LEAST_SIDE = 144
MOST_SIDE = 256
GAP = 10
TEXT = 13
LINE = 17
LETTER = 7
Ink = tuple[int, int, int]
INK = (20, 20, 20)
FAINT = (110, 110, 110)
PAPER = (255, 255, 255)
SAME_PSNR = 100.0
"""The PSNR in dB that stands for equal images."""
SheetColumn = tuple[EvaluationSetting, Sequence[tuple[Path, float]]]
"""A setting, and for each caption the file of its image and its PSNR in dB."""


def draw_contact_sheet(columns: Sequence[SheetColumn], captions: Sequence[str]) -> Image.Image:
    """Make a sheet with a column for each setting, a row for each caption, and differences below the images.

    A difference image shows the absolute difference from the original, averaged over the colours and amplified.

    Args:
        columns: the columns, the original first.
        captions: the captions, in the order of the images.
    """
    originals = [read_picture(path, "out") for path, _ in columns[0][1]]
    width, height = _compute_thumbnail_size(originals[0])
    heads = [_wrap_text_lines(_make_column_title(setting), width) for setting, _ in columns]
    # The sheet has the heads on top, then for each caption an image, a line of text, and a difference.
    head_height = LINE * max(map(len, heads)) + 2 * GAP
    row_height = 2 * height + LINE + 3 * GAP
    page_width = GAP + len(columns) * (width + GAP)
    page_height = head_height + len(captions) * row_height + LINE
    page = Image.new("RGB", (page_width, page_height), PAPER)
    for index, (setting, images) in enumerate(columns):
        left = GAP + index * (width + GAP)
        _write_lines(page, left, GAP, heads[index])
        for row, caption in enumerate(captions):
            top = head_height + row * row_height
            below = top + height + 3
            path, psnr = images[row]
            image = read_picture(path, "out")
            _paste_thumbnail(page, image, left, top, Image.Resampling.LANCZOS)
            if setting == ORIGINAL:
                # The original's difference would be black, so its column has the caption there.
                lines = _wrap_text_lines([caption], width)
                _write_lines(page, left, below + LINE, lines[: height // LINE])
                continue
            label = f"{psnr:.1f} dB"
            if psnr >= SAME_PSNR:
                label = "same image"
            _write_lines(page, left, below, [label], FAINT)
            difference = make_difference_image(image, originals[row])
            _paste_thumbnail(page, difference, left, below + LINE, Image.Resampling.BOX)
    note = f"below each image: its difference from the original, {AMPLIFIED} times as bright"
    _write_lines(page, GAP, page_height - LINE - 2, [note], FAINT)
    return page


def _write_lines(page: Image.Image, left: int, top: int, lines: Sequence[str], ink: Ink = INK) -> None:
    font = ImageFont.load_default(TEXT)
    ImageDraw.Draw(page).multiline_text((left, top), "\n".join(lines), ink, font, spacing=LINE - TEXT)


def _paste_thumbnail(page: Image.Image, image: Image.Image, left: int, top: int, resampling: Image.Resampling) -> None:
    size = _compute_thumbnail_size(image)
    page.paste(image.resize(size, resampling), (left, top))


def make_difference_image(image: Image.Image, original: Image.Image) -> Image.Image:
    """Make the amplified difference of an image from the original; white means a quarter of the range or more."""
    pixels = np.asarray(image, np.float32)
    difference = np.abs(pixels - np.asarray(original, np.float32)).mean(2)
    amplified = np.minimum(difference * AMPLIFIED, 255)
    return Image.fromarray(amplified.astype(np.uint8)).convert("RGB")


def _compute_thumbnail_size(image: Image.Image) -> tuple[int, int]:
    longer = max(image.size)
    scale = min(max(longer, LEAST_SIDE), MOST_SIDE) / longer
    return round(image.width * scale), round(image.height * scale)


def _make_column_title(setting: EvaluationSetting) -> list[str]:
    """Return the lines of a column's head, before they are wrapped."""
    if setting == ORIGINAL:
        return [str(ORIGINAL)]
    return [_name_plan(setting.plan), _name_cache(setting.cache)]


def _name_plan(plan: str) -> str:
    return "one process" if plan == ORIGINAL.plan else plan


def _name_cache(cache: str) -> str:
    return "no cache" if cache == NO_CACHE else cache


def _wrap_text_lines(texts: Sequence[str], width: int) -> list[str]:
    """Wrap texts to lines that fit a column of `width` pixels."""
    lines = []
    for text in texts:
        lines += textwrap.wrap(text, width // LETTER)
    return lines


def draw_tradeoff(evaluation: Row, out: Path) -> None:
    """Draw the settings of an evaluation, PSNR over latency, with a line through the Pareto front.

    Each plan has a colour and each cache a marker. A setting whose images equal the original's has no finite PSNR, and
    is drawn at the top.
    """
    require_extra("plots", "the figure of an evaluation")
    import matplotlib

    # This backend needs no display. It must be chosen before pyplot is imported.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = evaluation["settings"]
    finite = [row["psnr"] for row in rows if row["psnr"] < SAME_PSNR] or [30.0, 40.0]
    low = min(finite)
    high = max(finite)
    room = max(2.0, 0.15 * (high - low))
    # Settings whose images equal the original's lie above a dashed line.
    top = high + 2 * room
    figure, axes = plt.subplots(figsize=(9.6, 5))
    _draw_settings(axes, rows, top)
    axes.axhline(high + room, color="#cccccc", lw=0.8, ls="--", label="above it the same image, without a PSNR")
    # This is an entry for the legend, without data.
    axes.errorbar([], [], xerr=[], color="#555555", ls="none", lw=0.8, label="lowest to highest")
    axes.set_ylim(low - room, top + 0.8 * room)
    ticks = [tick for tick in axes.get_yticks() if low - room <= tick <= high + 0.4 * room]
    labels = [f"{tick:g}" for tick in ticks]
    axes.set_yticks([*ticks, top], [*labels, "same\nimage"])
    axes.set_xlim(left=0)
    axes.set_xlabel("time of an image, % of the original pipeline's (median; bars: lowest and highest)")
    axes.set_ylabel("mean PSNR to the original's image (dB)")
    count = evaluation["captions"]["count"]
    machine = evaluation["measured"]["machine"]
    axes.set_title(f"{evaluation['model']}, {count} caption(s), {machine}", fontsize=10)
    axes.grid(alpha=0.3)
    _add_legend(axes, rows)
    figure.tight_layout()
    save_figure(figure, out, dpi=110)
    plt.close(figure)


def _draw_settings(axes: Any, rows: Sequence[Row], top: float) -> None:
    """Draw the settings and the Pareto front; settings without a finite PSNR are drawn at `top`."""
    colours = assign_plan_colours(list_values(rows, "plan"))
    markers = _assign_cache_markers(rows)
    front = select_pareto_front(rows)
    x = [100 * row["latency_ratio"] for row in front]
    y = [_locate_psnr(row, top) for row in front]
    axes.plot(x, y, color="#999999", lw=1.2, zorder=1, label="the best (Pareto front)")
    style = {"ms": 8, "lw": 0.8, "mec": "white", "mew": 0.6, "zorder": 2, "alpha": 0.9}
    for row in rows:
        median = 100 * row["latency_ratio"]
        below = median - 100 * row["latency_lowest"]
        above = 100 * row["latency_highest"] - median
        style["color"] = colours[row["plan"]]
        style["marker"] = markers[row["cache"]]
        axes.errorbar(median, _locate_psnr(row, top), xerr=[[below], [above]], **style)


def _locate_psnr(row: Row, top: float) -> float:
    return top if row["psnr"] >= SAME_PSNR else float(row["psnr"])


def _assign_cache_markers(rows: Sequence[Row]) -> dict[str, str]:
    caches = dict.fromkeys(list_values(rows, "cache"))
    return {cache: MARKERS[index % len(MARKERS)] for index, cache in enumerate(caches)}


def _add_legend(axes: Any, rows: Sequence[Row]) -> None:
    """Add a legend of the plans' colours, the caches' markers, and the lines, to the right of the axes."""
    require_extra("plots", "the figure of an evaluation")
    from matplotlib.patches import Patch

    lines, _ = axes.get_legend_handles_labels()
    handles = []
    for plan, colour in assign_plan_colours(list_values(rows, "plan")).items():
        handles.append(Patch(color=colour, label=textwrap.fill(_name_plan(plan), 34)))
    for cache, marker in _assign_cache_markers(rows).items():
        handles += axes.plot([], [], marker, color="#555555", label=textwrap.fill(_name_cache(cache), 34))
    axes.legend(handles=[*handles, *lines], frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))

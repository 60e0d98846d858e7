"""The figures of an evaluation: a sheet of pictures side by side, and PSNR over latency."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ditile.cache.config_text import NO_CACHE
from ditile.measure.evaluate.options import ORIGINAL, EvaluationSetting
from ditile.measure.evaluate.store import select_pareto_front
from ditile.measure.palette import MARKERS, assign_plan_colours
from ditile.plan.extras import require_extra
from ditile.runner.requests.pictures import read_picture, save_figure

ROWS = 8
"""Captions that are shown."""

AMPLIFIED = 4
LEAST, MOST = 144, 256  # pixels of the longer side of a picture on the sheet
GAP, TEXT, LINE = 10, 13, 17
INK, FAINT, PAPER = (20, 20, 20), (110, 110, 110), (255, 255, 255)
SheetColumn = tuple[EvaluationSetting, Sequence[tuple[Path, float]]]
"""A setting; for each caption its file, and its PSNR in dB."""


def draw_contact_sheet(columns: Sequence[SheetColumn], captions: Sequence[str]) -> Image.Image:
    """A sheet with a column for each setting, a row for each caption, and differences below the pictures.

    A difference is the amplified mean over the colours of the absolute difference from the original, on black.

    Args:
        columns: the columns, the original first.
        captions: the captions, in the order of the pictures.
    """
    font = ImageFont.load_default(TEXT)
    pictures = [[read_picture(path, "out") for path, _ in shown] for _, shown in columns]
    width, height = _compute_thumbnail_size(pictures[0][0])
    heads = [_wrap_text_lines(_make_column_title(setting), font, width) for setting, _ in columns]
    head = LINE * max(map(len, heads)) + GAP
    row_height = 2 * height + LINE + 3 * GAP
    page = Image.new("RGB", (GAP + len(columns) * (width + GAP), GAP + head + len(captions) * row_height + LINE), PAPER)
    pen = ImageDraw.Draw(page)
    for k, (setting, shown) in enumerate(columns):
        left = GAP + k * (width + GAP)
        pen.multiline_text((left, GAP), "\n".join(heads[k]), INK, font, spacing=LINE - TEXT)
        for row, caption in enumerate(captions):
            top = GAP + head + row * row_height
            own, original = pictures[k][row], pictures[0][row]
            page.paste(own.resize((width, height), Image.Resampling.LANCZOS), (left, top))
            below = top + height + 3
            if setting == ORIGINAL:
                text = _wrap_text_lines(caption, font, width)[: height // LINE]
                pen.multiline_text((left, below + LINE), "\n".join(text), INK, font, spacing=LINE - TEXT)
                continue
            psnr = shown[row][1]
            pen.text((left, below), "same picture" if psnr >= 100 else f"{psnr:.1f} dB", FAINT, font)
            page.paste(
                make_difference_image(own, original).resize((width, height), Image.Resampling.BOX), (left, below + LINE)
            )
    note = f"below each picture: its difference from the original, {AMPLIFIED} times as bright"
    pen.text((GAP, page.height - LINE - 2), note, FAINT, font)
    return page


def make_difference_image(picture: Image.Image, original: Image.Image) -> Image.Image:
    """The amplified difference of a picture from the original; white is a quarter of the range or more."""
    apart = np.abs(np.asarray(picture, np.float32) - np.asarray(original, np.float32)).mean(2)
    return Image.fromarray(np.minimum(apart * AMPLIFIED, 255).astype(np.uint8)).convert("RGB")


def _compute_thumbnail_size(picture: Image.Image) -> tuple[int, int]:
    longer = max(picture.size)
    scale = min(max(longer, LEAST), MOST) / longer
    return round(picture.width * scale), round(picture.height * scale)


def _make_column_title(setting: EvaluationSetting) -> list[str]:
    """The lines of a column's head, before they are wrapped."""
    if setting == ORIGINAL:
        return [str(ORIGINAL)]
    plan = "one process" if setting.has_original_plan else setting.plan
    return [plan, "no cache" if setting.cache == NO_CACHE else setting.cache]


def _wrap_text_lines(
    text: str | list[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> list[str]:
    """Text in lines that are no wider than a column; a longer word is cut."""
    lines: list[str] = []
    for part in [text] if isinstance(text, str) else text:
        line = ""
        for word in part.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > width:
                lines.append(line)
                longer = word
            line = longer
            while font.getlength(line) > width:
                fits = next(n for n in range(len(line), 0, -1) if font.getlength(line[:n]) <= width or n == 1)
                lines.append(line[:fits])
                line = line[fits:]
        lines.append(line)
    return lines


def draw_tradeoff(evaluation: Mapping[str, Any], out: Path) -> None:
    """Draws the settings of an evaluation, PSNR over latency, with a line through the Pareto front.

    Each plan has a colour and each cache a marker. A setting whose pictures equal the original's, which have no finite
    PSNR, is drawn at the top.
    """
    require_extra("plots", "the figure of an evaluation")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = evaluation["settings"]
    plans, caches = (list(dict.fromkeys(row[name] for row in rows)) for name in ("plan", "cache"))
    finite = [row["psnr"] for row in rows if row["psnr"] < 100]
    low, high = (min(finite), max(finite)) if finite else (30.0, 40.0)
    room = max(2.0, 0.15 * (high - low))
    top = high + 2 * room
    figure, axes = plt.subplots(figsize=(9.6, 5))

    def locate_row(row: Mapping[str, Any]) -> tuple[float, float]:
        return 100 * row["latency_ratio"], row["psnr"] if row["psnr"] < 100 else top

    front = map(locate_row, select_pareto_front(rows))
    axes.plot(*zip(*front, strict=True), color="#999999", lw=1.2, zorder=1, label="the best (Pareto front)")
    colours = assign_plan_colours(plans)
    for row in rows:
        x, y = locate_row(row)
        colour, marker = colours[row["plan"]], MARKERS[caches.index(row["cache"]) % len(MARKERS)]
        spread = [[x - 100 * row["latency_lowest"]], [100 * row["latency_highest"] - x]]
        axes.errorbar(
            x, y, xerr=spread, color=colour, marker=marker, ms=8, lw=0.8, mec="white", mew=0.6, zorder=2, alpha=0.9
        )
    axes.axhline(high + room, color="#cccccc", lw=0.8, ls="--", label="above it the same picture, without a PSNR")
    axes.errorbar([], [], xerr=[], color="#555555", ls="none", lw=0.8, label="lowest to highest")
    axes.set_ylim(low - room, top + 0.8 * room)
    ticks = [tick for tick in axes.get_yticks() if low - room <= tick <= high + 0.4 * room]
    axes.set_yticks([*ticks, top], [*(f"{tick:g}" for tick in ticks), "same\npicture"])
    axes.set_xlim(left=0)
    axes.set_xlabel("time of a picture, % of the original pipeline's (median; bars: lowest and highest)")
    axes.set_ylabel("mean PSNR to the original's picture (dB)")
    count = evaluation["captions"]["count"]
    axes.set_title(f"{evaluation['model']}, {count} caption(s), {evaluation['measured']['machine']}", fontsize=10)
    axes.grid(alpha=0.3)
    _add_legend(axes, colours, caches)
    figure.tight_layout()
    save_figure(figure, out, dpi=110)
    plt.close(figure)


def _add_legend(axes: Any, colours: Mapping[str, str], caches: Sequence[str]) -> None:
    """Colours of plans, markers of caches, and lines, beside the figure."""
    require_extra("plots", "the figure of an evaluation")
    from matplotlib.patches import Patch

    plan_names = ["one process" if plan == ORIGINAL.plan else textwrap.fill(plan, 34) for plan in colours]
    cache_names = ["no cache" if cache == ORIGINAL.cache else textwrap.fill(cache, 34) for cache in caches]
    lines, _ = axes.get_legend_handles_labels()
    shown = [Patch(color=colour, label=name) for colour, name in zip(colours.values(), plan_names, strict=True)]
    for k, name in enumerate(cache_names):
        shown += axes.plot([], [], MARKERS[k % len(MARKERS)], color="#555555", label=name)
    axes.legend(handles=[*shown, *lines], frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))

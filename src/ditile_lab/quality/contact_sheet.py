"""The sheet of an evaluation: images side by side, with their differences from the original."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ditile.cache.config_text import NO_CACHE
from ditile.runner.requests.pictures import read_picture
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting

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
    return [name_plan(setting.plan), name_cache(setting.cache)]


def name_plan(plan: str) -> str:
    """Return a setting's plan in words."""
    return "one process" if plan == ORIGINAL.plan else plan


def name_cache(cache: str) -> str:
    """Return a setting's cache in words."""
    return "no cache" if cache == NO_CACHE else cache


def _wrap_text_lines(texts: Sequence[str], width: int) -> list[str]:
    """Wrap texts to lines that fit a column of `width` pixels."""
    lines = []
    for text in texts:
        lines += textwrap.wrap(text, width // LETTER)
    return lines

"""A sheet of pictures side by side: a column for each setting, a row for each caption, differences below the pictures.

A difference map is the mean over the colours of how far a picture is from the original's, amplified, on black.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ditile.cache.config_text import NO_CACHE
from ditile.cli.evaluate.options import ORIGINAL, EvaluationSetting
from ditile.cli.evaluate.scores import read_picture

ROWS = 8
"""Captions that are shown."""

AMPLIFIED = 4
LEAST, MOST = 144, 256  # pixels of the longer side of a picture on the sheet
GAP, TEXT, LINE = 10, 13, 17
INK, FAINT, PAPER = (20, 20, 20), (110, 110, 110), (255, 255, 255)
SheetColumn = tuple[EvaluationSetting, Sequence[tuple[Path, float]]]
"""A setting; for each caption its file, and its PSNR in dB."""


def draw_contact_sheet(columns: Sequence[SheetColumn], captions: Sequence[str]) -> Image.Image:
    """The whole sheet.

    Args:
        columns: the original first.
        captions: in the order of the pictures.
    """
    font = ImageFont.load_default(TEXT)
    pictures = [[Image.fromarray(read_picture(path)) for path, _ in shown] for _, shown in columns]
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
    """How far a picture is from the original, amplified; white is a quarter of all or more."""
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

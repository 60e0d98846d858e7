"""Layout: where the tokens of one image are, and how they are cut into patches. Pure; every rank computes the same.

A patch is a run of whole token rows. In joint attention the text belongs to patch 0, which is made smaller for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Joint = Literal["none", "text_first", "image_first"]

DUMMY_TEXT = 2  # tokens of text in a patch without text: no model takes 0, and 1 is specialised by torch.compile


class Grid(NamedTuple):
    """The token rows of an image: how many, tokens in each, and latent units along `latent_dim` in each."""

    rows: int
    tokens_per_row: int
    units_per_row: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of one image and guidance branch: `text` tokens, and rows of image tokens cut at `cuts`."""

    grid: Grid
    text: int
    joint: Joint
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, grid: Grid, patches: int, text: int, joint: Joint) -> Layout:
        """Cuts a grid into patches of equal work, the text counted as work of patch 0."""
        ends = [0]
        for rows in cut_rows(grid.rows, patches, text / grid.tokens_per_row):
            ends.append(ends[-1] + rows)
        return cls(grid, text, joint, tuple(ends))

    @property
    def patches(self) -> int:
        """M."""
        return len(self.cuts) - 1

    @property
    def image(self) -> int:
        """Image tokens."""
        return self.grid.rows * self.grid.tokens_per_row

    def rows(self, patch: int) -> int:
        """Token rows of a patch."""
        return self.cuts[patch + 1] - self.cuts[patch]

    def tokens(self, patch: int) -> slice:
        """The image tokens of a patch, counted among image tokens."""
        width = self.grid.tokens_per_row
        return slice(self.cuts[patch] * width, self.cuts[patch + 1] * width)

    def latents(self, patch: int) -> slice:
        """The latent units of a patch along the latents' `latent_dim`."""
        height = self.grid.units_per_row
        return slice(self.cuts[patch] * height, self.cuts[patch + 1] * height)

    def carries_text(self, patch: int | None) -> bool:
        """Whether the text rides with a patch (None: the whole image)."""
        return self.joint != "none" and patch in (None, 0)

    def message(self, patch: int) -> int:
        """Tokens that travel between stages for a patch."""
        return self.rows(patch) * self.grid.tokens_per_row + (self.text if self.carries_text(patch) else 0)


def cut_rows(rows: int, patches: int, text_rows: float = 0.0) -> list[int]:
    """Rows of each patch, none empty, as equal as can be; patch 0 has `text_rows` rows' worth of text on top.

    `rows` must be at least `patches`.
    """
    if patches == 1:
        return [rows]
    share = (rows + text_rows) / patches
    first = min(max(round(share - text_rows), 1), rows - (patches - 1))
    base, more = divmod(rows - first, patches - 1)
    return [first, *(base + (i < more) for i in range(patches - 1))]

"""Layout: where the tokens of one image are, how they are cut into patches, and how ranks share out a patch.

Pure; every rank computes the same. A patch is a run of whole token rows. In joint attention the text belongs to patch
0, which is made smaller for it. Ranks of the sequence axes share out each patch and the text as evenly as can be, so
that a rank's tokens of a whole step are those of its patches, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ditile.errors import PlanError


def row_parts(rows: int, parts: int) -> list[range]:
    """Runs of rows as even as can be, the larger ones first; as many as asked for, but none is empty."""
    parts = min(rows, parts)
    return [share(range(rows), parts, index) for index in range(parts)]


Joint = Literal["none", "text_first", "image_first"]

DUMMY_TEXT = 2  # tokens of text in a patch without text: no model takes 0, and 1 is specialised by torch.compile


class Grid(NamedTuple):
    """The token rows of an image: how many, tokens in each, and latent units along `latent_dim` in each."""

    rows: int
    tokens_per_row: int
    units_per_row: int


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens that one rank computes: a run of the text and runs of the image, each counted from 0.

    Where the model has a text stream and the run is empty, dummies stand for it.
    """

    text: range
    image: tuple[range, ...]

    @property
    def image_tokens(self) -> int:
        """Tokens of the image."""
        return sum(map(len, self.image))


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
        """Tokens that travel between stages for a patch, over all ranks that share it out."""
        return self.rows(patch) * self.grid.tokens_per_row + (self.text if self.carries_text(patch) else 0)

    def runs(self, part: Part, *, joint: bool) -> tuple[range, ...]:
        """Where a part's tokens are in the sequence of an attention layer, which sees the text or not."""
        if not joint:
            return part.image
        text_at, image_at = (0, self.text) if self.joint == "text_first" else (self.image, 0)
        text = [range(text_at + part.text.start, text_at + part.text.stop)] if part.text else []
        image = [range(image_at + run.start, image_at + run.stop) for run in part.image]
        return tuple(text + image if self.joint == "text_first" else image + text)


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share out the tokens of a patch: evenly, or (DistriFusion) a patch of rows each and the text to all.

    Ranks are counted with ulysses innermost. With `uneven` off, shares of a rank more or less are refused.
    """

    ring: int = 1
    distrifusion: int = 1
    ulysses: int = 1
    uneven: bool = True

    @property
    def ranks(self) -> int:
        """How many."""
        return self.ring * self.distrifusion * self.ulysses

    def parts(self, layout: Layout, patch: int | None) -> tuple[Part, ...]:
        """What each rank has of a patch, or of the whole image (None).

        Raises:
            PlanError: if a rank would have no token of the image, or not as many as another and `uneven` is off.
        """
        return _parts(self, layout, patch)

    def _made(self, layout: Layout, patch: int | None) -> tuple[Part, ...]:
        text = range(layout.text if layout.carries_text(patch) else 0)
        if self.distrifusion > 1:
            parts = self._of_rows(layout, text)
        else:
            patches = range(layout.patches) if patch is None else [patch]
            spans = [layout.tokens(p) for p in patches]
            parts = tuple(
                Part(share(text, self.ranks, k), joined(share(range(s.start, s.stop), self.ranks, k) for s in spans))
                for k in range(self.ranks)
            )
        least = min(part.image_tokens for part in parts)
        if least == 0:
            name = f"patch {patch}" if patch is not None else "the image"
            raise PlanError(
                f"{name} has fewer tokens than the {self.ranks} ranks that share it out; "
                "use fewer patches, a lower ring or ulysses degree, or a larger image"
            )
        if not self.uneven:
            self._check_even(parts, patch)
        return parts

    def _check_even(self, parts: tuple[Part, ...], patch: int | None) -> None:
        ranks = self.ring * self.ulysses
        for first in range(0, len(parts), ranks):
            some = parts[first : first + ranks]
            for name, lengths in (("text", [len(p.text) for p in some]), ("image", [p.image_tokens for p in some])):
                if len(set(lengths)) > 1:
                    fits = ", ".join(str(n) for n in range(1, ranks + 1) if sum(lengths) % n == 0)
                    where = "" if patch is None else f" in patch {patch}"
                    raise PlanError(
                        f"{sum(lengths)} tokens of {name}{where} are not divided by the {ranks} ranks of ring x "
                        f"ulysses and uaa is off; try {fits} ranks, or leave uaa out"
                    )

    def _of_rows(self, layout: Layout, text: range) -> tuple[Part, ...]:
        width, parts, at = layout.grid.tokens_per_row, list[Part](), 0
        for rows in cut_rows(layout.grid.rows, self.distrifusion):
            image = range(at * width, (at + rows) * width)
            at += rows
            parts += [
                Part(share(text, self.ulysses, k), joined([share(image, self.ulysses, k)])) for k in range(self.ulysses)
            ]
        return tuple(parts)


@lru_cache(maxsize=4096)
def _parts(split: Split, layout: Layout, patch: int | None) -> tuple[Part, ...]:
    """Asked for at every call of a model, and for every plan that is priced."""
    return split._made(layout, patch)


def share(items: range, ranks: int, index: int) -> range:
    """A rank's even share of a run; the first ranks have one more."""
    base, more = divmod(len(items), ranks)
    start = items.start + index * base + min(index, more)
    return range(start, start + base + (index < more))


def joined(runs: Iterable[range]) -> tuple[range, ...]:
    """Runs without the empty ones, neighbours as one."""
    found: list[range] = []
    for run in runs:
        if found and run and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        elif run:
            found.append(run)
    return tuple(found)


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

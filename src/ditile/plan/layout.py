"""Layout: where the tokens of one image are, how they are cut into patches, and how ranks share out a patch.

Pure; every rank computes the same. A patch is a run of whole token rows; of a video, the same rows of every frame. In
joint attention the text belongs to patch 0, which is made smaller for it. Tokens of reference pictures may be patches
of their own, in front of it. Ranks of the sequence axes share out each patch and the text as evenly as can be, so that
a rank's tokens of a whole step are those of its patches, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ditile.plan.errors import PlanError


def split_batch_evenly(batch_size: int, parts: int) -> list[range]:
    """Splits the rows of a batch into at most `parts` runs, none of them empty; the first runs have one row more."""
    parts = min(batch_size, parts)
    return [pick_even_chunk(range(batch_size), parts, index) for index in range(parts)]


Joint = Literal["none", "text_first", "image_first"]

# No model takes 0 tokens, and torch.compile specialises for 1.
DUMMY_TEXT = 2
"""Text tokens in a patch without text."""


class Grid(NamedTuple):
    """The tokens of an image, row after row, or of a video, frame after frame. Patches are runs of whole rows.

    Attributes:
        rows: of a frame.
        tokens_per_row: how many.
        frames: of a video whose patches are the same rows of every frame.
    """

    rows: int
    tokens_per_row: int
    frames: int = 1

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return self.frames * self.rows * self.tokens_per_row

    def locate_rows(self, start: int, stop: int) -> tuple[range, ...]:
        """The tokens of some rows: a run in each frame."""
        width = self.tokens_per_row
        frame = self.rows * self.tokens_per_row
        return merge_ranges(range(k * frame + start * width, k * frame + stop * width) for k in range(self.frames))


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens that one rank computes: a run of the text and runs of the image, each counted from 0.

    Where the model has a text stream and the run is empty, dummies stand for it.
    """

    text: range
    image: tuple[range, ...]

    @property
    def image_tokens(self) -> int:
        """Tokens of the image."""
        return sum(map(len, self.image))

    def count_tokens(self, *, joint: bool = True) -> int:
        """Tokens in an attention layer that sees the text too, or the image alone."""
        return self.image_tokens + (len(self.text) if joint else 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of one image and guidance branch: `text` tokens, and rows of image tokens cut at `cuts`.

    Attributes:
        grid, text, joint, cuts: the rows, the length and place of the text, and where rows are cut.
        owners: the patch of each part between two cuts; by default each is a patch, in this order.
        num_references: the first patches, which are of reference pictures; the text belongs to the one behind them.
    """

    grid: Grid
    text: int
    joint: Joint
    cuts: tuple[int, ...]
    owners: tuple[int, ...] = ()
    num_references: int = 0

    @classmethod
    def cut_into_patches(cls, grid: Grid, patches: int, text: int, joint: Joint) -> Layout:
        """Cuts a grid into patches of equal work, the text counted as work of patch 0."""
        ends = [0]
        for rows in balance_patch_rows(grid.rows, patches, text / (grid.tokens_per_row * grid.frames)):
            ends.append(ends[-1] + rows)
        return cls(grid, text, joint, tuple(ends))

    @classmethod
    def cut_around_references(
        cls, grid: Grid, patches: int, text: int, joint: Joint, references: Collection[int], *, even: bool
    ) -> Layout:
        """Cuts a grid into patches of reference pictures, which come first, and patches of the image.

        Args:
            grid, text, joint: as of a layout.
            patches: in all.
            references: the rows of reference pictures.
            even: whether patches are of equal work; else the references are one patch.

        Raises:
            PlanError: if there are fewer rows than patches.
        """
        image = grid.rows - len(references)
        share = round(patches * len(references) / grid.rows) if even else 1
        first = max(1, min(share, patches - 1, len(references)))
        if image < patches - first:
            raise PlanError(
                f"patches={patches}: {first} of them are for the references, and the other {patches - first} exceed "
                f"the {image} token rows of the image; use fewer patches"
            )
        sizes = balance_patch_rows(len(references), first)
        sizes += balance_patch_rows(image, patches - first, text / (grid.tokens_per_row * grid.frames))
        patch_of_each = [patch for patch, rows in enumerate(sizes) for _ in range(rows)]
        next_reference = iter(patch_of_each[: len(references)])
        next_row = iter(patch_of_each[len(references) :])
        of_rows = [next(next_reference if row in references else next_row) for row in range(grid.rows)]
        starts = [row for row, patch in enumerate(of_rows) if not row or patch != of_rows[row - 1]]
        return cls(grid, text, joint, (*starts, grid.rows), tuple(of_rows[row] for row in starts), first)

    def cut_alike(self, grid: Grid, text: int, shift: int) -> Layout:
        """The layout of another branch of guidance, whose patches have the same part of the image.

        Args:
            grid: of its tokens.
            text: its text tokens.
            shift: how many rows later the image begins in its sequence.
        """
        ends = [0]
        for end in self.cuts[1:-1]:
            ends.append(max(ends[-1] + 1, end + shift))
        return replace(self, grid=grid, text=text, cuts=(*ends, grid.rows))

    @property
    def num_patches(self) -> int:
        """The number of patches."""
        return max(self.owners) + 1 if self.owners else len(self.cuts) - 1

    @property
    def image_tokens(self) -> int:
        """Image tokens."""
        frames = self.grid.frames
        rows = self.grid.rows
        width = self.grid.tokens_per_row
        return frames * rows * width

    def count_layer_tokens(self, *, joint: bool) -> int:
        """Tokens in an attention layer that sees the text too, or the image alone."""
        return self.image_tokens + (self.text if joint else 0)

    def count_rows(self, patch: int, rows: int | None = None) -> int:
        """Token rows of a patch, or those of them that are among so many first rows."""
        return sum(len(run[: max(0, (rows or run.stop) - run.start)]) for run in self._list_row_runs(patch))

    def count_reference_tokens(self) -> int:
        """Tokens of reference pictures that are patches of their own."""
        return sum(len(run) for patch in range(self.num_references) for run in self.locate_tokens(patch))

    def locate_tokens(self, patch: int) -> tuple[range, ...]:
        """The image tokens of a patch, counted among image tokens."""
        return merge_ranges(
            run for rows in self._list_row_runs(patch) for run in self.grid.locate_rows(rows.start, rows.stop)
        )

    def _list_row_runs(self, patch: int) -> list[range]:
        if not self.owners:
            return [range(self.cuts[patch], self.cuts[patch + 1])]
        return [range(*self.cuts[part : part + 2]) for part, owner in enumerate(self.owners) if owner == patch]

    def carries_text(self, patch: int | None) -> bool:
        """Whether the text is computed with a patch (None: the whole image)."""
        return self.joint != "none" and patch in (None, self.num_references)

    def locate_in_sequence(self, shard: TokenShard, *, joint: bool) -> tuple[range, ...]:
        """The positions of a shard's tokens in an attention layer that sees the text too, or the image alone."""
        if not joint:
            return shard.image
        text_at, image_at = (0, self.text) if self.joint == "text_first" else (self.image_tokens, 0)
        text = [range(text_at + shard.text.start, text_at + shard.text.stop)] if shard.text else []
        image = [range(image_at + run.start, image_at + run.stop) for run in shard.image]
        return tuple(text + image if self.joint == "text_first" else image + text)


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share out the tokens of a patch: evenly; under DistriFusion each has a patch of rows, and all the text.

    Attributes:
        ring, distrifusion, ulysses: the degrees; ranks are counted with ulysses innermost.
        uneven: whether one rank may have a token more than another.
    """

    ring: int = 1
    distrifusion: int = 1
    ulysses: int = 1
    uneven: bool = True

    @property
    def num_ranks(self) -> int:
        """Ranks that share out the tokens."""
        return self.ring * self.distrifusion * self.ulysses

    def shard_tokens(self, layout: Layout, patch: int | None) -> tuple[TokenShard, ...]:
        """What each rank has of a patch, or of the whole image (None).

        Raises:
            PlanError: if a rank would have no token of the image, or not as many as another and `uneven` is off.
        """
        return _look_up_shards(self, layout, patch)

    def _compute_shards(self, layout: Layout, patch: int | None) -> tuple[TokenShard, ...]:
        text = range(layout.text if layout.carries_text(patch) else 0)
        if self.distrifusion > 1:
            parts = self._shard_by_rows(layout, text) if not layout.owners else self._shard_kinds(layout, text, patch)
        else:
            patches = range(layout.num_patches) if patch is None else [patch]
            of_patches = [layout.locate_tokens(p) for p in patches]
            if patch is None and self.num_ranks == 1:  # as the model has them
                of_patches = [(range(layout.image_tokens),)]
            parts = tuple(_pick_shard(text, of_patches, self.num_ranks, k) for k in range(self.num_ranks))
        if min(part.image_tokens for part in parts) == 0:
            name = f"patch {patch}" if patch is not None else "the image"
            raise PlanError(
                f"{name} has fewer tokens than the {self.num_ranks} ranks that share it out; "
                "use fewer patches, a lower ring or ulysses degree, or a larger image"
            )
        if not self.uneven:
            self._check_even(parts, patch)
        return parts

    def _check_even(self, parts: tuple[TokenShard, ...], patch: int | None) -> None:
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

    def _shard_kinds(self, layout: Layout, text: range, patch: int | None) -> tuple[TokenShard, ...]:
        """Under DistriFusion, a share of the references and of the image for each rank, or of one of them."""
        kinds = [layout.locate_tokens(kind) for kind in (range(layout.num_patches) if patch is None else [patch])]
        return tuple(
            _pick_shard(text, [list(_pick_from_runs(runs, self.distrifusion, rank)) for runs in kinds], self.ulysses, k)
            for rank in range(self.distrifusion)
            for k in range(self.ulysses)
        )

    def _shard_by_rows(self, layout: Layout, text: range) -> tuple[TokenShard, ...]:
        parts = list[TokenShard]()
        at = 0
        for rows in balance_patch_rows(layout.grid.rows, self.distrifusion):
            image = layout.grid.locate_rows(at, at + rows)
            at += rows
            parts += [_pick_shard(text, [image], self.ulysses, k) for k in range(self.ulysses)]
        return tuple(parts)


def _pick_shard(text: range, image: Iterable[Sequence[range]], ranks: int, index: int) -> TokenShard:
    """A rank's even share of the text and of each patch, which is runs of image tokens."""
    return TokenShard(
        pick_even_chunk(text, ranks, index),
        merge_ranges(run for runs in image for run in _pick_from_runs(runs, ranks, index)),
    )


def _pick_from_runs(runs: Sequence[range], ranks: int, index: int) -> Iterator[range]:
    """A rank's even share of what is in some runs, one after the other."""
    share = pick_even_chunk(range(sum(map(len, runs))), ranks, index)
    at = 0
    for run in runs:
        yield run[max(share.start - at, 0) : max(share.stop - at, 0)]
        at += len(run)


@lru_cache(maxsize=4096)
def _look_up_shards(split: Split, layout: Layout, patch: int | None) -> tuple[TokenShard, ...]:
    # A cache, because every call of a model asks for it, and the planner for every plan that it prices.
    return split._compute_shards(layout, patch)


def pick_even_chunk(items: range, ranks: int, index: int) -> range:
    """A rank's even share of a run; the first ranks have one item more."""
    base, more = divmod(len(items), ranks)
    start = items.start + index * base + min(index, more)
    return range(start, start + base + (index < more))


def merge_ranges(runs: Iterable[range]) -> tuple[range, ...]:
    """Drops empty runs, and joins runs that follow each other."""
    merged: list[range] = []
    for run in runs:
        if merged and run and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        elif run:
            merged.append(run)
    return tuple(merged)


def balance_patch_rows(rows: int, patches: int, text_rows: float = 0.0) -> list[int]:
    """Rows of each patch, none empty, as equal as can be; patch 0 has `text_rows` rows' worth of text on top.

    `rows` must be at least `patches`.
    """
    if patches == 1:
        return [rows]
    share = (rows + text_rows) / patches
    first = min(max(round(share - text_rows), 1), rows - (patches - 1))
    base, more = divmod(rows - first, patches - 1)
    return [first, *(base + (i < more) for i in range(patches - 1))]

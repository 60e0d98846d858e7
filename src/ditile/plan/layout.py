"""Layout: the positions of one image's tokens, their cuts into patches, and the split of a patch over ranks.

Every rank computes the same layout. A patch is a run of whole token rows; of a video, the same rows of every frame. In
joint attention the text belongs to the first patch of the image, which is made smaller for it. Tokens of reference
images may be patches of their own, before that one. Ranks of the sequence axes split each patch and the text as evenly
as possible, or by weights, so that a rank's tokens of a whole step are its parts of the patches, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ditile.plan.errors import PlanError

Joint = Literal["none", "text_first", "image_first"]

# No model takes 0 tokens, and torch.compile specialises for 1.
DUMMY_TEXT = 2
"""The number of dummy tokens that stand for the text in a patch without text."""


def split_batch_evenly(batch_size: int, parts: int) -> list[range]:
    """Split the rows of a batch into at most `parts` runs, none of them empty. The first runs have one row more."""
    parts = min(batch_size, parts)
    return [pick_even_chunk(range(batch_size), parts, index) for index in range(parts)]


class Grid(NamedTuple):
    """The tokens of an image, row after row, or of a video, frame after frame. Patches are runs of whole rows.

    Attributes:
        rows: the number of rows in a frame.
        tokens_per_row: the number of tokens in a row.
        frames: the number of frames in a video, whose patches are the same rows of every frame.
    """

    rows: int
    tokens_per_row: int
    frames: int = 1

    @property
    def num_tokens(self) -> int:
        """Return the number of all tokens."""
        return self.frames * self.rows * self.tokens_per_row

    def locate_rows(self, start: int, stop: int) -> tuple[range, ...]:
        """Return the tokens of some rows: a run in each frame."""
        runs = []
        for frame in range(self.frames):
            first_row = frame * self.rows
            runs.append(range((first_row + start) * self.tokens_per_row, (first_row + stop) * self.tokens_per_row))
        return merge_ranges(runs)


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens that one rank computes: a run of the text and runs of the image, each counted from 0.

    If the model has a text stream and the run of the text is empty, dummy tokens stand for the text.
    """

    text: range
    image: tuple[range, ...]

    @property
    def image_tokens(self) -> int:
        """Return the number of image tokens."""
        return sum(map(len, self.image))

    def count_tokens(self, *, joint: bool = True) -> int:
        """Count the tokens in an attention layer. A `joint` layer sees the text too."""
        if not joint:
            return self.image_tokens
        return self.image_tokens + len(self.text)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of one image and guidance branch: `text` tokens, and rows of image tokens cut at `cuts`.

    Attributes:
        grid, text, joint, cuts: the rows, the length and place of the text, and where rows are cut.
        owners: the patch of each part between two cuts; by default each part is a patch, in this order.
        num_references: how many patches, from the first on, are of reference images; the text belongs to the next one.
    """

    grid: Grid
    text: int
    joint: Joint
    cuts: tuple[int, ...]
    owners: tuple[int, ...] = ()
    num_references: int = 0

    @classmethod
    def cut_into_patches(cls, grid: Grid, patches: int, text: int, joint: Joint) -> Layout:
        """Cut a grid into patches of equal work, the text counted as work of patch 0."""
        ends = [0]
        text_rows = text / (grid.tokens_per_row * grid.frames)
        for rows in balance_patch_rows(grid.rows, patches, text_rows):
            ends.append(ends[-1] + rows)
        return cls(grid, text, joint, tuple(ends))

    @classmethod
    def cut_around_references(
        cls, grid: Grid, patches: int, text: int, joint: Joint, references: Collection[int], *, even: bool
    ) -> Layout:
        """Cut a grid into patches of reference images, which come first, and patches of the image.

        Args:
            grid, text, joint, references: as in `Layout`, and the token rows of reference images.
            even: whether patches are of equal work; otherwise the references are one patch.

        Raises:
            PlanError: if there are fewer rows than patches.
        """
        image_rows = grid.rows - len(references)
        share = round(patches * len(references) / grid.rows) if even else 1
        # At least one patch is left for the image, and each patch has a row.
        num_references = max(1, min(share, patches - 1, len(references)))
        num_own = patches - num_references
        if image_rows < num_own:
            raise PlanError(
                f"patches={patches}: {num_references} of them are for the references, and the other {num_own} "
                f"exceed the {image_rows} token rows of the image; use fewer patches"
            )
        text_rows = text / (grid.tokens_per_row * grid.frames)
        sizes = balance_patch_rows(len(references), num_references)
        sizes += balance_patch_rows(image_rows, num_own, text_rows)
        # References may lie anywhere among the rows: each row goes to the first patch of its sort that has room.
        cuts: list[int] = []
        owners: list[int] = []
        next_reference = 0
        next_patch = num_references
        for row in range(grid.rows):
            if row in references:
                while not sizes[next_reference]:
                    next_reference += 1
                patch = next_reference
            else:
                while not sizes[next_patch]:
                    next_patch += 1
                patch = next_patch
            sizes[patch] -= 1
            if not owners or owners[-1] != patch:
                cuts.append(row)
                owners.append(patch)
        return cls(grid, text, joint, (*cuts, grid.rows), tuple(owners), num_references)

    def cut_alike(self, grid: Grid, text: int, shift: int) -> Layout:
        """Return the layout of another branch of guidance, with the same part of the image in each patch.

        Args:
            shift: how many rows later the image begins in its sequence.
        """
        ends = [0]
        # Each patch keeps at least one row.
        for end in self.cuts[1:-1]:
            ends.append(max(ends[-1] + 1, end + shift))
        return replace(self, grid=grid, text=text, cuts=(*ends, grid.rows))

    @property
    def num_patches(self) -> int:
        """Return the number of patches."""
        if self.owners:
            return max(self.owners) + 1
        return len(self.cuts) - 1

    @property
    def image_tokens(self) -> int:
        """Return the number of image tokens."""
        return self.grid.num_tokens

    def count_layer_tokens(self, *, joint: bool) -> int:
        """Count the tokens in an attention layer. A `joint` layer sees the text too."""
        if not joint:
            return self.image_tokens
        return self.image_tokens + self.text

    def count_rows(self, patch: int, end: int | None = None) -> int:
        """Count the token rows of a patch. With `end`, only rows before that one count."""
        count = 0
        for run in self._list_row_runs(patch):
            stop = run.stop if end is None else min(run.stop, end)
            count += max(stop - run.start, 0)
        return count

    def count_reference_tokens(self) -> int:
        """Count the tokens of reference images that are patches of their own."""
        count = 0
        for patch in range(self.num_references):
            count += sum(map(len, self.locate_tokens(patch)))
        return count

    def locate_tokens(self, patch: int) -> tuple[range, ...]:
        """Return the image tokens of a patch, counted among image tokens."""
        runs: list[range] = []
        for rows in self._list_row_runs(patch):
            runs += self.grid.locate_rows(rows.start, rows.stop)
        return merge_ranges(runs)

    def _list_row_runs(self, patch: int) -> list[range]:
        if not self.owners:
            return [range(self.cuts[patch], self.cuts[patch + 1])]
        runs = []
        for index, owner in enumerate(self.owners):
            if owner == patch:
                runs.append(range(self.cuts[index], self.cuts[index + 1]))
        return runs

    def carries_text(self, patch: int | None) -> bool:
        """Return whether the text is computed with a patch (None: the whole image)."""
        return self.joint != "none" and patch in (None, self.num_references)

    def locate_in_sequence(self, shard: TokenShard, *, joint: bool) -> tuple[range, ...]:
        """Return the positions of a shard's tokens in an attention layer. A `joint` layer sees the text too."""
        if not joint:
            return shard.image
        is_text_first = self.joint == "text_first"
        text_offset = 0 if is_text_first else self.image_tokens
        image_offset = self.text if is_text_first else 0
        text = _shift_runs(filter(None, [shard.text]), text_offset)
        image = _shift_runs(shard.image, image_offset)
        if is_text_first:
            return (*text, *image)
        return (*image, *text)


def _shift_runs(runs: Iterable[range], offset: int) -> list[range]:
    return [range(offset + run.start, offset + run.stop) for run in runs]


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a patch's tokens over ranks. Under DistriFusion, ulysses splits a patch of rows and all the text.

    Attributes:
        ring, distrifusion, ulysses: the degrees; ranks are counted with ulysses innermost. Gather counts as ring.
        uneven: whether one rank may have a token more than another.
        weights: the share of each rank, in any unit; equal by default.
    """

    ring: int = 1
    distrifusion: int = 1
    ulysses: int = 1
    uneven: bool = True
    weights: tuple[float, ...] | None = None

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that split the tokens."""
        return self.ring * self.distrifusion * self.ulysses

    def shard_tokens(self, layout: Layout, patch: int | None) -> tuple[TokenShard, ...]:
        """Return the tokens of each rank in a patch, or in the whole image (None).

        Raises:
            PlanError: if a rank would have no token of the image, or not as many as another and `uneven` is off.
        """
        return _look_up_shards(self, layout, patch)

    def count_patch_rows(self, rows: int) -> Sequence[int]:
        """Return the rows of each patch of DistriFusion, for an image with `rows` rows."""
        shares = tuple(map(sum, self._group_weights()))
        # Equal weights count as no weights, as in `pick_weighted_chunk`.
        if len(set(shares)) == 1:
            return balance_patch_rows(rows, self.distrifusion)
        return count_weighted_shares(rows, shares)

    def _group_weights(self) -> list[tuple[float, ...]]:
        """Return the weights of the ranks along ulysses, for each place along the outer axis."""
        weights = self.weights or (1.0,) * self.num_ranks
        return [weights[first : first + self.ulysses] for first in range(0, self.num_ranks, self.ulysses)]

    def _compute_shards(self, layout: Layout, patch: int | None) -> tuple[TokenShard, ...]:
        text = range(0)
        if layout.carries_text(patch):
            text = range(layout.text)
        patches = range(layout.num_patches)
        if patch is not None:
            patches = range(patch, patch + 1)
        runs_of_patches = [layout.locate_tokens(patch) for patch in patches]
        if self.distrifusion > 1:
            shards = self._shard_over_distrifusion(layout, text, runs_of_patches)
        else:
            # A single rank has the tokens of the image in the order of the model, not of the patches.
            if patch is None and self.num_ranks == 1:
                runs_of_patches = [(range(layout.image_tokens),)]
            shares = self.weights or (1.0,) * self.num_ranks
            shards = [_pick_shard(text, runs_of_patches, shares, rank) for rank in range(self.num_ranks)]
        if min(shard.image_tokens for shard in shards) == 0:
            name = "the image" if patch is None else f"patch {patch}"
            num_ranks = self.num_ranks
            if self.distrifusion > 1:
                # These are the rows of one rank, which only ulysses splits.
                name = f"a share of {name}"
                num_ranks = self.ulysses
            raise PlanError(
                f"{name} has fewer tokens than the {num_ranks} ranks that split it; "
                "use fewer patches, a lower ring, gather or ulysses degree, or a larger image"
            )
        if not self.uneven:
            self._check_even(shards, patch)
        return tuple(shards)

    def _shard_over_distrifusion(
        self, layout: Layout, text: range, runs_of_patches: Sequence[Sequence[range]]
    ) -> list[TokenShard]:
        """Return the parts of the ranks: ulysses splits the text, and the rows of each place along distrifusion."""
        inner_weights = self._group_weights()
        shares = tuple(map(sum, inner_weights))
        shards: list[TokenShard] = []
        first_row = 0
        for rank, rows in enumerate(self.count_patch_rows(layout.grid.rows)):
            runs: list[Sequence[range]] = [layout.grid.locate_rows(first_row, first_row + rows)]
            first_row += rows
            # If references are patches of their own, a rank has a share of the references and of the image.
            if layout.owners:
                runs = [list(_pick_from_runs(patch_runs, shares, rank)) for patch_runs in runs_of_patches]
            shards += [_pick_shard(text, runs, inner_weights[rank], index) for index in range(self.ulysses)]
        return shards

    def _check_even(self, shards: Sequence[TokenShard], patch: int | None) -> None:
        """Raise `PlanError` if ranks that split the same tokens have unequal numbers of them."""
        ranks = self.ring * self.ulysses
        for first in range(0, len(shards), ranks):
            group = shards[first : first + ranks]
            for lengths in ([len(shard.text) for shard in group], [shard.image_tokens for shard in group]):
                if len(set(lengths)) > 1:
                    place = "" if patch is None else f" in patch {patch}"
                    raise PlanError(
                        f"{sum(lengths)} tokens{place} are not divided by the {ranks} ranks that share them, and "
                        "uaa is off; leave uaa out, or use as many ranks as divide them"
                    )


def _pick_shard(text: range, image: Iterable[Sequence[range]], weights: tuple[float, ...], index: int) -> TokenShard:
    """Return a rank's share of the text and of the patches. `image` has the runs of tokens in each patch."""
    own_runs: list[range] = []
    for runs in image:
        own_runs += _pick_from_runs(runs, weights, index)
    return TokenShard(pick_weighted_chunk(text, weights, index), merge_ranges(own_runs))


def _pick_from_runs(runs: Sequence[range], weights: tuple[float, ...], index: int) -> Iterator[range]:
    """Yield a rank's share of the tokens of some runs, one after the other."""
    share = pick_weighted_chunk(range(sum(map(len, runs))), weights, index)
    offset = 0
    for run in runs:
        yield run[max(share.start - offset, 0) : max(share.stop - offset, 0)]
        offset += len(run)


@lru_cache(maxsize=4096)
def _look_up_shards(split: Split, layout: Layout, patch: int | None) -> tuple[TokenShard, ...]:
    # Shards are cached, because every call of a model needs them, and the planner for every plan that it prices.
    return split._compute_shards(layout, patch)


def pick_even_chunk(items: range, ranks: int, index: int) -> range:
    """Return a rank's even share of a run. The first ranks have one item more."""
    base, more = divmod(len(items), ranks)
    # Each rank before this one has `base` items, and the first `more` of them one more.
    start = items.start + index * base + min(index, more)
    return range(start, start + base + (index < more))


def spread_branches(branches: Sequence[int], ranks: int, *, keeps_calls: bool = False) -> list[list[range]]:
    """Return the branches of guidance that each rank has in each call of a step, spread as evenly as possible.

    Args:
        branches: the number of branches in each call.
        ranks: the number of ranks that share them.
        keeps_calls: whether each call stays whole on one rank; otherwise several ranks may share its branches.
    """
    units = [1] * len(branches) if keeps_calls else branches  # for each call, how many parts may be on different ranks
    spread: list[list[range]] = []
    for rank in range(ranks):
        own = pick_even_chunk(range(sum(units)), ranks, rank)
        shares = []
        before = 0
        for count, call_units in zip(branches, units, strict=True):
            call = range(before, before + call_units)
            share = range(max(own.start, call.start) - before, min(own.stop, call.stop) - before)
            if keeps_calls and share:
                share = range(count)
            # An empty range may have other ends, which slices would count from the back.
            shares.append(share or range(0))
            before = call.stop
        spread.append(shares)
    return spread


def count_most_in_rows(branches: Sequence[int], ranks: int) -> int:
    """Return the most branches of a step that one rank computes if each call is split by itself.

    All ranks compute a call that has fewer branches than there are ranks. `branches` is as in `spread_branches`.
    """
    return sum(count if count < ranks else -(-count // ranks) for count in branches)


def pick_weighted_chunk(items: range, weights: tuple[float, ...], index: int) -> range:
    """Return a rank's share of a run, in proportion to its weight. No share is empty if there are enough items.

    Equal weights give the chunks of `pick_even_chunk`.
    """
    if len(set(weights)) == 1:
        return pick_even_chunk(items, len(weights), index)
    shares = count_weighted_shares(len(items), weights)
    start = sum(shares[:index])
    return items[start : start + shares[index]]


@lru_cache(maxsize=4096)
def count_weighted_shares(length: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the sizes of shares of a run in proportion to weights. None is empty if there are enough items."""
    least = 1 if length >= len(weights) else 0
    shares: list[int] = []
    taken = 0
    for rank in range(len(weights)):
        stop = round(length * sum(weights[: rank + 1]) / sum(weights))
        # This rank and each later one get at least `least` items.
        last = length - least * (len(weights) - 1 - rank)
        stop = min(max(stop, taken + least), last)
        shares.append(stop - taken)
        taken = stop
    return tuple(shares)


def merge_ranges(runs: Iterable[range]) -> tuple[range, ...]:
    """Drop empty runs, and join runs that follow each other."""
    merged: list[range] = []
    for run in runs:
        if merged and run and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        elif run:
            merged.append(run)
    return tuple(merged)


def balance_patch_rows(rows: int, patches: int, text_rows: float = 0.0) -> list[int]:
    """Divide rows into patches of nearly equal work, none empty. The text costs patch 0 as much as `text_rows` rows.

    `rows` must be at least `patches`.
    """
    if patches == 1:
        return [rows]
    share = (rows + text_rows) / patches
    # At least one row is left for each of the other patches.
    first_rows = min(max(round(share - text_rows), 1), rows - (patches - 1))
    base, more = divmod(rows - first_rows, patches - 1)
    return [first_rows] + [base + 1] * more + [base] * (patches - 1 - more)

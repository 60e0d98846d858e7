"""Halo: which rows of a picture each rank has at each resolution, and which rows of others it needs. Pure.

Every rank computes the same tables from the height alone, so no size is ever sent. A picture of H rows is cut at
`Rows.cuts`; some ranks may have no row. An operation with a `Window` makes each of its output rows from a run of input
rows; whoever has the input row at its place owns the output row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ditile.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a picture at one resolution: rank r has those from `cuts[r]` up to `cuts[r + 1]`, maybe none."""

    cuts: tuple[int, ...]

    @classmethod
    def even(cls, height: int, ranks: int) -> Rows:
        """As equal as can be."""
        return cls(tuple(height * rank // ranks for rank in range(ranks + 1)))

    @property
    def height(self) -> int:
        """All rows."""
        return self.cuts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each rank has."""
        return tuple(b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False))

    def of(self, rank: int) -> range:
        """The rows of a rank."""
        return range(self.cuts[rank], self.cuts[rank + 1])


@dataclass(frozen=True, slots=True)
class Window:
    """How an operation along the rows looks back at its input.

    Attributes:
        kernel: rows that an output row is made of.
        stride: rows from one output row to the next.
        before: rows of zeros above the picture.
        after: rows of zeros below it.
        scale: how often each input row is repeated first (nearest up-sampling).
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    scale: int = 1

    def rows(self, rows: Rows) -> Rows:
        """Who has which rows of the output.

        Raises:
            ModelError: if the picture is too low to make a row of.
        """
        height = (rows.height * self.scale + self.before + self.after - self.kernel) // self.stride + 1
        if height < 1:
            raise ModelError(
                f"a picture of height {rows.height} is too low for a kernel of {self.kernel} rows; try 64 pixels"
            )
        inner = (min(-(-cut * self.scale // self.stride), height) for cut in rows.cuts[1:-1])
        return Rows((0, *inner, height))

    def reach(self, out: range) -> range:
        """The repeated input rows that some output rows are made of; they may lie outside of the picture."""
        if not out:
            return range(0)
        first = out.start * self.stride - self.before
        return range(first, first + (len(out) - 1) * self.stride + self.kernel)

    def source(self, out: range, height: int) -> range:
        """The input rows that some output rows are made of, of a picture of `height` rows."""
        reach = self.reach(out)
        return overlap(range(reach.start // self.scale, -(-reach.stop // self.scale)), range(height))


class Part(NamedTuple):
    """Rows that travel to or from a peer."""

    peer: int
    rows: range


@dataclass(frozen=True, slots=True)
class Halo:
    """One rank's part in an operation.

    Attributes:
        own: the input rows that it has.
        out: the output rows that it makes.
        inner: those of them that need no rows of others.
        above: rows that it receives from lower ranks, from top to bottom.
        below: rows that it receives from higher ranks, from top to bottom.
        sends: rows of its own that it gives away.
    """

    own: range
    out: range
    inner: range
    above: tuple[Part, ...]
    below: tuple[Part, ...]
    sends: tuple[Part, ...]


@functools.lru_cache(maxsize=1024)
def halo(rows: Rows, window: Window, rank: int) -> Halo:
    """What a rank does in an operation on a picture that is cut so."""
    made = window.rows(rows)
    ranks, own, out = range(len(rows.sizes)), rows.of(rank), made.of(rank)
    needed = [window.source(made.of(peer), rows.height) for peer in ranks]

    def parts(peers: range, wanted: dict[int, range]) -> tuple[Part, ...]:
        return tuple(Part(peer, wanted[peer]) for peer in peers if wanted[peer])

    receives = {peer: overlap(needed[rank], rows.of(peer)) for peer in ranks}
    sends = {peer: overlap(needed[peer], own) if peer != rank else range(0) for peer in ranks}
    alone = [row for row in out if set(window.source(range(row, row + 1), rows.height)) <= set(own)]
    return Halo(
        own=own, out=out, inner=range(alone[0], alone[-1] + 1) if alone else range(out.start, out.start),
        above=parts(range(rank), receives), below=parts(range(rank + 1, len(ranks)), receives),
        sends=parts(ranks, sends),
    )  # fmt: skip


def overlap(a: range, b: range) -> range:
    """The rows that two runs have in common."""
    return range(max(a.start, b.start), max(min(a.stop, b.stop), max(a.start, b.start)))

"""Which rows of a picture each rank has at each resolution, which rows of others it needs, and how they travel.

Every rank computes the same tables from the height alone, so no size is ever sent. A picture of H rows is cut at
`PictureRows.cuts`; some ranks may have no row. An operation with a `RowWindow` makes each of its output rows from a run
of input rows; whoever has the input row at its place owns the output row. A `Strip` is what this rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_exchange, start_gather
from ditile.plan.errors import ModelError


@dataclass(frozen=True, slots=True)
class PictureRows:
    """The rows of a picture at one resolution: rank r has those from `cuts[r]` up to `cuts[r + 1]`, maybe none."""

    cuts: tuple[int, ...]

    @classmethod
    def split_evenly(cls, height: int, ranks: int) -> PictureRows:
        """Shares that differ by one row at most."""
        return cls(tuple(height * rank // ranks for rank in range(ranks + 1)))

    @property
    def picture_height(self) -> int:
        """All rows."""
        return self.cuts[-1]

    @property
    def rows_per_rank(self) -> tuple[int, ...]:
        """How many rows each rank has."""
        return tuple(b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False))

    def select_rank_rows(self, rank: int) -> range:
        """The rows of a rank."""
        return range(self.cuts[rank], self.cuts[rank + 1])


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Which input rows an operation needs for an output row.

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

    def divide_output_rows(self, rows: PictureRows) -> PictureRows:
        """Who has which rows of the output.

        Raises:
            ModelError: if the picture is too low to make a row of.
        """
        height = (rows.picture_height * self.scale + self.before + self.after - self.kernel) // self.stride + 1
        if height < 1:
            raise ModelError(
                f"a picture of height {rows.picture_height} is too low for a kernel of {self.kernel} rows; try 64 "
                "pixels"
            )
        inner = (min(-(-cut * self.scale // self.stride), height) for cut in rows.cuts[1:-1])
        return PictureRows((0, *inner, height))

    def compute_input_reach(self, out: range) -> range:
        """The repeated input rows that some output rows are made of; they may lie outside of the picture."""
        if not out:
            return range(0)
        first = out.start * self.stride - self.before
        return range(first, first + (len(out) - 1) * self.stride + self.kernel)

    def find_input_rows(self, out: range, height: int) -> range:
        """The input rows that some output rows are made of, of a picture of `height` rows."""
        reach = self.compute_input_reach(out)
        return intersect_ranges(range(reach.start // self.scale, -(-reach.stop // self.scale)), range(height))


class PeerRows(NamedTuple):
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
    above: tuple[PeerRows, ...]
    below: tuple[PeerRows, ...]
    sends: tuple[PeerRows, ...]


@functools.lru_cache(maxsize=1024)
def plan_halo_exchange(rows: PictureRows, window: RowWindow, rank: int) -> Halo:
    """What a rank does in an operation on a picture that is cut so."""
    made = window.divide_output_rows(rows)
    ranks = range(len(rows.rows_per_rank))
    own = rows.select_rank_rows(rank)
    out = made.select_rank_rows(rank)
    needed = [window.find_input_rows(made.select_rank_rows(peer), rows.picture_height) for peer in ranks]

    def list_peer_rows(peers: range, wanted: dict[int, range]) -> tuple[PeerRows, ...]:
        return tuple(PeerRows(peer, wanted[peer]) for peer in peers if wanted[peer])

    receives = {peer: intersect_ranges(needed[rank], rows.select_rank_rows(peer)) for peer in ranks}
    sends = {peer: intersect_ranges(needed[peer], own) if peer != rank else range(0) for peer in ranks}
    alone = [row for row in out if set(window.find_input_rows(range(row, row + 1), rows.picture_height)) <= set(own)]
    return Halo(
        own=own,
        out=out,
        inner=range(alone[0], alone[-1] + 1) if alone else range(out.start, out.start),
        above=list_peer_rows(range(rank), receives),
        below=list_peer_rows(range(rank + 1, len(ranks)), receives),
        sends=list_peer_rows(ranks, sends),
    )


def intersect_ranges(a: range, b: range) -> range:
    """The rows that two runs have in common."""
    return range(max(a.start, b.start), max(min(a.stop, b.stop), max(a.start, b.start)))


KIND = "vae"
"""The kind under which its bytes are counted."""


class PendingRows(Protocol):
    """Rows under way."""

    def wait_for_tensors(self) -> list[Tensor]: ...


class RowLinks(Protocol):
    """How rows travel between the ranks of a picture.

    Attributes:
        index: this rank.
        num_ranks: how many there are.
    """

    @property
    def index(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def start_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Sequence[int]]], like: Tensor
    ) -> PendingRows:
        """Starts messages to and from several peers; `receives` are (peer, shape) of tensors like one."""

    def start_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> PendingRows:
        """Starts to exchange a tensor with every rank; theirs have these shapes. All arrive, in rank order."""


class GroupLinks:
    """Links over a process group.

    Args:
        axis: the ranks of a picture.
        traffic: counts what is sent, as "vae".
    """

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        self.index = axis.index
        self.num_ranks = axis.num_ranks
        self._group = axis.group
        self._traffic = traffic

    def start_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Sequence[int]]], like: Tensor
    ) -> PendingRows:
        """As `RowLinks` says."""
        return start_exchange(sends, receives, like, self._group, self._traffic, KIND)

    def start_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> PendingRows:
        """As `RowLinks` says."""
        return start_gather(x, shapes, self._group, self._traffic, KIND)


class Strip:
    """This rank's rows of a picture or a video. Tensors are `[B, C, rows, W]` or `[B, C, T, rows, W]`.

    Attributes:
        rows: how the picture is cut at the resolution of the tensor that was looked at last.
        block_size: output rows that a convolution makes at a time; None for all.
    """

    def __init__(self, links: RowLinks, block_size: int | None = None) -> None:
        self.rows = PictureRows.split_evenly(0, links.num_ranks)
        self.block_size = block_size
        self._links = links
        self._rank = links.index
        self._known: list[PictureRows] = []

    @property
    def num_ranks(self) -> int:
        """The ranks that share out the rows."""
        return self._links.num_ranks

    @property
    def own_height(self) -> int:
        """The rows that this rank has."""
        return self.rows.rows_per_rank[self._rank]

    @property
    def picture_share(self) -> float:
        """The part of the picture that this rank has."""
        return self.rows.rows_per_rank[self._rank] / self.rows.picture_height

    def select_own_rows(self, picture: Tensor, unit: int = 1) -> Tensor:
        """Cuts a picture that all ranks have; returns this rank's rows of it.

        Args:
            picture: all rows.
            unit: a power of two: rows of which strips have a whole number, or else of half as many, and so on, so that
                each has whole rows at the lowest resolution of a coder.
        """
        height = picture.shape[-2]
        num_ranks = self._links.num_ranks
        while unit > 1 and (height % unit or height < unit * num_ranks):
            unit //= 2
        rows = PictureRows.split_evenly(height // unit, num_ranks)
        self.rows = PictureRows(tuple(cut * unit for cut in rows.cuts))
        self._known = [self.rows]
        own = self.rows.select_rank_rows(self._rank)
        return picture.narrow(-2, own.start, len(own))

    def find_rows(self, height: int) -> None:
        """Finds out at which resolution a tensor of so many own rows is, and sets `rows` to it.

        Besides what operations with a window made there may be resolutions that views made: a whole number of rows of
        each known row, or one of each such number.

        Raises:
            ModelError: if the tensor has no such number of rows.
        """
        rank = self._rank
        if self.rows.rows_per_rank[rank] == height:
            return
        for rows in reversed(self._known):
            if rows.rows_per_rank[rank] == height:
                self.rows = rows
                return
        for rows in self._known:
            own = rows.rows_per_rank[rank]
            if own and not height % own:
                self._remember_rows(PictureRows(tuple(cut * (height // own) for cut in rows.cuts)))
                return
            if height and not own % height and not any(cut % (own // height) for cut in rows.cuts):
                self._remember_rows(PictureRows(tuple(cut // (own // height) for cut in rows.cuts)))
                return
        raise ModelError(
            f"a coder makes {height} rows of a strip of {self._known[0].rows_per_rank[rank]}, so that it cannot be "
            "divided by rows; use vae=whole"
        )

    def _remember_rows(self, rows: PictureRows) -> None:
        self.rows = rows
        if rows not in self._known:
            self._known.append(rows)

    def begin_operation(self, window: RowWindow) -> Halo:
        """Returns this rank's part in an operation, and cuts the picture as its output is cut."""
        part = plan_halo_exchange(self.rows, window, self._rank)
        self._remember_rows(window.divide_output_rows(self.rows))
        return part

    def start_halo_exchange(self, x: Tensor, part: Halo) -> Callable[[], list[tuple[range, Tensor]]]:
        """Starts to send and to receive halo rows; returns what waits for all rows that this rank can see."""
        start = part.own.start
        parts = (*part.above, *part.below)
        exchange = self._links.start_exchange(
            [(peer, x.narrow(-2, rows.start - start, len(rows))) for peer, rows in part.sends],
            [(peer, (*x.shape[:-2], len(rows), x.shape[-1])) for peer, rows in parts],
            x,
        )

        def wait_for_rows() -> list[tuple[range, Tensor]]:
            received = [(rows, tensor) for (_, rows), tensor in zip(parts, exchange.wait_for_tensors(), strict=True)]
            above = len(part.above)
            return [*received[:above], (part.own, x), *received[above:]]

        return wait_for_rows

    def start_strip_gather(self, x: Tensor, units: int = 1) -> PendingRows:
        """Starts to gather the strips of all ranks, rows first: `[units * rows, ...]`, `units` to a row."""
        shapes = [(units * size, *x.shape[1:]) for size in self.rows.rows_per_rank]
        return self._links.start_gather(x, shapes)

    def gather_picture(self, x: Tensor) -> Tensor:
        """The whole picture, on every rank."""
        self.find_rows(x.shape[-2])
        return torch.cat(self.start_strip_gather(x.movedim(-2, 0)).wait_for_tensors()).movedim(0, -2).contiguous()

    def gather_picture_on_first(self, x: Tensor) -> Tensor:
        """The whole picture on the first rank; elsewhere zeros around this rank's own rows."""
        self.find_rows(x.shape[-2])
        sizes = self.rows.rows_per_rank
        first = self._rank == 0
        peers = [rank for rank in range(1, len(sizes)) if sizes[rank]]
        sends = [] if first or not x.numel() else [(0, x)]
        receives = [(rank, (*x.shape[:-2], sizes[rank], x.shape[-1])) for rank in peers] if first else []
        parts = self._links.start_exchange(sends, receives, x).wait_for_tensors()
        if first:
            return torch.cat([x, *parts], dim=-2)
        own = self.rows.select_rank_rows(self._rank)
        whole = x.new_zeros(*x.shape[:-2], self.rows.picture_height, x.shape[-1])
        whole.narrow(-2, own.start, len(own)).copy_(x)
        return whole

    def gather_equal_shapes(self, x: Tensor) -> Tensor:
        """Tensors of one shape from all ranks, `[ranks, ...]`."""
        shapes = [tuple(x.shape)] * self._links.num_ranks
        return torch.stack(self._links.start_gather(x, shapes).wait_for_tensors())

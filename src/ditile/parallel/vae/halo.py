"""Rows of an image: which of them a rank has at each resolution, which it needs from other ranks, and their messages.

Every rank computes the same tables from the height, so no size is ever sent. An image of H rows is cut at
`ImageRows.cuts`; some ranks may have no row. An operation with a `RowWindow` makes each of its output rows from a run
of input rows; output row i belongs to the rank that has input row i * stride / scale. A `Strip` is one rank's part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import IncomingShapes, OutgoingTensors, Traffic, start_exchange, start_gather
from ditile.plan.errors import ModelError
from ditile.plan.layout import count_weighted_shares


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of an image at one resolution: rank r has the rows from `cuts[r]` up to `cuts[r + 1]`, maybe none."""

    cuts: tuple[int, ...]

    @classmethod
    def split_by_weights(cls, height: int, weights: tuple[float, ...]) -> ImageRows:
        """Give each rank a share in proportion to its weight; equal weights make shares that differ by at most one
        row."""
        return cls((0, *itertools.accumulate(count_weighted_shares(height, weights))))

    @property
    def image_height(self) -> int:
        """Return the number of rows in the image."""
        return self.cuts[-1]

    @property
    def rows_per_rank(self) -> tuple[int, ...]:
        """Return the number of rows of each rank."""
        return tuple(len(self.select_rank_rows(rank)) for rank in range(len(self.cuts) - 1))

    def select_rank_rows(self, rank: int) -> range:
        """Return the rows of a rank."""
        return range(self.cuts[rank], self.cuts[rank + 1])


@dataclass(frozen=True, slots=True)
class RowWindow:
    """The input rows that an operation needs for an output row.

    Attributes:
        kernel: how many rows an output row is made of.
        stride: rows from one output row to the next.
        before: rows of padding above the image.
        after: rows of padding below the image.
        scale: how many times each input row is repeated first (nearest up-sampling).
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    scale: int = 1

    def divide_output_rows(self, rows: ImageRows) -> ImageRows:
        """Return the output rows of each rank.

        Raises:
            ModelError: if the image has too few rows for one output row.
        """
        padded_height = rows.image_height * self.scale + self.before + self.after
        height = (padded_height - self.kernel) // self.stride + 1
        if height < 1:
            raise ModelError(
                f"an image of height {rows.image_height} is too low for a kernel of {self.kernel} rows; try 64 pixels"
            )
        cuts = [0]
        for cut in rows.cuts[1:-1]:
            # The first output row at the cut or below it: cut * scale / stride, rounded up.
            cuts.append(min(-(-cut * self.scale // self.stride), height))
        return ImageRows((*cuts, height))

    def compute_input_reach(self, out: range) -> range:
        """Return the input rows for some output rows, counted after `scale`; they may lie outside of the image."""
        if not out:
            return range(0)
        first = out.start * self.stride - self.before
        return range(first, first + (len(out) - 1) * self.stride + self.kernel)

    def find_input_rows(self, out: range, height: int) -> range:
        """Return the input rows for some output rows, in an image of `height` rows."""
        reach = self.compute_input_reach(out)
        first = reach.start // self.scale
        # The end is rounded up: half of a doubled row needs the whole row.
        end = -(-reach.stop // self.scale)
        return intersect_ranges(range(first, end), range(height))


class PeerRows(NamedTuple):
    """Rows that are sent to a peer or received from one."""

    peer: int
    rows: range


@dataclass(frozen=True, slots=True)
class Halo:
    """One rank's part in an operation.

    Attributes:
        own: the rank's input rows.
        out: the rank's output rows.
        inner: the output rows for which the rank needs no rows of others.
        above: rows that it receives from lower ranks, from top to bottom.
        below: rows that it receives from higher ranks, from top to bottom.
        sends: rows of its own that it sends to others.
    """

    own: range
    out: range
    inner: range
    above: tuple[PeerRows, ...]
    below: tuple[PeerRows, ...]
    sends: tuple[PeerRows, ...]


@functools.lru_cache(maxsize=1024)
def plan_halo_exchange(rows: ImageRows, window: RowWindow, rank: int) -> Halo:
    """Return a rank's part in an operation on an image with these cuts."""
    output_rows = window.divide_output_rows(rows)
    height = rows.image_height
    own = rows.select_rank_rows(rank)
    out = output_rows.select_rank_rows(rank)
    needed = window.find_input_rows(out, height)
    above: list[PeerRows] = []
    below: list[PeerRows] = []
    sends: list[PeerRows] = []
    for peer in range(len(rows.cuts) - 1):
        if peer == rank:
            continue
        received = intersect_ranges(needed, rows.select_rank_rows(peer))
        if received:
            side = above if peer < rank else below
            side.append(PeerRows(peer, received))
        sent = intersect_ranges(window.find_input_rows(output_rows.select_rank_rows(peer), height), own)
        if sent:
            sends.append(PeerRows(peer, sent))
    inner_rows = []
    for row in out:
        input_rows = window.find_input_rows(range(row, row + 1), height)
        if intersect_ranges(input_rows, own) == input_rows:
            inner_rows.append(row)
    # Rows of neighbours are needed only at the edges, so the inner rows are one run.
    inner = range(out.start, out.start)
    if inner_rows:
        inner = range(inner_rows[0], inner_rows[-1] + 1)
    return Halo(own, out, inner, tuple(above), tuple(below), tuple(sends))


def intersect_ranges(a: range, b: range) -> range:
    """Return the rows that two runs have in common."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def replace_height(x: Tensor, height: int) -> tuple[int, ...]:
    """Return a tensor's shape with another number of rows."""
    return (*x.shape[:-2], height, x.shape[-1])


KIND = "vae"
"""The kind under which the bytes of these messages are counted."""


class PendingRows(Protocol):
    """Messages of rows under way."""

    def wait_for_tensors(self) -> list[Tensor]: ...


class RowLinks(Protocol):
    """The links over which the ranks of an image exchange rows.

    Attributes:
        index: this rank.
        num_ranks: how many there are.
    """

    index: int
    num_ranks: int

    def start_exchange(
        self,
        sends: OutgoingTensors,
        receives: IncomingShapes,
        like: Tensor,
    ) -> PendingRows:
        """Start messages to and from several peers.

        `receives` has (peer, shape) of each expected tensor; `like` gives dtype and device.
        """

    def start_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> PendingRows:
        """Start to gather tensors of these shapes from all ranks, in rank order."""


class GroupLinks:
    """Links over a process group.

    Args:
        axis: the ranks of an image.
        traffic: counts the sent bytes under "vae".
    """

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        self.index = axis.index
        self.num_ranks = axis.num_ranks
        # The axis is kept because its group is replaced when the groups are made anew.
        self._axis = axis
        self._traffic = traffic

    def start_exchange(
        self,
        sends: OutgoingTensors,
        receives: IncomingShapes,
        like: Tensor,
    ) -> PendingRows:
        """Start an exchange, see `RowLinks`."""
        return start_exchange(sends, receives, like, self._axis.group, self._traffic, KIND)

    def start_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> PendingRows:
        """Start a gather, see `RowLinks`."""
        return start_gather(x, shapes, self._axis.group, self._traffic, KIND)


class Strip:
    """This rank's rows of an image or a video. Tensors are `[B, C, rows, W]` or `[B, C, T, rows, W]`.

    Attributes:
        rows: the cuts of the image at the resolution of the last tensor.
        block_size: how many output rows a convolution makes at a time; None for all.
        num_ranks: how many ranks split the rows.

    Args:
        weights: the share of each rank, in any unit.
    """

    def __init__(self, links: RowLinks, weights: tuple[float, ...], block_size: int | None = None) -> None:
        self._weights = weights
        self.rows = ImageRows.split_by_weights(0, weights)
        self.block_size = block_size
        self.num_ranks = links.num_ranks
        self._links = links
        self._rank = links.index
        self._known: list[ImageRows] = []  # the cuts at each resolution so far

    @property
    def own_height(self) -> int:
        """Return this rank's number of rows."""
        return len(self.rows.select_rank_rows(self._rank))

    def select_own_rows(self, image: Tensor, unit: int = 1) -> Tensor:
        """Cut an image that all ranks have, and return this rank's rows.

        Args:
            image: all rows.
            unit: a power of two. The height of each strip is a multiple of it, so that a strip has whole rows at the
                lowest resolution of a coder. It is halved until that is possible.
        """
        # Fewer units than ranks would leave ranks without rows.
        height = image.shape[-2]
        while unit > 1 and (height % unit or height < unit * self.num_ranks):
            unit //= 2
        rows = ImageRows.split_by_weights(height // unit, self._weights)
        self.rows = ImageRows(tuple(cut * unit for cut in rows.cuts))
        self._known = [self.rows]
        own = self.rows.select_rank_rows(self._rank)
        return image.narrow(-2, own.start, len(own))

    def find_rows(self, height: int) -> None:
        """Find the resolution of a tensor with `height` own rows, and set `rows` to it.

        Raises:
            ModelError: if no resolution has this number of own rows.
        """
        if self.own_height == height:
            return
        for rows in reversed(self._known):
            if len(rows.select_rank_rows(self._rank)) == height:
                self.rows = rows
                return
        # No operation made this resolution: a view has split each row into several, or merged several.
        for rows in self._known:
            own = len(rows.select_rank_rows(self._rank))
            if own and height % own == 0:
                factor = height // own
                self._remember_rows(ImageRows(tuple(cut * factor for cut in rows.cuts)))
                return
            if own and height and own % height == 0:
                divisor = own // height
                if all(cut % divisor == 0 for cut in rows.cuts):
                    self._remember_rows(ImageRows(tuple(cut // divisor for cut in rows.cuts)))
                    return
        own = len(self._known[0].select_rank_rows(self._rank))
        raise ModelError(
            f"a coder makes {height} rows of a strip of {own}, so that it cannot be divided by rows; use vae=whole"
        )

    def _remember_rows(self, rows: ImageRows) -> None:
        self.rows = rows
        if rows not in self._known:
            self._known.append(rows)

    def begin_operation(self, window: RowWindow) -> Halo:
        """Return this rank's part in an operation, and set `rows` to the cuts of its output."""
        part = plan_halo_exchange(self.rows, window, self._rank)
        self._remember_rows(window.divide_output_rows(self.rows))
        return part

    def start_halo_exchange(self, x: Tensor, part: Halo) -> Callable[[], list[tuple[range, Tensor]]]:
        """Start to send and receive halo rows; return a function that waits for them.

        That function returns the received rows and the rank's own, from top to bottom.
        """
        sends = []
        for peer, rows in part.sends:
            sends.append((peer, x.narrow(-2, rows.start - part.own.start, len(rows))))
        incoming = (*part.above, *part.below)
        receives = [(peer, replace_height(x, len(rows))) for peer, rows in incoming]
        exchange = self._links.start_exchange(sends, receives, x)

        def wait_for_rows() -> list[tuple[range, Tensor]]:
            ranges = [rows for _, rows in incoming]
            visible = list(zip(ranges, exchange.wait_for_tensors(), strict=True))
            visible.insert(len(part.above), (part.own, x))
            return visible

        return wait_for_rows

    def start_strip_gather(self, x: Tensor, units: int = 1) -> PendingRows:
        """Start to gather the strips of all ranks, `[units * rows, ...]`: a row has `units` entries."""
        shapes = [(units * size, *x.shape[1:]) for size in self.rows.rows_per_rank]
        return self._links.start_gather(x, shapes)

    def gather_image(self, x: Tensor) -> Tensor:
        """Gather the whole image on every rank."""
        self.find_rows(x.shape[-2])
        # Rows come first, so that strips of different heights follow each other in memory.
        strips = self.start_strip_gather(x.movedim(-2, 0)).wait_for_tensors()
        return torch.cat(strips).movedim(0, -2).contiguous()

    def gather_equal_shapes(self, x: Tensor) -> Tensor:
        """Gather tensors of one shape from all ranks, `[ranks, ...]`."""
        shapes = [tuple(x.shape)] * self.num_ranks
        return torch.stack(self._links.start_gather(x, shapes).wait_for_tensors())

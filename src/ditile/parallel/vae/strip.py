"""Strip: the rows that this rank has of the picture that is being coded, and what travels between the strips."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import PendingMessages, Traffic, start_exchange, start_gather
from ditile.parallel.vae.halo import Halo, PictureRows, RowWindow, plan_halo_exchange

KIND = "vae"
"""As what its bytes are counted."""


class Strip:
    """This rank's rows. Tensors are `[B, C, rows, W]`.

    Attributes:
        rows: how the picture is cut at the resolution that the coder has come to; the modules that change the
            resolution change it.
        block_size: output rows that a convolution makes at a time; None for all.
    """

    def __init__(self, axis: Axis, traffic: Traffic, block_size: int | None) -> None:
        self.rows = PictureRows.split_evenly(0, axis.num_ranks)
        self.block_size = block_size
        self._axis, self._traffic = axis, traffic

    @property
    def picture_share(self) -> float:
        """The part of the picture that this rank has."""
        return self.rows.rows_per_rank[self._axis.index] / self.rows.picture_height

    def select_own_rows(self, picture: Tensor) -> Tensor:
        """Cuts a picture that all ranks have; returns this rank's rows of it."""
        self.rows = PictureRows.split_evenly(picture.shape[2], self._axis.num_ranks)
        own = self.rows.select_rank_rows(self._axis.index)
        return picture[:, :, own.start : own.stop]

    def begin_operation(self, window: RowWindow) -> Halo:
        """An operation begins: this rank's part in it. What follows has the rows of its output."""
        part = plan_halo_exchange(self.rows, window, self._axis.index)
        self.rows = window.divide_output_rows(self.rows)
        return part

    def start_halo_exchange(self, x: Tensor, part: Halo) -> Callable[[], list[tuple[range, Tensor]]]:
        """Starts to send and to receive halo rows; returns what waits for all rows that this rank can see."""
        batch, channels, _, width = x.shape
        start = part.own.start
        parts = (*part.above, *part.below)
        exchange = start_exchange(
            [(peer, x[:, :, rows.start - start : rows.stop - start]) for peer, rows in part.sends],
            [(peer, (batch, channels, len(rows), width)) for peer, rows in parts],
            x, self._axis.group, self._traffic, KIND,
        )  # fmt: skip

        def wait_for_rows() -> list[tuple[range, Tensor]]:
            received = [(rows, tensor) for (_, rows), tensor in zip(parts, exchange.wait_for_tensors(), strict=True)]
            above = len(part.above)
            return [*received[:above], (part.own, x), *received[above:]]

        return wait_for_rows

    def start_strip_gather(self, x: Tensor, units: int = 1) -> PendingMessages:
        """Starts to gather the strips of all ranks, rows first: `[units * rows, ...]`, `units` to a row."""
        shapes = [(units * size, *x.shape[1:]) for size in self.rows.rows_per_rank]
        return start_gather(x, shapes, self._axis.group, self._traffic, KIND)

    def gather_picture(self, x: Tensor) -> Tensor:
        """The whole picture, on every rank."""
        return torch.cat(self.start_strip_gather(x.movedim(2, 0)).wait_for_tensors()).movedim(0, 2).contiguous()

    def gather_picture_on_first(self, x: Tensor) -> Tensor:
        """The whole picture on the first rank; elsewhere zeros around this rank's own rows."""
        sizes, first = self.rows.rows_per_rank, self._axis.index == 0
        peers = [rank for rank in range(1, len(sizes)) if sizes[rank]]
        batch, channels, _, width = x.shape
        sends = [] if first or not x.numel() else [(0, x)]
        receives = [(rank, (batch, channels, sizes[rank], width)) for rank in peers] if first else []
        parts = start_exchange(sends, receives, x, self._axis.group, self._traffic, KIND).wait_for_tensors()
        if first:
            return torch.cat([x, *parts], dim=2)
        own = self.rows.select_rank_rows(self._axis.index)
        whole = x.new_zeros(batch, channels, self.rows.picture_height, width)
        whole[:, :, own.start : own.stop] = x
        return whole

    def gather_equal_shapes(self, x: Tensor) -> Tensor:
        """Tensors of one shape from all ranks, `[ranks, ...]`."""
        shapes = [tuple(x.shape)] * self._axis.num_ranks
        return torch.stack(start_gather(x, shapes, self._axis.group, self._traffic, KIND).wait_for_tensors())

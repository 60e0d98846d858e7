"""Strip: the rows that this rank has of the picture that is being coded, and what travels between the strips."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Pending, Traffic, start_exchange, start_gather
from ditile.parallel.vae.halo import Halo, Rows, Window, halo

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
        self.rows = Rows.even(0, axis.size)
        self.block_size = block_size
        self._axis, self._traffic = axis, traffic

    @property
    def share(self) -> float:
        """The part of the picture that this rank has."""
        return self.rows.sizes[self._axis.index] / self.rows.height

    def begin(self, picture: Tensor) -> Tensor:
        """Cuts a picture that all ranks have; returns this rank's rows of it."""
        self.rows = Rows.even(picture.shape[2], self._axis.size)
        own = self.rows.of(self._axis.index)
        return picture[:, :, own.start : own.stop]

    def pass_through(self, window: Window) -> Halo:
        """An operation begins: this rank's part in it. What follows has the rows of its output."""
        part = halo(self.rows, window, self._axis.index)
        self.rows = window.rows(self.rows)
        return part

    def exchange(self, x: Tensor, part: Halo) -> Callable[[], list[tuple[range, Tensor]]]:
        """Starts to send and to receive halo rows; returns what waits for all rows that this rank can see."""
        batch, channels, _, width = x.shape
        start = part.own.start
        parts = (*part.above, *part.below)
        exchange = start_exchange(
            [(peer, x[:, :, rows.start - start : rows.stop - start]) for peer, rows in part.sends],
            [(peer, (batch, channels, len(rows), width)) for peer, rows in parts],
            x, self._axis.group, self._traffic, KIND,
        )  # fmt: skip

        def seen() -> list[tuple[range, Tensor]]:
            received = [(rows, tensor) for (_, rows), tensor in zip(parts, exchange.wait(), strict=True)]
            above = len(part.above)
            return [*received[:above], (part.own, x), *received[above:]]

        return seen

    def start_gather(self, x: Tensor, units: int = 1) -> Pending:
        """Starts to gather the strips of all ranks, rows first: `[units * rows, ...]`, `units` to a row."""
        shapes = [(units * size, *x.shape[1:]) for size in self.rows.sizes]
        return start_gather(x, shapes, self._axis.group, self._traffic, KIND)

    def gather(self, x: Tensor) -> Tensor:
        """The whole picture, on every rank."""
        return torch.cat(self.start_gather(x.movedim(2, 0)).wait()).movedim(0, 2).contiguous()

    def gather_first(self, x: Tensor) -> Tensor:
        """The whole picture on the first rank; elsewhere zeros around this rank's own rows."""
        sizes, first = self.rows.sizes, self._axis.index == 0
        peers = [rank for rank in range(1, len(sizes)) if sizes[rank]]
        batch, channels, _, width = x.shape
        sends = [] if first or not x.numel() else [(0, x)]
        receives = [(rank, (batch, channels, sizes[rank], width)) for rank in peers] if first else []
        parts = start_exchange(sends, receives, x, self._axis.group, self._traffic, KIND).wait()
        if first:
            return torch.cat([x, *parts], dim=2)
        own = self.rows.of(self._axis.index)
        whole = x.new_zeros(batch, channels, self.rows.height, width)
        whole[:, :, own.start : own.stop] = x
        return whole

    def gather_equal(self, x: Tensor) -> Tensor:
        """Tensors of one shape from all ranks, `[ranks, ...]`."""
        shapes = [tuple(x.shape)] * self._axis.size
        return torch.stack(start_gather(x, shapes, self._axis.group, self._traffic, KIND).wait())

"""Processes in a grid: one axis for the branches of guidance, one for the ranks that share one call of the model.

A rank is at (branch, place). The ranks of one branch share its call; the ranks of one place compute the same part of
each branch. docs/design.md: "One idea".
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """The ranks of one row or column of the grid.

    Attributes:
        group: their group; None where this rank is alone.
        size, index: number of ranks; this rank's place among them.
    """

    group: dist.ProcessGroup | None
    size: int
    index: int

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensor of each rank, in order. All have one shape."""
        if self.group is None:
            return [x]
        everyone = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(everyone, x.contiguous(), group=self.group)
        return everyone

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """Send part r to rank r, and return what each rank sent here. All parts have one shape."""
        if self.group is None:
            return parts
        received = torch.empty_like(torch.stack(parts))
        dist.all_to_all_single(received, torch.stack(parts), group=self.group)
        return list(received)

    def shift(self, x: Tensor) -> Tensor:
        """Send a tensor to the next rank, and return that of the rank before."""
        received = torch.empty_like(x)
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        # Both at once: two ranks that send first would wait for each other.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()
        return received

    def send(self, x: Tensor, to: int) -> dist.Work:
        """Start to send a contiguous tensor to a rank of the axis. Keep the tensor alive until the work is done."""
        work = dist.isend(x, group=self.group, group_dst=to)
        assert work is not None
        return work

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Return the next tensor of a rank of the axis."""
        received = torch.empty_like(like)
        dist.recv(received, group=self.group, group_src=source)
        return received


ALONE = Axis(None, 1, 0)


@dataclass(frozen=True)
class Mesh:
    """The two axes of this rank: the branches of guidance, and the ranks that share a call."""

    cfg: Axis = ALONE
    inner: Axis = ALONE


def make_mesh(cfg: int, inner: int) -> Mesh:
    """Make the groups of `cfg` x `inner` ranks. Every rank of the default group must call this."""
    rank = dist.get_rank()
    if dist.get_world_size() != cfg * inner:
        raise ValueError(f"cfg={cfg} x {inner} needs {cfg * inner} processes, and there are {dist.get_world_size()}")
    rows = [list(range(branch * inner, (branch + 1) * inner)) for branch in range(cfg)]
    columns = [list(range(place, cfg * inner, inner)) for place in range(inner)]
    # Every rank makes every group, in the same order.
    return Mesh(_make_axis(columns, rank), _make_axis(rows, rank))


def _make_axis(lines: list[list[int]], rank: int) -> Axis:
    axis = ALONE
    for ranks in lines:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks and group is not None:
            axis = Axis(group, len(ranks), ranks.index(rank))
    return axis


def join_processes() -> None:
    """Join the processes that torchrun started, or be alone.

    The example is for reading, so it runs on CPUs and uses gloo alone. NCCL would need a device for each rank and all
    tensors on it, and an order of messages that cannot hang.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

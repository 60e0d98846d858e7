"""Collectives of the tensor axis over NCCL or gloo; bytes are counted as the ring algorithm sends them.

A stream of tokens is split by `pick_even_chunk`; the first ranks may have one token more. Messages are padded to the
longest share, so one equal-sized collective works for any length, even with fewer tokens than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.recording.tape import exchange_tensors
from ditile.distributed.transport import Traffic, choose_transfer_device
from ditile.plan.layout import pick_even_chunk

KIND = "tensor"

# Newer releases of torch have renamed these functions, and warn about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TensorCollectives:
    """Sums and exchanges along one axis. Every rank gets the same bits.

    Args:
        axis: the tensor axis.
        traffic: where bytes are counted, as "tensor": (n-1)/n of the tensor for each of reduce-scatter and gather.
    """

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        self._axis = axis
        self._index = axis.index
        self._num_ranks = axis.num_ranks
        self._traffic = traffic
        # The device of messages is cached, because each sum needs it; groups that are made again have the same one.
        self._transfer_devices: dict[torch.device, torch.device] = {}

    def count_own_tokens(self, streams: Sequence[int]) -> int:
        """Return this rank's number of tokens in streams of these whole lengths."""
        return sum(len(pick_even_chunk(range(length), self._num_ranks, self._index)) for length in streams)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place if it is contiguous."""
        summed = x.contiguous()
        exchange_tensors(self._sum_in_place, [summed], [summed])
        return summed

    def _find_transfer_device(self, device: torch.device) -> torch.device:
        if device not in self._transfer_devices:
            assert self._axis.group is not None
            self._transfer_devices[device] = choose_transfer_device(device, self._axis.group)
        return self._transfer_devices[device]

    def _sum_in_place(self, x: Tensor, _: Tensor) -> None:
        group = self._axis.group
        staged = x.to(self._find_transfer_device(x.device))
        with self._traffic.trace.record_wait(KIND):
            dist.all_reduce(staged, group=group)
        self._count_traffic(2 * x.nbytes)
        if staged is not x:
            x.copy_(staged)
        # torch does not count writes by messages in a tensor's version.
        torch.autograd.graph.increment_version(x)

    def sum_and_scatter(self, x: Tensor, streams: Sequence[int]) -> Tensor:
        """Sum whole streams `[B, S, C]` over the ranks and keep this rank's share `[B, own, C]`.

        `streams` are the whole lengths of the streams in the sequence, in order.
        """
        # `packed` has the tokens of each rank, `[n, B, longest, C]`. Padding beyond a rank's own tokens is never read.
        if len(streams) == 1 and x.shape[1] % self._num_ranks == 0:
            # Equal shares need no padding, and one copy brings them into order.
            packed = x.unflatten(1, (self._num_ranks, -1)).movedim(1, 0).contiguous()
        else:
            packed = x.new_zeros(self._num_ranks, x.shape[0], self._count_longest_share(streams), x.shape[2])
            for index in range(self._num_ranks):
                stream_start = 0
                own_start = 0
                for length in streams:
                    chunk = pick_even_chunk(range(length), self._num_ranks, index)
                    tokens = x[:, stream_start + chunk.start : stream_start + chunk.stop]
                    packed[index, :, own_start : own_start + len(chunk)] = tokens
                    stream_start += length
                    own_start += len(chunk)
        summed = torch.empty_like(packed[0])
        exchange_tensors(partial(self._reduce_scatter, x.nbytes), [packed], [summed])
        return summed[:, : self.count_own_tokens(streams)]

    def _reduce_scatter(self, num_bytes: int, packed: Tensor, summed: Tensor) -> None:
        group = self._axis.group
        staged = packed.to(self._find_transfer_device(packed.device))
        if staged.is_cuda:
            with self._traffic.trace.record_wait(KIND):
                _reduce_scatter(summed, packed.flatten(0, 1), group=group)
        else:
            # gloo's reduce-scatter would send everything to every rank, so an all-to-all and a local sum take its
            # place.
            received = torch.empty_like(staged)
            with self._traffic.trace.record_wait(KIND):
                dist.all_to_all_single(received, staged, group=group)
            summed.copy_(received.sum(0))
        self._count_traffic(num_bytes)

    def gather_streams(self, x: Tensor, streams: Sequence[int]) -> Tensor:
        """Gather whole streams `[B, S, C]` from every rank's share `[B, own, C]`."""
        longest = self._count_longest_share(streams)
        batch, own, width = x.shape
        mine = x.contiguous()
        if own < longest:
            mine = torch.cat([x, x.new_zeros(batch, longest - own, width)], dim=1)
        received = mine.new_empty(self._num_ranks, batch, longest, width)
        # Padding is left out of the counted bytes.
        whole_bytes = batch * sum(streams) * width * x.element_size()
        exchange_tensors(partial(self._gather, whole_bytes), [mine], [received])
        # Bring the shares into the order `[B, S, C]`, which `sum_and_scatter` undoes.
        if len(streams) == 1 and streams[0] % self._num_ranks == 0:
            return received.transpose(0, 1).flatten(1, 2)
        parts = []
        starts = [0] * self._num_ranks
        for length in streams:
            for index in range(self._num_ranks):
                end = starts[index] + len(pick_even_chunk(range(length), self._num_ranks, index))
                parts.append(received[index, :, starts[index] : end])
                starts[index] = end
        return torch.cat(parts, dim=1)

    def _gather(self, num_bytes: int, mine: Tensor, received: Tensor) -> None:
        group = self._axis.group
        staged = mine.to(self._find_transfer_device(mine.device))
        landing = received
        if staged is not mine:
            landing = torch.empty_like(received, device=staged.device)
        with self._traffic.trace.record_wait(KIND):
            _all_gather(landing.flatten(0, 1), staged, group=group)
        if landing is not received:
            received.copy_(landing)
        self._count_traffic(num_bytes)

    def _count_longest_share(self, streams: Sequence[int]) -> int:
        return sum(-(-length // self._num_ranks) for length in streams)

    def _count_traffic(self, num_bytes: int) -> None:
        self._traffic.count_message(KIND, num_bytes * (self._num_ranks - 1) // self._num_ranks)

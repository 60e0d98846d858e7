"""Ranks as threads: proofs run a divided model on several ranks in one process, without a process group."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ditile.distributed.transport import IncomingShapes, OutgoingTensors

TIMEOUT = 60.0
"""Seconds that a rank waits for a message. Proofs run tiny models, so a longer wait means that ranks disagree."""

Result = TypeVar("Result")


class PendingThreadMessages(NamedTuple):
    """Messages from other threads that are yet to be received."""

    receive: Callable[[], list[Tensor]]

    def wait_for_tensors(self) -> list[Tensor]:
        """Return the messages in the order of the requests."""
        return self.receive()


class PeerFailedError(Exception):
    """Raised in a rank that waits for one that has failed."""


class ThreadRank:
    """One of several ranks that are threads of this process.

    Attributes:
        index: this rank's number.
        num_ranks: how many there are.
    """

    def __init__(self, index: int, queues: Sequence[Sequence[queue.Queue[Any]]]) -> None:
        self.index = index
        self.num_ranks = len(queues)
        self._queues = queues  # by sender and receiver

    def start_exchange(
        self,
        sends: OutgoingTensors,
        receives: IncomingShapes,
        like: Tensor,
    ) -> PendingThreadMessages:
        """Send tensors to several peers; `receives` has (peer, shape) of each expected message."""
        for peer, x in sends:
            # The sender may write into its tensor before the receiver has read it.
            self._queues[self.index][peer].put(x.clone())
        return PendingThreadMessages(lambda: [self._receive(peer, shape) for peer, shape in receives])

    def start_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> PendingThreadMessages:
        """Exchange a tensor with every rank and return all of them in rank order.

        `shapes` has the shapes of the ranks' tensors.
        """
        peers = [peer for peer in range(self.num_ranks) if peer != self.index]
        sends = [(peer, x) for peer in peers]
        pending = self.start_exchange(sends, [(peer, shapes[peer]) for peer in peers], x)

        def receive() -> list[Tensor]:
            tensors = pending.wait_for_tensors()
            tensors.insert(self.index, x)
            return tensors

        return PendingThreadMessages(receive)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, added in rank order so that every rank has the same bits."""
        everyone = self.start_gather(x, [tuple(x.shape)] * self.num_ranks).wait_for_tensors()
        return functools.reduce(torch.add, everyone)

    def announce_failure(self) -> None:
        """Wake the ranks that wait for this one."""
        for mailbox in self._queues[self.index]:
            mailbox.put(PeerFailedError())

    def _receive(self, peer: int, shape: Sequence[int]) -> Tensor:
        try:
            message = self._queues[peer][self.index].get(timeout=TIMEOUT)
        except queue.Empty:
            raise RuntimeError(f"rank {peer} sent nothing for {TIMEOUT:g} s") from None
        if isinstance(message, PeerFailedError):
            raise message
        if tuple(message.shape) != tuple(shape):
            raise RuntimeError(f"a tensor of shape {tuple(message.shape)} arrives where {tuple(shape)} is expected")
        return message  # type: ignore[no-any-return]


def run_thread_ranks(num_ranks: int, run: Callable[[ThreadRank], Result]) -> list[Result]:
    """Run a function on each of several ranks and return their results; raise the first error if a rank fails."""
    queues: list[list[queue.Queue[Any]]] = []
    for _ in range(num_ranks):
        queues.append([queue.Queue() for _ in range(num_ranks)])
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run_rank(rank: ThreadRank) -> None:
        try:
            results[rank.index] = run(rank)
        except PeerFailedError:
            rank.announce_failure()
        except Exception as error:
            errors.append(error)
            rank.announce_failure()

    threads = [threading.Thread(target=run_rank, args=(ThreadRank(index, queues),)) for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(num_ranks)]

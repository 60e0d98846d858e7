"""NCCL's order, on gloo, which has none of its own: a plan that would hang on GPUs hangs here.

NCCL does what a rank asks of a communicator in turn, and a message is sent when it is received. In a group torch makes
a communicator for collectives and batches of messages, which all its ranks must come to first, and one for each pair of
ranks that send each other single messages: what one of them receives and what it sends are one queue. If the default
group is bound to a device there is one for everything in a group (ProcessGroupNCCL.cpp, `pointToPoint`). To make one
may want the whole device, so nothing may be under way then. What tensor parallel sums in blocks is left to gloo:
nothing else goes on in its group meanwhile.

    with in_order(eager=False) as order:
        runner = parallelize(pipe, plan)
        ...
    assert order.done
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile.distributed.backend
import ditile.distributed.mesh
import ditile.distributed.transport
from ditile.distributed.recording.tape import CURRENT

NEW_GROUP = ditile.distributed.backend.make_group_on_one_loop
SINGLE, BATCHED, TAKEN = 1, 2, 10
"""Tags, by which gloo tells messages apart as NCCL does by communicators; `TAKEN` more says that one was received."""


class Work:
    """Something that a queue will do.

    Attributes:
        is_known: whether it was waited for, or known to be done.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self._over, self._error, self.is_known = threading.Event(), None, False

    def run(self) -> None:
        assert self._do is not None
        try:
            self._do()
        except RuntimeError as error:
            self._error = error
        self._do = None  # and with it the tensors
        self._over.set()

    def wait(self) -> None:
        _refuse_in_capture()
        self.is_known = True
        self._over.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        _refuse_in_capture()
        self.is_known = self.is_known or self._over.is_set()
        return self.is_known


def _refuse_in_capture() -> None:
    """What is asked of NCCL's works is an event of CUDA, which ends a capture that is open."""
    if CURRENT.recording is not None and not CURRENT.is_exchanging:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Message(NamedTuple):
    """One message of a batch, as `P2POp`."""

    op: Callable[..., Any]
    tensor: Tensor
    group: dist.ProcessGroup
    group_peer: int


class Order:
    """Stands for `torch.distributed` where messages and collectives start.

    Args:
        eager: whether a group has one queue for everything.

    Attributes:
        done: how many operations went through queues.
    """

    def __init__(self, *, eager: bool) -> None:
        self.done, self._eager = 0, eager
        self._plain: set[str] = set()
        self._queues: dict[tuple[str, int | None], queue.SimpleQueue[Work | None]] = {}
        self._works: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def new_group(self, ranks: Sequence[int], timeout: Any, backend: str | None, *, links: bool = False) -> Any:
        """A group; one that was asked to be gloo's stays so."""
        group = NEW_GROUP(ranks, timeout, backend, links=links)
        if backend == "gloo":
            self._plain.add(_name(group))
        return group

    def isend(self, tensor: Tensor, group: dist.ProcessGroup, group_dst: int) -> Any:
        return self._single(Message(dist.isend, tensor, group, group_dst))

    def irecv(self, tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> Any:
        return self._single(Message(dist.irecv, tensor, group, group_src))

    def P2POp(  # noqa: N802
        self, op: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, group_peer: int
    ) -> Message:
        return Message(dist.isend if op == self.isend else dist.irecv, tensor, group, group_peer)

    def batch_isend_irecv(self, ops: Sequence[Message]) -> list[Any]:
        assert _name(ops[0].group) not in self._plain
        return [self._put(ops[0].group, None, lambda: _exchange(ops, BATCHED))]

    def all_gather(self, parts: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self._collective(dist.all_gather, (parts, x), {}, group, async_op)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        return self._collective(dist.all_reduce, (x, op), {}, group, async_op)

    def all_to_all_single(self, to: Tensor, x: Tensor, *sizes: Any, group: Any = None, async_op: bool = False) -> Any:
        return self._collective(dist.all_to_all_single, (to, x, *sizes), {}, group, async_op)

    def broadcast(self, x: Tensor, group: Any, group_src: int, async_op: bool = False) -> Any:
        return self._collective(dist.broadcast, (x,), {"group_src": group_src}, group, async_op)

    def end(self) -> None:
        """Ends the queues."""
        for jobs in self._queues.values():
            jobs.put(None)

    def _single(self, message: Message) -> Any:
        if _name(message.group) in self._plain:
            return _start(message, message.tensor, 0)
        return self._put(message.group, message.group_peer, lambda: _exchange([message], SINGLE))

    def _collective(self, start: Any, given: tuple[Any, ...], also: dict[str, Any], group: Any, later: bool) -> Any:
        if _name(group) in self._plain:
            return start(*given, group=group, async_op=later, **also)
        work = self._put(group, None, lambda: start(*given, group=group, **also))
        return work if later else work.wait()

    def _put(self, group: dist.ProcessGroup, peer: int | None, do: Callable[[], None]) -> Work:
        key = (_name(group), None if self._eager else peer)
        self._works = [work for work in self._works if not work.is_known]
        if key not in self._queues:
            if not self._eager:
                assert not self._works, "a communicator is made beside kernels that wait for messages"
                _meet(group, peer)
            jobs = self._queues[key] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), daemon=True).start()
        self.done += 1
        work = Work(do)
        self._works.append(work)
        self._queues[key].put(work)
        return work


def _work(jobs: queue.SimpleQueue[Work | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()


def _meet(group: dist.ProcessGroup, peer: int | None) -> None:
    """A communicator is made: all its ranks must come."""
    if peer is None:
        dist.barrier(group=group)
    else:
        _exchange([Message(op, _byte(), group, peer) for op in (dist.isend, dist.irecv)], 0)


def _exchange(messages: Sequence[Message], tag: int) -> None:
    """All at once, over when every one of them was received."""
    started = [(m, _start(m, m.tensor, tag)) for m in messages]
    rest = [_start(m._replace(op=dist.irecv), _byte(), tag + TAKEN) for m in messages if m.op is dist.isend]
    for m, work in started:
        if m.op is dist.isend:
            rest.append(work)
        else:
            work.wait()
            rest.append(_start(m._replace(op=dist.isend), _byte(), tag + TAKEN))
    for work in rest:
        work.wait()


def _name(group: Any) -> str:
    """Of a group, which no later one has; a rank that is not in it has none."""
    return str(getattr(group, "group_name", ""))


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _start(message: Message, x: Tensor, tag: int) -> Any:
    op, _, group, peer = message
    return op(x, group=group, tag=tag, **{"group_dst" if op is dist.isend else "group_src": peer})


@contextmanager
def in_order(*, eager: bool) -> Iterator[Order]:
    """What runners are made and called within is done in NCCL's order."""
    order = Order(eager=eager)
    with pytest.MonkeyPatch.context() as patch:
        for module in (ditile.distributed.mesh, ditile.distributed.transport):
            patch.setattr(module, "dist", order)
        patch.setattr(ditile.distributed.backend, "make_group_on_one_loop", order.new_group)
        patch.setattr(ditile.distributed.mesh, "has_one_queue", lambda: eager)
        yield order
    order.end()

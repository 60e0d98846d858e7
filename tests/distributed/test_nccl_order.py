"""Plans under NCCL's order (see `nccl`): they end, with the pictures that gloo gives, bit for bit.

A failure, most likely a hang, means that ranks on GPUs wait for each other for ever. To try a plan, add a row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile.distributed.backend
import ditile.distributed.mesh
import ditile.distributed.transport
from ditile.cache.config import DBCacheConfig
from ditile.distributed.recording.tape import CURRENT
from ditile.distributed.transport import PeerChannel, Traffic
from ditile.plan.plan import Plan
from ditile.runner.caching import enable_cache
from ditile_lab.machine.messages import LonePeerMessage as Message
from tests.pool import CaseError, Pool
from tests.runner.cases import MAKE, divided, run, same

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


LARGE = {"height": 40, "width": 56, "max_sequence_length": 7}
LATENTS = {"callback_on_step_end_tensor_inputs": ["latents"]}
TWO = {"num_images_per_prompt": 2}
CACHED = {"num_inference_steps": 6}
PROBE = DBCacheConfig(Fn_compute_blocks=3, max_warmup_steps=1, residual_diff_threshold=0.5)  # longer than a stage
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("flux", "pipefusion=2 patches=2 warmup=0", {}),
    ("flux", "pipefusion=3 patches=3", LATENTS),
    ("flux true cfg", "pipefusion=4 patches=4 warmup=2", LATENTS),
    ("sd3.5 medium", "pipefusion=3 patches=2 warmup=2 warmup_mode=pipelined", LATENTS),
    ("pixart sigma", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", {}),
    ("flux true cfg", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", LATENTS),
    ("pixart sigma", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", LARGE),
    ("flux", "pipefusion=2 patches=3 ring=2", LARGE),
    ("sd3.5 medium", "pipefusion=2 patches=3 ulysses=2 async_ulysses=true", LARGE),
    ("flux", "pipefusion=2 patches=3 tensor=2 text=first vae=rows", {"output_type": "pt"}),
    ("sd3.5 medium", "ring=2 ulysses=2 text=split vae=rows", {"output_type": "pt"}),
    ("pixart sigma", "distrifusion=3 vae=rows", LARGE | {"output_type": "pt"}),
    ("sd3.5 medium", "cfg=2 distrifusion=2", TWO),
    ("pixart sigma", "data=3 vae=rows", TWO | {"output_type": "pt"}),  # one replica has no image
    ("pixart sigma", "data=2 cfg=2 pipefusion=2 patches=3", TWO),
    ("flux", "pipefusion=3 patches=2", CACHED),
    ("sd3.5 medium", "pipefusion=2 patches=3 ulysses=2", CACHED),
]  # fmt: skip


def in_both_orders(name: str, plan: str, call: dict[str, Any]) -> list[int]:
    """On a rank: a picture on gloo, then in order, lazy and eager; how many operations went through queues."""
    given = dict(call)
    if "callback_on_step_end_tensor_inputs" in given:
        given["callback_on_step_end"] = lambda pipe, step, t, tensors: tensors
    pipe, words = MAKE[name](), asdict(Plan.parse(plan))
    if call == CACHED:
        enable_cache(pipe, PROBE)
    with divided(pipe, **words) as runner:
        wanted = run(runner, name, **given)
    done = []
    # Lazy communicators are made in the first picture, so that a second one finds them there.
    for eager, turns in ((False, 2), (True, 1)):
        with in_order(eager=eager) as order, divided(pipe, **words) as runner:
            for turn in range(turns):
                same(run(runner, name, **given), wanted, f"{plan}, eager={eager}, turn {turn}")
        done.append(order.done)
    return done


@pytest.mark.parametrize(("name", "plan", "call"), ROWS, ids=[f"{name} {plan}" for name, plan, _ in ROWS])
def test_plans_keep_the_order(pool: Pool, name: str, plan: str, call: dict[str, Any]) -> None:
    done = pool.run(in_both_orders, Plan.parse(plan).world, name, plan, call)
    assert all(map(all, done)), "nothing was put in order"


def cross(ordered: bool) -> float:
    """Messages both ways between two ranks; the first has posted its receive before it sends."""
    with in_order(eager=False) if ordered else nullcontext():
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        channel, number = PeerChannel(group, 1 - rank, "test", Traffic()), torch.full((1,), float(rank))
        channel.post_receive(None, (1,), number)
        received = None if rank == 0 else channel.receive_message(None)
        channel.send_tensor(number)
        return float(channel.receive_message(None) if received is None else received)


def test_a_hang_is_found(pool: Pool) -> None:
    """Gloo delivers them, NCCL would not. A failure means that the tests above would find no hang."""
    assert pool.run(cross, 2, False) == [1.0, 0.0]
    with pytest.raises(CaseError, match="cross hung"):
        pool.run(cross, 2, True, timeout=3)

"""Worlds of several sizes in one run: the first n of the ranks that were started get a process group of their own.

    worlds = Worlds.join_shared_store(timeout, cores)
    with worlds.create_world_group(2, threads) as inside:      # on every rank; inside is False from rank 2 on
        ...

So `torchrun --nproc-per-node 8` measures plans of 2, 4 and 8 ranks. Ranks outside of a world sleep until it is done.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ditile.distributed import env
from ditile.distributed.launch import pin_to_own_cores
from ditile.distributed.private_network import make_groups
from ditile.distributed.torchrun import join_torchrun
from ditile.distributed.transport import gather_json

IDLE = datetime.timedelta(days=30)
"""How long a rank sleeps at most while others measure; the process that started a rank ends it if the others fail."""


@dataclass(slots=True)
class Worlds:
    """The ranks that were started; between two worlds they have no process group.

    Attributes:
        rank, size: the rank of this process, and the number of ranks.
        backend: the backend of every group.
        timeout: the time after which a rank stops waiting for the others.
        cores: the cores that this process may use; None if the system does not say.
    """

    rank: int
    size: int
    backend: str
    timeout: datetime.timedelta
    cores: Sequence[int] | None
    _store: Any
    _num_worlds: int = field(default=0)

    @classmethod
    def join_shared_store(cls, timeout: float, cores: Sequence[int] | None) -> Worlds:
        """Leaves the group that `launch` made, or torchrun's, for a store that all ranks share.

        Under `launch` it is a file in the folder of the run. Under torchrun rank 0 listens for the other hosts. torch's
        store listens on all interfaces, without authentication.
        """
        limit = datetime.timedelta(seconds=timeout)
        join_torchrun(timeout)
        rank = dist.get_rank()
        size = dist.get_world_size()
        backend = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend_config(dist.group.WORLD) else "gloo"
        directory = env.read_shared_directory()
        if directory is None:
            store = _create_tcp_store(rank, limit)
        else:
            store = dist.FileStore(str(directory / "worlds"), size)  # type: ignore[attr-defined]
            store.set_timeout(limit)
        wait_for_all_ranks()
        dist.destroy_process_group()
        return cls(rank, size, backend, limit, cores, store)

    def broadcast_text(self, value: str) -> str:
        """Rank 0's text, on every rank."""
        if self.rank == 0:
            self._store.set("first", value)
        return str(self._store.get("first").decode())

    @contextmanager
    def create_world_group(self, world: int, threads: int) -> Iterator[bool]:
        """Makes a group of the first `world` ranks, of so many threads each; yields whether this rank is in it."""
        self._num_worlds += 1
        name = f"world-{self._num_worlds}"
        if self.rank >= world:
            yield False
            self._store.wait([name], IDLE)
        else:
            # First undo the binding of an earlier world: `pin_to_own_cores` chooses among the cores it may use now.
            _bind_to_cores(self.cores)
            if not torch.cuda.is_available():
                pin_to_own_cores(self.rank, world, threads)
            store = dist.PrefixStore(f"{name}-", self._store)  # type: ignore[attr-defined]
            with make_groups():
                dist.init_process_group(
                    self.backend, store=store, rank=self.rank, world_size=world, timeout=self.timeout
                )
            yield True
            wait_for_all_ranks()
            dist.destroy_process_group()
            if self.rank == 0:
                self._store.set(name, "done")

    def leave_shared_store(self) -> None:
        """Ends the use of the store on every rank; rank 0, whose process has the store, leaves last."""
        self._store.set(f"left-{self.rank}", "yes")
        if self.rank == 0:
            self._store.wait([f"left-{rank}" for rank in range(self.size)], self.timeout)


def _create_tcp_store(rank: int, limit: datetime.timedelta) -> Any:
    """A store in the process of rank 0, on a free port."""
    host = env.read_master_address()
    server = dist.TCPStore(host, 0, None, True, limit, False) if rank == 0 else None  # type: ignore[attr-defined]
    port = gather_json(0 if server is None else server.port, dist.group.WORLD)[0]
    return dist.TCPStore(host, port, None, False, limit, False) if server is None else server  # type: ignore[attr-defined]


def wait_for_all_ranks() -> None:
    """Waits until all ranks of the group have called this, on the CPU."""
    dist.all_reduce(torch.zeros(1))


def list_allowed_cores() -> list[int] | None:
    """The cores that this process may use; None if the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


@contextmanager
def allow_all_cores(cores: Sequence[int] | None = None) -> Iterator[None]:
    """Lets this process use any of `cores`, by default all, although `launch` has bound it to its own cores."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    _bind_to_cores(range(os.cpu_count() or 1) if cores is None else cores)
    try:
        yield
    finally:
        _bind_to_cores(sorted(own))


def _bind_to_cores(cores: Sequence[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)

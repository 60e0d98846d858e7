"""Worlds of several sizes in one run: the first n ranks of those started get their own process group.

    worlds = Worlds.join_shared_store(timeout, cores)
    with worlds.create_world_group(2, threads) as inside:      # on every rank; inside is False from rank 2 on
        ...

So `torchrun --nproc-per-node 8` measures plans of 2, 4 and 8 ranks. Ranks outside of a world sleep until it is done.
"""

from __future__ import annotations

import datetime
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
from ditile_lab.sessions import bind_to_cores, wait_for_all_ranks

IDLE = datetime.timedelta(days=30)
"""The longest sleep of a rank while others measure; the process that started a rank ends it if the others fail."""


@dataclass(slots=True)
class Worlds:
    """The ranks that were started; between two worlds they have no process group.

    Attributes:
        rank, size: the rank of this process, and the number of ranks.
        backend: the backend of every group.
        timeout: the time after which a rank stops waiting for the others.
        cores: the cores that this process may use.
    """

    rank: int
    size: int
    backend: str
    timeout: datetime.timedelta
    cores: Sequence[int]
    _store: Any
    _num_worlds: int = field(default=0)

    @classmethod
    def join_shared_store(cls, timeout: float, cores: Sequence[int]) -> Worlds:
        """Replace the group made by `launch` or torchrun with a store that all ranks share.

        Under `launch` it is a file in the folder of the run. Under torchrun rank 0 listens for the other hosts. torch's
        store listens on all interfaces, without authentication.
        """
        limit = datetime.timedelta(seconds=timeout)
        join_torchrun(timeout)
        rank = dist.get_rank()
        size = dist.get_world_size()
        backend = "gloo"
        if "nccl" in dist.get_backend_config(dist.group.WORLD):
            backend = "cpu:gloo,cuda:nccl"
        directory = env.read_shared_directory()
        if directory is None:
            store = _create_tcp_store(rank, limit)
        else:
            store = dist.FileStore(str(directory / "worlds"), size)  # type: ignore[attr-defined]
            store.set_timeout(limit)
        # torch has one default group: it must end on all ranks before a world can take its place.
        wait_for_all_ranks()
        dist.destroy_process_group()
        return cls(rank, size, backend, limit, cores, store)

    def broadcast_text(self, value: str) -> str:
        """Return rank 0's text, on every rank."""
        if self.rank == 0:
            self._store.set("first", value)
        return str(self._store.get("first").decode())

    @contextmanager
    def create_world_group(self, world: int, threads: int) -> Iterator[bool]:
        """Make a group of the first `world` ranks, with `threads` threads each; yield whether this rank is in it."""
        self._num_worlds += 1
        name = f"world-{self._num_worlds}"
        if self.rank >= world:
            yield False
            self._store.wait([name], IDLE)
            return
        # First undo the binding of an earlier world: `pin_to_own_cores` chooses among the cores it may use now.
        bind_to_cores(self.cores)
        if not torch.cuda.is_available():
            pin_to_own_cores(self.rank, world, threads)
        # Each world has its own keys in the store.
        store = dist.PrefixStore(f"{name}-", self._store)  # type: ignore[attr-defined]
        with make_groups():
            dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=world, timeout=self.timeout)
        yield True
        wait_for_all_ranks()
        dist.destroy_process_group()
        if self.rank == 0:
            self._store.set(name, "done")

    def leave_shared_store(self) -> None:
        """End the use of the store on every rank; rank 0 leaves last, because its process has the store."""
        self._store.set(f"left-{self.rank}", "yes")
        if self.rank == 0:
            self._store.wait([f"left-{rank}" for rank in range(self.size)], self.timeout)


def _create_tcp_store(rank: int, limit: datetime.timedelta) -> Any:
    """Create a store in the process of rank 0, on a free port that the other ranks learn from the group."""
    host = env.read_master_address()
    if rank == 0:
        store = dist.TCPStore(host, 0, None, True, limit, False)  # type: ignore[attr-defined]
        gather_json(store.port, dist.group.WORLD)
        return store
    port = gather_json(0, dist.group.WORLD)[0]
    return dist.TCPStore(host, port, None, False, limit, False)  # type: ignore[attr-defined]

"""Worlds of several sizes on one machine: whom their ranks meet, and where they listen."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ditile.distributed.cpus import list_usable_cores
from ditile.distributed.launch import launch
from ditile_lab.bench.worlds import Worlds


def summed(texts: list[str]) -> tuple[list[Any], set[str]]:
    """Rank 0's text and the sums of the ranks of a world of one and of two, and the addresses of all that listens."""
    worlds = Worlds.join_shared_store(20.0, list_usable_cores())
    found: list[Any] = [worlds.broadcast_text(texts[worlds.rank])]
    listens = set()
    for world in (1, 2):
        with worlds.create_world_group(world, 1) as inside:
            if inside:
                total = torch.tensor([worlds.rank + 1.0])
                dist.all_reduce(total)
                found.append(total.item())
            every = psutil.Process().net_connections("inet")
            listens |= {each.laddr.ip for each in every if each.status == psutil.CONN_LISTEN}
    worlds.leave_shared_store()
    return found, listens


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_of_launch_meet_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an earlier run of several hosts has left. A failure means that anybody in the network may write into
    the store of a measurement, or that its ranks look for each other on another host."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    first, second = launch(summed, 2, (["of rank 0", "of rank 1"],), threads=1, stall_timeout=60)
    assert first[0] == ["of rank 0", 1.0, 3.0] and second[0] == ["of rank 0", 3.0]
    assert first[1] | second[1] <= {"127.0.0.1", "::1"}

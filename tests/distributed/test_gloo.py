"""Groups of gloo: on one event loop, and there when all of their ranks have connected."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.distributed import backend
from ditile.distributed.mesh import build_mesh
from ditile.plan.plan import Plan
from tests.pool import Pool

TASKS = Path("/proc/self/task")


def event_loops(plan: Plan) -> list[int]:
    """The threads of gloo that wait for the network, before there is a mesh, with one, and when it is closed."""

    def running() -> int:
        return [Path(task, "comm").read_text().strip() for task in TASKS.iterdir()].count("gloo_tcp_loop")

    counts = [running()]
    mesh = build_mesh(plan)
    dist.all_reduce(torch.zeros(1), group=mesh.control)
    counts.append(running())
    mesh.close_groups()
    return [*counts, running()]


@pytest.mark.skipif(not TASKS.exists(), reason="counts the threads of a Linux process")
def test_all_groups_share_one_event_loop(pool: Pool) -> None:
    """A failure means that a rank is interrupted a hundred times a second by each of its groups."""
    for counts in pool.run(event_loops, 8, Plan(cfg=2, pipefusion=2, ulysses=2)):
        assert counts == [1, 1, 1]


def without_devices() -> list[object]:
    """The backend of a group made where nothing is known of that of all ranks, and a sum over it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_find_world_devices", list)
        group = backend.make_group_on_one_loop([0, 1], None, "gloo")
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return [dist.get_backend(group), one.item()]


def test_a_group_whose_device_is_not_told_has_one_of_its_own(pool: Pool) -> None:
    """As under TORCH_DISTRIBUTED_DEBUG=DETAIL. A failure means a run that ends in an AttributeError."""
    assert pool.run(without_devices, 2) == [["gloo", 2.0]] * 2


def connects(late: float) -> tuple[float, float]:
    """When this rank has connected to the other, rank 1 later than rank 0, and when it has the group."""
    made, connected = dist.new_group, []

    def slow(*args: Any, **kwargs: Any) -> Any:
        group = made(*args, **kwargs)
        time.sleep(late * dist.get_rank())
        connected.append(time.monotonic())
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", slow)
        backend.make_group_on_one_loop([0, 1], None, "gloo")
    return connected[0], time.monotonic()


def test_no_rank_has_a_group_before_all_have_connected(pool: Pool) -> None:
    """A failure means that one which gives it back at once can close it on others: "Connection closed by peer"."""
    (_, first), (last, _) = pool.run(connects, 2, 0.3)
    assert first >= last, "seconds of one clock"

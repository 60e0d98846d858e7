"""Groups of gloo: on one event loop, and there when all of their ranks have connected."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.distributed import backend, heartbeat
from ditile.distributed.mesh import build_mesh
from ditile.plan.plan import Plan
from tests.pool import Pool

TASKS = Path("/proc/self/task")


def list_event_loops() -> set[str]:
    """The threads of this process by which gloo waits for the network."""
    loops = set()
    for task in TASKS.iterdir():
        # A thread that has just ended is listed for a moment longer.
        with contextlib.suppress(OSError):
            if Path(task, "comm").read_text().strip() == "gloo_tcp_loop":
                loops.add(task.name)
    return loops


def add_event_loops(plan: Plan) -> tuple[bool, set[str]]:
    """Whether this rank has an event loop before it has a mesh, and those that come with a mesh or remain of it."""
    before = list_event_loops()
    mesh = build_mesh(plan)
    dist.all_reduce(torch.zeros(1), group=mesh.control)
    within = list_event_loops()
    mesh.close_groups()
    return bool(before), (within | list_event_loops()) - before


@pytest.mark.skipif(not TASKS.exists(), reason="lists the threads of a Linux process")
def test_all_groups_share_one_event_loop(pool: Pool) -> None:
    """A failure means that a rank is interrupted a hundred times a second by each of its groups."""
    assert pool.run(add_event_loops, 8, Plan(cfg=2, pipefusion=2, ulysses=2)) == [(True, set())] * 8


def without_devices() -> list[object]:
    """The backend of a group made where nothing is known of that of all ranks, and a sum over it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_find_world_devices", list)
        group = backend.make_group_on_one_loop([0, 1], None, "gloo")
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    name = dist.get_backend(group)
    dist.destroy_process_group(group)
    return [name, one.item()]


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


def spin(name: bytes, over: threading.Event) -> None:
    """Uses a core in a thread of a name until it is over."""
    ctypes.CDLL(None).prctl(15, name)
    while not over.is_set():
        pass


def measure_spinning(name: bytes) -> float:
    """Which part of the processor that a thread of a name uses counts as computing."""
    over = threading.Event()
    threading.Thread(target=spin, args=(name, over)).start()
    time.sleep(0.1)
    used, computed = time.process_time(), heartbeat._measure_cpu_seconds()
    time.sleep(0.5)
    used, computed = time.process_time() - used, heartbeat._measure_cpu_seconds() - computed
    over.set()
    return computed / used


@pytest.mark.skipif(not TASKS.exists(), reason="reads what the threads of a Linux process used")
def test_a_thread_that_reads_messages_does_not_compute() -> None:
    """Gloo's event loop spins while there is a message that nobody receives. A failure means that ranks which wait for
    each other for ever seem to compute, and run on for ten times the stall limit."""
    assert measure_spinning(b"gloo_tcp_loop") < 0.5 < measure_spinning(b"another")

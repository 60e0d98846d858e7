"""Replicas on a Ray cluster of two nodes of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ditile.cli import main
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.link import Batch, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.ray_replicas import cluster as module
from ditile.serve.replica import ReplicaEvent
from tests.serve.test_replica import PROMPT, make_job

pytest.importorskip("ray", reason="the extra ray")
MEMORY = 80 * 2**20
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""How soon Ray learns that a node has gone; it takes 15 s by default."""


class RayRun:
    """The replicas on a cluster, and the events that came from them."""

    def __init__(self, cluster: Any, plan: Plan, state: Path, **flags: Any) -> None:
        self._events: asyncio.Queue[ReplicaEvent] = asyncio.Queue()
        options = ServeOptions(model="shapes-pixart", ray=cluster.address, threads=1, state=str(state), **flags)
        setup = WorkerSetup(options=options, plan=plan, cache=CacheOptions())
        made = module.RayCluster(setup)
        names = map(str, range(options.max_replicas))
        self.groups = [made.make_replica(name, self._events.put_nowait) for name in names]

    async def __aenter__(self) -> RayRun:
        for group in self.groups:
            group.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.gather(*(group.end() for group in self.groups))

    async def draw(self, name: str, **options: Any) -> bytes:
        self.begin(name, **options)
        events = await self.wait_for("ended")
        (drawn,) = [event for event in events if event.kind == "done"]
        return drawn.files["0.png"]

    def begin(self, name: str, group: int = 0, **options: Any) -> None:
        self.groups[group].generate(Batch(name, [make_job(name, **options)]))

    async def wait_for(self, *kinds: str) -> list[ReplicaEvent]:
        """All events up to the first of some kinds."""
        seen: list[ReplicaEvent] = []
        while not seen or seen[-1].kind not in kinds:
            seen.append(await asyncio.wait_for(self._events.get(), 150))
        return seen

    async def wait_for_loss(self, batch_id: str) -> float:
        """Waits until the batch is lost and there are ranks again; returns after how many seconds it was known."""
        since = time.monotonic()
        down = (await self.wait_for("down"))[-1]
        seconds = time.monotonic() - since
        assert down.kind == "down"
        assert (down.batch_id, down.failure.code) == (batch_id, "rank_failed")
        assert "has gone" in down.failure.message
        assert "\n" not in down.failure.message
        await self.wait_for("ready")
        return seconds


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a core each, so that a plan of two ranks needs both."""
    from ditile.distributed import env

    env.prepare_ray()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.second = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    yield cluster
    cluster.shutdown()


def find_actors(cluster: Any) -> list[psutil.Process]:
    """The processes of the ranks on the second node."""
    node = psutil.Process(cluster.second.all_processes["raylet"][0].process.pid)
    return [process for process in node.children() if process.name().startswith("ray::RankActor")]


def test_ranks_of_two_nodes_draw_stop_and_are_replaced(cluster: Any, tmp_path: Path) -> None:
    """A failure would mean another picture than that of one machine, or a server that waits for what has gone."""
    out = tmp_path / "a.png"
    words = ["--model", "shapes-pixart", "--pipefusion", "2", "--steps", "4", "--seed", "5", "--threads", "1"]
    assert main.main(["generate", PROMPT, *words, "--out", str(out)]) == 0

    async def run() -> None:
        async with RayRun(cluster, Plan(pipefusion=2), tmp_path) as driven:
            await driven.wait_for("ready")
            assert len(find_actors(cluster)) == 1
            assert await driven.draw("first") == out.read_bytes()
            driven.begin("long", steps=400)
            await driven.wait_for("step")
            driven.groups[0].stop("long")
            ended = (await driven.wait_for("ended"))[-1]
            assert ended.kind == "ended"
            assert await driven.draw("second") == out.read_bytes()
            driven.begin("kill of a rank", steps=400)
            await driven.wait_for("step")
            find_actors(cluster)[0].kill()
            assert await driven.wait_for_loss("kill of a rank") < 5
            assert await driven.draw("third") == out.read_bytes()
            other = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
            driven.begin("kill of a node", steps=400)
            await driven.wait_for("step")
            cluster.remove_node(cluster.second, allow_graceful=False)
            cluster.second = other
            assert await driven.wait_for_loss("kill of a node") < 15
            assert await driven.draw("fourth") == out.read_bytes()
            find_actors(cluster)[0].kill()
            down = (await driven.wait_for("down"))[-1]
            assert down.kind == "down"
            assert (down.batch_id, driven.groups[0].state) == (None, "down")
            await driven.wait_for("ready")
            assert await driven.draw("fifth") == out.read_bytes()

    asyncio.run(run())


def test_a_replica_that_waits_in_vain_ends_and_starts_again(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure would mean that replicas above --replicas keep their devices for ever, or are lost."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.5)

    async def run() -> None:
        async with RayRun(cluster, Plan(), tmp_path, ray_max_replicas=2) as driven:
            spare = driven.groups[1]
            for _ in range(2):
                await driven.wait_for("asleep")
                assert spare.state == "asleep"
                spare.start()

    asyncio.run(run())

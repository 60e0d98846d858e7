"""Replicas on a Ray cluster of two nodes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ditile.cli import main
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.link import WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.ray_replicas import cluster as module
from tests.serve.test_replica import PROMPT, Driven, drive_groups, list_files, make_job

pytest.importorskip("ray", reason="the extra ray")
MEMORY = 80 * 2**20
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""How soon Ray learns that a node has gone; it takes 15 s by default."""


def drive(cluster: Any, plan: Plan, state: Path, **flags: Any) -> AbstractAsyncContextManager[Driven]:
    options = ServeOptions(model="shapes-pixart", ray=cluster.address, threads=1, state=str(state), **flags)
    setup = WorkerSetup(options=options, plan=plan, cache=CacheOptions())
    return drive_groups(module.RayCluster(setup).make_replica, options.max_replicas)


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


async def test_ranks_of_two_nodes_draw_stop_and_are_replaced(cluster: Any, tmp_path: Path) -> None:
    """A failure would mean another picture than that of one machine, or a server that waits for what has gone."""
    out = tmp_path / "a.png"
    words = ["--model", "shapes-pixart", "--pipefusion", "2", "--steps", "4", "--seed", "5", "--threads", "1"]
    assert main.main(["generate", PROMPT, *words, "--out", str(out)]) == 0
    async with drive(cluster, Plan(pipefusion=2), tmp_path) as driven:

        async def check_picture(name: str) -> None:
            assert list_files(await driven.draw(name, make_job(name)))[0]["0.png"] == out.read_bytes()

        assert len(find_actors(cluster)) == 1
        await check_picture("first")
        await driven.begin("long")
        driven.group.stop("long")
        await driven.wait_for("ended")
        await check_picture("second")
        await driven.begin("kill of a rank")
        find_actors(cluster)[0].kill()
        assert "has gone" in await driven.wait_for_loss("kill of a rank", 5)
        await check_picture("third")
        other = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        await driven.begin("kill of a node")
        cluster.remove_node(cluster.second, allow_graceful=False)
        cluster.second = other
        assert "has gone" in await driven.wait_for_loss("kill of a node", 15)
        await check_picture("fourth")
        find_actors(cluster)[0].kill()
        assert (await driven.wait_for("down"))[-1].batch_id is None
        await driven.wait_for("ready")
        await check_picture("fifth")


async def test_a_replica_that_waits_in_vain_ends_and_starts_again(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure would mean that replicas above --replicas keep their devices for ever, or are lost."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.5)
    async with drive(cluster, Plan(), tmp_path, ray_max_replicas=2) as driven:
        spare = driven.groups[1]
        for _ in range(2):
            await driven.wait_for("asleep")
            assert spare.state == "asleep"
            spare.start()

"""What the environment says of this process, and what is left out of its log."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditile
from ditile.distributed import backend, cpus, env, start_watcher, torchrun
from ditile.distributed.mesh import build_mesh, find_process_rank
from ditile.plan.errors import JoinError, PlanError
from ditile.plan.plan import Plan
from tests import tiny


def test_what_is_said_while_connecting_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """torch 2.9's gloo prints on standard output. A failure means that `--json -` is not JSON there."""
    with pytest.raises(ZeroDivisionError), env.redirect_native_stdout():
        os.write(1, b"connected\n")
        raise ZeroDivisionError
    os.write(1, b"{}\n")
    assert tuple(capfd.readouterr()) == ("{}\n", "connected\n")


PLACES: list[tuple[dict[str, str], env.Torchrun | None | str]] = [
    ({}, None),
    ({"WORLD_SIZE": "4"}, None),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    ({"RANK": "1", "WORLD_SIZE": "4"}, env.Torchrun(1, 4, 1)),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, env.Torchrun(3, 4, 1)),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2', WORLD_SIZE='2' of the environment .*unset them"),
    ({"RANK": "", "WORLD_SIZE": "1"}, "RANK=''"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9{20}' of"),
]
"""Variables of the environment, and the place that they name, or what is said of them."""


@pytest.mark.parametrize(("variables", "wanted"), PLACES)
def test_places_by_the_environment(
    variables: dict[str, str], wanted: env.Torchrun | None | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means that variables which a container has set are taken for torchrun's, or end in a traceback."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(wanted, str):
        with pytest.raises(PlanError, match=wanted):
            env.read_torchrun_place()
    else:
        assert env.read_torchrun_place() == wanted


@pytest.mark.parametrize("call", [find_process_rank, build_mesh, env.check_torchrun_world])
def test_variables_left_over_are_named(call: Callable[[Plan], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a user waits for ranks that nobody starts, or reads of ranks that do not run."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match=r"needs 2 rank\(s\) and 4 .*RANK=0 and WORLD_SIZE=4 .*unset them"):
        call(Plan(pipefusion=2))


def test_a_rank_that_waits_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means ten minutes of silence where one of the ranks was never started."""
    monkeypatch.setattr(start_watcher, "NOTICE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    place, rendezvous = env.read_torchrun_place(), dist.rendezvous
    assert place is not None

    def connect_after_notice(*args: Any, **kwargs: Any) -> Iterator[Any]:
        deadline = time.monotonic() + 60  # a busy machine may not run the thread within the limit of the join
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        return rendezvous(*args, **kwargs)

    monkeypatch.setattr(dist, "rendezvous", connect_after_notice)
    with pytest.raises(JoinError, match="rank 0 of 2 cannot connect"):
        torchrun.join_process_group(place, 1.0)
    assert "rank 0 of 2 still waits for the others at 127.0.0.1:" in caplog.text and "unset RANK" in caplog.text


def test_threads_that_spin_on_a_busy_machine_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure means a step that takes a hundred times as long, without a word, or words where nothing is wrong."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: cpus.count_usable_cores() + 1)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    cpus._warn_once.cache_clear()
    pipe = tiny.flux()
    for _ in range(2):
        ditile.parallelize(pipe).restore()
    said = [record for record in caplog.records if "OMP_WAIT_POLICY=passive" in record.message]
    assert len(said) == 1
    cpus._warn_once.cache_clear()
    caplog.clear()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    ditile.parallelize(pipe).restore()
    assert not caplog.records
    cpus._warn_once.cache_clear()


def test_threads_sleep_while_they_wait_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that two threads on a busy machine crawl, or that a setting of the user's is overruled."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert env.build_rank_environment(env.RankPlace(0, 1, 0, 1, 2), "d", None, 3)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert "OMP_WAIT_POLICY" not in env.build_rank_environment(env.RankPlace(0, 1, 0, 1, 2), "d", None, 3)


def test_a_gpu_has_a_queue_for_each_stream(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that kernels may stand behind messages, or that a setting of the user's is overruled."""
    place, name = env.RankPlace(0, 1, 0, 1, 2), "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(backend, "_identify_gpu", lambda device: "a GPU")
    for queues in (None, "1"):
        monkeypatch.delenv(name, raising=False)
        if queues is not None:
            monkeypatch.setenv(name, queues)
        assert env.build_rank_environment(place, "d", None, 3)[name] == (queues or "32")
        assert backend.choose_backend(dist.HashStore(), 0, 1, torch.device("cuda")) == backend.NCCL
        assert (f"{name}=1" in caplog.text) == (queues == "1")

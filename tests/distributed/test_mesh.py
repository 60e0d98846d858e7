"""The ranks of each axis, as the worked example of docs/design.md has them."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.cache import agreement
from ditile.cli.main import main
from ditile.distributed import backend, env, transport
from ditile.distributed.backend import PEER_TIMEOUT, pick_device
from ditile.distributed.launch import _set_up_process_group as join_launched
from ditile.distributed.mesh import Communicators, build_mesh, make_subgroup
from ditile.distributed.torchrun import join_process_group
from ditile.plan.errors import PlanError
from ditile.plan.plan import AXES, IMAGE, SEQUENCE, Plan, list_subgroups
from ditile.runner import runner
from ditile_lab.study.prove import StillScheduler
from tests.pool import Pool, on_ranks


def place(plan: Plan) -> dict[str, tuple[tuple[int, ...], int]]:
    mesh = build_mesh(plan)
    axes = [*(mesh[name] for name in AXES), mesh.sequence, mesh.image]
    return {name: (axis.ranks, axis.index) for name, axis in zip([*AXES, "sequence", "image"], axes, strict=True)}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, cfg=2, pipefusion=2),
        Plan(pipefusion=2, ring=2, ulysses=2),
        Plan(cfg=2, distrifusion=2, tensor=2),
        Plan(ulysses=4),
    ],
    ids=str,
)
def test_groups(pool: Pool, plan: Plan) -> None:
    """Each rank's groups are the lines it is on. A failure means that messages go to other ranks than planned."""
    for rank, axes in enumerate(pool.run(place, plan.world, plan)):
        for name, (ranks, index) in axes.items():
            names = {"sequence": SEQUENCE, "image": IMAGE}.get(name, (name,))
            assert ranks in list_subgroups(plan, names)
            assert ranks[index] == rank


def made(plan: Plan) -> list[tuple[int, ...]]:
    """The groups that a mesh has made here, for all its ranks."""
    groups, asked = Communicators(), []
    with pytest.MonkeyPatch.context() as patch:
        new = backend.make_group_on_one_loop

        def recorded(ranks: Any, *also: Any, **named: Any) -> Any:
            asked.append(tuple(ranks))
            return new(ranks, *also, **named)

        patch.setattr(backend, "make_group_on_one_loop", recorded)
        mesh = build_mesh(plan, groups)
    mesh.shared = False
    mesh.close_groups()
    return asked


def test_groups_are_made_once_for_each_line(pool: Pool) -> None:
    """On all ranks in one order. A failure means more threads than are needed, or ranks that wait for each other."""
    plan = Plan(cfg=2, ulysses=2)
    pairs, everyone = list_subgroups(plan, ["cfg"]) + list_subgroups(plan, ["ulysses"]), (0, 1, 2, 3)
    for asked in pool.run(made, plan.world, plan):
        assert asked == [everyone, *pairs, *[everyone] * 3], "everyone, both axes, image, control, within calls"


NCCL = "cpu:gloo,cuda:nccl"
JOINS: dict[str, tuple[list[tuple[str, str, int]], str, str, str]] = {
    "no GPUs": ([("a", "", 0), ("a", "", 1)], "cpu cpu", "gloo", ""),
    "a rank sees all": ([("a", "KL", 0), ("a", "KL", 1)], "cuda:0 cuda:1", NCCL, ""),
    "a rank sees its own": ([("a", "K", 0), ("a", "L", 1)], "cuda:0 cuda:0", NCCL, ""),
    "two share one": ([("a", "K", 0), ("a", "K", 1)], "cuda:0 cuda:0", "gloo", "ranks 0 and 1 have one GPU, K of a"),
    "three share two": (
        [("a", "KL", 0), ("a", "KL", 1), ("a", "KL", 2)], "cuda:0 cuda:1 cuda:0", "gloo",
        "ranks 0 and 2 have one GPU, K of a",
    ),
    "some see one, some all": ([("a", "K", 0), ("a", "KL", 1)], "cuda:0 cuda:1", NCCL, ""),
    "unequal hosts": ([("a", "KL", 0), ("a", "KL", 1), ("b", "K", 0)], "cuda:0 cuda:1 cuda:0", NCCL, ""),
    "a host without": ([("a", "K", 0), ("b", "", 0)], "cuda:0 cpu", "gloo", "rank 1 has no GPU"),
    "first host without": ([("a", "", 0), ("b", "K", 0)], "cpu cuda:0", "gloo", "rank 0 has no GPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("starter", ["torchrun", "launch"])
def test_ranks_join_with_nccl_if_no_two_have_one_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, starter: str, name: str
) -> None:
    """`ranks` are host, visible GPUs and local rank of each. A failure means that ranks make different groups and wait
    for each other for ever, that messages of GPUs which NCCL could carry go through the CPU and nobody says so, or that
    NCCL is asked for two ranks on one GPU."""
    ranks, devices, wanted, warning = JOINS[name]
    here, store, current, joined = threading.local(), dist.HashStore(), {}, {}

    def connected(kind: str, store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        joined[rank] = kind, world_size, timeout.total_seconds()

    def rank(number: int) -> None:
        here.host, here.gpus, local_rank = ranks[number]
        here.rank = number
        current[number] = "cpu"
        if starter == "torchrun":
            join_process_group(env.Torchrun(number, len(ranks), local_rank), 90)
        else:
            join_launched(env.RankPlace(number, len(ranks), number, len(ranks), 1), str(tmp_path), None)

    # The descriptors of a process are those of all its threads.
    monkeypatch.setattr(env, "redirect_native_stdout", nullcontext)
    monkeypatch.setitem(join_launched.__globals__, "pin_to_own_cores", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(backend.socket, "gethostname", lambda: here.host)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(here.gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here.gpus))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.update({here.rank: str(device)}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=here.gpus[gpu.index]))
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, here.rank, len(ranks))]))
    monkeypatch.setattr(dist, "init_process_group", connected)
    with ThreadPoolExecutor(len(ranks)) as threads, caplog.at_level("WARNING", "ditile"):
        list(threads.map(rank, range(len(ranks)), timeout=20))
    limit = 90 if starter == "torchrun" else PEER_TIMEOUT.total_seconds()  # `launch` ends those that stall
    assert joined == dict.fromkeys(range(len(ranks)), (wanted, len(ranks), limit))
    assert " ".join(current[number] for number in range(len(ranks))) == devices
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ([warning] if warning else [])


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a rank which sees one GPU asks for another, or a traceback of torch for a typo."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for wanted in (None, "cuda", "cuda:0"):
        assert pick_device(wanted, 5) == torch.device("cuda:0")
    with pytest.raises(PlanError, match=r"device='cuda:5' is not among the 1 GPU\(s\)"):
        pick_device("cuda:5", 5)


class ReachedError(Exception):
    """What a test wanted to see has happened."""


def test_the_device_is_made_current_before_there_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a script's own group. A failure means batches of messages that hang, or a context on the first GPU."""
    happened: list[str] = []
    parts = {"transformer": torch.nn.Linear(1, 1), "scheduler": StillScheduler()}
    pipe = SimpleNamespace(device="cpu", components=parts, **parts)

    def made(*_: Any, **__: Any) -> None:
        happened.append("group")
        raise ReachedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: happened.append(str(device)))
    # What is recorded may hold a share of the device's memory.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 30))
    monkeypatch.setattr(runner, "compose_strategies", made)
    with pytest.raises(ReachedError):
        runner.parallelize(pipe, Plan(), device="cuda:1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(backend, "make_group_on_one_loop", made)
    with pytest.raises(ReachedError):
        runner.parallelize(pipe, Plan(cfg=2, ulysses=2))
    assert happened == ["cuda:1", "group", "cuda:1", "group"]


@contextmanager
def batches() -> Iterator[list[tuple[str, int]]]:
    """The messages of the batches that are started, with their peers, as if a GPU's."""
    started, start = list[tuple[str, int]](), dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:

        def recorded(ops: list[Any]) -> Any:
            started.extend(sorted((op.op.__name__, op.group_peer) for op in ops))
            return start(ops)

        patch.setattr(dist, "batch_isend_irecv", recorded)
        patch.setattr(transport, "is_on_gpu", lambda device, group: True)
        yield started


def peers(plans: list[Plan]) -> list[list[tuple[str, int]]]:
    """For each plan the messages in which its mesh connects."""
    messages, cpu = [], torch.device("cpu")
    for plan in plans:
        mesh = build_mesh(plan)
        with batches() as sent:
            mesh.connect_groups(plan, cpu)
        messages.append(sent)
        with batches() as sent, pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "is_on_gpu", lambda device, group: False)
            mesh.connect_groups(plan, cpu)
        assert not sent, "gloo has no connections to make"
        assert not mesh.traffic.bytes
        mesh.close_groups()
    return messages


def peers_of_decisions() -> list[tuple[str, int]]:
    """The messages in which the groups of caches connect."""
    plan = Plan(pipefusion=2)
    mesh = build_mesh(plan)
    with batches() as sent:
        agreement.AgreementGroups.create_groups(plan, mesh, torch.device("cpu"))
    mesh.close_groups()
    return sent


def test_pairs_that_send_each_other_messages_connect_before_a_picture(pool: Pool) -> None:
    """Under NCCL, where two ranks connect when they first do. A failure means that they do so beside kernels that wait
    for messages, that all ranks of a large run connect for nothing, or that connecting is counted as traffic."""
    three, pair = [Plan(ulysses=3), Plan(ring=3), Plan(data=3), Plan(distrifusion=3)], [("irecv", 1), ("isend", 1)]
    for rank, sent in enumerate(pool.run(peers, 3, three)):
        others = [other for other in range(3) if other != rank]
        assert sent == [[("irecv", other) for other in others] + [("isend", other) for other in others]] * len(three)
    messages = ["cfg=2", "pipefusion=2 warmup=2 warmup_mode=sequence", "tensor=2 vae=rows"]
    none = ["tensor=2", "pipefusion=2"]
    sent, _ = pool.run(peers, 2, [Plan.parse(words) for words in messages + none])
    assert sent == [pair] * len(messages) + [[]] * len(none)
    assert pool.run(peers_of_decisions, 2)[0] == pair, "a probe that is longer than a stage"


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "a red circle", "--pipefusion", "2"), ("generate", "a red circle", "--plan", "auto"),
    ],
)  # fmt: skip
def test_ranks_of_torchrun_wait_for_each_other_as_long_as_they_were_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Nobody watches them. A failure means that --stall-timeout says nothing to them: a slow one is not waited for."""
    timeouts_seen: list[datetime.timedelta] = []

    def refused(url: str, timeout: datetime.timedelta) -> None:
        timeouts_seen.append(timeout)
        raise RuntimeError("refused")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "rendezvous", refused)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([*words, "--model", "shapes-pixart", "--threads", "1", "--stall-timeout", "900"]) != 0
    assert timeouts_seen == [datetime.timedelta(seconds=900)]


@on_ranks(4)
def test_groups_wait_as_long_as_that_of_all_ranks() -> None:
    """A failure means that --stall-timeout says nothing to most groups: torch's own 30 minutes are theirs."""
    plan = Plan(cfg=2, ulysses=2)
    mesh = build_mesh(plan)
    made = [mesh["cfg"].group, mesh["ulysses"].group, mesh.image.group, mesh.control, mesh.everyone]
    made.append(make_subgroup("decisions", ("cfg",), plan, mesh, backend="gloo"))
    every: list[Any] = [dist.group.WORLD, *made]
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in every]
    mesh.close_groups()
    everyone, *others = limits
    assert everyone not in (datetime.timedelta(minutes=30), None) and set(others) == {everyone}


def test_a_host_s_numbers_go_by_nccl_where_there_is_no_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a world that a user made for NCCL alone. A failure: NCCL is given a tensor on the CPU."""
    host, gpu = torch.device("cpu"), torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for config, wanted in (("cuda:nccl", (gpu, gpu)), ("cpu:gloo,cuda:nccl", (host, gpu)), ("cpu:gloo", (host, host))):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        assert tuple(transport.choose_transfer_device(each, None) for each in (host, gpu)) == wanted  # type: ignore[arg-type]

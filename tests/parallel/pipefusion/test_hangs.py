"""No plan makes ranks wait for each other for ever under NCCL, whatever its buffers hold and a launch waits for.

`host_programs.py` has what each host does and a model of what NCCL makes of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditile.distributed.transport import PeerChannel
from ditile.parallel.pipefusion.shared_warmup import LATENTS
from ditile.plan import schedule as schedules
from ditile.plan.plan import Plan
from ditile.plan.schedule import PatchSchedule
from tests.parallel.pipefusion.host_programs import (
    KINDS,
    RECEIVE,
    SEND,
    STEPPED,
    WAIT,
    HostProgram,
    find_hang,
    write_programs,
)
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, divided, run, same
from tests.zoo import ZOO

MODES = ("serial", "pipelined", "sequence")


def list_schedules(mode: str) -> Iterator[PatchSchedule]:
    """Up to four stages and patches, two to four steps, any warmup and group, and steps that are whole again."""
    for stages, patches, steps in itertools.product(range(2, 5), range(1, 5), range(2, 5)):
        for warmup in range(min(steps, 3) + 1):
            if warmup or mode == "serial":
                rows = 2 if mode == "pipelined" else 1
                yield PatchSchedule(stages, patches, steps, warmup, mode=mode, batch=rows)
            if warmup and mode == "serial" and steps > 3:
                for again in (frozenset({3}), frozenset({2, 3})):
                    yield PatchSchedule(stages, patches, steps, warmup, again=again)


@pytest.mark.parametrize("mode", MODES)
def test_no_schedule_hangs(mode: str) -> None:
    """Nothing fits a buffer and every launch waits for all messages: then none hangs where fewer do, either."""
    for schedule, calls, eager in itertools.product(list_schedules(mode), (1, 2), (False, True)):
        hang = find_hang(write_programs(schedule, calls, eager=eager), KINDS, launches_wait=True)
        assert hang is None, f"{schedule} with {calls} calls, eager={eager}: {hang}"


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_recorded_stages_that_split_tokens(stages: int) -> None:
    """What is played waits for its last send too, and ranks of a stage exchange tokens in each computation.

    Both only add waits, so that stages of one rank, and calls that are not recorded, end where these do.
    """
    rows = range(1, 9) if stages < 8 else (1, 2, 7, 8)
    for patches, warmup, calls in itertools.product(rows, (0, 1), (1, 2)):
        schedule = PatchSchedule(stages, patches, 4, warmup)
        for eager, sequence in ((False, 2), (True, 1)):
            programs = write_programs(schedule, calls, eager=eager, recorded=True, sequence=sequence)
            assert find_hang(programs, KINDS, launches_wait=True) is None, (schedule, calls, eager, sequence)


@pytest.mark.parametrize(("stages", "calls"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (5, 2), (8, 1), (8, 2)])
def test_any_number_of_patches(stages: int, calls: int) -> None:
    for patches, warmup in itertools.product((2, 3, 4, 6, 8, 12, 16), (0, 1)):
        schedule = PatchSchedule(stages, patches, 4, warmup)
        assert find_hang(write_programs(schedule, calls), KINDS, launches_wait=True) is None, schedule


@pytest.mark.parametrize("calls", [1, 2])
def test_patches_without_latents(calls: int) -> None:
    """Those of reference pictures: somewhere among the others, or first and left out of some steps."""
    for stages, patches, warmup in itertools.product((2, 3, 4), range(2, 8), (0, 1)):
        for first, references in itertools.product((1, patches // 2), (0, 1, 2)):
            schedule = PatchSchedule(stages, patches, 5, warmup, uneven_latents=True)
            programs = write_programs(schedule, calls, streams=dict.fromkeys(range(first), 0))
            assert find_hang(programs, KINDS, launches_wait=True) is None, (schedule, first)
            if first == 1:
                schedule = replace(schedule, references=references, num_references=first)
                assert find_hang(write_programs(schedule, calls), KINDS, launches_wait=True) is None, schedule


@pytest.mark.parametrize("calls", [1, 2])
def test_latents_that_all_stages_read(calls: int) -> None:
    """As where a ControlNet is shown them: the last stage sends each stepped patch to every other one."""
    for stages, patches, warmup, eager in itertools.product((2, 3, 4), (1, 2, 3, 4, 6, 8), (0, 1, 2), (False, True)):
        schedule = PatchSchedule(stages, patches, 5, warmup, shares_latents=True)
        assert find_hang(write_programs(schedule, calls, eager=eager), KINDS, launches_wait=True) is None, schedule


@pytest.mark.parametrize("calls", [1, 2])
def test_two_schedulers_in_a_step(calls: int) -> None:
    """A video and its sound: some patches send two messages, or a sound comes with patches that have no picture."""
    for stages, patches, warmup, eager in itertools.product((2, 3, 4), (2, 3, 4, 6, 8), (0, 1, 2), (False, True)):
        schedule = PatchSchedule(stages, patches, 5, warmup, uneven_latents=True)
        for streams in ({0: 2}, dict.fromkeys(range(patches), 2), {patches - 1: 2}):
            programs = write_programs(schedule, calls, eager=eager, streams=streams)
            assert find_hang(programs, KINDS, launches_wait=True) is None, (schedule, streams)


def test_the_model_finds_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where patches are taken late, from M > 2 N - 1 on; but not if latents fit the buffer, or launches wait for none.

    A failure means that the tests above would find none either.
    """
    monkeypatch.setattr(schedules, "_count_calls_ahead", lambda stages, patches, calls, *_: patches * calls)
    for stages, patches in itertools.product((2, 3, 4), (3, 4, 5, 6, 7, 8)):
        programs = write_programs(PatchSchedule(stages, patches, 3, 1), 1)
        assert (find_hang(programs, KINDS, launches_wait=True) is not None) == (patches > 2 * stages - 1)
        assert find_hang(programs, KINDS - {STEPPED}, launches_wait=True) is None
        assert find_hang(programs, KINDS, launches_wait=False) is None


@pytest.mark.parametrize(("stages", "patches"), [(2, 2), (2, 4), (3, 3), (4, 8), (8, 8)])
def test_a_receive_that_is_posted_late_hangs(monkeypatch: pytest.MonkeyPatch, stages: int, patches: int) -> None:
    """A stage that launches between its send and its next receive waits for one that does so too."""
    monkeypatch.setattr(HostProgram, "_post_before_send", lambda program: None)
    programs = write_programs(PatchSchedule(stages, patches, 4, 1), 2)
    assert find_hang(programs, KINDS, launches_wait=True) is not None
    assert find_hang(programs, KINDS - {STEPPED}, launches_wait=True) is None
    assert find_hang(programs, KINDS, launches_wait=False) is None


ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("flux", "pipefusion=2 patches=5", {"height": 40, "width": 56}),
    ("flux true cfg", "pipefusion=2 patches=3 warmup=2", {"height": 40, "width": 56}),
    ("flux true cfg", "pipefusion=3 patches=4", {"height": 40, "width": 56}),
    ("sd3.5 medium", "pipefusion=3 patches=3 warmup=0", {"height": 40, "width": 56}),
    ("sd3.5 medium", "pipefusion=2 patches=3 warmup=2 warmup_mode=pipelined", {"height": 40, "width": 56}),
    ("flux true cfg", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", {"height": 40, "width": 56}),
    ("flux-controlnet", "pipefusion=3 patches=3", {}),
    ("ltx-2", "pipefusion=2 patches=3 warmup=4", {}),
]
OTHERWISE: dict[str, tuple[dict[str, bool], dict[int, int]]] = {
    "flux-controlnet": ({"shares_latents": True}, {}),
    "ltx-2": ({"uneven_latents": True}, {0: 2}),
}
"""What a rehearsal finds: fields of the schedule, and patches that two schedulers step."""
Messages = list[tuple[str, str, int, int]]


def record_messages(name: str, plan: str, call: dict[str, Any], steps: int) -> Messages:
    """On a rank: what is sent, received and waited for, with its kind, sender and receiver, as the host does it."""
    pipe, seen = MAKE[name]() if name in MAKE else ZOO[name].make(), list[tuple[str, PeerChannel]]()
    with pytest.MonkeyPatch.context() as patch, divided(pipe, **asdict(Plan.parse(plan))) as runner:
        start, receive = PeerChannel._start_transfer, PeerChannel.receive_message
        patch.setattr(PeerChannel, "occupies_device", lambda self, device: True)

        def start_transfer(self: PeerChannel, message: Any, *, sends: bool) -> Any:
            if message.dtype != torch.uint8:  # by which channels are opened
                seen.append((SEND if sends else RECEIVE, self))
            return start(self, message, sends=sends)

        def receive_message(self: PeerChannel, key: Any) -> Any:
            seen.append((WAIT, self))
            return receive(self, key)

        patch.setattr(PeerChannel, "_start_transfer", start_transfer)
        patch.setattr(PeerChannel, "receive_message", receive_message)
        arguments = call_of(name, **call) if name in MAKE else ZOO[name].call() | call
        runner(**arguments | {"num_inference_steps": steps})
        own = runner.mesh.stage_index
    sent = {id(each) for what, each in seen if what == SEND}
    ways = {True: lambda peer: (own, peer), False: lambda peer: (peer, own)}
    return [(what, each._kind, *ways[id(each) in sent](each._peer)) for what, each in seen]


@pytest.mark.parametrize(("name", "plan", "call"), ROWS, ids=[f"{name} {plan}" for name, plan, _ in ROWS])
def test_programs_are_those_of_ranks(pool: Pool, name: str, plan: str, call: dict[str, Any]) -> None:
    """A failure means that what is proven above is not what ranks do."""
    parsed = Plan.parse(plan)
    schedule = PatchSchedule.from_plan(parsed, 4, batch=2 if parsed.warmup_mode == "pipelined" else 1)
    fields, streams = OTHERWISE.get(name, ({}, {}))
    wanted = write_programs(replace(schedule, **fields), 2 if name == "flux true cfg" else 1, streams=streams)
    for stage, seen in enumerate(pool.run(record_messages, parsed.world, name, plan, call, 4)):
        messages = [(action.what, action.message) for action in wanted[stage] if action.message]
        named = [(what, *m[:3]) for what, m in messages if (what, m.sender) != (WAIT, stage)]  # sends end by themselves
        assert seen == [(what, LATENTS if kind == STEPPED else kind, *way) for what, kind, *way in named]


WAITS = ("barrier", "send", "recv", "all_gather_object", "broadcast_object_list", "batch_isend_irecv")
"""Calls of torch.distributed that block, agree on shapes, or pickle."""


def forbidden(name: str) -> Any:
    return mock.Mock(side_effect=AssertionError(f"{name} was called in the middle of a picture"))


def without_waiting(name: str, plan: dict[str, Any], waits: tuple[str, ...]) -> None:
    pipe = MAKE[name]()
    with divided(pipe, patches=3, **plan) as runner:
        wanted = run(runner, name)
        no_waits = mock.patch.multiple(dist, **{wait: forbidden(wait) for wait in waits})
        with no_waits, mock.patch.multiple(torch.cuda, synchronize=forbidden("synchronize")):
            same(run(runner, name), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_nothing_blocks_but_the_wait_for_a_message(pool: Pool, name: str) -> None:
    """A failure means that ranks shake hands, pickle, or wait for the whole device. In a hybrid, ranks that gather
    start all sends and receives at once, and then wait."""
    pool.run(without_waiting, 2, name, {"pipefusion": 2}, WAITS)
    pool.run(without_waiting, 4, name, {"pipefusion": 2, "ring": 2}, WAITS[:-1])

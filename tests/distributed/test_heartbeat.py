"""What a watcher concludes from what ranks say of themselves: without a process, on a clock that the test sets."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from ditile.distributed import failure_detection, heartbeat
from ditile.distributed.failure_detection import LaunchLimits, RankState, find_first_failure
from ditile.distributed.heartbeat import COMPUTING, HEARTBEAT, PROGRESS, READING, RankSigns, describe_error

LIMITS = LaunchLimits(stall=60)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (heartbeat, failure_detection):
        monkeypatch.setattr(module, "time", clock)
    return clock


def note(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


ERROR = ["ValueError", "ValueError: by rank 1", "", ""]


def two_ranks() -> list[RankState]:
    ranks = [RankState(0), RankState(1)]
    for rank in ranks:
        rank.signs.read_signs(PROGRESS)
    return ranks


def test_notes_come_in_pieces_and_with_heartbeats_between() -> None:
    """A pipe gives what it has. A failure means that a watcher reads nonsense, and ends a run that is well."""
    signs = RankSigns()
    data = PROGRESS + note(enter=1) + HEARTBEAT + PROGRESS * 3 + note(leave=1, error=ERROR) + READING
    data = data.replace(b'"leave"', b'"le' + HEARTBEAT + COMPUTING + b'ave"')
    assert sum(signs.read_signs(data[k : k + 1]) for k in range(len(data))) == 3, "the first says that it has started"
    assert signs.started and signs.call is None
    assert {call: failure[1:] for call, failure in signs.raised.items()} == {1: tuple(ERROR)}


def test_a_call_that_one_rank_has_left_by_an_error(clock: Clock) -> None:
    """A failure means that the others wait until the stall limit for a rank whose script has caught the error."""
    first, second = ranks = two_ranks()
    for rank in ranks:
        rank.signs.read_signs(note(enter=7))
    second.signs.read_signs(note(leave=7, error=ERROR))
    for _ in range(20):  # what still computes is let be
        clock.now += 1
        first.signs.read_signs(COMPUTING)
        second.signs.read_signs(HEARTBEAT)
        assert find_first_failure(ranks, LIMITS, clock.now) is None
    for _ in range(3):
        clock.now += 1.1
        first.signs.read_signs(HEARTBEAT)
        second.signs.read_signs(HEARTBEAT)
    found = find_first_failure(ranks, LIMITS, clock.now)
    assert found is not None and found[1] == 1
    assert "other ranks wait for it there: ValueError: by rank 1" in found[0].message


def test_a_rank_whose_next_call_raises_too_is_not_forgiven_the_first(clock: Clock) -> None:
    """A script that catches errors and tries again. A failure means that only the stall limit ends the run."""
    first, second = ranks = two_ranks()
    first.signs.read_signs(note(enter=7))
    for call in (7, 8, 9):
        second.signs.read_signs(
            note(enter=call) + note(leave=call, error=[*ERROR[:1], f"error of call {call}", "", ""])
        )
    second.signs.read_signs(note(enter=10))
    clock.now += 4
    found = find_first_failure(ranks, LIMITS, clock.now)
    assert found is not None and found[1] == 1 and found[0].message.endswith("error of call 7")


@pytest.mark.parametrize("end", [note(leave=7), note(leave=7, error=ERROR), note(leave=7) + note(enter=8)])
def test_ranks_that_have_all_left_may_go_on(clock: Clock, end: bytes) -> None:
    """All raise alike. A failure means that a script which catches errors on all ranks is ended."""
    first, second = ranks = two_ranks()
    for rank in ranks:
        rank.signs.read_signs(note(enter=7))
    second.signs.read_signs(note(leave=7, error=ERROR))
    first.signs.read_signs(end)
    for _ in range(30):
        clock.now += 1
        for rank in ranks:
            rank.signs.read_signs(HEARTBEAT)
    assert find_first_failure(ranks, LIMITS, clock.now) is None


@pytest.mark.parametrize(("sign", "seconds"), [(HEARTBEAT, 60), (COMPUTING, 600), (READING, None), (PROGRESS, None)])
def test_what_is_a_stall(clock: Clock, sign: bytes, seconds: int | None) -> None:
    """A failure means that a compilation or a slow disk ends a run, or that one that hangs is let be."""
    ranks = two_ranks()
    for second in range(700):
        clock.now += 1
        ranks[0].signs.read_signs(HEARTBEAT)
        ranks[1].signs.read_signs(sign)
        found = find_first_failure(ranks, LIMITS, clock.now)
        if found is not None:
            assert seconds is not None and abs(second - seconds) <= 2 and "no rank made progress" in found[0].message
            return
    assert seconds is None


BROKEN, ENDED, CAUSE = (
    ("RuntimeError", "RuntimeError: Connection reset by peer"),
    (failure_detection.TERMINATED, failure_detection.TERMINATED),
    ("ValueError", "ValueError: the cause"),
)


@pytest.mark.parametrize(("first", "second"), [(BROKEN, ENDED), (ENDED, CAUSE), (BROKEN, CAUSE)])
def test_who_is_blamed(clock: Clock, first: tuple[str, str], second: tuple[str, str]) -> None:
    """torchrun ends the others when a rank fails. A failure means that the line names a rank which only noticed."""
    ranks = two_ranks()
    for rank, words in zip(ranks, (first, second), strict=True):
        rank.outcome = heartbeat.RankFailure(clock.now, *words)
        clock.now += 0.1
    clock.now += 1
    found = find_first_failure(ranks, LIMITS, clock.now)
    assert found is not None and found[1] == 1


def test_memory_that_is_used_up_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means "killed by SIGKILL", or a line of an allocator, and a user who looks for an enemy."""
    assert describe_error(MemoryError()).message == "out of memory: MemoryError"
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        assert describe_error(error).message.startswith("out of memory: RuntimeError")
    kills = failure_detection.count_memory_kills()
    assert failure_detection.explain_kill(-signal.SIGKILL, kills) == ""
    monkeypatch.setattr(failure_detection, "count_memory_kills", lambda: kills + 1)
    assert "out of memory" in failure_detection.explain_kill(-signal.SIGKILL, kills)
    assert failure_detection.explain_kill(-signal.SIGTERM, kills) == ""
    # As under `ulimit -v`.
    unmapped = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert describe_error(unmapped).message.startswith("out of memory: ImportError: libtorch_cpu.so")
    silent = SystemError("initialization of _C raised unreported exception")
    assert describe_error(silent).message.startswith("SystemError")
    monkeypatch.setattr(heartbeat.resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    assert describe_error(silent).message.startswith("out of memory: SystemError")

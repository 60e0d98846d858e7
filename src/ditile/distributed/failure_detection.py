"""Decides when a run has failed, and which rank is to blame, for `launch` and for `torchrun_watcher`."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed.heartbeat import RankFailure, RankSigns
from ditile.plan import errors
from ditile.plan.errors import DitileError, RankError

TERMINATED = "killed by SIGTERM"
SILENT = "no sign of life"
STALLED = "no progress"
BUSY_LIMITS = 10
"""How many stall limits may pass while ranks compute but report no progress."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|socket closed|broken pipe|remote process|remoteerror",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLimits:
    """The time limits of a run, in seconds."""

    stall: float = 600.0
    """how long all ranks may be idle (no progress, disk read or computation) before the run fails; never less than
    `start` while a rank is starting. Ranks that compute may go ten times as long without a report or a disk read"""
    silence: float = 10.0
    """longest silence of a rank that has started; a silent rank is stopped, or one of its threads holds the GIL"""
    stopped: float = 10.0
    """longest silence of a process that the OS reports as stopped"""
    start: float = 120.0
    """longest silence of a rank that is still starting: importing torch from a cold disk holds the GIL"""
    grace: float = 0.3
    """wait after the first failure, in case the report of an earlier one is still to arrive"""
    term: float = 1.0
    """from SIGTERM to SIGKILL"""
    leave: float = 10.0
    """wait for ranks to exit by themselves once all have returned"""
    abandoned: float = 3.0
    """how long a rank may be idle in a shared call that another rank has left with an error"""


class RankResult(NamedTuple):
    """What a rank returned, which may be None."""

    value: Any


def is_consequence(failure: RankFailure) -> bool:
    """Return whether a rank failed only because another one did: the connection between them broke."""
    return bool(_CONSEQUENCE.search(f"{failure.message}\n{failure.traceback}"))


def make_error(failure: RankFailure, rank: int) -> DitileError:
    """Make the error to raise for a rank's failure: one of `PLAIN_ERRORS` as it was, otherwise a `RankError`."""
    error = RankError(rank, failure.cause, failure.message, failure.traceback)
    if failure.plain:
        plain: DitileError = getattr(errors, failure.plain)(failure.message)
        plain.__cause__ = error
        return plain
    if failure.traceback and sys.version_info >= (3, 11):
        error.add_note(f"\n{failure.traceback.rstrip()}")
    return error


class RankState:
    """The known state of one rank.

    Attributes:
        number: the rank.
        signs: its signs of life.
        outcome: what it returned, or how it failed; None while it runs.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.signs = RankSigns()
        self.outcome: RankResult | RankFailure | None = None

    def detect_silence(self, limits: LaunchLimits, read_at: float) -> None:
        """Set `outcome` to a failure if the rank has been silent for too long.

        Args:
            read_at: when this process last began to read signs. It is not the present time, because this process may
                have been stopped since.
        """
        silence = read_at - self.signs.last_sign_of_life
        if self.outcome is not None:
            return
        longest = limits.silence if self.signs.started else limits.start
        # Check this last: is_stopped() reads a file in /proc for each rank.
        if silence > longest or (silence > limits.stopped and self.is_stopped()):
            message = f"no sign of life for {silence:.0f} s: stopped, or its interpreter is blocked"
            self.outcome = RankFailure(time.monotonic(), SILENT, message)

    def is_stopped(self) -> bool:
        """Return whether the OS says that the process is stopped. False where the process may be on another host."""
        return False


def find_first_failure(
    ranks: Sequence[RankState],
    limits: LaunchLimits,
    read_at: float,
) -> tuple[RankFailure, int] | None:
    """Find the failure that ends a run, and its rank; None if it may go on. For `read_at` see `detect_silence`."""
    failures = [(rank.outcome, rank.number) for rank in ranks if isinstance(rank.outcome, RankFailure)]
    if failures:
        # Failures are compared by their times, which are the first field.
        first_failure, _ = min(failures)
        # The report of an earlier failure may still be under way.
        if time.monotonic() < first_failure.at + limits.grace:
            return None
        return min(failures, key=_order_of_blame)
    abandoned = _find_abandoned_call(ranks, limits, read_at)
    running = [rank for rank in ranks if rank.outcome is None]
    if abandoned is not None or not running:
        return abandoned
    stall = limits.stall
    if not all(rank.signs.started for rank in running):
        stall = max(stall, limits.start)
    idle = read_at - max(rank.signs.last_activity for rank in ranks)
    without_progress = read_at - max(rank.signs.last_progress for rank in ranks)
    if idle <= stall and without_progress <= BUSY_LIMITS * stall:
        return None
    # All wait for one rank, most likely for the one whose progress is oldest.
    blamed = min(running, key=lambda rank: rank.signs.last_progress)
    message = f"no rank made progress for {without_progress:.0f} s; this one has been without for longest"
    return RankFailure(read_at, STALLED, message), blamed.number


def _order_of_blame(entry: tuple[RankFailure, int]) -> tuple[int, float, int]:
    """Return a sort key that puts the rank to blame first. Last come broken connections, which follow from another
    failure; before them come ranks that torchrun ended, perhaps because another rank failed."""
    failure, number = entry
    if is_consequence(failure):
        return 2, failure.at, number
    return int(failure.cause == TERMINATED), failure.at, number


def _find_abandoned_call(
    ranks: Sequence[RankState],
    limits: LaunchLimits,
    read_at: float,
) -> tuple[RankFailure, int] | None:
    """Find the first rank with an error in a call, if another rank is still in that call and does nothing."""
    # Forget errors of calls that every rank has left: a server makes calls without end.
    oldest = min(rank.signs.last_call for rank in ranks)
    failures = []
    for rank in ranks:
        rank.signs.raised = {call: failure for call, failure in rank.signs.raised.items() if call >= oldest}
        for call, failure in rank.signs.raised.items():
            for peer in ranks:
                # A rank that worked until after the error is idle only since then.
                idle_since = max(failure.at, peer.signs.last_activity)
                if peer.signs.call == call and read_at - idle_since > limits.abandoned:
                    failures.append((failure, rank.number))
                    break
    if not failures:
        return None
    failure, number = min(failures, key=_order_of_blame)
    message = f"left a call with an error, and other ranks wait for it there: {failure.message}"
    return failure._replace(message=message, plain=""), number


def describe_exit(code: int) -> str:
    """Describe the end of a process by its return code. The code is negative for a signal."""
    if code >= 0:
        return f"exited with code {code} before it returned"
    # Python has no names for real-time signals.
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def explain_kill(code: int, memory_kills: int) -> str:
    """Explain a rank's end, if the kernel killed it because no memory was left.

    Args:
        code: its return code.
        memory_kills: the value of `count_memory_kills` when the rank started.
    """
    if code != -signal.SIGKILL or count_memory_kills() <= memory_kills:
        return ""
    return ": out of memory (the system's memory or this run's limit was used up, and the kernel killed it)"


def count_memory_kills() -> int:
    """Count the processes that the kernel's OOM killer ended, in this control group or, if unknown, on the machine."""
    # The files in which the kernel counts the kills in this process's control groups.
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            # Version 2 of control groups has one hierarchy, without a name; version 1 has one for each controller.
            if controllers in ("", "memory"):
                root = Path("/sys/fs/cgroup", controllers)
                # In a container the root can be the group itself, and `group` is then its path on the host.
                folder = root / group.lstrip("/")
                paths += [folder / "memory.events", folder / "memory.oom_control", root / "memory.oom_control"]
    counts = [0]
    for path in [path for path in paths if path.exists()] or [Path("/proc/vmstat")]:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    counts.append(int(count))
    return max(counts)

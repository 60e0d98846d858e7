"""The parent's side of `launch`: read what every rank reports, find out who failed first, leave nothing behind.

A rank is one process, in a session of its own, with three anonymous pipes:

    control   to the rank: its job, then one byte that lets it leave; the rank ends when this pipe does (a dead parent)
    report    from the rank: one frame, what it returned or how it failed
    pulse     from the rank: what `pulse` describes

The parent never waits for one pipe alone, so that a rank which stops in the middle of a frame blocks nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed.pulse import RankFailure, RankSigns
from ditile.plan import errors
from ditile.plan.errors import DitileError, RankError

STACK_SIGNAL = signal.SIGUSR1
"""What makes a rank write the Python stacks of its threads into its stack file."""

LEAVE = b"!"
HEADER = 8
"""Bytes of a frame's length, little-endian, before its pickle."""
TERMINATED = "killed by SIGTERM"
SILENT, STALLED = "no sign of life", "no progress"
BUSY_LIMITS = 10
"""How many times the stall limit a run may last in which ranks compute and none reports progress."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|socket closed|broken pipe|remote process|remoteerror",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLimits:
    """How long each thing may take, in seconds."""

    stall: float = 600.0
    """no rank reports progress, reads from a disk or computes; at least `start` while one is starting. Where ranks
    compute, ten times as long without a report"""
    silence: float = 10.0
    """a rank that has started gives no heartbeat: it is stopped, or holds the interpreter's lock"""
    stopped: float = 10.0
    """the same, where the system says that it is stopped"""
    start: float = 120.0
    """the same before it has started, unless it is stopped: loading torch from a cold disk holds that lock"""
    grace: float = 0.3
    """after the first failure, for an earlier cause to arrive"""
    term: float = 1.0
    """from SIGTERM to SIGKILL"""
    leave: float = 10.0
    """for ranks that all returned to exit by themselves"""
    abandoned: float = 3.0
    """a rank neither computes nor reads in a call that another one has left by an error"""


class RankResult(NamedTuple):
    """A rank's result."""

    value: Any


def is_consequence(failure: RankFailure) -> bool:
    """Whether a rank failed because its connection to another one broke: then that other one failed first."""
    return bool(_CONSEQUENCE.search(f"{failure.message}\n{failure.traceback}"))


def make_error(failure: RankFailure, rank: int) -> DitileError:
    """What is raised for a rank's failure."""
    error = RankError(rank, failure.cause, failure.message, failure.traceback)
    if failure.plain:
        plain: DitileError = getattr(errors, failure.plain)(failure.message)
        plain.__cause__ = error
        return plain
    if failure.traceback and sys.version_info >= (3, 11):
        error.add_note(f"\n{failure.traceback.rstrip()}")
    return error


class RankState:
    """What is known of one rank.

    Attributes:
        number: its place in the world.
        signs: its signs of life.
        outcome: what it returned, or how it failed; None before.
    """

    def __init__(self, number: int) -> None:
        self.number, self.signs = number, RankSigns()
        self.outcome: RankResult | RankFailure | None = None

    def detect_silence(self, limits: LaunchLimits, looked: float) -> None:
        """Sets `outcome` to a failure if the rank has been silent for too long.

        Args:
            limits: how long is too long.
            looked: when this process last looked for signs, before it read them: it may have been stopped since.
        """
        silence = looked - self.signs.last_sign_of_life
        if self.outcome is not None or silence <= min(limits.silence, limits.stopped):
            return
        longest = limits.silence if self.signs.started else limits.start
        if silence > longest or (silence > limits.stopped and self.is_stopped()):
            message = f"no sign of life for {silence:.0f} s: stopped, or its interpreter is blocked"
            self.outcome = RankFailure(time.monotonic(), SILENT, message)

    def is_stopped(self) -> bool:
        """Whether the system says that the process is stopped."""
        return False


class RankProcess(RankState):
    """One rank as its parent sees it.

    Args:
        number: its place in the world.
        command: the command line; the numbers of its three descriptors follow as words.
        environ: its whole environment, given the number of its pulse descriptor.
        job: the frame that the parent sends to it.
        stacks: the file into which it writes its stacks.
        descriptors: more descriptors that it inherits, with their numbers.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Callable[[int], dict[str, str]],
        job: bytes,
        stacks: Path,
        descriptors: Sequence[int] = (),
    ) -> None:
        super().__init__(number)
        self.stacks = stacks
        self._memory_kills = count_memory_kills()
        self._unsent_bytes, self._received_bytes = memoryview(job), bytearray()
        (theirs_in, self._control), (self._report, theirs_out) = os.pipe(), os.pipe()
        self._pulse, theirs_pulse = os.pipe()
        theirs = (theirs_in, theirs_out, theirs_pulse)
        try:
            self.process = subprocess.Popen(
                [*command, *map(str, theirs)],
                env=environ(theirs_pulse),
                pass_fds=(*theirs, *descriptors),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            self.close_pipes()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def register_pipes(self, selector: selectors.BaseSelector, progress: Callable[[int, int], None] | None) -> None:
        """Adds its three pipes; the data of each is a function that handles it, and returns False at its end."""
        for fd in (self._control, self._report, self._pulse):
            os.set_blocking(fd, False)
        selector.register(self._control, selectors.EVENT_WRITE, self._send_frame_chunk)
        selector.register(self._report, selectors.EVENT_READ, self._receive_frame_chunk)
        selector.register(self._pulse, selectors.EVENT_READ, lambda: self._read_pulse(progress))

    def is_stopped(self) -> bool:
        """Whether the system says that the process is stopped."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def detect_failure(self, limits: LaunchLimits, looked: float) -> None:
        """Sets `outcome` to a failure if the process is gone, or has been silent for too long."""
        code, now = self.process.poll(), time.monotonic()
        if code is not None and self.outcome is None:
            # Its last report may still be in the pipe.
            with contextlib.suppress(BlockingIOError):
                while self._receive_frame_chunk():
                    pass
        if code is not None and self.outcome is None:
            cause = describe_exit(code)
            message = cause + explain_kill(code, self._memory_kills)
            self.outcome = RankFailure(now, cause, message, self.read_stack_file())
        self.detect_silence(limits, looked)

    def read_stack_file(self) -> str:
        """What the rank wrote into its stack file so far."""
        return self.stacks.read_text(errors="replace") if self.stacks.exists() else ""

    def signal_process_group(self, number: signal.Signals) -> None:
        """Sends a signal to the rank and to whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self.process.pid, number)

    def allow_exit(self) -> None:
        """Lets a rank that returned leave."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, LEAVE)

    def wait_for_exit(self, deadline: float) -> None:
        """Returns when the process has ended, or at `deadline`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def close_pipes(self) -> None:
        """Closes the parent's ends of the pipes."""
        for fd in (self._control, self._report, self._pulse):
            os.close(fd)

    def _send_frame_chunk(self) -> bool:
        try:
            self._unsent_bytes = self._unsent_bytes[os.write(self._control, self._unsent_bytes[: 1 << 16]) :]
        except BrokenPipeError:  # it ended; `detect_failure` finds out how
            return False
        return bool(self._unsent_bytes)

    def _receive_frame_chunk(self) -> bool:
        data = os.read(self._report, 1 << 16)
        self._received_bytes += data
        self.signs.last_progress = self.signs.last_activity = time.monotonic()
        if self.outcome is None and len(self._received_bytes) >= HEADER:
            end = HEADER + int.from_bytes(self._received_bytes[:HEADER], "little")
            if len(self._received_bytes) >= end:
                self.outcome = pickle.loads(memoryview(self._received_bytes)[HEADER:end])
                self._received_bytes = bytearray()
        return bool(data)

    def _read_pulse(self, progress: Callable[[int, int], None] | None) -> bool:
        data = os.read(self._pulse, 1 << 16)
        reports = self.signs.read_signs(data)
        if progress and reports:
            progress(self.number, reports)
        return bool(data)


def watch_ranks(
    ranks: Sequence[RankProcess],
    limits: LaunchLimits,
    progress: Callable[[int, int], None] | None,
    checks: Sequence[Callable[[], None]],
) -> list[Any]:
    """Waits for all ranks; returns their results in order. `checks` may raise to end the run.

    Raises:
        RankError: for the first rank that fails, is silent or stalls.
        PlanError, ModelError, LoadError, StateError: if that is what it raised.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            rank.register_pipes(selector, progress)
        while not all(isinstance(rank.outcome, RankResult) for rank in ranks):
            for check in checks:
                check()
            looked = time.monotonic()
            for key, _ in selector.select(timeout=0.1):
                if not key.data():
                    selector.unregister(key.fd)
            # After the pipes were emptied: this process may have been stopped too, and then all ranks seem silent.
            for rank in ranks:
                rank.detect_failure(limits, looked)
            _raise_first_failure(ranks, limits, looked)
    for rank in ranks:
        rank.allow_exit()
    deadline = time.monotonic() + limits.leave
    for rank in ranks:
        rank.wait_for_exit(deadline)
    return [rank.outcome.value for rank in ranks if isinstance(rank.outcome, RankResult)]


def terminate_ranks(ranks: Iterable[RankProcess], limits: LaunchLimits) -> None:
    """Ends every rank, however it is blocked, and the processes that it started; returns when none is left."""
    try:
        deadline = time.monotonic() + limits.term
        for rank in ranks:
            rank.signal_process_group(signal.SIGTERM)
        for rank in ranks:
            rank.wait_for_exit(deadline)
    # Also when a second Ctrl-C comes while it waits.
    finally:
        for rank in ranks:
            rank.signal_process_group(signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()
            rank.close_pipes()


def _raise_first_failure(ranks: Sequence[RankProcess], limits: LaunchLimits, looked: float) -> None:
    found = find_first_failure(ranks, limits, looked)
    if found is None:
        return
    failure, number = found
    if failure.cause in (SILENT, STALLED):
        failure = failure._replace(traceback=_collect_stacks(ranks))
    raise make_error(failure, number)


def find_first_failure(
    ranks: Sequence[RankState], limits: LaunchLimits, looked: float
) -> tuple[RankFailure, int] | None:
    """The failure that ends a run, and its rank; None while the run may go on. `looked`: as in `detect_silence`."""
    failed = [(rank.outcome, rank.number) for rank in ranks if isinstance(rank.outcome, RankFailure)]
    if failed:
        if time.monotonic() < min(failed)[0].at + limits.grace:
            return None
        return min(failed, key=_order_of_blame)
    return _find_abandoned_call(ranks, limits, looked) or _find_stall(ranks, limits, looked)


def _order_of_blame(found: tuple[RankFailure, int]) -> tuple[int, float, int]:
    """Causes first; then ranks that torchrun may have ended because of another; then those whose connection broke."""
    failure, number = found
    return 2 * is_consequence(failure) or int(failure.cause == TERMINATED), failure.at, number


def _find_abandoned_call(
    ranks: Sequence[RankState], limits: LaunchLimits, now: float
) -> tuple[RankFailure, int] | None:
    """The first rank that left a call by an error, if another one is still in that call and does nothing."""
    # Errors of calls that every rank has left do not concern anybody, and there may be any number of them.
    oldest = min(rank.signs.last_call for rank in ranks)
    found = []
    for rank in ranks:
        raised = rank.signs.raised = {call: rank.signs.raised[call] for call in rank.signs.raised if call >= oldest}
        for call, failure in raised.items():
            waiting = [other.signs.last_activity for other in ranks if other.signs.call == call]
            if any(now - max(failure.at, since) > limits.abandoned for since in waiting):
                found.append((failure, rank.number))
    if not found:
        return None
    failure, number = min(found, key=_order_of_blame)
    message = f"left a call with an error, and other ranks wait for it there: {failure.message}"
    return failure._replace(message=message, plain=""), number


def _find_stall(ranks: Sequence[RankState], limits: LaunchLimits, now: float) -> tuple[RankFailure, int] | None:
    waiting = [rank for rank in ranks if rank.outcome is None]
    starting = not all(rank.signs.started for rank in waiting)
    stall = max(limits.stall, limits.start) if starting else limits.stall
    idle = now - max(rank.signs.last_activity for rank in ranks)
    without = now - max(rank.signs.last_progress for rank in ranks)
    if not waiting or (idle <= stall and without <= BUSY_LIMITS * stall):
        return None
    first = min(waiting, key=lambda rank: rank.signs.last_progress)
    message = f"no rank made progress for {without:.0f} s; this one has been without for longest"
    return RankFailure(now, STALLED, message), first.number


def _collect_stacks(ranks: Sequence[RankProcess]) -> str:
    """The Python stacks of every rank, asked for now."""
    for rank in ranks:
        # Before the rank has made its file it has no handler, and the signal would end it.
        if rank.process.poll() is None and rank.stacks.exists():
            rank.process.send_signal(STACK_SIGNAL)
    time.sleep(0.5)
    return "\n".join(f"rank {rank.number}:\n{rank.read_stack_file() or '  (left no stack)'}" for rank in ranks)


def describe_exit(code: int) -> str:
    """How a process ended, by its return code, which is negative for a signal."""
    if code >= 0:
        return f"exited with code {code} before it returned"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def explain_kill(code: int, memory_kills: int) -> str:
    """What else is known of a rank that ended, to be put behind how it ended.

    Args:
        code: its return code.
        memory_kills: the value of `count_memory_kills` before.
    """
    if code != -signal.SIGKILL or count_memory_kills() <= memory_kills:
        return ""
    return ": out of memory (the system's memory or this run's limit was used up, and the kernel killed it)"


def count_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory, in this control group or, if unknown, anywhere."""
    counts = [_read_kill_count(path) for path in _list_memory_files()] or [_read_kill_count(Path("/proc/vmstat"))]
    return max(counts)


def _list_memory_files() -> list[Path]:
    """The files of this process's control groups that count kills; version 2's, then version 1's."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    root, found = Path("/sys/fs/cgroup"), []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            folder = root / controllers / group.lstrip("/")
            found += [
                folder / "memory.events",
                folder / "memory.oom_control",
                root / controllers / "memory.oom_control",
            ]
    return [path for path in found if path.exists()]


def _read_kill_count(path: Path) -> int:
    """The number behind `oom_kill` in a file of the kernel."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(words[1]) for words in pairs if words[0] == "oom_kill"), 0)

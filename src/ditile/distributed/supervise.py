"""The parent's side of `launch`: read what every rank reports, find out who failed first, leave nothing behind.

A rank is one process, in a session of its own, with three anonymous pipes:

    control   to the rank: its job, then one byte that lets it leave; the rank ends when this pipe does (a dead parent)
    report    from the rank: one frame, what it returned or how it failed
    pulse     from the rank: a NUL every second means that it lives, `READING` that it has read from a disk too, any
              other byte that it makes progress

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

from ditile import errors
from ditile.errors import DitileError, RankError

STACK_SIGNAL = signal.SIGUSR1
"""What makes a rank write the Python stacks of its threads into its stack file."""

HEARTBEAT = b"\0"
READING = b"\1"
"""A heartbeat of a rank that has read from a disk: weights are in mapped files until they are first used."""
PROGRESS = b"."
LEAVE = b"!"
HEADER = 8
"""Bytes of a frame's length, little-endian, before its pickle."""

PLAIN_ERRORS = ("PlanError", "ModelError", "LoadError", "StateError")
"""What a rank may raise that needs no traceback: the parent raises the very type with the same message."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|socket closed|broken pipe|remote process|remoteerror",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLimits:
    """How long each thing may take, in seconds."""

    stall: float = 600.0
    """no rank reports progress or reads from a disk; at least `start` while one is starting"""
    silence: float = 10.0
    """a rank that has started gives no heartbeat: it is stopped, or holds the interpreter's lock"""
    start: float = 120.0
    """the same before it has started: loading torch from a cold disk holds that lock"""
    grace: float = 0.3
    """after the first failure, for an earlier cause to arrive"""
    term: float = 1.0
    """from SIGTERM to SIGKILL"""
    leave: float = 10.0
    """for ranks that all returned to exit by themselves"""


class RankResult(NamedTuple):
    """A rank's result."""

    value: Any


class RankFailure(NamedTuple):
    """How a rank failed.

    Attributes:
        at: when, on the monotonic clock that the processes of one machine share.
        cause: the exception type, or how the rank ended.
        message: one line for a person.
        traceback: the rank's own traceback or stack.
        plain: the name in `PLAIN_ERRORS` of what it raised, or "".
    """

    at: float
    cause: str
    message: str
    traceback: str = ""
    plain: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed because its connection to another one broke: then that other one failed first."""
        return bool(_CONSEQUENCE.search(f"{self.message}\n{self.traceback}"))

    def make_error(self, rank: int) -> DitileError:
        """What the parent raises."""
        error = RankError(rank, self.cause, self.message, self.traceback)
        if self.plain:
            plain: DitileError = getattr(errors, self.plain)(self.message)
            plain.__cause__ = error
            return plain
        if self.traceback and sys.version_info >= (3, 11):
            error.add_note(f"\n{self.traceback.rstrip()}")
        return error


class RankProcess:
    """One rank as its parent sees it.

    Args:
        number: its place in the world.
        command: the command line; the numbers of its three descriptors follow as words.
        environ: its whole environment, given the number of its pulse descriptor.
        job: the frame that the parent sends to it.
        stacks: the file into which it writes its stacks.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Callable[[int], dict[str, str]],
        job: bytes,
        stacks: Path,
    ) -> None:
        self.number, self.stacks = number, stacks
        self.outcome: RankResult | RankFailure | None = None
        self.started = False
        self.last_sign_of_life = self.last_progress = time.monotonic()
        self._unsent_bytes, self._received_bytes = memoryview(job), bytearray()
        (theirs_in, self._control), (self._report, theirs_out) = os.pipe(), os.pipe()
        self._pulse, theirs_pulse = os.pipe()
        theirs = (theirs_in, theirs_out, theirs_pulse)
        try:
            self.process = subprocess.Popen(
                [*command, *map(str, theirs)],
                env=environ(theirs_pulse),
                pass_fds=theirs,
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

    def detect_failure(self, limits: LaunchLimits) -> None:
        """Sets `outcome` to a failure if the process is gone, or has been silent for too long."""
        code, now = self.process.poll(), time.monotonic()
        if code is not None and self.outcome is None:
            # Its last report may still be in the pipe.
            with contextlib.suppress(BlockingIOError):
                while self._receive_frame_chunk():
                    pass
        if self.outcome is not None:
            return
        if code is not None:
            cause = _describe_exit(code)
            self.outcome = RankFailure(now, cause, cause, self.read_stack_file())
        elif now - self.last_sign_of_life > (limits.silence if self.started else limits.start):
            silence = now - self.last_sign_of_life
            message = f"no sign of life for {silence:.0f} s: stopped, or its interpreter is blocked"
            self.outcome = RankFailure(now, "no sign of life", message)

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
        self.last_progress = time.monotonic()
        if self.outcome is None and len(self._received_bytes) >= HEADER:
            end = HEADER + int.from_bytes(self._received_bytes[:HEADER], "little")
            if len(self._received_bytes) >= end:
                self.outcome = pickle.loads(memoryview(self._received_bytes)[HEADER:end])
                self._received_bytes = bytearray()
        return bool(data)

    def _read_pulse(self, progress: Callable[[int, int], None] | None) -> bool:
        data = os.read(self._pulse, 1 << 16)
        self.last_sign_of_life = time.monotonic()
        if data.strip(HEARTBEAT):
            self.last_progress = self.last_sign_of_life
        if reports := len(data) - data.count(HEARTBEAT) - data.count(READING):
            # The first report says that it has started.
            reports -= not self.started
            self.started = True
            if progress and reports:
                progress(self.number, reports)
        return bool(data)


def watch_ranks(
    ranks: Sequence[RankProcess],
    limits: LaunchLimits,
    progress: Callable[[int, int], None] | None,
    check: Callable[[], None],
) -> list[Any]:
    """Waits for all ranks; returns their results in order. `check` may raise to end the run.

    Raises:
        RankError: for the first rank that fails, is silent or stalls.
        PlanError, ModelError, LoadError, StateError: if that is what it raised.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            rank.register_pipes(selector, progress)
        while not all(isinstance(rank.outcome, RankResult) for rank in ranks):
            check()
            for key, _ in selector.select(timeout=0.1):
                if not key.data():
                    selector.unregister(key.fd)
            # After the pipes were emptied: this process may have been stopped too, and then all ranks seem silent.
            for rank in ranks:
                rank.detect_failure(limits)
            _raise_first_failure(ranks, limits)
            _raise_on_stall(ranks, limits)
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


def _raise_first_failure(ranks: Sequence[RankProcess], limits: LaunchLimits) -> None:
    failed = [(rank.outcome, rank.number) for rank in ranks if isinstance(rank.outcome, RankFailure)]
    if not failed or time.monotonic() < min(failed)[0].at + limits.grace:
        return
    failure, number = min([pair for pair in failed if not pair[0].is_consequence] or failed)
    if failure.cause == "no sign of life":
        failure = failure._replace(traceback=_collect_stacks(ranks))
    raise failure.make_error(number)


def _raise_on_stall(ranks: Sequence[RankProcess], limits: LaunchLimits) -> None:
    idle = time.monotonic() - max(rank.last_progress for rank in ranks)
    waiting = [rank for rank in ranks if rank.outcome is None]
    starting = not all(rank.started for rank in waiting)
    if not waiting or idle <= (max(limits.stall, limits.start) if starting else limits.stall):
        return
    first = min(waiting, key=lambda rank: rank.last_progress)
    message = f"no rank made progress for {idle:.0f} s; this one has been without for longest"
    raise RankFailure(time.monotonic(), "no progress", message, _collect_stacks(ranks)).make_error(first.number)


def _collect_stacks(ranks: Sequence[RankProcess]) -> str:
    """The Python stacks of every rank, asked for now."""
    for rank in ranks:
        # Before the rank has made its file it has no handler, and the signal would end it.
        if rank.process.poll() is None and rank.stacks.exists():
            rank.process.send_signal(STACK_SIGNAL)
    time.sleep(0.5)
    return "\n".join(f"rank {rank.number}:\n{rank.read_stack_file() or '  (left no stack)'}" for rank in ranks)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code} before it returned"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"

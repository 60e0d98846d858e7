"""The parent's side of `launch`: read what every rank reports, find out who failed first, leave nothing running.

A rank is one process, in a session of its own, with three anonymous pipes:

    control     to the rank: its job, then one byte that lets it leave; the rank ends when this pipe does
    report      from the rank: one frame, what it returned or how it failed
    heartbeats  from the rank: what `heartbeat` describes

The parent never waits for a single pipe, so a rank that stops in the middle of a frame blocks nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ditile.distributed.failure_detection import (
    SILENT,
    STALLED,
    LaunchLimits,
    RankResult,
    RankState,
    count_memory_kills,
    describe_exit,
    explain_kill,
    find_first_failure,
    make_error,
)
from ditile.distributed.heartbeat import RankFailure, read_stat

STACK_SIGNAL = signal.SIGUSR1
"""The signal for a rank to write the Python stacks of its threads into its stack file."""
LEAVE = b"!"
HEADER = 8
"""Bytes of a frame's length, little-endian, before its pickle."""
CHUNK = 1 << 16
"""Bytes that are read from or written to a pipe at a time, as many as a pipe of Linux holds."""
STACK_SECONDS = 0.5
"""The time that ranks have for writing their stacks."""


class RankProcess(RankState):
    """One rank as its parent sees it.

    Args:
        number: its place in the world.
        command: its command line, to which the numbers of its three pipes are added.
        environ: makes its whole environment from the number of its heartbeat pipe.
        job: the frame that the parent sends to it.
        stacks: the file into which it writes its stacks.
        descriptors: more descriptors that it inherits, under the same numbers.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Callable[[int], dict[str, str]],
        job: bytes,
        stacks: Path,
        descriptors: Sequence[int],
    ) -> None:
        super().__init__(number)
        self.stacks = stacks
        self._memory_kills = count_memory_kills()
        self._unsent_bytes = memoryview(job)
        self._received_bytes = bytearray()
        rank_control, self._control = os.pipe()
        self._report, rank_report = os.pipe()
        self._heartbeats, rank_heartbeats = os.pipe()
        rank_ends = (rank_control, rank_report, rank_heartbeats)
        try:
            self.process = subprocess.Popen(
                [*command, *map(str, rank_ends)],
                env=environ(rank_heartbeats),
                pass_fds=(*rank_ends, *descriptors),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            self.close_pipes()
            raise
        finally:
            # A pipe ends only when all processes have closed it, so the parent must not keep the rank's ends open.
            for fd in rank_ends:
                os.close(fd)

    def register_pipes(self, selector: selectors.BaseSelector, progress: Callable[[int, int], None] | None) -> None:
        """Register the rank's three pipes. The data of each is its handler, which returns False at the pipe's end."""
        for fd in (self._control, self._report, self._heartbeats):
            os.set_blocking(fd, False)
        selector.register(self._control, selectors.EVENT_WRITE, self._send_frame_chunk)
        selector.register(self._report, selectors.EVENT_READ, self._receive_frame_chunk)
        selector.register(self._heartbeats, selectors.EVENT_READ, lambda: self._read_heartbeats(progress))

    def is_stopped(self) -> bool:
        """Return whether the system says that the process is stopped."""
        return read_stat(Path("/proc", str(self.process.pid)))[:1] == ["T"]

    def detect_failure(self, limits: LaunchLimits, read_at: float) -> None:
        """Set `outcome` to a failure if the process is gone, or has been silent for too long."""
        code = self.process.poll()
        if code is not None and self.outcome is None:
            # Its last report may still be in the pipe.
            with contextlib.suppress(BlockingIOError):
                while self._receive_frame_chunk():
                    pass
        if code is not None and self.outcome is None:
            cause = describe_exit(code)
            message = cause + explain_kill(code, self._memory_kills)
            self.outcome = RankFailure(time.monotonic(), cause, message, self.read_stack_file())
        self.detect_silence(limits, read_at)

    def read_stack_file(self) -> str:
        """Return the present content of the rank's stack file."""
        # A rank makes the file once it has started.
        if not self.stacks.exists():
            return ""
        return self.stacks.read_text(errors="replace")

    def signal_process_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to the processes that it started."""
        # macOS raises EPERM for a group of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def allow_exit(self) -> None:
        """Let a rank that returned leave."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, LEAVE)

    def wait_for_exit(self, deadline: float) -> None:
        """Wait until the process has ended, or until `deadline`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def close_pipes(self) -> None:
        """Close the parent's ends of the pipes."""
        for fd in (self._control, self._report, self._heartbeats):
            os.close(fd)

    def _send_frame_chunk(self) -> bool:
        try:
            written = os.write(self._control, self._unsent_bytes[:CHUNK])
        except BrokenPipeError:  # the rank has ended; `detect_failure` finds out how
            return False
        self._unsent_bytes = self._unsent_bytes[written:]
        return bool(self._unsent_bytes)

    def _receive_frame_chunk(self) -> bool:
        data = os.read(self._report, CHUNK)
        self._received_bytes += data
        # A large result takes long to send, and this is progress.
        self.signs.last_progress = time.monotonic()
        self.signs.last_activity = self.signs.last_progress
        if self.outcome is None and len(self._received_bytes) >= HEADER:
            end = HEADER + int.from_bytes(self._received_bytes[:HEADER], "little")
            if len(self._received_bytes) >= end:
                self.outcome = pickle.loads(memoryview(self._received_bytes)[HEADER:end])
                self._received_bytes = bytearray()
        return bool(data)

    def _read_heartbeats(self, progress: Callable[[int, int], None] | None) -> bool:
        data = os.read(self._heartbeats, CHUNK)
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
    """Wait for all ranks, and return their results in order. `checks` may raise to end the run.

    Raises:
        RankError: for the first rank that fails, is silent or stalls.
        PlanError, ModelError, LoadError, StateError: if the first rank that failed raised one.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            rank.register_pipes(selector, progress)
        while not all(isinstance(rank.outcome, RankResult) for rank in ranks):
            for check in checks:
                check()
            read_at = time.monotonic()
            for key, _ in selector.select(timeout=0.1):
                if not key.data():
                    selector.unregister(key.fd)
            # Failures are looked for after the pipes were emptied: until then all ranks seem silent if this process was
            # stopped too.
            for rank in ranks:
                rank.detect_failure(limits, read_at)
            first_failure = find_first_failure(ranks, limits, read_at)
            if first_failure is not None:
                failure, number = first_failure
                if failure.cause in (SILENT, STALLED):
                    for rank in ranks:
                        # Before the rank has made its file it has no handler, and the signal would end it.
                        if rank.process.poll() is None and rank.stacks.exists():
                            rank.process.send_signal(STACK_SIGNAL)
                    time.sleep(STACK_SECONDS)
                    stacks = [f"rank {rank.number}:\n{rank.read_stack_file() or '  (left no stack)'}" for rank in ranks]
                    failure = failure._replace(traceback="\n".join(stacks))
                raise make_error(failure, number)
    for rank in ranks:
        rank.allow_exit()
    deadline = time.monotonic() + limits.leave
    for rank in ranks:
        rank.wait_for_exit(deadline)
    return [rank.outcome.value for rank in ranks if isinstance(rank.outcome, RankResult)]


def terminate_ranks(ranks: Iterable[RankProcess], limits: LaunchLimits) -> None:
    """End every rank, even a blocked one, and the processes that it started. Returns when none is left."""
    try:
        deadline = time.monotonic() + limits.term
        for rank in ranks:
            rank.signal_process_group(signal.SIGTERM)
        for rank in ranks:
            rank.wait_for_exit(deadline)
    # This runs also if a second Ctrl-C interrupts the wait.
    finally:
        for rank in ranks:
            rank.signal_process_group(signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()
            rank.close_pipes()

"""The watcher: a small process for each of torchrun's ranks, which reads its rank's heartbeats and can end it.

The watcher of rank 0 is the hub. It receives the reports of all ranks, decides by `failure_detection` whether the run
has failed, and tells the other watchers. A watcher does not import torch; `start_watcher` is the rank's side.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ditile.distributed import env
from ditile.distributed.failure_detection import (
    SILENT,
    TERMINATED,
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

HUB_ALIVE = b"\3"
"""The byte that the hub sends to the watchers every `TICK` seconds."""
TICK = 0.2
CHUNK = 1 << 16
GRACE = 0.5
"""Seconds that the hub waits after the first failure. It is short: torchrun ends a host's other ranks at once."""
# A connection that does not know the secret may take neither time nor memory from the hub.
HELLO_SIZE = 4096
HELLO_SECONDS = 10.0
MAX_STRANGERS = 64
SCRIPT_STALL = 60.0
"""A user's script is ended after this many seconds without progress in a runner's call."""
STAT_WORDS = 50
"""Words of /proc/PID/stat after the command's name; the last one is the exit status."""


def run_watcher() -> None:
    """Run a watcher. Its standard input comes from its rank, and its standard output goes to its rank."""
    # A signal that ends the ranks must not end the process that reports why.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process = WatchedProcess(int(sys.argv[-1]))
    line = read_line(0)
    if not line:
        # A signal may have killed the rank before it had joined the other ranks.
        end = process.explain_end()
        if end is not None and end[0].startswith("killed") and end[0] != TERMINATED:
            place = env.read_torchrun_place()
            rank = 0 if place is None else place.rank
            print_line(f"rank {rank}: {end[1]}")
        return
    task = json.loads(line)
    verdict = Hub(task, process).watch_until_end() if task["rank"] == 0 else watch_for_hub(task, process)
    if verdict is not None:
        # One line for each host is enough.
        if task["local_rank"] == 0 and verdict["line"]:
            print_line(verdict["line"])
        process.end_process(verdict["code"])


def read_line(fd: int) -> bytes:
    """Read one line and nothing after it. Empty if the other side has closed the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return b""
        line += byte
    return line


def print_line(message: str) -> None:
    """Print why a run failed. A line break comes first, because a progress bar may be on the current line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nditile: {message}\n".encode())


def _start_thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


class WatchedProcess:
    """The rank's process, which is the parent of its watcher."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._folder = Path("/proc", str(pid))
        self._memory_kills = count_memory_kills()
        # The pipe by itself is not enough: it stays open if a child of the rank has inherited it.
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)

    def iterate_signs(self) -> Iterator[bytes]:
        """Yield the bytes that the process sends, and after its end a note about how it ended."""
        descriptors = [0]
        if self._pidfd is not None:
            descriptors.append(self._pidfd)
        while True:
            readable, _, _ = select.select(descriptors, [], [])
            # What the process sent before its end is read first.
            data = b""
            if 0 in readable:
                data = os.read(0, CHUNK)
            if not data:
                break
            yield data
        yield json.dumps({"ended": self.explain_end()}).encode() + b"\n"

    def end_process(self, code: int) -> None:
        """Ask the process to exit with a code, and kill it if it does not."""
        with contextlib.suppress(OSError):
            os.write(1, bytes([code]))
        deadline = time.monotonic() + LaunchLimits().term
        while time.monotonic() < deadline:
            # The process is gone, or it is a zombie that its parent has not waited for yet.
            if read_stat(self._folder)[:1] in ([], ["Z"], ["X"]):
                return
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)

    def explain_end(self) -> tuple[str, str] | None:
        """Return the cause and the message of its failure. None if it exited with code 0."""
        words = read_stat(self._folder)
        if len(words) < STAT_WORDS:
            # torchrun has collected its exit status already, or this is not Linux.
            return "ended", "ended before its work was done"
        code = os.waitstatus_to_exitcode(int(words[STAT_WORDS - 1]))
        if code == 0:
            return None
        cause = describe_exit(code)
        return cause, cause + explain_kill(code, self._memory_kills)


class WatchedRank(RankState):
    """The hub's knowledge of a rank from the messages of its watcher.

    Attributes:
        host: its host; empty before its watcher has connected.
        code: the exit code of the run if this rank fails first.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.host = ""
        self.code = 1

    def read_report(self, data: bytes) -> None:
        """Process bytes from its watcher."""
        self.signs.read_signs(data)
        last_note = self.signs.said
        if isinstance(self.outcome, RankFailure):
            return
        if "failed" in last_note:
            self.code = last_note["code"]
            self.outcome = RankFailure(time.monotonic(), *last_note["failed"])
        elif last_note.get("ended"):
            self.outcome = RankFailure(time.monotonic(), *last_note["ended"])
        elif "ended" in last_note:
            self.outcome = RankResult(None)


class Hub:
    """The watcher of rank 0: it receives the reports of all ranks, and decides whether the run has failed.

    Each link has a thread that reads it.
    """

    def __init__(self, task: dict[str, Any], process: WatchedProcess) -> None:
        self._secret = task["secret"].encode()
        # A command has a time limit from its start on; a script is timed only within calls of a runner.
        self._is_command = task["stall"] is not None
        self._limits = LaunchLimits(stall=task["stall"] or SCRIPT_STALL, grace=GRACE)
        self._ranks = [WatchedRank(number) for number in range(task["world"])]
        self._ranks[0].host = task["host"]
        self._links: list[socket.socket] = []
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._lock = threading.Lock()
        # The hub listens on all addresses of this host if the master's is not one of them.
        try:
            server = socket.create_server((task["master"], 0), backlog=1024)
        except OSError:
            server = socket.create_server(("", 0), backlog=1024)
        _start_thread(self._accept_links, server)
        _start_thread(self._read_own_rank, process)
        # The rank passes the port on to the other ranks.
        os.write(1, b"%d\n" % server.getsockname()[1])

    def watch_until_end(self) -> dict[str, Any] | None:
        """Watch until all ranks have ended. If one fails, returns the line to print and the exit code."""
        while not all(isinstance(rank.outcome, RankResult) for rank in self._ranks):
            # The time from before the wait: if this process was stopped meanwhile, all ranks seem silent until the
            # links were read.
            read_at = time.monotonic()
            time.sleep(TICK)
            with self._lock:
                for rank in self._ranks:
                    rank.detect_silence(self._limits, read_at)
                if not self._is_command and all(rank.signs.call is None for rank in self._ranks):
                    # Between calls a script may take any time.
                    for rank in self._ranks:
                        rank.signs.last_activity = time.monotonic()
                        rank.signs.last_progress = time.monotonic()
                first_failure = find_first_failure(self._ranks, self._limits, read_at)
            if first_failure is not None:
                failure, number = first_failure
                rank = self._ranks[number]
                hosts = {state.host for state in self._ranks if state.host}
                message = str(make_error(failure, number))
                if not failure.plain and len(hosts) > 1 and rank.host:
                    message = message.replace(f"rank {number}:", f"rank {number} on {rank.host}:", 1)
                    if failure.cause == SILENT:
                        message += ", or the link to its host is gone"
                if failure.cause == TERMINATED and not all(state.host for state in self._ranks):
                    # torchrun ended this rank because a rank that has not connected failed; that rank's watcher prints
                    # why.
                    message = ""
                verdict = {"line": " ".join(message.split()), "code": rank.code}
                self._send_to_all(json.dumps(verdict).encode() + b"\n")
                return verdict
            self._send_to_all(HUB_ALIVE)
        self._send_to_all(b"null\n")
        return None

    def _send_to_all(self, data: bytes) -> None:
        for link in list(self._links):
            # A broken link is noticed by its thread.
            with contextlib.suppress(OSError):
                link.sendall(data)

    def _read_own_rank(self, process: WatchedProcess) -> None:
        for data in process.iterate_signs():
            with self._lock:
                self._ranks[0].read_report(data)

    def _accept_links(self, server: socket.socket) -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                # There may be no free descriptor. Without a pause, this loop would try again at once, without end.
                time.sleep(TICK)
                continue
            if self._strangers.acquire(blocking=False):
                _start_thread(self._read_link, link)
            else:
                link.close()

    def _read_link(self, link: socket.socket) -> None:
        """Read the reports of a watcher, or close a connection that does not begin with the secret."""
        with link:
            line, data = _read_hello(link)
            self._strangers.release()
            secret, _, hello = line.partition(b" ")
            # The secret is compared in constant time, so that it cannot be guessed letter by letter.
            if not hmac.compare_digest(secret, self._secret):
                return
            facts = json.loads(hello)
            rank = self._ranks[facts["rank"]]
            rank.host = facts["host"]
            self._links.append(link)
            while True:
                if data:
                    with self._lock:
                        rank.read_report(data)
                data = _receive(link)
                if not data:
                    break
            self._links.remove(link)
        with self._lock:
            if rank.outcome is None:
                rank.outcome = RankFailure(time.monotonic(), "no watcher", "its watcher has ended, or its host is gone")


def _read_hello(link: socket.socket) -> tuple[bytes, bytes]:
    """Read the first line of a connection, and what came after it. Both are empty if none comes."""
    deadline = time.monotonic() + HELLO_SECONDS
    received = b""
    while b"\n" not in received and len(received) < HELLO_SIZE:
        link.settimeout(max(deadline - time.monotonic(), 0.01))
        data = _receive(link)
        if not data:
            return b"", b""
        received += data
    link.settimeout(None)
    line, _, rest = received.partition(b"\n")
    return line, rest


def watch_for_hub(task: dict[str, Any], process: WatchedProcess) -> dict[str, Any] | None:
    """Pass the reports of a rank other than 0 to the hub. If the hub ends the run, returns the line and exit code.

    It returns None when all ranks have ended. A hub that is silent for too long ends the run as well.
    """
    link: socket.socket | None = None
    deadline = time.monotonic() + LaunchLimits().silence
    while link is None and time.monotonic() < deadline:
        for address in task["addresses"]:
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, task["port"]), timeout=5)
                break
        else:
            time.sleep(TICK)
    if link is None:
        where = f"{task['addresses'][0]}:{task['port']}"
        return {"line": f"rank {task['rank']}: cannot connect to the watcher of rank 0 at {where}", "code": 2}
    hello = {"rank": task["rank"], "host": task["host"]}
    link.sendall(f"{task['secret']} {json.dumps(hello)}\n".encode())
    _start_thread(_pass_on_signs, link, process)
    silence = LaunchLimits().silence
    link.settimeout(silence)
    received = b""
    while not received.endswith(b"\n"):
        try:
            data = link.recv(CHUNK)
        except TimeoutError:
            line = f"rank 0: no word from its host for {silence:.0f} s: the host or the link to it is gone"
            return {"line": line, "code": 1}
        except OSError:
            data = b""
        if not data:
            return {"line": "rank 0: its watcher has ended, or its host is gone", "code": 1}
        received += data.replace(HUB_ALIVE, b"")
    # The verdict on a failed run, or None if all ranks have ended.
    verdict: dict[str, Any] | None = json.loads(received)
    return verdict


def _pass_on_signs(link: socket.socket, process: WatchedProcess) -> None:
    # A broken link is noticed by the silence of the hub.
    with contextlib.suppress(OSError):
        for data in process.iterate_signs():
            link.sendall(data)


def _receive(link: socket.socket) -> bytes:
    """Read the bytes that have arrived. Empty at the end of a connection."""
    try:
        return link.recv(CHUNK)
    except OSError:
        return b""

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
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from ditile.distributed import env
from ditile.distributed.failure_detection import (
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
from ditile.distributed.heartbeat import RankFailure

LINK_ALIVE = b"\3"
"""The byte that a watcher sends to the hub every second. It shows that the link works, and nothing about the rank."""
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
        process.print_early_end()
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


class WatchedProcess:
    """The rank's process, which is the parent of its watcher.

    Attributes:
        has_ended: whether `read_signs` has reported that the process has ended.
    """

    def __init__(self, pid: int) -> None:
        self.has_ended = False
        self._pid = pid
        self._memory_kills = count_memory_kills()
        # The pipe by itself is not enough: it stays open if a child of the rank has inherited it.
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)

    def register_process(self, selector: selectors.BaseSelector) -> None:
        """Add its pipe and the descriptor for its end, if the system has one. That becomes readable at its end."""
        os.set_blocking(0, False)
        selector.register(0, selectors.EVENT_READ, self.read_signs)
        if self._pidfd is not None:
            selector.register(self._pidfd, selectors.EVENT_READ, self.read_signs)

    def unregister_ended(self, selector: selectors.BaseSelector) -> None:
        """Remove its descriptors once it has ended. They would stay readable forever."""
        if self.has_ended:
            own_descriptors = [key.fileobj for key in selector.get_map().values() if key.data == self.read_signs]
            for descriptor in own_descriptors:
                selector.unregister(descriptor)

    def read_signs(self) -> bytes:
        """Read the bytes that it has sent. After its end this is a last note about how it ended."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(0, 1 << 16)
            if data:
                return data
            self.has_ended = True
        if not self.has_ended and self._pidfd is not None:
            self.has_ended = bool(select.select([self._pidfd], [], [], 0)[0])
        if not self.has_ended:
            return b""
        return json.dumps({"ended": self._explain_end()}).encode() + b"\n"

    def print_early_end(self) -> None:
        """Print how the rank ended, if a signal killed it before it had joined the other ranks."""
        end = self._explain_end()
        if end is None or not end[0].startswith("killed") or end[0] == TERMINATED:
            return
        place = env.read_torchrun_place()
        rank = 0 if place is None else place.rank
        print_line(f"rank {rank}: {end[1]}")

    def end_process(self, code: int) -> None:
        """Ask the process to exit with a code, and kill it if it does not."""
        with contextlib.suppress(OSError):
            os.write(1, bytes([code]))
        deadline = time.monotonic() + LaunchLimits().term
        while time.monotonic() < deadline:
            # The process is gone, or it is a zombie that its parent has not waited for yet.
            if self._read_stat()[:1] in ([], ["Z"], ["X"]):
                return
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)

    def _read_stat(self) -> list[str]:
        """Return the words of its /proc/PID/stat. Empty if it is gone, or the system has no /proc."""
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return []

    def _explain_end(self) -> tuple[str, str] | None:
        """Return the cause and the message of its failure. None if it exited with code 0."""
        words = self._read_stat()
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
        last_word: when its watcher last sent anything.
        code: the exit code of the run if this rank fails first.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.host = ""
        self.last_word = time.monotonic()
        self.code = 1

    def read_link(self, data: bytes) -> None:
        """Process bytes from its watcher."""
        self.last_word = time.monotonic()
        data = data.replace(LINK_ALIVE, b"")
        if not data:
            return
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

    def detect_silence(self, limits: LaunchLimits, looked: float) -> None:
        """Set `outcome` to a failure if the rank, or the link to its host, has been silent for too long."""
        silence = looked - self.last_word
        if self.outcome is None and self.host and silence > limits.silence:
            self.outcome = RankFailure(time.monotonic(), "no link", _describe_lost_link(silence))
        super().detect_silence(limits, looked)


def _describe_lost_link(silence: float) -> str:
    return f"no word from its host for {silence:.0f} s: the host or the link to it is gone"


class Hub:
    """The watcher of rank 0: it receives the reports of all ranks, and decides whether the run has failed."""

    def __init__(self, task: dict[str, Any], process: WatchedProcess) -> None:
        self._process = process
        self._secret = task["secret"].encode()
        # A command has a time limit from its start on; a script is timed only within calls of a runner.
        self._is_command = task["stall"] is not None
        self._limits = LaunchLimits(stall=task["stall"] or SCRIPT_STALL, grace=GRACE)
        self._ranks = [WatchedRank(number) for number in range(task["world"])]
        self._ranks[0].host = task["host"]
        self._links: dict[socket.socket, WatchedRank] = {}
        # Connections that have not identified themselves yet -> since when they exist, and what they have sent.
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}
        self._server = _listen(task["master"])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept_stranger)
        process.register_process(self._selector)
        # The rank passes the port on to the other ranks.
        os.write(1, b"%d\n" % self._server.getsockname()[1])

    def watch_until_end(self) -> dict[str, Any] | None:
        """Watch until all ranks have ended. If one fails, returns the line to print and the exit code."""
        last_sent = 0.0
        while not all(isinstance(rank.outcome, RankResult) for rank in self._ranks):
            looked = time.monotonic()
            for key, _ in self._selector.select(timeout=0.2):
                if key.data == self._process.read_signs:
                    self._ranks[0].read_link(self._process.read_signs())
                else:
                    key.data(key.fileobj)
            self._process.unregister_ended(self._selector)
            # Rank 0 is on this host, so no link to it can break.
            self._ranks[0].last_word = time.monotonic()
            # Only after all links were read: if this process was stopped for a while, all ranks seem silent before.
            for rank in self._ranks:
                rank.detect_silence(self._limits, looked)
            if not self._is_command:
                self._allow_idle_script()
            first_failure = find_first_failure(self._ranks, self._limits, looked)
            if first_failure is not None:
                return self._announce_failure(*first_failure)
            if time.monotonic() - last_sent > 1:
                last_sent = time.monotonic()
                self._send_to_all({"alive": True})
                self._drop_silent_strangers()
        self._send_to_all({"over": True})
        return None

    def _allow_idle_script(self) -> None:
        """Restart the time limits while no rank is in a call. Between calls a script may take any time."""
        if any(rank.signs.call is not None for rank in self._ranks):
            return
        for rank in self._ranks:
            rank.signs.last_activity = time.monotonic()
            rank.signs.last_progress = time.monotonic()

    def _announce_failure(self, failure: RankFailure, number: int) -> dict[str, Any]:
        """Send the line and the exit code of the run to all watchers, and return them."""
        rank = self._ranks[number]
        hosts = {state.host for state in self._ranks if state.host}
        message = str(make_error(failure, number))
        if not failure.plain and len(hosts) > 1 and rank.host:
            message = message.replace(f"rank {number}:", f"rank {number} on {rank.host}:", 1)
        if failure.cause == TERMINATED and not all(state.host for state in self._ranks):
            # torchrun ended this rank because a rank that has not connected failed; that rank's watcher prints why.
            message = ""
        verdict = {"line": " ".join(message.split()), "code": rank.code}
        self._send_to_all({"end": verdict})
        return verdict

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for link in list(self._links):
            try:
                link.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._drop_link(link)

    def _accept_stranger(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = server.accept()
            if len(self._strangers) >= MAX_STRANGERS:
                stranger.close()
                return
            stranger.setblocking(False)
            self._strangers[stranger] = time.monotonic(), b""
            self._selector.register(stranger, selectors.EVENT_READ, self._greet_stranger)

    def _greet_stranger(self, stranger: socket.socket) -> None:
        """Read the first line of a connection, and close it unless the line contains the secret."""
        since, received = self._strangers[stranger]
        data = _receive(stranger)
        received += data
        if data and b"\n" not in received and len(received) < HELLO_SIZE:
            self._strangers[stranger] = since, received
            return
        line, _, rest = received.partition(b"\n")
        secret, _, hello = line.partition(b" ")
        # The secret is compared in constant time, so that it cannot be guessed letter by letter.
        if not hmac.compare_digest(secret, self._secret):
            self._drop_stranger(stranger)
            return
        del self._strangers[stranger]
        facts = json.loads(hello)
        rank = self._ranks[facts["rank"]]
        rank.host = facts["host"]
        self._links[stranger] = rank
        # The timeout is for sending; data to receive has arrived before it is read.
        stranger.settimeout(5)
        self._selector.modify(stranger, selectors.EVENT_READ, self._read_link)
        rank.read_link(rest)

    def _drop_silent_strangers(self) -> None:
        for stranger, (since, _) in list(self._strangers.items()):
            if time.monotonic() - since > HELLO_SECONDS:
                self._drop_stranger(stranger)

    def _drop_stranger(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()

    def _read_link(self, link: socket.socket) -> None:
        data = _receive(link)
        rank = self._links[link]
        if data:
            rank.read_link(data)
            return
        self._drop_link(link)
        if rank.outcome is None:
            rank.outcome = RankFailure(time.monotonic(), "no watcher", "its watcher has ended, or its host is gone")

    def _drop_link(self, link: socket.socket) -> None:
        del self._links[link]
        self._selector.unregister(link)
        link.close()


def watch_for_hub(task: dict[str, Any], process: WatchedProcess) -> dict[str, Any] | None:
    """Pass the reports of a rank other than 0 to the hub. If the hub ends the run, returns the line and exit code.

    It returns None when all ranks have ended. A hub that is silent for too long ends the run as well.
    """
    link = _connect(task["addresses"], task["port"])
    if link is None:
        where = f"{task['addresses'][0]}:{task['port']}"
        return {"line": f"rank {task['rank']}: cannot connect to the watcher of rank 0 at {where}", "code": 2}
    hello = {"rank": task["rank"], "host": task["host"]}
    link.sendall(f"{task['secret']} {json.dumps(hello)}\n".encode())
    received = b""
    last_word = time.monotonic()
    last_sent = 0.0
    with selectors.DefaultSelector() as selector:
        process.register_process(selector)
        selector.register(link, selectors.EVENT_READ)
        while True:
            looked = time.monotonic()
            for key, _ in selector.select(timeout=0.2):
                if key.fileobj is not link:
                    _pass_on(link, process.read_signs())
                    continue
                last_word = time.monotonic()
                data = _receive(link)
                if not data:
                    return {"line": "rank 0: its watcher has ended, or its host is gone", "code": 1}
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "alive" not in message:
                        # The verdict on a failed run, or None if the hub reports that all ranks have ended.
                        verdict: dict[str, Any] | None = message.get("end")
                        return verdict
            process.unregister_ended(selector)
            if time.monotonic() - last_sent > 1:
                last_sent = time.monotonic()
                _pass_on(link, LINK_ALIVE)
            if looked - last_word > LaunchLimits().silence:
                return {"line": f"rank 0: {_describe_lost_link(looked - last_word)}", "code": 1}


def _pass_on(link: socket.socket, data: bytes) -> None:
    # A broken link is noticed by the silence of the hub.
    with contextlib.suppress(OSError):
        link.sendall(data)


def _listen(address: str) -> socket.socket:
    """Listen on a free port of `address`, or of all addresses of this host if `address` is not one of them."""
    try:
        return socket.create_server((address, 0), backlog=1024)
    except OSError:
        return socket.create_server(("", 0), backlog=1024)


def _connect(addresses: Sequence[str], port: int) -> socket.socket | None:
    deadline = time.monotonic() + LaunchLimits().silence
    while time.monotonic() < deadline:
        for address in addresses:
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, port), timeout=5)
                link.settimeout(5)
                return link
        time.sleep(0.2)
    return None


def _receive(link: socket.socket) -> bytes:
    """Read the bytes that have arrived. Empty at the end of a connection."""
    try:
        return link.recv(1 << 16)
    except OSError:
        return b""

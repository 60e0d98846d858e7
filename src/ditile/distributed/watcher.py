"""The watcher: a small process beside each of torchrun's ranks, which reads its signs of life and can end it.

The watcher of rank 0 is the hub: it hears of all ranks, decides by `failure_rules`, and tells the other watchers.
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
from ditile.distributed.failure_rules import (
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

LINK = b"\3"
"""What a watcher sends to the hub every second. It says that the link is whole, and nothing of the rank."""


GRACE = 0.5
"""Seconds after the first failure: torchrun ends the other ranks of a host as soon as one has failed."""


HELLO_SIZE, HELLO_SECONDS, MAX_STRANGERS = 4096, 10.0, 64
"""Who connects has so many seconds to say who it is, in so many bytes; and so many may try at once."""


def run_watcher() -> None:
    """Runs a watcher: its standard input comes from its rank, its standard output goes there."""
    # What ends ranks must not end who tells of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    own = WatchedProcess(int(sys.argv[-1]))
    line = read_line(0)
    if not line:
        own.tell_early_end()
        return
    task = json.loads(line)
    watcher = Hub(task, own) if task["rank"] == 0 else Spoke(task, own)
    verdict = watcher.watch_until_end()
    if verdict is not None:
        if task["local_rank"] == 0 and verdict["line"]:
            print_line(verdict["line"])
        own.end_process(verdict["code"])


def print_line(message: str) -> None:
    """Prints the one line of a run, on a line of its own: a progress bar may stand before it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nditile: {message}\n".encode())


class WatchedProcess:
    """The rank's process, which is the parent of its watcher."""

    def __init__(self, pid: int) -> None:
        self._pid, self._memory_kills, self._ended = pid, count_memory_kills(), False
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)

    def register_process(self, selector: selectors.BaseSelector) -> None:
        """Adds its pipe, and where the system has such a thing the descriptor that says that it has ended."""
        selector.register(0, selectors.EVENT_READ, self.read_signs)
        if self._pidfd is not None:
            selector.register(self._pidfd, selectors.EVENT_READ, self.read_signs)

    def read_signs(self) -> bytes:
        """What it has said; at its end a last note, which says how it ended."""
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError):
            if data := os.read(0, 1 << 16):
                return data
            self._ended = True
        if not self._ended and self._pidfd is not None:
            self._ended = bool(select.select([self._pidfd], [], [], 0)[0])
        return json.dumps({"ended": self._explain_end()}).encode() + b"\n" if self._ended else b""

    @property
    def has_ended(self) -> bool:
        """Whether `read_signs` has told of its end."""
        return self._ended

    def tell_early_end(self) -> None:
        """Says how the rank ended, if a signal ended it before it found the others."""
        how = self._explain_end()
        if how and how[0].startswith("killed") and how[0] != TERMINATED:
            place = env.read_torchrun_place()
            print_line(f"rank {place.rank if place else 0}: {how[1]}")

    def end_process(self, code: int) -> None:
        """Lets it exit with a code, or kills it."""
        with contextlib.suppress(OSError):
            os.write(1, bytes([code]))
        until = time.monotonic() + LaunchLimits().term
        while time.monotonic() < until:
            if self._read_state() in ("", "Z", "X"):
                return
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)

    def _read_words(self) -> list[str]:
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return []

    def _read_state(self) -> str:
        return next(iter(self._read_words()), "")

    def _explain_end(self) -> list[str] | None:
        """How it ended, as the cause and the message of a failure; None if well."""
        words = self._read_words()
        if len(words) < 50:  # its parent has asked for its exit code before; or this is not Linux
            return ["ended", "ended before its work was done"]
        code = os.waitstatus_to_exitcode(int(words[49]))
        return (
            None if code == 0 else [describe_exit(code), describe_exit(code) + explain_kill(code, self._memory_kills)]
        )


class WatchedRank(RankState):
    """A rank as the hub sees it: what it has said over the link of its watcher."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.host, self.connected, self.last_word, self.code = "", False, time.monotonic(), 1

    def read_link(self, data: bytes) -> None:
        """Reads what its watcher has passed on."""
        self.last_word = time.monotonic()
        if not (data := data.replace(LINK, b"")):
            return
        self.signs.read_signs(data)
        said = self.signs.said
        if isinstance(self.outcome, RankFailure):
            return
        if "failed" in said:
            self.code = said["code"]
            self.outcome = RankFailure(time.monotonic(), *said["failed"])
        elif said.get("ended"):
            self.outcome = RankFailure(time.monotonic(), *said["ended"])
        elif "ended" in said:
            self.outcome = RankResult(None)

    def detect_silence(self, limits: LaunchLimits, looked: float) -> None:
        """Sets `outcome` to a failure if the rank, or the link to its host, has been silent for too long."""
        silence = looked - self.last_word
        if self.outcome is None and self.connected and silence > limits.silence:
            message = f"no word from its host for {silence:.0f} s: the host or the link to it is gone"
            self.outcome = RankFailure(time.monotonic(), "no link", message)
        super().detect_silence(limits, looked)


class Hub:
    """The watcher of rank 0, which hears of all ranks and decides."""

    def __init__(self, task: dict[str, Any], own: WatchedProcess) -> None:
        self._own = own
        self._secret = task["secret"]
        self._world = task["world"]
        self._is_command = task["stall"] is not None
        self._limits = LaunchLimits(stall=task["stall"] or 60.0, grace=GRACE)
        self._ranks = [WatchedRank(number) for number in range(task["world"])]
        self._ranks[0].connected = True
        self._ranks[0].host = task["host"]
        self._links: dict[socket.socket, WatchedRank] = {}
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}
        self._server = _listen(task["master"])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept_stranger)
        own.register_process(self._selector)
        os.write(1, b"%d\n" % self._server.getsockname()[1])

    def watch_until_end(self) -> dict[str, Any] | None:
        """Watches until all ranks have ended; returns the line and the exit code if one failed."""
        last = 0.0
        while not all(isinstance(rank.outcome, RankResult) for rank in self._ranks):
            looked = time.monotonic()
            for key, _ in self._selector.select(timeout=0.2):
                if key.data == self._own.read_signs:
                    self._ranks[0].read_link(key.data())
                    self._forget_own_process()
                else:
                    key.data(key.fileobj)
            self._ranks[0].last_word = time.monotonic()
            for rank in self._ranks:
                rank.detect_silence(self._limits, looked)
            self._excuse_idleness()
            found = find_first_failure(self._ranks, self._limits, looked)
            if found is not None:
                return self._tell_verdict(*found)
            if time.monotonic() - last > 1:
                last = time.monotonic()
                self._tell_all({"alive": True})
                self._drop_silent_strangers()
        self._tell_all({"over": True})
        return None

    def _forget_own_process(self) -> None:
        if self._own.has_ended:
            for fileobj in [
                key.fileobj for key in self._selector.get_map().values() if key.data == self._own.read_signs
            ]:
                self._selector.unregister(fileobj)

    def _excuse_idleness(self) -> None:
        """A script may do what it likes, and nothing, while no rank is in a call."""
        if not self._is_command and all(rank.signs.call is None for rank in self._ranks):
            for rank in self._ranks:
                rank.signs.last_activity = rank.signs.last_progress = time.monotonic()

    def _tell_verdict(self, failure: RankFailure, number: int) -> dict[str, Any]:
        rank = self._ranks[number]
        hosts = {each.host for each in self._ranks if each.host}
        message = str(make_error(failure, number))
        if not failure.plain and len(hosts) > 1 and rank.host:
            message = message.replace(f"rank {number}:", f"rank {number} on {rank.host}:", 1)
        if failure.cause == TERMINATED and not all(each.connected for each in self._ranks):
            message = ""  # torchrun ended it because of a rank that has not come so far, whose own watcher tells
        verdict = {"line": " ".join(message.split()), "code": rank.code}
        self._tell_all({"end": verdict})
        return verdict

    def _tell_all(self, word: dict[str, Any]) -> None:
        for link in list(self._links):
            try:
                link.sendall(json.dumps(word).encode() + b"\n")
            except OSError:
                self._drop_link(link)

    def _accept_stranger(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = server.accept()
            if len(self._strangers) >= MAX_STRANGERS:
                stranger.close()
                return
            stranger.setblocking(False)
            self._strangers[stranger] = (time.monotonic(), b"")
            self._selector.register(stranger, selectors.EVENT_READ, self._greet_stranger)

    def _greet_stranger(self, stranger: socket.socket) -> None:
        """Reads the first line of a connection; drops it unless it knows the secret."""
        since, said = self._strangers[stranger]
        data = _receive(stranger)
        said += data
        self._strangers[stranger] = since, said
        if data and b"\n" not in said and len(said) < HELLO_SIZE:
            return
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        line, _, rest = said.partition(b"\n")
        secret, _, who = line.partition(b" ")
        if not hmac.compare_digest(secret, self._secret.encode()):
            stranger.close()
            return
        hello = json.loads(who)
        rank = self._ranks[hello["rank"]]
        rank.host = hello["host"]
        rank.connected = True
        self._links[stranger] = rank
        stranger.settimeout(5)  # of what is sent; what is received is there
        self._selector.register(stranger, selectors.EVENT_READ, self._read_link)
        rank.read_link(rest)

    def _drop_silent_strangers(self) -> None:
        for stranger, (since, _) in list(self._strangers.items()):
            if time.monotonic() - since > HELLO_SECONDS:
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


class Spoke:
    """The watcher of another rank, which passes on what that says and does what the hub says."""

    def __init__(self, task: dict[str, Any], own: WatchedProcess) -> None:
        self._own = own
        self._rank = task["rank"]
        self._heard = b""
        self._link = _connect(task["addresses"], task["port"])
        hello = {"rank": task["rank"], "host": task["host"]}
        if self._link is not None:
            self._link.sendall(task["secret"].encode() + b" " + json.dumps(hello).encode() + b"\n")
        self._where = f"{task['addresses'][0]}:{task['port']}"

    def watch_until_end(self) -> dict[str, Any] | None:
        """Watches until all ranks have ended; returns the line and the exit code if one failed."""
        if self._link is None:
            return {"line": f"rank {self._rank}: cannot connect to the watcher of rank 0 at {self._where}", "code": 2}
        silence = LaunchLimits().silence
        last_word = time.monotonic()
        sent = 0.0
        with selectors.DefaultSelector() as selector:
            self._own.register_process(selector)
            selector.register(self._link, selectors.EVENT_READ)
            while True:
                looked = time.monotonic()
                for key, _ in selector.select(timeout=0.2):
                    if key.fileobj is self._link:
                        last_word = time.monotonic()
                        if word := self._read_words():
                            return word[0]
                    elif not self._own.has_ended:
                        self._pass_on(self._own.read_signs())
                if self._own.has_ended:
                    for fileobj in [key.fileobj for key in selector.get_map().values() if key.data is not None]:
                        selector.unregister(fileobj)
                if time.monotonic() - sent > 1:
                    sent = time.monotonic()
                    self._pass_on(LINK)
                if (quiet := looked - last_word) > silence:
                    line = f"rank 0: no word from its host for {quiet:.0f} s: the host or the link to it is gone"
                    return {"line": line, "code": 1}

    def _read_words(self) -> list[dict[str, Any] | None]:
        """What the hub has said that ends the watch: a verdict, or None if all is over."""
        assert self._link is not None
        data = _receive(self._link)
        if not data:
            return [{"line": "rank 0: its watcher has ended, or its host is gone", "code": 1}]
        *lines, self._heard = (self._heard + data).split(b"\n")
        words = [json.loads(line) for line in lines]
        return [word.get("end") for word in words if "alive" not in word]

    def _pass_on(self, data: bytes) -> None:
        assert self._link is not None
        with contextlib.suppress(OSError):  # of a link that is cut; the silence of the hub tells
            self._link.sendall(data)


def _listen(address: str) -> socket.socket:
    """A port of an address of this host, or of all where the address is not this host's own."""
    try:
        return socket.create_server((address, 0), backlog=1024)
    except OSError:
        return socket.create_server(("", 0), backlog=1024)


def _connect(addresses: Sequence[str], port: int) -> socket.socket | None:
    until = time.monotonic() + LaunchLimits().silence
    while time.monotonic() < until:
        for address in addresses:
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, port), timeout=5)
                link.settimeout(5)
                return link
        time.sleep(0.2)
    return None


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 16)
    except BlockingIOError:
        return b""
    except OSError:
        return b""


def read_line(fd: int) -> bytes:
    """A line, without reading what follows it; empty if the other side has ended."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return b""
        line += byte
    return line

"""A rank as an actor of a Ray cluster: `serve.worker` with Ray's calls as its messages.

The deployment polls each of its actors: for signs of life, as `distributed.heartbeat` describes them, answers of rank
0, and how the rank ended. What Ray pickles here is text of JSON and bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from typing import Any, NamedTuple

from ditile.distributed import env
from ditile.distributed.env import RankPlace
from ditile.distributed.heartbeat import describe_error, send_heartbeats
from ditile.serve.jobs import Files
from ditile.serve.link import Message, WorkerSetup

# Seconds that a poll waits if there is no news.
POLL_SECONDS = 0.5
# The number of Linux's ioctl SIOCGIFADDR.
_GET_ADDRESS = 0x8915
# A message as text of JSON, and its files by name.
Answer = tuple[str, Files]


class RankNews(NamedTuple):
    """The report of an actor about its rank.

    Attributes:
        signs: signs of life.
        answers: the answers of rank 0.
        failure: the fields of a `RankFailure` if the rank has ended by an error.
    """

    signs: bytes
    answers: list[Answer]
    failure: tuple[Any, ...] | None


class ActorPlace(NamedTuple):
    """The place of an actor: its node, the node's address, and a free port there."""

    node: str
    address: str
    port: int


class RankActor:
    """A rank of a replica, and the rank's end of its link to the server. Several of its methods may run at once."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._signs, self._pulse = os.pipe()
        os.set_blocking(self._signs, False)
        self._failure: tuple[Any, ...] | None = None
        self._inbox: queue.SimpleQueue[tuple[Message, Files]] = queue.SimpleQueue()
        # None wakes a poll when the rank has ended.
        self._outbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

    # The deployment calls the following methods.

    def find_place(self) -> ActorPlace:
        """Return the node, address and a free port of this actor."""
        from ray import get_runtime_context, util

        address = util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        return ActorPlace(get_runtime_context().get_node_id(), address, port)

    def start_rank(self, place: RankPlace, own: ActorPlace, master: ActorPlace) -> None:
        """Start the rank in a thread of its own. `own` and `master` are the places of this actor and of rank 0."""
        env.set_actor_place(place, master.address, master.port, find_interface(own.address))
        env.set_progress_fd(self._pulse)
        threading.Thread(target=send_heartbeats, args=(self._pulse,), daemon=True).start()
        threading.Thread(target=self._run_rank, name="rank", daemon=True).start()

    def send(self, message: str, files: Files) -> None:
        """Send the rank a message, text of JSON, and its files."""
        self._inbox.put((json.loads(message), files))

    def poll(self) -> RankNews:
        """Return the news of the rank, after waiting a while if there is none."""
        answers = []
        timeout = POLL_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._outbox.get(timeout=timeout)
                if answer is None:
                    break
                answers.append(answer)
                timeout = 0.0
        signs = b""
        with contextlib.suppress(BlockingIOError):
            signs = os.read(self._signs, 2**16)
        return RankNews(signs, answers, self._failure)

    # The rank calls the following methods, those of a `MessageLink`.

    def send_message(self, message: Message, files: Files | None = None) -> None:
        """Keep an answer until the next poll."""
        self._outbox.put((json.dumps(message), dict(files or {})))

    def receive_message(self) -> tuple[Message, Files]:
        """Wait for the next message, and its files."""
        return self._inbox.get()

    def _run_rank(self) -> None:
        try:
            env.drop_import_complaints()
            # This imports torch, which takes seconds, and the deployment expects signs of this actor meanwhile.
            from ditile.serve.worker import RankWorker

            # The first progress report says that the rank has started.
            env.report_progress()
            with contextlib.redirect_stdout(sys.stderr):
                RankWorker(self._setup, self).serve_batches()
        # SystemExit is caught too, since whatever ends a rank must be reported.
        except BaseException as error:
            self._failure = tuple(describe_error(error))
            self._outbox.put(None)


def find_interface(address: str) -> str:
    """Return the network interface with an address of this machine; the loopback device if none has it."""
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            # The struct ifreq has a name of 16 bytes, and in the reply an address from byte 20 on.
            request = name.encode()[:15].ljust(256, b"\0")
            reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return "lo0" if sys.platform == "darwin" else "lo"

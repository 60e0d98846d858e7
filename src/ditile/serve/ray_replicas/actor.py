"""A rank as an actor of a Ray cluster: `serve.worker` with Ray's calls as its messages.

The server polls its actors: for signs of life, as `distributed.heartbeat` describes them, answers of rank 0, and how
the rank ended. Messages that Ray pickles hold only JSON text and bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from typing import Any

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


class RankActor:
    """A rank of a replica, and the rank's end of its link to the server. Several of its methods may run at once.

    Args:
        folder: the server's working folder, on which the relative paths of options depend.
    """

    def __init__(self, setup: WorkerSetup, folder: str) -> None:
        self._setup = setup
        # A node may lack the folder, and with it the files that have relative paths.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._signs, self._pulse = os.pipe()
        os.set_blocking(self._signs, False)
        self._end: tuple[Any, ...] | None = None
        self._inbox: queue.SimpleQueue[tuple[Message, Files]] = queue.SimpleQueue()
        # None wakes a poll when the rank has ended.
        self._outbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

    def find_place(self) -> tuple[str, str, int]:
        """Return this actor's node, the node's address, and a free port there."""
        from ray import get_runtime_context, util

        address = util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        return get_runtime_context().get_node_id(), address, port

    def start_rank(self, place: RankPlace, address: str, master: str, port: int) -> None:
        """Start the rank in a thread of its own, on a node of this address. The ranks meet at `master` and `port`."""
        env.set_actor_place(place, master, port, find_interface(address))
        env.set_progress_fd(self._pulse)
        threading.Thread(target=send_heartbeats, args=(self._pulse,), daemon=True).start()
        threading.Thread(target=self._run_rank, name="rank", daemon=True).start()

    def send(self, message: str, files: Files) -> None:
        """Send the rank a message, text of JSON, and its files."""
        self._inbox.put((json.loads(message), files))

    def poll(self) -> tuple[bytes, list[Answer], tuple[Any, ...] | None]:
        """Return signs of life, the answers of rank 0, and the end, after waiting a while if there is no answer.

        The end is None while the rank runs, the fields of a `RankFailure` after an error, and empty otherwise.
        """
        answers: list[Answer] = []
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
        return signs, answers, self._end

    # The next two methods are those of a `MessageLink`.

    def send_message(self, message: Message, files: Files | None = None) -> None:
        """Keep an answer until the next poll."""
        self._outbox.put((json.dumps(message), dict(files or {})))

    def receive_message(self) -> tuple[Message, Files]:
        """Wait for the next message, and its files."""
        return self._inbox.get()

    def _run_rank(self) -> None:
        try:
            env.drop_import_complaints()
            # This imports torch, which takes seconds, and the server expects signs of this actor meanwhile.
            from ditile.serve.worker import RankWorker

            # The first progress report says that the rank has started.
            env.report_progress()
            with contextlib.redirect_stdout(sys.stderr):
                RankWorker(self._setup, self).serve()
            self._end = ()
        # SystemExit is caught too, since whatever ends a rank must be reported.
        except BaseException as error:
            self._end = tuple(describe_error(error))
        self._outbox.put(None)


def find_interface(address: str) -> str:
    """Return the network interface with an address of this machine; the loopback device if none has it."""
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            # The struct ifreq begins with a name of 16 bytes; the reply has an address from byte 20 on.
            request = name.encode()[:15].ljust(256, b"\0")
            reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return "lo0" if sys.platform == "darwin" else "lo"

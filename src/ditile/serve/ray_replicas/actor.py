"""A rank as an actor of a Ray cluster: the drawing of `serve.rank`, whose messages come and go by Ray's calls.

A replica asks each of its actors again and again what there is to tell: signs of life, as `distributed.heartbeat`
describes them, answers of rank 0, and how the rank ended. What Ray pickles here is text of JSON and bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ditile.distributed import env
from ditile.distributed.env import RankPlace
from ditile.distributed.heartbeat import describe_error, send_heartbeats
from ditile.serve.link import GroupSetup

POLL_SECONDS = 0.5
"""How long an actor that has nothing to tell lets its replica wait."""


class RankNews(NamedTuple):
    """What an actor tells of its rank.

    Attributes:
        signs: of life.
        answers: of rank 0: text of JSON, and files by name.
        failure: the fields of a `RankFailure` if the rank has ended by an error.
    """

    signs: bytes
    answers: list[tuple[str, dict[str, bytes]]]
    failure: tuple[Any, ...] | None


class ActorPlace(NamedTuple):
    """Where an actor is: its node, that node's address, and a port that is free there."""

    node: str
    address: str
    port: int


class CallLink:
    """A rank's end of a link whose messages come and go by calls of its actor."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[dict[str, Any], dict[str, bytes]]] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[tuple[str, dict[str, bytes]] | None] = queue.SimpleQueue()

    def send_message(self, message: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        """Keeps an answer until the replica asks."""
        self.outbox.put((json.dumps(message), dict(files or {})))

    def receive_message(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Waits for the next message, and its files."""
        return self.inbox.get()


class RankActor:
    """A rank of a replica. Several of its methods may run at once.

    Args:
        setup: what it loads.
    """

    def __init__(self, setup: GroupSetup) -> None:
        self._setup, self._link = setup, CallLink()
        self._signs, self._pulse = os.pipe()
        os.set_blocking(self._signs, False)
        self._failure: tuple[Any, ...] | None = None

    def find_place(self) -> ActorPlace:
        """Where this actor is."""
        from ray import get_runtime_context, util

        address: str = util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        return ActorPlace(get_runtime_context().get_node_id(), address, port)

    def start_rank(self, place: RankPlace, own: ActorPlace, master: ActorPlace) -> None:
        """Starts the rank, in a thread of its own.

        Args:
            place: of the rank among those of the replica.
            own, master: where this actor and that of rank 0 are.
        """
        env.set_actor_place(place, master.address, master.port, find_interface(own.address))
        env.set_progress_fd(self._pulse)
        threading.Thread(target=send_heartbeats, args=(self._pulse,), daemon=True).start()
        threading.Thread(target=self._run_rank, name="rank", daemon=True).start()

    def send(self, message: str, files: dict[str, bytes]) -> None:
        """Gives the rank a message, text of JSON, and its files."""
        self._link.inbox.put((json.loads(message), files))

    def poll(self) -> RankNews:
        """What is new; waits a while for something."""
        answers: list[tuple[str, dict[str, bytes]]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._link.outbox.get(timeout=0.0 if answers else POLL_SECONDS)
                if answer is None:
                    break
                answers.append(answer)
        with contextlib.suppress(BlockingIOError):
            return RankNews(os.read(self._signs, 1 << 16), answers, self._failure)
        return RankNews(b"", answers, self._failure)

    def _run_rank(self) -> None:
        try:
            env.drop_import_complaints()
            # It imports torch, which takes seconds in which the replica wants to hear of this actor.
            from ditile.serve.rank import RankServer

            env.report_progress()  # it has started
            with contextlib.redirect_stdout(sys.stderr):
                RankServer(self._setup, self._link).serve_batches()
        # SystemExit too: whatever ends a rank must be told.
        except BaseException as error:
            self._failure = tuple(describe_error(error))
            self._link.outbox.put(None)


def find_interface(address: str) -> str:
    """The network interface of an address of this machine, by its name; the loopback device's if none has it."""
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            request = name.encode()[:15].ljust(256, b"\0")
            reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return "lo0" if sys.platform == "darwin" else "lo"


_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""

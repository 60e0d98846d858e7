"""What ranks of the server are started with, and the messages between them and it: JSON and bytes over a pair of
sockets that no other process can reach.

A message is one frame of JSON, and a frame for each of its files. Nothing is pickled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import EngineOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSetup:
    """What the ranks of a group load, and how they compute.

    Attributes:
        model: a bundled model, a folder or a hub id.
        engine, plan, cache: as of `ditile generate`.
        lora_dir: the folder of the LoRAs that requests may name; None without.
        max_loras: how many of them stay loaded.
        local_ranks: as of `launch`.
    """

    model: str
    engine: EngineOptions
    plan: Plan
    cache: CacheOptions
    lora_dir: str | None
    max_loras: int
    local_ranks: tuple[int, int] | None = None


class MessageLink(Protocol):
    """One end of a link between the server and a rank."""

    def send_message(self, message: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        """Sends JSON types, and files by name."""

    def receive_message(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Waits for the next message, and its files. Raises `EOFError` if none will come."""


class RankLink:
    """One end of the link between the server and a rank. Several threads may send; one receives.

    Args:
        fd: the descriptor of the socket, which the link owns.
    """

    def __init__(self, fd: int) -> None:
        self._connection, self._sending = Connection(fd), threading.Lock()

    def send_message(self, message: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        """Sends JSON types, and files by name.

        Raises:
            OSError: if the other end has gone.
        """
        files = files or {}
        header = json.dumps({"message": message, "files": list(files)}).encode()
        with self._sending:
            self._connection.send_bytes(header)
            for content in files.values():
                self._connection.send_bytes(content)

    def receive_message(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Waits for the next message, and its files.

        Raises:
            EOFError, OSError: if the other end has gone.
        """
        header = json.loads(self._connection.recv_bytes())
        return header["message"], {name: self._connection.recv_bytes() for name in header["files"]}

    def close_connection(self) -> None:
        """Closes this end."""
        self._connection.close()

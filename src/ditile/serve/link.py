"""What ranks of the server are started with, and the messages between them and it: JSON and bytes over a pair of
sockets that no other process can reach.

A message is one frame of JSON, and a frame for each of its files. Nothing is pickled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import EngineOptions
from ditile.serve.jobs import Files, Request

# JSON types by name.
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What the ranks of a replica load, and how they compute.

    Attributes:
        model: a bundled model, a folder or a hub id.
        components: component -> a file with its weights; the model's own are left out.
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
    components: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job as its ranks see it: what to generate, and the content of its input files by name."""

    id: str
    request: Request
    inputs: Files = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs of one shape, which one call generates."""

    id: str
    jobs: list[BatchJob]

    def to_message(self) -> tuple[Message, Files]:
        """Return the message for a rank about this batch, and its files."""
        files = {}
        jobs = []
        for job in self.jobs:
            for name, content in job.inputs.items():
                files[f"{job.id}/{name}"] = content
            jobs.append({"id": job.id, "request": job.request.to_json()})
        return {"generate": self.id, "jobs": jobs}, files

    @classmethod
    def from_message(cls, message: Message, files: Files) -> Batch:
        """Build the batch of a message."""
        batch = cls(message["generate"], [])
        for values in message["jobs"]:
            job = BatchJob(values["id"], Request.from_json(values["request"]))
            for path, content in files.items():
                job_id, _, name = path.rpartition("/")
                if job_id == job.id:
                    job.inputs[name] = content
            batch.jobs.append(job)
        return batch


class MessageLink(Protocol):
    """One end of a link between the server and a rank."""

    def send_message(self, message: Message, files: Files | None = None) -> None:
        """Send JSON types, and files by name."""

    def receive_message(self) -> tuple[Message, Files]:
        """Wait for the next message, and its files. Raises `EOFError` if none will come."""


class SocketLink:
    """One end of a link over a socket, whose descriptor it owns. Several threads may send; one receives."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._sending = threading.Lock()

    def send_message(self, message: Message, files: Files | None = None) -> None:
        """Send JSON types, and files by name. Raises `OSError` if the other end has gone."""
        files = files or {}
        header = json.dumps({"message": message, "files": list(files)}).encode()
        with self._sending:
            self._connection.send_bytes(header)
            for content in files.values():
                self._connection.send_bytes(content)

    def receive_message(self) -> tuple[Message, Files]:
        """Wait for the next message, and its files. Raises `EOFError` or `OSError` if the other end has gone."""
        header = json.loads(self._connection.recv_bytes())
        files = {}
        for name in header["files"]:
            files[name] = self._connection.recv_bytes()
        return header["message"], files

    def close_connection(self) -> None:
        """Close this end."""
        self._connection.close()

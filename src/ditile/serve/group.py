"""A group of ranks that live on: started by `launch` in a thread of the server, and again whenever one of them fails.

A group says what happens by events, in the server's event loop and in order. Whatever ends the ranks (a signal, a
rank that hangs, an error that leaves messages under way) ends the batch that they were drawing, and no other job.
A group whose starts fail again and again in the same way has failed: requests are answered with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from ditile.distributed import env
from ditile.distributed.failure_rules import LaunchLimits
from ditile.distributed.heartbeat import MEMORY_MESSAGE
from ditile.distributed.launch import launch
from ditile.plan.errors import DitileError, RankError, StateError
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.jobs import Drawn, Failure, Job
from ditile.serve.link import GroupSetup, RankLink

LOG = logging.getLogger("ditile")
GroupState = Literal["starting", "ready", "drawing", "down", "failed"]
FAILED_STARTS = 3
"""After how many starts that ended in the same way a group has failed."""
STOPPED_SECONDS = 2.0
"""After how long a rank that the system has stopped counts as failed."""
LONGEST_DELAY = 30.0
"""Seconds between two starts, at most; ranks that never became ready wait 1, 2, 4 .. seconds."""
_FOLDERS = re.compile(r"(?<![\w:/])/(?:[^\s/'\"]+/)+")
"""The folders of a path, which health and clients are not told: they name users and projects."""
STOP_AGAIN_SECONDS = 0.2
"""How often a batch is told to stop, until it has: its call may not have begun yet."""
LEAVE_SECONDS = 10.0
STOP_LIMIT = 120.0
"""Seconds in which a stopped batch has to end, within two steps; after that its ranks are started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Jobs that are drawn by one call.

    Attributes:
        id: of the batch.
        jobs: of one shape.
        inputs: of each job: file name -> content.
    """

    id: str
    jobs: tuple[Job, ...]
    inputs: dict[str, dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class GroupReady:
    """The ranks have loaded the model, and draw what they are given."""

    group: ReplicaGroup
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class BatchBegun:
    """The ranks draw a batch now; a group may be given one before it has ranks for it."""

    group: ReplicaGroup
    batch_id: str


@dataclass(frozen=True, slots=True)
class StepMade:
    """A step of a batch has ended; steps count from 1."""

    group: ReplicaGroup
    batch_id: str
    step: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class PreviewMade:
    """The running latents of a job as a PNG; `index` counts from 0."""

    group: ReplicaGroup
    batch_id: str
    job_id: str
    index: int
    png: bytes


@dataclass(frozen=True, slots=True)
class JobDrawn:
    """A job is done, with its files."""

    group: ReplicaGroup
    batch_id: str
    job_id: str
    drawn: Drawn
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The pipeline has refused a job, on all ranks alike; they live on."""

    group: ReplicaGroup
    batch_id: str
    job_id: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """The last event of a batch whose ranks live. If it was stopped, its jobs have no other event."""

    group: ReplicaGroup
    batch_id: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class GroupDown:
    """The ranks have ended. They are started again, unless the group has failed without ever being ready.

    Attributes:
        batch_id: the batch that is lost; None if there was none.
        error: what `launch` raised; an error other than `RankError` before the group was ever ready says that the
            model, the plan or an option does not fit.
    """

    group: ReplicaGroup
    failure: Failure
    batch_id: str | None
    error: DitileError


GroupEvent = GroupReady | BatchBegun | StepMade | PreviewMade | JobDrawn | JobFailed | BatchEnded | GroupDown


class ReplicaGroup(ABC):
    """The ranks of one replica of the model, wherever they are. All methods are called in the loop of the server.

    Args:
        name: of the replica.
        loop: the event loop of the server.
        on_event: called there with each event.

    Attributes:
        state: what the ranks do.
        facts: of the model; None before the ranks were ready for the first time.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, on_event: Callable[[GroupEvent], None]) -> None:
        self.name = name
        self.state: GroupState = "starting"
        self.facts: ModelFacts | None = None
        self._loop, self._on_event = loop, on_event
        self._batch_id: str | None = None
        self._last_line = ""

    @abstractmethod
    def start(self) -> None:
        """Starts the ranks, and starts them again when they fail."""

    @abstractmethod
    def draw(self, batch: Batch) -> None:
        """Gives the ranks, which are ready, a batch to draw."""

    @abstractmethod
    def stop(self, batch_id: str) -> None:
        """Ends a batch within two steps on every rank; does nothing if it has ended."""

    @abstractmethod
    async def end(self) -> None:
        """Ends the ranks for good; returns when no process is left."""

    def _note_batch(self, batch: Batch) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Notes that the ranks draw a batch; returns the message that tells them so, and its files."""
        assert self.state == "ready", "a batch for ranks that draw another"
        self.state, self._batch_id = "drawing", batch.id
        jobs = [{"id": job.id, "request": job.request.to_json()} for job in batch.jobs]
        files = {f"{job}/{name}": content for job, given in batch.inputs.items() for name, content in given.items()}
        return {"draw": batch.id, "jobs": jobs}, files

    def _note_ready(self, facts: ModelFacts) -> None:
        self.facts, self.state = facts, "ready"
        self._last_line = ""
        self._on_event(GroupReady(self, facts))

    def _note_down(self, error: DitileError, has_failed: bool = False) -> None:
        """Tells that the ranks have ended, or with `has_failed` that starting them again has not helped."""
        failure = describe_failed_group(error, self.facts is not None) if has_failed else describe_group_failure(error)
        self._log_end(error, failure, has_failed)
        lost, self._batch_id = self._batch_id, None
        self.state = "failed" if has_failed else "down"
        self._on_event(GroupDown(self, failure, lost, error))

    def _log_end(self, error: DitileError, failure: Failure, has_failed: bool) -> None:
        """Logs the end of the ranks: with the traceback once, and of a group that has failed one line once."""
        if has_failed:
            if self.state != "failed":
                LOG.error("replica %s has failed: %s", self.name, failure.message)
            return
        # Of a model that does not fit the command tells when it ends.
        if not isinstance(error, RankError) and self.facts is None:
            return
        line = str(error)
        traceback = getattr(error, "traceback", "").rstrip()
        if traceback and line != self._last_line:
            LOG.error("replica %s: %s\n%s", self.name, line, traceback)
        else:
            LOG.error("replica %s: %s", self.name, line)
        self._last_line = line

    def _note_ended(self, batch_id: str, stopped: bool) -> None:
        # Ranks that have gone are not ready because their batch was stopped.
        self.state, self._batch_id = "ready" if self.state == "drawing" else self.state, None
        self._on_event(BatchEnded(self, batch_id, stopped))

    def _handle_answer(self, message: dict[str, Any], files: dict[str, bytes]) -> None:
        """Tells what rank 0 has answered."""
        if "ready" in message:
            self._note_ready(ModelFacts.from_json(message["ready"]))
            return
        batch_id = message["batch"]
        if "step" in message:
            self._on_event(StepMade(self, batch_id, *message["step"]))
        elif "preview" in message:
            self._on_event(PreviewMade(self, batch_id, message["job"], message["preview"], files["preview"]))
        elif "drawn" in message:
            drawn = Drawn(**message["drawn"] | {"size": tuple(message["drawn"]["size"])})
            self._on_event(JobDrawn(self, batch_id, message["job"], drawn, files))
        elif "failed" in message:
            self._on_event(JobFailed(self, batch_id, message["job"], Failure(**message["failed"])))
        elif "ended" in message:
            self._note_ended(batch_id, message["ended"]["stopped"])


class RankGroup(ReplicaGroup):
    """The ranks of one replica, on this machine.

    Args:
        name: of the replica.
        setup: what they load.
        loop: the event loop of the server, in which all methods are called.
        on_event: called there with each event.
    """

    def __init__(
        self, name: str, setup: GroupSetup, loop: asyncio.AbstractEventLoop, on_event: Callable[[GroupEvent], None]
    ) -> None:
        super().__init__(name, loop, on_event)
        self._setup = setup
        self._links: list[RankLink] = []
        # One thread, so that messages keep their order; links block while a rank computes and files are large.
        self._sender = ThreadPoolExecutor(1, f"links-{name}")
        self._ending, self._killed = threading.Event(), threading.Event()
        self._ended = asyncio.Event()
        self._repeat: asyncio.TimerHandle | None = None
        self._stopping, self._stop_began, self._hangs = "", 0.0, threading.Event()

    def start(self) -> None:
        """Starts the ranks, and starts them again when they fail."""
        threading.Thread(target=self._keep_ranks_alive, name=f"ranks-{self.name}", daemon=True).start()

    def draw(self, batch: Batch) -> None:
        """Gives the ranks, which are ready, a batch to draw."""
        self._send(*self._note_batch(batch))
        self._on_event(BatchBegun(self, batch.id))

    def stop(self, batch_id: str) -> None:
        """Ends a batch within two steps on every rank; does nothing if it has ended."""
        if self._batch_id != batch_id or self.state != "drawing" or self._ending.is_set():
            return
        if self._stopping != batch_id:
            self._stopping, self._stop_began = batch_id, time.monotonic()
        elif time.monotonic() - self._stop_began > STOP_LIMIT:
            self._hangs.set()
            return
        self._send({"stop": batch_id})
        self._repeat = self._loop.call_later(STOP_AGAIN_SECONDS, self.stop, batch_id)

    async def end(self) -> None:
        """Ends the ranks for good; returns when no process is left."""
        self._ending.set()
        self._send({"leave": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), 0.1 if self.state != "ready" else LEAVE_SECONDS)
        self._killed.set()
        await self._ended.wait()
        self._sender.shutdown()

    def _send(self, message: dict[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        self._sender.submit(_send_to_all, list(self._links), message, files)

    def _keep_ranks_alive(self) -> None:
        """Starts the ranks whenever they have ended. A group that fails without ever being ready is left alone: what
        ranks lacked three times will not come. One that was ready may get it back, such as memory of a GPU."""
        delay, failed_starts, has_been_ready = 0.0, Counter[str](), False
        while not self._ending.is_set():
            error, was_ready = self._run_ranks()
            if was_ready:
                delay, has_been_ready = 0.0, True
                failed_starts.clear()
            else:
                delay = min(LONGEST_DELAY, max(1.0, 2 * delay))
                failed_starts[name_cause(error)] += 1
            has_failed = max(failed_starts.values(), default=0) >= FAILED_STARTS
            if not self._ending.is_set():
                self._post(self._note_down, error, has_failed)
            if has_failed and not has_been_ready:
                break
            self._ending.wait(delay)
        self._loop.call_soon_threadsafe(self._ended.set)

    def _run_ranks(self) -> tuple[DitileError, bool]:
        """Runs the ranks until they end; returns how they did, and whether they were ready to draw."""
        world, ready = self._setup.plan.world, threading.Event()
        error: DitileError = StateError("the ranks have left")
        self._hangs.clear()
        try:
            pairs = [socket.socketpair() for _ in range(world)]
        except OSError as raised:  # of too many open files
            return _describe_failed_start(raised), False
        links = [RankLink(ours.detach()) for ours, _ in pairs]
        reader = threading.Thread(target=self._receive_answers, args=(links[0], ready), daemon=True)
        try:
            self._post(self._note_links, links)
            reader.start()
            launch(
                serve_rank,
                world,
                (self._setup,),
                threads=self._setup.engine.threads,
                stall_timeout=self._setup.engine.stall_timeout,
                limits=LaunchLimits(stopped=STOPPED_SECONDS),
                links=[theirs.fileno() for _, theirs in pairs],
                check=self._raise_if_killed,
                local_ranks=self._setup.local_ranks,
            )
        except DitileError as raised:
            error = raised
        except OSError as raised:  # of a full disk, or too many processes
            error = _describe_failed_start(raised)
        finally:
            for _, theirs in pairs:
                theirs.close()
            reader.join()
            for link in links:
                link.close_connection()
        return error, ready.is_set()

    def _raise_if_killed(self) -> None:
        if self._killed.is_set():
            raise StateError("the server ends")
        if self._hangs.is_set():
            raise RankError(0, "hangs", f"a stopped call did not end in {STOP_LIMIT:.0f} s")

    def _receive_answers(self, link: RankLink, ready: threading.Event) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message, files = link.receive_message()
                if "ready" in message:
                    ready.set()
                self._post(self._handle_answer, message, files)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        # The loop is closed if the server ended in a hurry.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _note_links(self, links: list[RankLink]) -> None:
        self._links = links
        # A group that has failed has done so until its ranks are ready.
        if self.state != "failed":
            self.state = "starting"

    def _note_ended(self, batch_id: str, stopped: bool) -> None:
        if self._repeat is not None:
            self._repeat.cancel()
        super()._note_ended(batch_id, stopped)


def _describe_failed_start(error: OSError) -> RankError:
    return RankError(0, type(error).__name__, f"not started: {error}")


def serve_rank(setup: GroupSetup) -> None:
    """Draws what the server asks this rank for, until it says that the rank may leave, or has gone."""
    # It imports torch, which the server never does.
    from ditile.serve.rank import RankServer

    fd = env.read_link_fd()
    assert fd is not None, "a rank of the server has a link to it"
    # The standard output is the server's.
    with contextlib.redirect_stdout(sys.stderr):
        RankServer(setup, RankLink(fd)).serve_batches()


def name_cause(error: DitileError) -> str:
    """The way in which ranks have ended: the type of an error, or the signal."""
    return error.cause if isinstance(error, RankError) else type(error).__name__


def describe_group_failure(error: DitileError) -> Failure:
    """What a client is told of ranks that have ended: one line, without a traceback."""
    line = _shorten_reason(error)
    if MEMORY_MESSAGE.search(line) or "out of memory" in line:
        return Failure(code="out_of_memory", message=f"{line}; ask for a smaller picture, or fewer at once")
    return Failure(code="rank_failed", message=f"{line}; the ranks are started again")


def describe_failed_group(error: DitileError, has_been_ready: bool) -> Failure:
    """The same of ranks whose starts have failed in the same way."""
    rest = f"they are started every {LONGEST_DELAY:.0f} s" if has_been_ready else "mend this and start the server again"
    message = f"{_shorten_reason(error)}; {FAILED_STARTS} starts of the ranks ended so; {rest}"
    return Failure(code="ranks_failed", message=message)


def _shorten_reason(error: DitileError) -> str:
    return _FOLDERS.sub("", " ".join(str(error).split()))[:300]


def _send_to_all(links: list[RankLink], message: dict[str, Any], files: Mapping[str, bytes] | None) -> None:
    for link in links:
        # Of a rank that has gone the launcher tells.
        with contextlib.suppress(OSError, EOFError):
            link.send_message(message, files)

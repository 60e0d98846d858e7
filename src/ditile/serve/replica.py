"""A replica of the model: ranks that run in a thread of the server, and are started again when one fails.

A replica reports by events, which arrive in order in the server's event loop. Whatever ends the ranks (a signal, a rank
that hangs, an error that leaves messages in flight) ends only the batch that they were generating, and no other job. If
the starts of a replica keep failing in the same way, the replica has failed, and requests are answered with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from ditile.distributed import env
from ditile.distributed.failure_detection import LaunchLimits
from ditile.distributed.heartbeat import MEMORY_MESSAGE
from ditile.distributed.launch import launch
from ditile.plan.errors import DitileError, RankError, StateError, describe_class_and_text
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.jobs import Failure, Files, JobResult
from ditile.serve.link import Batch, Message, SocketLink, WorkerSetup

LOG = logging.getLogger("ditile")
# The states of a replica, under the names that /health reports.
ReplicaState = Literal["asleep", "starting", "ready", "drawing", "down", "failed"]
# A replica has failed after this many starts with the same failure since its ranks were last ready.
FAILED_STARTS = 3
# The cause of a failure if the server could not start the processes of ranks.
NOT_STARTED = "not started"
# Seconds until a rank stopped by the system counts as failed.
STOPPED_SECONDS = 2.0
# At most these seconds between two starts; ranks that never became ready wait 1, 2, 4 .. seconds.
LONGEST_DELAY = 30.0
# Seconds between requests to stop a batch. They are repeated because its call may not have begun yet.
STOP_AGAIN_SECONDS = 0.2
# Seconds for ranks to exit before they are killed: idle ranks, and busy or loading ones.
LEAVE_SECONDS = 10.0
LEAVE_BUSY_SECONDS = 0.1
# Seconds for a stopped batch to end, within two steps. After that its ranks are started again.
STOP_LIMIT = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaEvent:
    """One report of a replica.

    Attributes:
        kind: "ready" (the ranks have loaded the model), "step", "preview", "done" or "failed" (a job), "ended" (the
            last event of a batch whose ranks live; jobs of a batch that was stopped have no other event), "down" (the
            ranks have failed), or "asleep" (they have ended because there was nothing to do).
        batch_id: None for "ready", and for "down" if no batch was lost.
        job_id: the job of a "preview", "done" or "failed"; otherwise empty.
        step, num_steps: in a "step", its number from 1 and the number of all steps; in a "preview", its number from 0.
        files: in a "done", the files by name; in a "preview", a PNG named "preview".
        result: only in a "done".
        failure: only in a "failed" or "down".
        error: only in a "down", the error of `launch`. If it is no `RankError` and the replica was never ready, the
            model, the plan or an option does not fit.
    """

    kind: Literal["ready", "step", "preview", "done", "failed", "ended", "down", "asleep"]
    replica: Replica
    batch_id: str | None = None
    job_id: str = ""
    step: int = 0
    num_steps: int = 0
    files: Files = field(default_factory=dict)
    result: JobResult | None = None
    failure: Failure | None = None
    error: DitileError | None = None


# A function called in the server's event loop with each event of a replica.
EventHandler = Callable[[ReplicaEvent], None]


class Replica(ABC):
    """The ranks of one replica, on any machine. The server's event loop creates it and calls it.

    Attributes:
        state: what the ranks are doing.
        facts: the facts of the model; None before the ranks are ready for the first time.
    """

    def __init__(self, name: str, setup: WorkerSetup, on_event: EventHandler) -> None:
        self.name = name
        self.state: ReplicaState = "asleep"
        self.facts: ModelFacts | None = None
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._batch_id: str | None = None
        self._last_line = ""
        # A single thread keeps messages in order. Links can block while a rank computes or files are large.
        self._sender = ThreadPoolExecutor(1, f"links-{name}")
        self._is_ready = threading.Event()
        self._is_ending = threading.Event()
        # Why the ranks are to be ended at once.
        self._kill_reason: DitileError | None = None
        self._has_ended = asyncio.Event()
        # When the ranks were first told to stop their batch.
        self._stopped_at: float | None = None
        self._next_stop: asyncio.TimerHandle | None = None
        # Seconds without a batch after which the ranks end. None keeps them.
        self._idle_seconds = setup.options.idle_unload
        self._idle_timer: asyncio.TimerHandle | None = None
        self._leaves = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _run_ranks(self, leaves: threading.Event) -> DitileError | None:
        """Run the ranks until they end, or until `leaves` is set. Return the reason; None only if `leaves` is set."""

    @abstractmethod
    def _deliver(self, message: Message, files: Files | None) -> None:
        """Send every rank a message."""

    def start(self) -> None:
        """Start the ranks, and start them again when they fail."""
        self.state = "starting"
        # Each start has its own events, since the thread of an earlier start may not have ended yet.
        has_ended = asyncio.Event()
        self._has_ended = has_ended
        self._leaves = threading.Event()
        self._kill_reason = None
        args = (has_ended, self._leaves, self._thread)
        # The thread of the executor starts now, since later the system may allow no more threads.
        self._sender.submit(int)
        name = f"ranks-{self.name}"
        self._thread = threading.Thread(target=self._keep_ranks_alive, args=args, name=name, daemon=True)
        self._thread.start()

    def generate(self, batch: Batch) -> None:
        """Give a batch to the ranks, which must be ready."""
        assert self.state == "ready", "a batch for ranks that have another"
        self._stop_idle_timer()
        self.state = "drawing"
        self._batch_id = batch.id
        self._stopped_at = None
        self._sender.submit(self._deliver, *batch.to_message())

    def stop(self, batch_id: str) -> None:
        """End a batch within two steps on every rank; does nothing if it has ended."""
        if self._batch_id != batch_id or self.state != "drawing" or self._is_ending.is_set():
            return
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at > STOP_LIMIT:
            self._kill_reason = RankError(0, "hangs", f"a stopped call did not end in {STOP_LIMIT:.0f} s")
            return
        self._sender.submit(self._deliver, {"stop": batch_id}, None)
        self._next_stop = self._loop.call_later(STOP_AGAIN_SECONDS, self.stop, batch_id)

    async def end(self) -> None:
        """End the ranks for good, and return when no process is left."""
        self._is_ending.set()
        self._stop_idle_timer()
        # Ranks of a replica that is asleep may not have left yet.
        if self._thread is not None:
            self._sender.submit(self._deliver, {"leave": True}, None)
            seconds = LEAVE_SECONDS if self.state in ("ready", "asleep") else LEAVE_BUSY_SECONDS
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), seconds)
            self._kill_reason = StateError("the server ends")
            await self._has_ended.wait()
        self._sender.shutdown()

    def _keep_ranks_alive(
        self, has_ended: asyncio.Event, leaves: threading.Event, earlier_thread: threading.Thread | None
    ) -> None:
        """Start the ranks, and start them again when they fail, until they are to end or new starts cannot help."""
        delay = 0.0
        failed_starts = Counter[str]()
        has_been_ready = False
        try:
            # Ranks that are still leaving hold the memory that new ranks need.
            if earlier_thread is not None:
                earlier_thread.join()
            while not (self._is_ending.is_set() or leaves.is_set()):
                self._is_ready.clear()
                error = self._run_ranks(leaves)
                if error is None or leaves.is_set():
                    return
                # Ranks that were ready have shown that the model and the plan fit.
                if self._is_ready.is_set():
                    delay = 0.0
                    has_been_ready = True
                    failed_starts.clear()
                else:
                    # The delay doubles, since a missing resource may take long to come back.
                    delay = min(LONGEST_DELAY, max(1.0, 2 * delay))
                    failed_starts[name_cause(error)] += 1
                has_failed = max(failed_starts.values(), default=0) >= FAILED_STARTS
                if not self._is_ending.is_set():
                    self._post(self._note_down, error, has_failed)
                # What three starts lacked will stay missing. But what ranks had when they were ready may come back,
                # such as GPU memory, and so may the threads of the server.
                if has_failed and not has_been_ready and name_cause(error) != NOT_STARTED:
                    return
                self._is_ending.wait(delay)
                # Clear this before `_is_ending` is read again: an ending server sets that first, and then its reason.
                self._kill_reason = None
        finally:
            # Whatever ends this thread, the server must not wait for it when it ends.
            self._post(has_ended.set)

    def _raise_if_killed(self) -> None:
        if self._kill_reason is not None:
            raise self._kill_reason

    def _take_message(self, message: Message, files: Files) -> None:
        """Hand a message of rank 0 to the event loop, from any thread."""
        if message["kind"] == "ready":
            self._is_ready.set()
        self._post(self._handle_message, message, files)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        # The loop is closed if the server ended in a hurry.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # The event loop calls the following methods.

    def _tell(self, kind: Any, batch_id: str | None = None, **values: Any) -> None:
        if self._idle_seconds is not None and kind in ("ready", "ended"):
            self._stop_idle_timer()
            self._idle_timer = self._loop.call_later(self._idle_seconds, self._fall_asleep)
        self._on_event(ReplicaEvent(kind=kind, replica=self, batch_id=batch_id, **values))

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _fall_asleep(self) -> None:
        """End the ranks, which have nothing to do, until the next start."""
        if self.state == "ready" and not self._is_ending.is_set():
            self.state = "asleep"
            self._leaves.set()
            self._sender.submit(self._deliver, {"leave": True}, None)
            self._tell("asleep")

    def _note_start(self) -> None:
        # A replica that has failed counts as failed until its ranks are ready.
        if self.state != "failed":
            self.state = "starting"

    def _note_ready(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.state = "ready"
        self._last_line = ""
        self._tell("ready")

    def _note_ended(self, batch_id: str) -> None:
        if self._next_stop is not None:
            self._next_stop.cancel()
        # Ranks that went down meanwhile are not ready.
        if self.state == "drawing":
            self.state = "ready"
        self._batch_id = None
        self._tell("ended", batch_id)

    def _note_down(self, error: DitileError, has_failed: bool = False) -> None:
        """Report that the ranks have ended. `has_failed` says that starting them again has not helped."""
        # The ranks failed after they had been told to leave.
        if self.state == "asleep":
            return
        if has_failed:
            is_started_again = self.facts is not None or name_cause(error) == NOT_STARTED
            failure = describe_failed_replica(error, is_started_again)
            # Logged once, in one line; each start has already logged its own error.
            if self.state != "failed":
                LOG.error("replica %s has failed: %s (%s)", self.name, failure.message, error)
        else:
            failure = describe_lost_ranks(error)
            # If the model does not fit, the command itself reports it when it ends.
            if isinstance(error, RankError) or self.facts is not None:
                line = str(error)
                traceback = getattr(error, "traceback", "").rstrip()
                # Starts that fail in the same way log only one traceback.
                if traceback and line != self._last_line:
                    line = f"{line}\n{traceback}"
                LOG.error("replica %s: %s", self.name, line)
                self._last_line = str(error)
        lost_batch_id = self._batch_id
        self._batch_id = None
        self.state = "failed" if has_failed else "down"
        self._tell("down", lost_batch_id, failure=failure, error=error)

    def _handle_message(self, message: Message, files: Files) -> None:
        """Report a message of rank 0. It has the fields of an event as JSON types."""
        values = dict(message)
        kind = values.pop("kind")
        if kind == "ready":
            self._note_ready(ModelFacts.from_json(values["facts"]))
            return
        if kind == "ended":
            self._note_ended(values["batch_id"])
            return
        if kind == "done":
            values["result"] = JobResult.from_json(values["result"])
        elif kind == "failed":
            values["failure"] = Failure(**values["failure"])
        self._tell(kind, files=files, **values)


class LocalReplica(Replica):
    """The ranks of one replica on this machine."""

    _links: Sequence[SocketLink] = ()

    def _deliver(self, message: Message, files: Files | None) -> None:
        for link in self._links:
            # The launcher reports a rank that has gone.
            with contextlib.suppress(OSError, EOFError):
                link.send_message(message, files)

    def _run_ranks(self, leaves: threading.Event) -> DitileError | None:
        try:
            launch_linked_ranks(self._setup, self._receive_messages, self._raise_if_killed)
        except DitileError as error:
            return error
        except (OSError, RuntimeError) as error:
            # The disk is full, or there are too many open files, processes or threads for the moment.
            return RankError(0, NOT_STARTED, f"{NOT_STARTED}: {describe_class_and_text(error)}")
        return StateError("the ranks have left")

    def _receive_messages(self, links: Sequence[SocketLink]) -> None:
        self._links = links
        self._post(self._note_start)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take_message(*links[0].receive_message())


def launch_linked_ranks(
    setup: WorkerSetup, receive: Callable[[Sequence[SocketLink]], None], check: Callable[[], None]
) -> None:
    """Run ranks that have a link to this process, until they end.

    Args:
        receive: called in a thread with the links; it must return once the ranks close their ends.
        check: as in `launch`.

    Raises:
        DitileError: as `launch` does.
        OSError, RuntimeError: if the system has not enough files, processes or threads.
    """
    pairs = [socket.socketpair() for _ in range(setup.plan.world)]
    links = [SocketLink(ours.detach()) for ours, _ in pairs]
    reader = threading.Thread(target=receive, args=(links,), daemon=True)
    try:
        reader.start()
        launch(
            run_worker,
            setup.plan.world,
            (setup,),
            threads=setup.options.threads,
            stall_timeout=setup.options.stall_timeout,
            limits=LaunchLimits(stopped=STOPPED_SECONDS),
            links=[theirs.fileno() for _, theirs in pairs],
            check=check,
            local_ranks=setup.local_ranks,
        )
    finally:
        # The reader ends only when every process has closed the other end of its link.
        for _, theirs in pairs:
            theirs.close()
        if reader.ident is not None:
            reader.join()
        for link in links:
            link.close_connection()


def run_worker(setup: WorkerSetup) -> None:
    """Serve the server's requests on this rank, until the server dismisses the rank or has gone."""
    # These import torch, which the server never does.
    from ditile.serve.forward.ranks import ForwardRank
    from ditile.serve.worker import RankWorker

    rank_class = RankWorker if setup.options.forward is None else ForwardRank
    fd = env.read_link_fd()
    assert fd is not None, "a rank of the server has a link to it"
    # The standard output belongs to the server.
    with contextlib.redirect_stdout(sys.stderr):
        rank_class(setup, SocketLink(fd)).serve()


def name_cause(error: DitileError) -> str:
    """Return how ranks have ended: the type of an error, or the signal."""
    if isinstance(error, RankError):
        return error.cause
    return type(error).__name__


def describe_lost_ranks(error: DitileError) -> Failure:
    """Return the message for a client about ranks that have ended: one line, without a traceback."""
    line = _name_end(error)
    text = str(error)
    if MEMORY_MESSAGE.search(text) or "out of memory" in text:
        message = f"{line}: out of memory; ask for a smaller image, or fewer at once"
        return Failure(code="out_of_memory", message=message)
    return Failure(code="rank_failed", message=f"{line}; the ranks are started again")


def describe_failed_replica(error: DitileError, is_started_again: bool) -> Failure:
    """Return the message for a client about ranks whose starts have failed in the same way."""
    remedy = "mend this and start the server again"
    if is_started_again:
        remedy = f"they are started every {LONGEST_DELAY:.0f} s"
    message = f"{_name_end(error)}; {FAILED_STARTS} starts of the ranks ended so; the server's log says why; {remedy}"
    return Failure(code="ranks_failed", message=message)


def _name_end(error: DitileError) -> str:
    """Return how ranks have ended, without the text of an error: that may name folders and hosts of this machine."""
    cause = name_cause(error).removeprefix("builtins.")
    if isinstance(error, RankError):
        return f"rank {error.rank}: {cause}"
    return f"the ranks: {cause}"

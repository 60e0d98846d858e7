"""The service's state of one job, with its batch, watchers and outcome, and of one batch."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ditile.serve.jobs import Failure, Job, JobResult, State
from ditile.serve.replica import Replica

# The number of newest events to keep for a slow watcher.
MAX_NEWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How a job ends; the state `queued` leaves it to the next server.

    Attributes:
        accepts_result: whether a result that still arrives replaces this outcome.
    """

    state: State = "failed"
    failure: Failure | None = None
    result: JobResult | None = None
    accepts_result: bool = False


@dataclass(slots=True, eq=False)
class _Watcher:
    """One reader of a job's news."""

    pending: deque[Job] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class JobState:
    """A job of this server.

    Attributes:
        job: the job as it is now, without a preview.
        timer: the timer of its timeout; None for a job that had ended before this server started.
        batch: its batch; None while it waits.
        outcome: the outcome that the job gets when its ranks have stopped; None while nothing has ended it.
        is_ending: whether its end is being written to disk.
        is_settled: whether there will be no more news of it.
    """

    job: Job
    timer: asyncio.TimerHandle | None = None
    batch: RunningBatch | None = None
    outcome: JobOutcome | None = None
    is_ending: bool = False
    is_settled: bool = False
    watchers: set[_Watcher] = field(default_factory=set)

    def publish(self, news: Job) -> None:
        """Replace the job, and notify its watchers."""
        self.job = dataclasses.replace(news, preview=None, preview_index=0)
        for watcher in self.watchers:
            # A step replaces the step before it, so that steps push no preview out of the queue.
            if watcher.pending and watcher.pending[-1].preview is None:
                watcher.pending.pop()
            watcher.pending.append(news)
            watcher.has_news.set()

    async def watch(self) -> AsyncIterator[Job]:
        """Yield the job's current state, and then its news until it is settled."""
        # The watcher is added before the first event is sent, so that it misses none.
        watcher = _Watcher()
        self.watchers.add(watcher)
        try:
            yield self.job
            while watcher.pending or not self.is_settled:
                if watcher.pending:
                    yield watcher.pending.popleft()
                else:
                    watcher.has_news.clear()
                    await watcher.has_news.wait()
        finally:
            self.watchers.discard(watcher)


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that a replica has, or is about to get.

    Attributes:
        open: its jobs that have not ended and are not about to end.
        begun: when its ranks began it, by the monotonic clock; None before, while its jobs count as waiting.
    """

    id: str
    replica: Replica
    open: list[JobState]
    num_jobs: int
    begun: float | None = None

"""The book of jobs: all of them as they are now, in memory and on disk, and told to who watches.

The store works in a thread of its own, in the order in which it is called, so that the event loop never waits for a
disk. What a job ends with is told when it is on disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ditile.plan.errors import StateError
from ditile.serve.jobs import Failure, Job, JobEvent, JobNotFoundError, Kind
from ditile.serve.store import JobStore

LOG = logging.getLogger("ditile")
T = TypeVar("T")
MAX_NEWS = 16
"""Events that are kept for a watcher who does not come for them: the newest."""


@dataclass(slots=True, eq=False)
class _Watcher:
    """News of a job for one who watches it. Steps replace each other while nobody comes for them."""

    pending: deque[JobEvent] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    def put_event(self, event: JobEvent) -> None:
        if self.pending and self.pending[-1].preview is None:
            self.pending.pop()
        self.pending.append(event)
        self.wake.set()

    def close_queue(self) -> None:
        self.is_closed = True
        self.wake.set()

    async def wait_for_event(self) -> JobEvent | None:
        """The next event; None after the last."""
        while not self.pending:
            if self.is_closed:
                return None
            self.wake.clear()
            await self.wake.wait()
        return self.pending.popleft()


class JobBook:
    """All jobs of one server. All but `read_file` is called in the event loop in which it was opened.

    Args:
        keep_results: seconds from a job's end until it expires.
    """

    def __init__(self, keep_results: float) -> None:
        self._keep_results = keep_results
        self._jobs: dict[str, Job] = {}
        """In the order in which they came."""
        self._news: dict[str, JobEvent] = {}
        """The last event of each job that has not ended, without its preview."""
        self._watchers: dict[str, set[_Watcher]] = {}
        self._unsaved: list[Job] = []
        """Jobs that have ended, but could not be written."""
        self._disk = ThreadPoolExecutor(1, "store")
        self._sweeper: asyncio.Task[None] | None = None

    async def open_book(self, folder: Path) -> list[Job]:
        """Opens the store in a folder, and returns the jobs that wait there.

        Raises:
            StateError: if the folder cannot be used, or another server uses it.
        """
        self._store = await self._run_on_disk(JobStore, folder, self._keep_results)
        try:
            jobs = await self._run_on_disk(self._store.recover_jobs)
        except StateError:
            await self._run_on_disk(self._store.close)
            raise
        for job in jobs:
            self._enter_job(job)
        self._sweeper = asyncio.create_task(self._sweep_results())
        return [job for job in jobs if not job.has_ended]

    async def close_book(self) -> None:
        """Lets another server use the folder, after all that was to be written."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        await self._run_on_disk(self._store.close)
        self._disk.shutdown()

    def get_job(self, job_id: str) -> Job:
        """A job as it is now. Raises `JobNotFoundError` if there is none."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise JobNotFoundError(f"there is no job {job_id[:64]!r}; it may have expired") from None

    def list_jobs(self, owner: str, kind: Kind) -> list[Job]:
        """The jobs of an owner, in the order in which they came."""
        return [job for job in self._jobs.values() if job.owner == owner and job.kind == kind]

    async def accept_job(self, job: Job, inputs: Mapping[str, bytes]) -> None:
        """Keeps a new job; when this returns it is on disk. Raises `StateError` if it cannot be written."""
        await self._run_on_disk(self._store.accept_job, job, inputs)
        self._enter_job(job)

    async def save_jobs(self, jobs: list[Job]) -> None:
        """Writes jobs as they are; what cannot be written is logged, and those that have ended are tried again."""
        try:
            await self._run_on_disk(self._store.save_jobs, jobs)
        except StateError as error:
            LOG.error("%s", error)
            self._unsaved += [job for job in jobs if job.has_ended]

    async def end_job(self, job: Job, files: Mapping[str, bytes]) -> Job:
        """Writes the end of a job and its files, and then tells it; returns how it ended.

        A job whose result cannot be written has failed. One that is not at its end is left to the next server: its
        watchers have no more news.
        """
        if job.has_ended:
            now = time.time()
            job = dataclasses.replace(job, ended=now, expires=now + self._keep_results)
        try:
            await self._run_on_disk(self._store.save_jobs, [job], {job.id: files})
        except StateError as error:
            if job.state == "done":
                failure = Failure(code="internal", message=f"the result cannot be kept: {error}")
                job = dataclasses.replace(job, state="failed", failure=failure, drawn=None, progress=0)
            await self.save_jobs([job])
        self._jobs[job.id] = job
        del self._news[job.id]
        for watcher in self._watchers.pop(job.id, ()):
            watcher.put_event(JobEvent(job=job))
            watcher.close_queue()
        return job

    def tell_event(self, event: JobEvent) -> None:
        """Replaces a job that has not ended, and tells its watchers."""
        self._jobs[event.job.id] = event.job
        self._news[event.job.id] = dataclasses.replace(event, preview=None, preview_index=0)
        for watcher in self._watchers.get(event.job.id, ()):
            watcher.put_event(event)

    def tell_preview(self, job_id: str, preview: bytes, index: int) -> None:
        """Tells the watchers of a job of a new preview, a PNG."""
        self.tell_event(dataclasses.replace(self._news[job_id], preview=preview, preview_index=index))

    async def watch_job(self, job_id: str) -> AsyncIterator[JobEvent]:
        """First the job as it is, then its news. Raises `JobNotFoundError` if there is none."""
        job = self.get_job(job_id)
        news = self._news.get(job_id)
        if news is None:
            yield JobEvent(job=job)
            return
        watcher = _Watcher()
        self._watchers.setdefault(job_id, set()).add(watcher)
        try:
            yield news
            while (event := await watcher.wait_for_event()) is not None:
                yield event
        finally:
            self._watchers.get(job_id, set()).discard(watcher)

    async def remove_job(self, job_id: str) -> None:
        """Removes a job that has ended, and its files. Raises `StateError` if it cannot be."""
        await self._run_on_disk(self._store.remove_jobs, [job_id])
        self._jobs.pop(job_id, None)

    async def read_inputs(self, job_id: str) -> dict[str, bytes]:
        """The pictures that a job starts from: name -> content. Raises `StateError` if they cannot be read."""
        return await self._run_on_disk(self._store.read_inputs, job_id)

    def read_file(self, job_id: str, name: str) -> bytes:
        """The content of a file of a job. Raises `JobNotFoundError` if there is none of this name."""
        return self._store.read_job_file(job_id, name)

    def _enter_job(self, job: Job) -> None:
        self._jobs[job.id] = job
        if not job.has_ended:
            self._news[job.id] = JobEvent(job=job)

    async def _sweep_results(self) -> None:
        """Removes jobs that have expired, for ever."""
        while True:
            await asyncio.sleep(min(30.0, max(0.05, self._keep_results / 10)))
            now = time.time()
            ids = [job.id for job in self._jobs.values() if job.expires is not None and job.expires <= now]
            for job_id in ids:
                del self._jobs[job_id]
            unsaved = self._unsaved
            self._unsaved = []
            await self.save_jobs(unsaved)
            try:
                await self._run_on_disk(self._store.remove_jobs, ids)
            except StateError as error:
                LOG.error("%s", error)

    def _run_on_disk(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Calls a method of the store in its thread."""
        return asyncio.get_running_loop().run_in_executor(self._disk, function, *args)

"""The service: takes requests as jobs, has groups of ranks draw them, and ends each of them.

All of it runs in one event loop. Groups answer by events; a job's end is told by the book when it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import string
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ditile.plan.errors import DitileError, RankError, StateError
from ditile.plan.plan import Plan
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.book import JobBook
from ditile.serve.group import (
    Batch,
    BatchBegun,
    BatchEnded,
    GroupDown,
    GroupEvent,
    GroupReady,
    JobDrawn,
    PreviewMade,
    ReplicaGroup,
    StepMade,
)
from ditile.serve.jobs import (
    Drawn,
    Failure,
    Job,
    JobEvent,
    JobNotFoundError,
    Kind,
    NotReadyError,
    RanksFailedError,
    Request,
    State,
)
from ditile.serve.metrics import Metrics
from ditile.serve.options import ServeOptions
from ditile.serve.queue import JobQueue

T = TypeVar("T")
GroupFactory = Callable[[str, Callable[[GroupEvent], None]], ReplicaGroup]
"""Makes the group of a replica of this name, which tells its events to a function in the event loop."""

STOP_SECONDS = 10.0
"""How long a server that ends waits for ranks that were told to stop."""
ID_LETTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a job ends with whatever its ranks do; `queued` leaves it to the next server.

    Attributes:
        keeps_result: whether a result that comes all the same is welcome.
    """

    state: State
    failure: Failure | None = None
    keeps_result: bool = False


@dataclass(slots=True)
class _ActiveJob:
    """A job that has not ended.

    Attributes:
        timer: of its timeout.
        batch_id: of its batch; None while it waits.
        is_ending: whether its end is being written to disk.
    """

    timer: asyncio.TimerHandle
    batch_id: str | None = None
    verdict: _Verdict | None = None
    is_ending: bool = False


@dataclass(slots=True)
class _RunningBatch:
    """A batch that a group has, or is about to get.

    Attributes:
        open: ids of its jobs that have not ended, nor are about to.
        is_given: whether the group has it.
        begun: when its ranks began to draw it, by the monotonic clock; None before, while its jobs wait.
    """

    id: str
    group: ReplicaGroup
    open: set[str]
    num_jobs: int
    is_given: bool = False
    begun: float | None = None


class Service:
    """Jobs of one server. All methods are called in the event loop in which it was started.

    Args:
        options: limits, the state folder and the number of replicas.
        make_group: makes the group of ranks of a replica.
        plan: what `describe_plan` says of the plan before anything was drawn, in types of JSON.
    """

    def __init__(self, options: ServeOptions, make_group: GroupFactory, plan: Mapping[str, Any] | None = None) -> None:
        self.options, self.metrics = options, Metrics()
        self._plan, self._last_drawn = dict(plan or {}), dict[str, Any]()
        self._groups = [make_group(str(number), self._handle_event) for number in range(options.num_groups)]
        self._queue, self._max_batch = JobQueue(options.max_queue), options.max_batch
        self._book = JobBook(options.keep_results)
        self._active: dict[str, _ActiveJob] = {}
        self._batches: dict[str, _RunningBatch] = {}
        self._facts: ModelFacts | None = None
        self._failures: dict[str, Failure] = {}
        """Name of a group that is down -> its failure."""
        self._refusal: DitileError | None = None
        self._has_started, self._has_failed = asyncio.Event(), asyncio.Event()
        self._batch_released = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the store, lets the videos wait that an earlier server left, and starts the ranks.

        Raises:
            StateError: if the state folder cannot be used, or another server uses it.
        """
        self._loop = asyncio.get_running_loop()
        for job in await self._book.open_book(self.options.find_state_folder()):
            self._add_to_queue(job)
        for group in self._groups:
            group.start()

    async def wait_until_ready(self) -> None:
        """Returns when a group of ranks can draw.

        Raises:
            DitileError: if the model, the plan or an option does not fit, so that no start will help.
            RanksFailedError: if all starts of the ranks failed in the same way.
            NotReadyError: if the server ended before.
        """
        await self._has_started.wait()
        if self._refusal is not None:
            raise self._refusal
        self._check_not_failed()
        if self._facts is None:
            raise NotReadyError("the server ended before its ranks had loaded the model")

    async def wait_until_failed(self) -> None:
        """Returns when every group has failed in all of its starts."""
        await self._has_failed.wait()

    @property
    def facts(self) -> ModelFacts:
        """What the model takes. Raises `NotReadyError` before the ranks have loaded it."""
        if self._facts is None:
            self._check_not_failed()
            raise _build_start_error()
        return self._facts

    async def submit(self, kind: Kind, owner: str, request: Request, inputs: Mapping[str, bytes] | None = None) -> Job:
        """Takes a job; when this returns it is on disk. If the caller is cancelled meanwhile, so is the job.

        Args:
            kind: of what the job draws.
            owner: the name of the client's key.
            request: what to draw, which `facts.check_options` has taken.
            inputs: name -> content of pictures to start from.

        Raises:
            QueueFullError: if as many jobs wait as may.
            NotReadyError: if the server starts, ends, or cannot write; or its ranks have failed.
        """
        self._check_not_draining()
        self._check_not_failed()
        if self._facts is None:
            raise _build_start_error()
        letters = "".join(secrets.choice(ID_LETTERS) for _ in range(24))
        job = Job(id=f"{kind}_{letters}", owner=owner, kind=kind, request=request)
        accepting = self._spawn_task(self._accept_job(job, inputs or {}))
        try:
            return await asyncio.shield(accepting)
        except asyncio.CancelledError:
            self._spawn_task(self._cancel_unseen_job(accepting, job.id))
            raise

    def find_job(self, job_id: str, owner: str | None) -> Job:
        """A job as it is now. Raises `JobNotFoundError` if there is none of this owner; None is any owner."""
        job = self._book.get_job(job_id)
        if owner not in (None, job.owner):
            raise JobNotFoundError(f"there is no job {job_id[:64]!r}; it may have expired")
        return job

    def list_jobs(
        self, owner: str, kind: Kind, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> list[Job]:
        """Jobs of an owner in the order in which they came.

        Args:
            owner: the name of the client's key.
            kind: of the jobs.
            after: id of the job before the first.
            limit: most jobs.
            newest_first: whether the last comes first.

        Raises:
            JobNotFoundError: if `after` is no job of this owner and kind.
        """
        jobs = self._book.list_jobs(owner, kind)
        if newest_first:
            jobs.reverse()
        if after is None:
            return jobs[:limit]
        if self.find_job(after, owner).kind != kind:
            raise JobNotFoundError(f"{after!r} is no {kind}")
        first = next(k for k, job in enumerate(jobs) if job.id == after) + 1
        return jobs[first : first + limit]

    def watch(self, job_id: str) -> AsyncIterator[JobEvent]:
        """First the job as it is, then news of it, until it has ended or the server ends. A slow watcher misses some.

        Raises:
            JobNotFoundError: at the first event, if there is no such job.
        """
        return self._book.watch_job(job_id)

    async def cancel(self, job_id: str, owner: str) -> Job:
        """Ends a job: one that waits at once, one that runs within two steps on every rank.

        Returns:
            The job as it ended, or as it had ended before.

        Raises:
            JobNotFoundError: if there is none of this owner.
        """
        self.find_job(job_id, owner)
        self._condemn_job(job_id, _Verdict("cancelled"))
        async for event in self.watch(job_id):
            if event.job.has_ended:
                return event.job
        return self._book.get_job(job_id)

    async def delete(self, job_id: str, owner: str) -> None:
        """Removes a job and its files, after it was cancelled if it had not ended.

        Raises:
            JobNotFoundError: if there is none of this owner.
            NotReadyError: if the server ends, or cannot write.
        """
        await self.cancel(job_id, owner)
        self._check_not_draining()
        try:
            await self._book.remove_job(job_id)
        except StateError as error:
            raise NotReadyError(f"the job cannot be removed: {error}") from None

    def read_output(self, job: Job, name: str) -> bytes:
        """The content of an output file or of a picture that the job started from. Any thread may call this.

        Raises:
            JobNotFoundError: if there is none of this name, or none any more.
        """
        return self._book.read_file(job.id, name)

    def describe_health(self) -> dict[str, Any]:
        """Whether requests are served, and what each replica does, in types of JSON."""
        states = {group.state for group in self._groups}
        reasons = [failure.message for failure in self._failures.values()]
        if self._end is not None:
            status = "draining"
        elif states & {"ready", "drawing"}:
            status = "ok"
        elif self._find_failure() is not None:
            status = "failed"
        else:
            status = "starting" if self._facts is None else "restarting"
        waiting, running = self._count_jobs()
        return {
            "status": status,
            "reason": reasons[0] if reasons and status != "ok" else None,
            "replicas": [self._describe_replica(group) for group in self._groups],
            "running": running,
            "waiting": waiting,
        }

    def _describe_replica(self, group: ReplicaGroup) -> dict[str, Any]:
        failure = self._failures.get(group.name)
        return {
            "name": group.name,
            "state": group.state,
            "failure": None if failure is None else failure.code,
            "reason": None if failure is None else failure.message,
        }

    def describe_plan(self) -> dict[str, Any]:
        """The plan, what was predicted, and the last measurement, in types of JSON."""
        known = {} if self._facts is None else {"model": self._facts.name, "plan": self._facts.plan}
        return {**known, **self._plan, "last": self._last_drawn or None}

    def note_plan_facts(self, facts: Mapping[str, Any]) -> None:
        """Adds to what `describe_plan` says."""
        self._plan.update(facts)

    async def drain(self, seconds: float) -> None:
        """Ends the service: takes no more jobs, gives those that run some time, and ends the ranks.

        Videos that wait or are stopped are left to the next server; pictures fail. A second call shortens the time.
        """
        self._loop.call_later(seconds, self._stop_batches)
        if self._end is None:
            self._end = self._loop.create_task(self._end_service())
        await asyncio.shield(self._end)

    # Taking jobs.

    async def _accept_job(self, job: Job, inputs: Mapping[str, bytes]) -> Job:
        with self._queue.reserve_place():
            try:
                await self._book.accept_job(job, inputs)
            except StateError as error:
                raise NotReadyError(f"the job cannot be kept: {error}") from None
        self._add_to_queue(job)
        self.metrics.note_accepted_job(job)
        if self._end is not None:
            self._leave_to_next_server([job.id])
        self._dispatch_batches()
        return job

    async def _cancel_unseen_job(self, accepting: asyncio.Task[Job], job_id: str) -> None:
        """Cancels a job whose client went before it knew the job."""
        with contextlib.suppress(DitileError):
            await accepting
            self._condemn_job(job_id, _Verdict("cancelled"))

    def _add_to_queue(self, job: Job) -> None:
        seconds = min(job.request.timeout or self.options.timeout, self.options.timeout)
        failure = Failure(
            code="timeout", message=f"not drawn within {seconds:g} s; ask for less, or try when fewer jobs wait"
        )
        timer = self._loop.call_later(seconds, self._condemn_job, job.id, _Verdict("failed", failure))
        self._active[job.id] = _ActiveJob(timer)
        self._queue.add_job(job)

    # Drawing them.

    def _dispatch_batches(self) -> None:
        """Gives each group that is ready its next batch."""
        busy = {batch.group.name for batch in self._batches.values()}
        for group in self._groups:
            if self._end is None and group.state == "ready" and group.name not in busy:
                jobs = self._queue.take_batch(self._max_batch)
                if not jobs:
                    break
                batch = _RunningBatch(f"batch_{secrets.token_hex(8)}", group, {job.id for job in jobs}, len(jobs))
                self._batches[batch.id] = batch
                for job in jobs:
                    self._active[job.id].batch_id = batch.id
                self._spawn_task(self._begin_batch(batch, [job.id for job in jobs]))
        self.metrics.set_job_counts(*self._count_jobs())

    async def _begin_batch(self, batch: _RunningBatch, ids: list[str]) -> None:
        inputs = {}
        for job_id in ids:
            if self._book.get_job(job_id).request.options.image is not None:
                try:
                    inputs[job_id] = await self._book.read_inputs(job_id)
                except StateError as error:
                    self._end_job(job_id, "failed", Failure(code="internal", message=str(error)))
        ids = [job_id for job_id in ids if job_id in batch.open]  # others were cancelled meanwhile
        if not ids:
            self._release_batch(batch)
        elif self._end is not None:
            self._leave_to_next_server(ids)
            self._release_batch(batch)
        elif batch.group.state != "ready":
            for job_id in reversed(ids):
                self._active[job_id].batch_id = None
                self._queue.put_back_job(self._book.get_job(job_id))
            self._release_batch(batch)
        else:
            batch.is_given = True
            jobs = tuple(self._book.get_job(job_id) for job_id in ids)
            batch.group.draw(Batch(id=batch.id, jobs=jobs, inputs=inputs))

    def _note_begun(self, batch: _RunningBatch) -> None:
        batch.begun = time.monotonic()
        # Tasks begin in their order, and the store keeps it: nothing of these jobs is written before this.
        self._spawn_task(self._book.save_jobs([self._note_started(job_id) for job_id in batch.open]))
        self.metrics.set_job_counts(*self._count_jobs())

    def _note_started(self, job_id: str) -> Job:
        job = self._book.get_job(job_id)
        job = dataclasses.replace(job, state="running", started=time.time(), attempts=job.attempts + 1)
        self.metrics.note_started_job(job)
        self._book.tell_event(JobEvent(job=job))
        return job

    def _release_batch(self, batch: _RunningBatch) -> None:
        """Lets the group of a batch draw the next one."""
        del self._batches[batch.id]
        self._batch_released.set()
        self._dispatch_batches()

    # What groups tell.

    def _handle_event(self, event: GroupEvent) -> None:
        if isinstance(event, GroupReady):
            self._facts = event.facts
            self._has_failed.clear()
            # A plan with `data` has ranks for so many pictures at once.
            self._max_batch = max(self.options.max_batch, Plan.parse(event.facts.plan).data)
            self._failures.pop(event.group.name, None)
            self._has_started.set()
            self.metrics.note_ready_group(event.group.name)
            self._dispatch_batches()
        elif isinstance(event, GroupDown):
            self._note_group_down(event)
        elif (batch := self._batches.get(event.batch_id)) is None:
            return
        elif isinstance(event, BatchBegun):
            self._note_begun(batch)
        elif isinstance(event, StepMade):
            self._note_step(batch, event.step, event.num_steps)
        elif isinstance(event, BatchEnded):
            if batch.begun is not None:
                seconds = time.monotonic() - batch.begun
                self._queue.note_seconds(seconds / len(self._groups), batch.num_jobs)
            failure = Failure(code="internal", message="the ranks ended without this; send it again")
            self._close_batch(batch, failure)
        elif event.job_id not in batch.open:
            return  # dropped, while others of its batch were drawn
        elif isinstance(event, PreviewMade):
            self._book.tell_preview(event.job_id, event.png, event.index)
        elif isinstance(event, JobDrawn):
            self._note_result(event)
        else:
            self._end_by_verdict(event.job_id, _Verdict("failed", event.failure))

    def _note_group_down(self, event: GroupDown) -> None:
        self._failures[event.group.name] = event.failure
        self.metrics.note_lost_group(event.group.name)
        if self._facts is None and not isinstance(event.error, RankError):
            self._refusal = event.error
            self._has_started.set()
        if event.batch_id is not None and (batch := self._batches.get(event.batch_id)) is not None:
            self._close_batch(batch, event.failure)
        if self._find_failure() is not None:
            self._has_failed.set()
            self._has_started.set()
            self._fail_waiting_pictures(event.failure)

    def _find_failure(self) -> Failure | None:
        """Why nothing can be drawn; None while a group can draw or may come to it."""
        if any(group.state != "failed" for group in self._groups):
            return None
        return self._failures[self._groups[0].name]

    def _fail_waiting_pictures(self, failure: Failure) -> None:
        """Answers the requests that wait. Videos are left to the next server, or to ranks that come up again."""
        for job_id in tuple(self._active):
            if self._book.get_job(job_id).kind == "image":
                self._condemn_job(job_id, _Verdict("failed", failure))

    def _note_step(self, batch: _RunningBatch, step: int, num_steps: int) -> None:
        self.metrics.note_step()
        for job_id in batch.open:
            # 100 is told when the result is on disk.
            job = dataclasses.replace(self._book.get_job(job_id), progress=min(99, 100 * step // max(1, num_steps)))
            self._book.tell_event(JobEvent(job=job, step=step, num_steps=num_steps))

    def _note_result(self, event: JobDrawn) -> None:
        verdict = self._active[event.job_id].verdict
        if verdict is not None and not verdict.keeps_result:
            self._end_by_verdict(event.job_id, verdict)
            return
        # Without what leads to the picture, which is its owner's.
        private = ("files", "seeds")
        drawn = dataclasses.asdict(event.drawn)
        self._last_drawn = {name: value for name, value in drawn.items() if name not in private}
        self._end_job(event.job_id, "done", drawn=event.drawn, files=event.files)

    def _close_batch(self, batch: _RunningBatch, failure: Failure) -> None:
        """Ends the jobs of a batch that have no result."""
        for job_id in tuple(batch.open):
            self._end_by_verdict(job_id, _Verdict("failed", failure))
        self._release_batch(batch)

    # How jobs end.

    def _condemn_job(self, job_id: str, verdict: _Verdict) -> None:
        """Ends a job that waits, drops one from its batch, or stops the batch if nobody wants any more of it."""
        active = self._active.get(job_id)
        if active is None or active.is_ending:
            return
        if active.verdict is None or active.verdict.keeps_result:
            active.verdict = verdict
        batch = self._batches.get(active.batch_id or "")
        if batch is None or not batch.is_given:
            self._queue.remove_job(self._book.get_job(job_id))
            self._end_by_verdict(job_id, verdict)
        elif all(self._active[other].verdict is not None for other in batch.open):
            batch.group.stop(batch.id)  # it says when the ranks have
        elif not verdict.keeps_result:
            self._end_by_verdict(job_id, verdict)

    def _end_by_verdict(self, job_id: str, otherwise: _Verdict) -> None:
        verdict = self._active[job_id].verdict or otherwise
        self._end_job(job_id, verdict.state, verdict.failure)

    def _end_job(
        self,
        job_id: str,
        state: State,
        failure: Failure | None = None,
        drawn: Drawn | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Writes the end of a job, and then tells it."""
        job, active = self._book.get_job(job_id), self._active[job_id]
        if active.is_ending:
            return
        active.is_ending = True
        active.timer.cancel()
        batch = self._batches.get(active.batch_id or "")
        if batch is not None:
            batch.open.discard(job_id)
        if state == "queued":
            # The server ends, which is no fault of the job: this attempt does not count.
            begun = job.state == "running"
            job = dataclasses.replace(job, state=state, progress=0, started=None, attempts=job.attempts - begun)
        else:
            progress = 100 if state == "done" else job.progress
            job = dataclasses.replace(job, state=state, failure=failure, drawn=drawn, progress=progress)
        self._spawn_task(self._write_end(job, files or {}, batch.group.name if batch else "0"))

    async def _write_end(self, job: Job, files: Mapping[str, bytes], group: str) -> None:
        job = await self._book.end_job(job, files)
        del self._active[job.id]
        if job.has_ended:
            self.metrics.note_ended_job(job, group)
        self.metrics.set_job_counts(*self._count_jobs())

    # The end of the server.

    def _check_not_draining(self) -> None:
        if self._end is not None:
            raise NotReadyError("the server ends; try again in a minute")

    def _check_not_failed(self) -> None:
        failure = self._find_failure()
        if failure is not None:
            raise RanksFailedError(failure.message)

    def _leave_to_next_server(self, ids: Iterable[str]) -> None:
        failure = Failure(code="restarted", message="the server ended before this was drawn; send it again")
        for job_id in tuple(ids):
            if self._book.get_job(job_id).kind == "video":
                self._condemn_job(job_id, _Verdict("queued", keeps_result=True))
            else:
                self._condemn_job(job_id, _Verdict("failed", failure, keeps_result=True))

    def _stop_batches(self) -> None:
        """Ends what runs, when its time is over."""
        for batch in tuple(self._batches.values()):
            self._leave_to_next_server(batch.open)
        self._loop.call_later(STOP_SECONDS, self._give_batches_up)

    def _give_batches_up(self) -> None:
        failure = Failure(code="restarted", message="the server ended, and its ranks did not stop; send it again")
        for batch in tuple(self._batches.values()):
            self._close_batch(batch, failure)

    async def _end_service(self) -> None:
        drawn = {job_id for batch in self._batches.values() if batch.begun is not None for job_id in batch.open}
        self._leave_to_next_server([job_id for job_id in self._active if job_id not in drawn])
        while self._batches:
            self._batch_released.clear()
            await self._batch_released.wait()
        await asyncio.gather(*(group.end() for group in self._groups))
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._book.close_book()
        self._has_started.set()

    def _count_jobs(self) -> tuple[int, int]:
        """How many jobs wait, and how many are drawn or written."""
        waiting = len(self._queue) + sum(len(one.open) for one in self._batches.values() if one.begun is None)
        return waiting, len(self._active) - waiting

    def _spawn_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _build_start_error() -> NotReadyError:
    return NotReadyError("the ranks load the model; try again in some seconds")

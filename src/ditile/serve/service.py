"""The service: it accepts requests as jobs, gives them to replicas in batches, and ends each of them.

All of it runs in one event loop, except the store: one thread runs the calls of the store in their order, so that the
loop never waits for a disk. Replicas report by events. The end of a job is published when it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import string
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ditile.plan.errors import DitileError, RankError, StateError
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.job_state import JobOutcome, JobState, RunningBatch
from ditile.serve.jobs import (
    Failure,
    Files,
    Job,
    JobNotFoundError,
    Kind,
    NotReadyError,
    RanksFailedError,
    Request,
)
from ditile.serve.link import Batch, BatchJob
from ditile.serve.metrics import Metrics
from ditile.serve.options import ServeOptions
from ditile.serve.queue import JobQueue
from ditile.serve.replica import EventHandler, Replica, ReplicaEvent
from ditile.serve.store import JobStore

LOG = logging.getLogger("ditile")
T = TypeVar("T")
# A function (name, handler) -> the replica, which reports its events to the handler in the event loop.
ReplicaFactory = Callable[[str, EventHandler], Replica]
# Seconds that an ending server waits for ranks that were told to stop.
STOP_SECONDS = 10.0
# Seconds that jobs wait before a replica that is asleep is started for them.
WAKE_SECONDS = 3.0
ID_LETTERS = string.ascii_lowercase + string.digits


class Service:
    """The jobs of one server. All methods but `read_output` are called in the event loop that started it.

    Attributes:
        plan_facts: extra facts to show in `describe_plan`, as JSON types; more may be added.
    """

    def __init__(
        self, options: ServeOptions, make_replica: ReplicaFactory, plan_facts: Mapping[str, Any] | None = None
    ) -> None:
        self.options = options
        self.metrics = Metrics()
        self.plan_facts = dict(plan_facts or {})
        self._last_result: JsonObject | None = None
        self._replicas = [make_replica(str(number), self._handle_event) for number in range(options.max_replicas)]
        self._queue = JobQueue(options.max_queue)
        self._max_batch = options.max_batch
        # Id -> state, in the order of arrival.
        self._states: dict[str, JobState] = {}
        # Name of a replica -> its batch.
        self._batches: dict[str, RunningBatch] = {}
        # Jobs that have ended, but could not be written.
        self._unsaved: list[Job] = []
        self._disk = ThreadPoolExecutor(1, "store")
        self._facts: ModelFacts | None = None
        # Name of a replica that is down -> its failure.
        self._failures: dict[str, Failure] = {}
        self._refusal: DitileError | None = None
        self._has_started = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._batch_released = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._end: asyncio.Task[None] | None = None
        self._wake_timer: asyncio.TimerHandle | None = None

    async def start(self) -> tuple[int, int]:
        """Open the store, queue the videos that an earlier server left, and start the ranks.

        Return how many ended jobs and waiting videos it left. Raises `StateError` if the state folder cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        folder = self.options.find_state_folder()
        self._store = await self._run_on_disk(JobStore, folder, self.options.keep_results)
        try:
            jobs = await self._run_on_disk(self._store.recover_jobs)
        except StateError:
            await self._run_on_disk(self._store.close)
            raise
        for job in jobs:
            if job.has_ended:
                self._states[job.id] = JobState(job, is_settled=True)
            else:
                self._add_to_queue(job)
        self._sweeper = self._loop.create_task(self._sweep_results())
        for replica in self._replicas[: self.options.replicas]:
            replica.start()
        num_waiting = len(self._queue)
        return len(jobs) - num_waiting, num_waiting

    async def wait_until_ready(self) -> None:
        """Wait until a replica is ready.

        Raises:
            DitileError: if the model, the plan or an option does not fit, so that another start would not help.
            RanksFailedError: if all starts of the ranks failed in the same way.
            NotReadyError: if the server ended first.
        """
        await self._has_started.wait()
        if self._refusal is not None:
            raise self._refusal
        # These raise if the ranks have failed, or the server has ended before they were ready.
        self._check_not_failed()
        _ = self.facts

    async def wait_until_failed(self) -> None:
        """Wait until every replica has failed in all of its starts."""
        await self._has_failed.wait()

    @property
    def facts(self) -> ModelFacts:
        """Return the facts of the model. Raises `NotReadyError` before the ranks have loaded it."""
        if self._facts is None:
            self._check_not_failed()
            raise NotReadyError("the ranks load the model; try again in some seconds")
        return self._facts

    async def submit(self, kind: Kind, owner: str, request: Request, inputs: Files) -> Job:
        """Accept a job and write it to disk before returning. If the caller is cancelled meanwhile, so is the job.

        Args:
            request: the request, already accepted by `facts.check_options`.
            inputs: name -> content of images to start from.

        Raises:
            QueueFullError: if the queue is full.
            NotReadyError: if the server is starting or ending, cannot write, or its ranks have failed.
        """
        self._check_not_draining()
        self._check_not_failed()
        # This raises until the first replica has reported the facts of the model.
        _ = self.facts
        # 24 characters out of 36 cannot be guessed, so the address of an image needs no key.
        letters = "".join(secrets.choice(ID_LETTERS) for _ in range(24))
        job_id = f"{kind}_{letters}"
        job = Job(id=job_id, owner=owner, kind=kind, request=request)
        accepting = self._spawn_task(self._accept_job(job, inputs))
        try:
            # If the client disconnects, the job is still written completely, and cancelled after that.
            return await asyncio.shield(accepting)
        except asyncio.CancelledError:

            async def cancel_unseen_job() -> None:
                with contextlib.suppress(DitileError):
                    await accepting
                    self._cancel_job(self._states[job_id], JobOutcome(state="cancelled"))

            self._spawn_task(cancel_unseen_job())
            raise

    def find_job(self, job_id: str, owner: str | None) -> Job:
        """Return a job in its current state.

        Raises `JobNotFoundError` if the owner has no such job; None stands for any owner.
        """
        return self._find_state(job_id, owner).job

    def list_jobs(
        self, owner: str, kind: Kind, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> list[Job]:
        """Return jobs of an owner in the order of arrival.

        Args:
            after: the id of the job before the first one returned; `JobNotFoundError` is raised if it is not listed.
            limit: the most jobs to return.
        """
        jobs = []
        for state in self._states.values():
            if state.job.owner == owner and state.job.kind == kind:
                jobs.append(state.job)
        if newest_first:
            jobs.reverse()
        start = 0
        if after is not None:
            ids = [job.id for job in jobs]
            if after not in ids:
                raise JobNotFoundError(f"no {kind} has the id {after[:64]!r}; it may have expired")
            start = ids.index(after) + 1
        return jobs[start : start + limit]

    def watch(self, job_id: str) -> AsyncIterator[Job]:
        """Yield the job now and after each change, until the job or the server ends.

        A slow reader misses some changes. Raises `JobNotFoundError` if there is no such job.
        """
        return self._find_state(job_id, None).watch()

    async def cancel(self, job_id: str, owner: str) -> Job:
        """End a job, and return it. A waiting job ends at once, a running one within two steps on every rank.

        Raises `JobNotFoundError` if the owner has no such job.
        """
        state = self._find_state(job_id, owner)
        self._cancel_job(state, JobOutcome(state="cancelled"))
        async for job in self.watch(job_id):
            if job.has_ended:
                return job
        return state.job

    async def delete(self, job_id: str, owner: str) -> None:
        """Remove a job and its files, after cancelling it if it had not ended.

        Raises:
            JobNotFoundError: if the owner has no such job.
            NotReadyError: if the server is ending, or cannot write.
        """
        await self.cancel(job_id, owner)
        # The store is closed at the end of the server, which may have begun meanwhile.
        self._check_not_draining()
        try:
            await self._run_on_disk(self._store.remove_jobs, [job_id])
        except StateError as error:
            raise NotReadyError(_hide_error("the job cannot be removed", error)) from None
        self._states.pop(job_id, None)

    def read_output(self, job: Job, name: str) -> bytes:
        """Return the content of an output file, or of an image that the job started from. Any thread may call this.

        Raises `JobNotFoundError` if there is no such file, or it was removed.
        """
        return self._store.read_job_file(job.id, name)

    def describe_health(self) -> JsonObject:
        """Return whether requests are served, and the state of each replica, as JSON types."""
        replica_states = {replica.state for replica in self._replicas}
        if self._end is not None:
            status = "draining"
        elif replica_states & {"ready", "drawing"}:
            status = "ok"
        elif replica_states == {"asleep"}:
            # The next request starts the ranks.
            status = "unloaded"
        elif self._find_failure() is not None:
            status = "failed"
        elif self._facts is None:
            status = "starting"
        else:
            status = "restarting"
        reason = None
        # While another replica serves, clients need no reason.
        if status != "ok" and self._failures:
            reason = next(iter(self._failures.values())).message
        replicas = []
        for replica in self._replicas:
            values: JsonObject = {"name": replica.name, "state": replica.state, "failure": None, "reason": None}
            failure = self._failures.get(replica.name)
            if failure is not None:
                values |= {"failure": failure.code, "reason": failure.message}
            replicas.append(values)
        waiting, running = self._count_jobs()
        return {
            "status": status,
            "reason": reason,
            "replicas": replicas,
            "running": running,
            "waiting": waiting,
        }

    def describe_plan(self) -> JsonObject:
        """Return the model and its plan, `plan_facts`, and the last result, as JSON types."""
        known: JsonObject = {}
        if self._facts is not None:
            known = {"model": self._facts.name, "plan": self._facts.plan}
            if self._facts.components:
                known["components"] = self._facts.components
        return {**known, **self.plan_facts, "last": self._last_result}

    async def drain(self, seconds: float) -> None:
        """End the service. It accepts no more jobs, gives running ones `seconds`, and ends the ranks.

        Videos that wait or are stopped are left to the next server; images fail. A second call may shorten the time.
        """
        self._loop.call_later(seconds, self._stop_batches)
        if self._end is None:
            self._end = self._loop.create_task(self._end_service())
        await asyncio.shield(self._end)

    # Methods that accept jobs and write them to disk.

    async def _accept_job(self, job: Job, inputs: Files) -> Job:
        with self._queue.reserve_place():
            try:
                await self._run_on_disk(self._store.accept_job, job, inputs)
            except StateError as error:
                raise NotReadyError(_hide_error("the job cannot be kept", error)) from None
        self._add_to_queue(job)
        self.metrics.count("jobs_accepted", job.kind)
        # The server may have begun to end while the job was written.
        if self._end is not None:
            self._leave_to_next_server([self._states[job.id]])
        self._dispatch_batches()
        return job

    def _add_to_queue(self, job: Job) -> None:
        seconds = min(job.request.timeout or self.options.timeout, self.options.timeout)
        message = f"not finished within {seconds:g} s; ask for less, or try when fewer jobs wait"
        outcome = JobOutcome(failure=Failure(code="timeout", message=message))
        state = JobState(job)
        state.timer = self._loop.call_later(seconds, self._cancel_job, state, outcome)
        self._states[job.id] = state
        self._queue.add_job(job)

    def _find_state(self, job_id: str, owner: str | None) -> JobState:
        state = self._states.get(job_id)
        # A job of another owner is reported as missing.
        if state is None or owner not in (None, state.job.owner):
            raise JobNotFoundError(f"there is no job {job_id[:64]!r}; it may have expired")
        return state

    # Methods that form batches and give them to replicas.

    def _dispatch_batches(self) -> None:
        """Give a batch to each replica that is ready."""
        for replica in self._replicas:
            if self._end is not None:
                break
            if replica.state != "ready" or replica.name in self._batches:
                continue
            jobs = self._queue.take_batch(self._max_batch)
            if not jobs:
                break
            batch_id = f"batch_{secrets.token_hex(8)}"
            states = [self._states[job.id] for job in jobs]
            batch = RunningBatch(batch_id, replica, states, len(jobs))
            self._batches[replica.name] = batch
            for state in states:
                state.batch = batch
            self._spawn_task(self._send_batch(batch))
        if len(self._queue) and self._wake_timer is None:
            # If all sleep, no replica can become free while the jobs wait.
            pause = 0.0 if all(replica.state == "asleep" for replica in self._replicas) else WAKE_SECONDS
            self._wake_timer = self._loop.call_later(pause, self._wake_replica)
        self._update_job_counts()

    def _wake_replica(self) -> None:
        """Start one more replica if jobs still wait, and none is starting."""
        self._wake_timer = None
        replica_states = [replica.state for replica in self._replicas]
        if len(self._queue) and self._end is None and "asleep" in replica_states and "starting" not in replica_states:
            self._replicas[replica_states.index("asleep")].start()

    async def _send_batch(self, batch: RunningBatch) -> None:
        """Read the inputs of a batch from disk, and give it to its replica if that is still possible."""
        inputs: dict[str, Files] = {}
        for state in tuple(batch.open):
            job = state.job
            if job.request.options.image is None:
                continue
            try:
                inputs[job.id] = await self._run_on_disk(self._store.read_inputs, job.id)
            except StateError as error:
                message = _hide_error("the images of the job cannot be read", error)
                failure = Failure(code="internal", message=message)
                self._end_job(state, JobOutcome(failure=failure))
        # Meanwhile jobs may have been cancelled, the server may be stopping, and the ranks may be lost.
        if self._end is not None:
            self._leave_to_next_server(batch.open)
        elif batch.replica.state != "ready":
            # Reversed, because each is put at the front of the queue.
            for state in reversed(batch.open):
                state.batch = None
                self._queue.put_back_job(state.job)
        elif batch.open:
            self._begin_batch(batch, inputs)
            return
        self._release_batch(batch)

    def _begin_batch(self, batch: RunningBatch, inputs: Mapping[str, Files]) -> None:
        batch.begun = time.monotonic()
        jobs = []
        batch_jobs = []
        for state in batch.open:
            attempts = state.job.attempts + 1
            job = dataclasses.replace(state.job, state="running", started=time.time(), attempts=attempts)
            jobs.append(job)
            batch_jobs.append(BatchJob(job.id, job.request, inputs.get(job.id, {})))
            self.metrics.note_seconds("wait", job.created, job.started)
            state.publish(job)
        # Tasks begin in the order in which they were made, so the store writes this before any later state of the jobs.
        self._spawn_task(self._save_jobs(jobs))
        batch.replica.generate(Batch(batch.id, batch_jobs))
        self._update_job_counts()

    def _release_batch(self, batch: RunningBatch) -> None:
        """Free the replica of a batch for the next one."""
        # The batch is gone already if reading its inputs took longer than an ending server waits.
        self._batches.pop(batch.replica.name, None)
        self._batch_released.set()
        self._dispatch_batches()

    def _close_batch(self, batch: RunningBatch, failure: Failure) -> None:
        """End the jobs of a batch that have no result."""
        for state in tuple(batch.open):
            self._end_job(state, state.outcome or JobOutcome(failure=failure))
        self._release_batch(batch)

    # Handlers of the events that replicas report.

    def _handle_event(self, event: ReplicaEvent) -> None:
        is_ready = event.replica.state in ("ready", "drawing")
        self.metrics.set_replica_readiness(event.replica.name, is_ready=is_ready)
        if event.kind == "ready":
            self._note_ready(event.replica)
        elif event.kind == "down":
            self._note_down(event)
        batch = self._batches.get(event.replica.name)
        # An event of an earlier batch may be late.
        if batch is None or batch.id != event.batch_id:
            return
        if event.kind == "step":
            self.metrics.count("steps")
            # 100 is reserved for a result on disk.
            progress = min(99, 100 * event.step // max(1, event.num_steps))
            for state in batch.open:
                news = dataclasses.replace(state.job, progress=progress, step=event.step, num_steps=event.num_steps)
                state.publish(news)
        elif event.kind == "ended":
            if batch.begun is not None:
                seconds = time.monotonic() - batch.begun
                # All replicas take jobs from one queue, so a job keeps others waiting for only a part of this time.
                self._queue.note_seconds(seconds / len(self._replicas), batch.num_jobs)
            failure = Failure(
                code="internal", message="the ranks finished the batch without a result for this job; send it again"
            )
            self._close_batch(batch, failure)
        else:
            job_state = self._states.get(event.job_id)
            # A job may have been dropped while the others of its batch are generated.
            if job_state is not None and job_state in batch.open:
                self._handle_job_event(job_state, event)

    def _handle_job_event(self, state: JobState, event: ReplicaEvent) -> None:
        if event.kind == "preview":
            preview = event.files["preview"]
            state.publish(dataclasses.replace(state.job, preview=preview, preview_index=event.step))
        elif event.kind == "failed":
            self._end_job(state, state.outcome or JobOutcome(failure=event.failure))
        elif state.outcome is not None and not state.outcome.accepts_result:
            self._end_job(state, state.outcome)
        else:
            assert event.result is not None, "the result of a job that is done"
            self._last_result = dataclasses.asdict(event.result)
            # Files and seeds would reveal the image, which belongs to its owner.
            del self._last_result["files"], self._last_result["seeds"]
            self._end_job(state, JobOutcome(state="done", result=event.result), event.files)

    def _note_ready(self, replica: Replica) -> None:
        assert replica.facts is not None, "a replica that is ready knows its model"
        self._facts = replica.facts
        self._has_failed.clear()
        # A plan with `data` has ranks for several images at once.
        plan = Plan.parse(replica.facts.plan)
        self._max_batch = max(self.options.max_batch, plan.data)
        self._failures.pop(replica.name, None)
        self._has_started.set()
        self._dispatch_batches()

    def _note_down(self, event: ReplicaEvent) -> None:
        assert event.failure is not None, "ranks that have ended had a reason"
        name = event.replica.name
        self._failures[name] = event.failure
        self.metrics.count("group_failures", name)
        # A `RankError` may pass. Before a replica was ready, other errors say that the model or an option does not fit.
        if self._facts is None and not isinstance(event.error, RankError):
            self._refusal = event.error
            self._has_started.set()
        batch = self._batches.get(name)
        if batch is not None and batch.id == event.batch_id:
            self._close_batch(batch, event.failure)
        if self._find_failure() is None:
            return
        self._has_failed.set()
        self._has_started.set()
        # Clients wait for images, so these fail. Videos are left to the next server, or to restarted ranks.
        for state in self._list_open_states():
            if state.job.kind == "image":
                self._cancel_job(state, JobOutcome(failure=event.failure))

    def _find_failure(self) -> Failure | None:
        """Return why nothing can be generated; None while a replica is ready or may become ready."""
        # Sleeping replicas do not count: if all others fail in each start, these would fail too.
        replica_states = {replica.state for replica in self._replicas} - {"asleep"}
        if replica_states != {"failed"}:
            return None
        return next(iter(self._failures.values()))

    # Methods that end jobs and publish their results.

    def _cancel_job(self, state: JobState, outcome: JobOutcome) -> None:
        """Cancel a queued job, or one of a batch. The batch stops once all its jobs are cancelled."""
        if state.is_ending or state.is_settled:
            return
        # The first outcome counts, unless it still accepts a result.
        if state.outcome is None or state.outcome.accepts_result:
            state.outcome = outcome
        batch = state.batch
        if batch is None or batch.begun is None:
            self._queue.remove_job(state.job)
            self._end_job(state, state.outcome)
        elif all(sibling.outcome is not None for sibling in batch.open):
            # The jobs end when the replica reports that its ranks have stopped.
            batch.replica.stop(batch.id)
        elif not outcome.accepts_result:
            self._end_job(state, state.outcome)

    def _end_job(self, state: JobState, outcome: JobOutcome, files: Files | None = None) -> None:
        """Start writing the job's final state; it is published once written."""
        if state.is_ending:
            return
        state.is_ending = True
        if state.timer is not None:
            state.timer.cancel()
        job = state.job
        if state.batch is not None and state in state.batch.open:
            state.batch.open.remove(state)
        if outcome.state == "queued":
            # This attempt does not count, since the end of the server is not a fault of the job.
            attempts = job.attempts
            if job.state == "running":
                attempts -= 1
            job = dataclasses.replace(job, state="queued", progress=0, started=None, attempts=attempts)
        else:
            progress = 100 if outcome.state == "done" else job.progress
            job = dataclasses.replace(
                job, state=outcome.state, failure=outcome.failure, result=outcome.result, progress=progress
            )
        self._spawn_task(self._write_end(state, job, files or {}))

    async def _write_end(self, state: JobState, job: Job, files: Files) -> None:
        if job.has_ended:
            now = time.time()
            job = dataclasses.replace(job, ended=now, expires=now + self.options.keep_results)
        try:
            await self._run_on_disk(self._store.save_jobs, [job], {job.id: files})
        except StateError as error:
            if job.state == "done":
                message = _hide_error("the result cannot be kept", error)
                failure = Failure(code="internal", message=message)
                job = dataclasses.replace(job, state="failed", failure=failure, result=None, progress=0)
            await self._save_jobs([job])
        state.is_settled = True
        # No step is under way any more.
        state.publish(dataclasses.replace(job, step=0, num_steps=0))
        if job.has_ended:
            # A job that ended without a replica is counted for the first one.
            name = "0" if state.batch is None else state.batch.replica.name
            self.metrics.note_ended_job(job, name)
        self._update_job_counts()

    # Methods that write to disk and remove expired results.

    async def _save_jobs(self, jobs: list[Job]) -> None:
        """Write jobs to disk. A failure is logged, and jobs that have ended are written again later."""
        try:
            await self._run_on_disk(self._store.save_jobs, jobs)
        except StateError as error:
            LOG.error("%s", error)
            self._unsaved += [job for job in jobs if job.has_ended]

    async def _sweep_results(self) -> None:
        """Remove expired jobs again and again."""
        while True:
            # A tenth of the time that results are kept, within bounds for very short and very long times.
            pause = self.options.keep_results / 10
            await asyncio.sleep(min(30.0, max(0.05, pause)))
            now = time.time()
            ids = []
            for job_id, state in self._states.items():
                expires = state.job.expires
                if expires is not None and expires <= now:
                    ids.append(job_id)
            for job_id in ids:
                del self._states[job_id]
            unsaved = self._unsaved
            self._unsaved = []
            await self._save_jobs(unsaved)
            try:
                await self._run_on_disk(self._store.remove_jobs, ids)
            except StateError as error:
                LOG.error("%s", error)

    def _run_on_disk(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call a method of the store in its thread."""
        return asyncio.get_running_loop().run_in_executor(self._disk, function, *args)

    # Methods that end the service and its replicas.

    def _check_not_draining(self) -> None:
        if self._end is not None:
            raise NotReadyError("the server ends; try again in a minute")

    def _check_not_failed(self) -> None:
        failure = self._find_failure()
        if failure is not None:
            raise RanksFailedError(failure.message)

    def _leave_to_next_server(self, states: Iterable[JobState]) -> None:
        message = "the server ended before this was generated; send it again"
        failure = Failure(code="restarted", message=message)
        for state in tuple(states):
            if state.job.kind == "video":
                self._cancel_job(state, JobOutcome(state="queued", accepts_result=True))
            else:
                self._cancel_job(state, JobOutcome(failure=failure, accepts_result=True))

    def _stop_batches(self) -> None:
        """Stop the running batches when their time is over, and give up those whose ranks do not stop."""

        def give_batches_up() -> None:
            message = "the server ended, and its ranks did not stop; send it again"
            for batch in tuple(self._batches.values()):
                self._close_batch(batch, Failure(code="restarted", message=message))

        for batch in tuple(self._batches.values()):
            self._leave_to_next_server(batch.open)
        self._loop.call_later(STOP_SECONDS, give_batches_up)

    async def _end_service(self) -> None:
        # Running jobs may use the remaining time of the server.
        for state in self._list_open_states():
            if state.batch is None or state.batch.begun is None:
                self._leave_to_next_server([state])
        while self._batches:
            self._batch_released.clear()
            await self._batch_released.wait()
        await asyncio.gather(*(replica.end() for replica in self._replicas))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        # The store is closed after all pending writes.
        await self._run_on_disk(self._store.close)
        self._disk.shutdown()
        self._has_started.set()

    def _list_open_states(self) -> list[JobState]:
        """Return the states of jobs that may still change."""
        return [state for state in self._states.values() if not state.is_settled]

    def _count_jobs(self) -> tuple[int, int]:
        """Count the waiting jobs, and those that are generated or written."""
        waiting = len(self._queue)
        for batch in self._batches.values():
            if batch.begun is None:
                waiting += len(batch.open)
        return waiting, len(self._list_open_states()) - waiting

    def _update_job_counts(self) -> None:
        self.metrics.set_job_counts(*self._count_jobs())

    def _spawn_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        # The loop has only a weak reference to the task.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _hide_error(what: str, error: StateError) -> str:
    """Log an error, and return what a client learns: the text of an error may name folders of this machine."""
    LOG.error("%s: %s", what, error)
    return f"{what}; the server's log says why"

"""What becomes of jobs, whatever ranks, clients and the server do.

The ranks are scripted here: a group that says what a test has it say. Real ones have their own tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ditile.plan.errors import DitileError, RankError
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.facts import CallFacts, ModelFacts
from ditile.runner.requests.options import GenerateOptions
from ditile.serve import service as service_module
from ditile.serve.job_state import MAX_NEWS
from ditile.serve.jobs import (
    Failure,
    Files,
    Job,
    JobNotFoundError,
    JobResult,
    Kind,
    NotReadyError,
    RanksFailedError,
    Request,
)
from ditile.serve.link import Batch, Message, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.replica import Replica, ReplicaEvent
from ditile.serve.service import Service
from ditile.serve.store import JobStore
from tests.serve.servers import read_metric

PLAIN = dict.fromkeys(["prompt", "num_inference_steps", "height", "width"])
CALL = CallFacts(pipeline="ShapesPipeline", defaults=PLAIN)
EDIT = CallFacts(pipeline="ShapesEditPipeline", defaults=PLAIN | {"image": None, "strength": 0.6}, max_pictures=1)
FACTS = ModelFacts(name="shapes", plan="cfg=2", is_video=False, call=CALL, edit=EDIT, size_multiple=16)
RESULT = JobResult(files=["0.png"], seeds=[0], size=(16, 16), seconds={"total": 1.0}, num_steps=4)


class ScriptedReplica(Replica):
    """A group of ranks that does what its test says, and notes what it is told."""

    def __init__(self, name: str, on_event: Callable[[ReplicaEvent], None]) -> None:
        setup = WorkerSetup(options=ServeOptions(), plan=Plan(), cache=CacheOptions())
        super().__init__(name, setup, on_event)
        self.batches: list[Batch] = []
        self.stopped: list[str] = []
        self.obeys = False

    def start(self) -> None:
        self.get_ready()

    def get_ready(self, facts: ModelFacts = FACTS) -> None:
        self._note_ready(facts)

    def _run_ranks(self, leaves: threading.Event) -> None:
        """Nothing runs."""

    def _deliver(self, message: Message, files: Files | None) -> None:
        """Nobody is told."""

    def generate(self, batch: Batch) -> None:
        assert self.state == "ready"
        self.state = "drawing"
        self._batch_id = batch.id
        self.batches.append(batch)

    def stop(self, batch_id: str) -> None:
        self.stopped.append(batch_id)
        if self.obeys:
            self.finish(stopped=True)

    async def end(self) -> None:
        self.state = "down"

    def say(self, kind: str, **values: Any) -> None:
        self._tell(kind, self.batches[-1].id, **values)

    def finish(self, *, stopped: bool = False) -> None:
        for job in () if stopped else self.batches[-1].jobs:
            self.say("done", job_id=job.id, result=RESULT, files={"0.png": job.id.encode()})
        self._note_ended(self.batches[-1].id)

    def die(self, error: DitileError | None = None, *, has_failed: bool = False) -> None:
        self._note_down(error or RankError(1, "killed by SIGKILL", "it was killed"), has_failed)


class Served:
    """A service with one scripted group."""

    def __init__(self, state: Path, **options: Any) -> None:
        self.groups: list[ScriptedReplica] = []
        self.service = Service(ServeOptions(state=str(state), **options), self.make_replica)

    def make_replica(self, name: str, on_event: Callable[[ReplicaEvent], None]) -> Any:
        self.groups.append(ScriptedReplica(name, on_event))
        return self.groups[-1]

    @property
    def group(self) -> ScriptedReplica:
        return self.groups[0]

    async def submit(
        self, kind: Kind = "image", owner: str = "", *, timeout: float | None = None, **options: Any
    ) -> Job:
        wanted = GenerateOptions(**{"prompt": "a fox", "seed": 0} | options)
        inputs = dict.fromkeys(wanted.image or (), b"pixels")
        return await self.service.submit(kind, owner, Request(options=wanted, timeout=timeout), inputs)

    async def run_until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def begin(self, num_batches: int) -> None:
        await self.run_until(lambda: len(self.group.batches) == num_batches)

    async def end(self, job: Job) -> Job:
        """The job at its end."""
        return [news async for news in self.service.watch(job.id)][-1]

    def read_files(self, job: Job) -> list[bytes]:
        with contextlib.suppress(JobNotFoundError):
            return [self.service.read_output(job, "0.png")]
        return []


@contextlib.asynccontextmanager
async def serve(state: Path, **options: Any) -> AsyncIterator[Served]:
    served = Served(state, **options)
    await served.service.start()
    try:
        yield served
    finally:
        served.group.obeys = True
        await served.service.drain(0)


async def test_a_job_from_its_arrival_to_its_removal(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        service, group = served.service, served.group
        job = await served.submit(owner="ann", image=("image",), strength=0.5)
        events: list[Job] = []

        async def watch() -> None:
            async for event in service.watch(job.id):
                events.append(event)

        watching = asyncio.create_task(watch())
        await served.run_until(lambda: len(events) == 2)
        assert group.batches[0].jobs[0].inputs == {"image": b"pixels"}
        preview = {"job_id": job.id, "step": 0, "files": {"preview": b"png"}}
        news = [("step", {"step": 1, "num_steps": 4}), ("preview", preview), ("step", {"step": 4, "num_steps": 4})]
        for number, (kind, values) in enumerate(news):
            group.say(kind, **values)
            await served.run_until(lambda seen=2 + number: len(events) > seen)
        group.finish()
        await watching
        assert [e.state for e in events] == ["queued", *["running"] * 4, "done"]
        assert [(e.step, e.progress, e.preview) for e in events][2:] == [
            (1, 25, None), (1, 25, b"png"), (4, 99, None), (0, 100, None),
        ]  # fmt: skip
        done = service.find_job(job.id, "ann")
        assert (done.result, done.attempts, service.list_jobs("ann", "image")) == (RESULT, 1, [done])
        assert done.expires == (done.ended or 0) + service.options.keep_results
        assert served.read_files(done) == [job.id.encode()]
        assert read_metric(service.metrics, "ditile_jobs_ended_total", kind="image", state="done") == 1
        assert service.find_job(job.id, None) == done
        for other in ("", "bob"):
            assert service.list_jobs(other, "image") == []
            with pytest.raises(JobNotFoundError):
                await service.delete(job.id, other)
        await service.delete(job.id, "ann")
        assert (served.read_files(done), service.list_jobs("ann", "image")) == ([], [])


async def test_a_job_dropped_from_its_batch_does_not_stop_the_others(tmp_path: Path) -> None:
    async with serve(tmp_path, max_batch=3) as served:
        service, group = served.service, served.group
        blocker = await served.submit(steps=9)
        await served.begin(1)
        jobs = [await served.submit(seed=seed) for seed in range(3)]
        group.finish()
        await served.begin(2)
        assert [job.id for job in group.batches[1].jobs] == [job.id for job in jobs]
        assert (await service.cancel(jobs[0].id, "")).state == "cancelled"
        assert group.stopped == []
        group.finish()
        assert [(await served.end(job)).state for job in (blocker, *jobs)] == ["done", "cancelled", "done", "done"]
        assert [len(served.read_files(job)) for job in jobs] == [0, 1, 1]


@pytest.mark.parametrize("end", ["stopped", "drawn too early", "refused", "killed"])
async def test_a_running_job_is_cancelled_when_its_ranks_have_stopped(tmp_path: Path, end: str) -> None:
    async with serve(tmp_path) as served:
        job, later = await served.submit(), await served.submit()
        await served.begin(1)
        cancelling = asyncio.create_task(served.service.cancel(job.id, ""))
        await served.run_until(lambda: served.group.stopped)
        assert served.service.find_job(job.id, "").state == "running"
        assert not cancelling.done()
        if end == "killed":
            served.group.die()
            served.group.get_ready()
        else:
            if end == "refused":
                served.group.say("failed", job_id=job.id, failure=Failure(code="refused", message="no"))
            served.group.finish(stopped=end == "stopped")
        assert (await cancelling).state == "cancelled"
        assert served.read_files(job) == []
        await served.begin(2)
        assert served.group.batches[1].jobs[0].id == later.id
        assert (await served.service.cancel(job.id, "")).state == "cancelled"  # again, to no effect


async def test_ranks_that_die_end_their_jobs_alone(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        job, waits = await served.submit("video"), await served.submit("video")
        await served.begin(1)
        served.group.die()
        failed = await served.end(job)
        reason = "rank 1: killed by SIGKILL; the ranks are started again"
        assert (failed.state, failed.failure) == ("failed", Failure(code="rank_failed", message=reason))
        health = served.service.describe_health()
        assert (health["status"], health["waiting"], health["running"]) == ("restarting", 1, 0)
        (replica,) = health["replicas"]
        assert replica == {"name": "0", "state": "down", "failure": "rank_failed", "reason": reason}
        assert health["reason"] == reason
        served.group.get_ready()
        await served.begin(2)
        served.group.finish()
        assert (await served.end(waits)).state == "done"
        assert served.service.describe_health()["status"] == "ok"


async def test_requests_are_answered_with_the_reason_for_which_ranks_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure would mean clients that wait for ranks that do not come, or videos that are lost with them."""
    async with serve(tmp_path, replicas=2) as served:
        service, (first, second) = served.service, served.groups
        drawn = [await served.submit(), await served.submit()]
        waits, film = await served.submit(), await served.submit("video")
        await served.run_until(lambda: first.batches and second.batches)
        failing = asyncio.create_task(service.wait_until_failed())
        error = RankError(0, "OSError", "OSError: no /data/ann/weights/a.safetensors", "Traceback ..")
        first.die(error)
        first.die(error, has_failed=True)
        # Another group may draw what waits.
        assert (service.describe_health()["status"], failing.done()) == ("ok", False)
        second.die(error)
        second.die(error, has_failed=True)
        second.die(error, has_failed=True)
        await failing
        ends = "rank 0: OSError; 3 starts of the ranks ended so"
        reason = f"{ends}; the server's log says why; they are started every 30 s"
        health = service.describe_health()
        assert (health["status"], health["reason"]) == ("failed", reason)
        assert (await served.end(waits)).failure == Failure(code="ranks_failed", message=reason)
        assert {(await served.end(job)).state for job in drawn} == {"failed"}
        with pytest.raises(RanksFailedError, match="rank 0: OSError"):
            await served.submit()
        assert [text.count("has failed: rank 0") for text in caplog.messages] == [0, 1, 0, 1]
        assert [text.count("Traceback") for text in caplog.messages] == [1, 0, 1, 0]
        second.get_ready()
        await served.run_until(lambda: len(second.batches) == 2)
        second.finish()
        assert (await served.end(film)).state == "done"
        assert service.describe_health()["status"] == "ok"


@pytest.mark.parametrize("first", ["runs", "waits"])
async def test_a_deadline_ends_a_job(tmp_path: Path, first: str) -> None:
    async with serve(tmp_path) as served:
        if first == "waits":
            await served.submit()
        job = await served.submit(timeout=0.1)
        await served.begin(1)
        if first == "runs":
            await served.run_until(lambda: served.group.stopped)
            assert served.service.find_job(job.id, "").state == "running"
            served.group.finish(stopped=True)
        ended = await served.end(job)
        assert ended.failure is not None and ended.failure.code == "timeout"
        assert ended.state == "failed" and "0.1 s" in ended.failure.message


async def test_a_client_that_goes_while_its_job_is_written_leaves_none(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.submit()
        await served.begin(1)
        submitting = asyncio.create_task(served.submit("video"))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await served.run_until(lambda: [job.state for job in served.service.list_jobs("", "video")] == ["cancelled"])
        assert served.service.describe_health()["waiting"] == 0


async def test_a_slow_watcher_holds_the_newest_events_alone(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        job = await served.submit()
        await served.begin(1)
        news = served.service.watch(job.id)
        await anext(news)
        for step in range(1, 101):
            served.group.say("step", step=step, num_steps=100)
            served.group.say("preview", job_id=job.id, step=step, files={"preview": b"png"})
        served.group.finish()
        await served.run_until(lambda: served.service.find_job(job.id, "").has_ended)
        events = [event async for event in news]
        assert len(events) <= MAX_NEWS
        assert [event.preview_index for event in events[-3:-1]] == [99, 100]
        assert events[-1].state == "done"


async def test_inputs_that_are_read_for_longer_than_an_ending_server_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their batch is given up once, and what reads them raises nothing when it goes on."""
    monkeypatch.setattr(service_module, "STOP_SECONDS", 0.01)
    goes_on = threading.Event()
    read = JobStore.read_inputs
    monkeypatch.setattr(JobStore, "read_inputs", lambda *args: goes_on.wait(60) and read(*args))
    async with serve(tmp_path) as served:
        service = served.service
        await served.submit(image=("image",), strength=0.5)
        sending = set(service._tasks)
        draining = asyncio.create_task(service.drain(0))
        await served.run_until(lambda: service._end is not None and not service._batches)
        goes_on.set()
        await draining
        assert sending and not any(task.exception() for task in sending)


async def test_what_a_server_that_ends_leaves_to_the_next(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        film, waiting_film = await served.submit("video"), await served.submit("video")
        picture = await served.submit()
        await served.begin(1)
        pictures_end = asyncio.create_task(served.end(picture))
        draining = asyncio.create_task(served.service.drain(0.05))
        failure = (await pictures_end).failure
        assert failure is not None and failure.code == "restarted"
        assert served.service.describe_health()["status"] == "draining"
        with pytest.raises(NotReadyError, match="the server ends"):
            await served.submit()
        await served.run_until(lambda: served.group.stopped)
        served.group.finish(stopped=True)
        await draining
    async with serve(tmp_path) as served:
        for number, job in enumerate((film, waiting_film), 1):
            await served.begin(number)
            (given,) = served.group.batches[-1].jobs
            assert (given.id, served.service.find_job(given.id, "").attempts) == (job.id, 1)
            served.group.finish()
            assert (await served.end(job)).state == "done"
        assert served.service.find_job(picture.id, "").state == "failed"


async def test_results_expire(tmp_path: Path) -> None:
    async with serve(tmp_path, keep_results=0.2) as served:
        job, waits = await served.submit(), await served.submit()
        await served.begin(1)
        served.group.finish()
        await served.end(job)
        assert served.read_files(job)
        await served.run_until(lambda: not served.read_files(job))
        assert [j.id for j in served.service.list_jobs("", "image")] == [waits.id]


async def test_a_result_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        job = await served.submit()
        await served.begin(1)
        shutil.rmtree(tmp_path / "jobs")
        served.group.finish()
        ended = await served.end(job)
        assert ended.failure == Failure(code="internal", message="the result cannot be kept; the server's log says why")
        with pytest.raises(NotReadyError, match="the job cannot be kept; the server's log says why"):
            await served.submit(image=("image",), strength=0.5)


async def test_a_request_wakes_an_unloaded_server(tmp_path: Path) -> None:
    """At once. A failure would mean a request that is lost, or that waits for longer than the weights take."""
    async with serve(tmp_path, replicas=2) as served:
        served.groups[1]._fall_asleep()
        assert served.service.describe_health()["status"] == "ok"
        served.group._fall_asleep()
        assert served.service.describe_health()["status"] == "unloaded"
        job = await served.submit()
        await served.begin(1)
        assert [group.state for group in served.groups] == ["drawing", "asleep"]
        served.group.finish()
        assert (await served.end(job)).state == "done"
        # The reason is that of the replica that failed.
        served.group._fall_asleep()
        served.groups[1].start()
        served.groups[1].die(has_failed=True)
        with pytest.raises(RanksFailedError):
            await served.submit()


async def test_jobs_that_wait_wake_another_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure would mean that --ray-max-replicas has no effect, or that replicas asleep hide that all others fail."""
    monkeypatch.setattr(service_module, "WAKE_SECONDS", 0.05)

    async with serve(tmp_path, ray="local", ray_max_replicas=3) as served:
        assert [group.state for group in served.groups] == ["ready", "asleep", "asleep"]
        jobs = [await served.submit() for _ in range(2)]
        await served.run_until(lambda: served.groups[1].batches)
        await asyncio.sleep(0.2)
        assert served.groups[2].state == "asleep"
        for group in served.groups[:2]:
            group.finish()
        assert [(await served.end(job)).state for job in jobs] == ["done", "done"]
        for group in served.groups[:2]:
            group.die(has_failed=True)
        with pytest.raises(RanksFailedError):
            await served.submit()

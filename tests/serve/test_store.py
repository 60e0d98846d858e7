"""What the store took is there after any death of the server. A failure means jobs that are lost or drawn twice."""

from __future__ import annotations

import dataclasses
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ditile.plan.errors import StateError
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Failure, Job, JobNotFoundError, JobResult, Kind, Request
from ditile.serve.store import JobStore

KEEP = 60.0
RESULT = JobResult(files=["0.mp4"], seeds=[7], size=(64, 32), seconds={"total": 1.5}, num_steps=4, frames=5, fps=8.0)


def make_job(number: int, kind: Kind = "video", **changes: Any) -> Job:
    options = GenerateOptions(prompt="a fox \N{FOX FACE}", seed=7, image=("image",), strength=0.5)
    request = Request(options=options, loras={"ink": 0.5}, client={"size": "64x32"})
    return Job(id=f"{kind}_{number:024d}", owner="ann", kind=kind, request=request, **changes)


def end_job(job: Job) -> Job:
    now = time.time()
    return dataclasses.replace(job, state="done", progress=100, ended=now, expires=now + KEEP, result=RESULT)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[], JobStore]]:
    """Opens the store as a server that starts does, after the one before has gone."""
    stores: list[JobStore] = []

    def reopen() -> JobStore:
        if stores:
            stores.pop().close()
        stores.append(JobStore(tmp_path / "state", KEEP))
        return stores[-1]

    yield reopen
    for store in stores:
        store.close()


def test_what_a_restart_makes_of_jobs(open_store: Callable[[], JobStore]) -> None:
    store = open_store()
    done, waits, runs, tried = (make_job(number) for number in range(4))
    picture, running_picture = make_job(4, "image"), make_job(5, "image")
    for job in (done, waits, runs, tried, picture, running_picture):
        store.accept_job(job, {"image": b"pixels"})
    running = [dataclasses.replace(j, state="running", started=1.0, attempts=1) for j in (done, runs, running_picture)]
    store.save_jobs([*running, dataclasses.replace(tried, state="running", started=1.0, attempts=3)])
    ended = end_job(running[0])
    store.save_jobs([ended], {done.id: {"0.mp4": b"film"}})

    store = open_store()
    jobs = store.recover_jobs()
    assert jobs[:2] == [ended, waits]
    assert jobs[2] == dataclasses.replace(runs, attempts=1)
    assert [(job.state, job.failure and job.failure.code) for job in jobs[3:]] == [
        ("failed", "rank_failed"), ("failed", "restarted"), ("failed", "restarted"),
    ]  # fmt: skip
    assert all(job.expires == (job.ended or 0) + KEEP for job in jobs[3:])
    assert store.read_job_file(done.id, "0.mp4") == b"film"
    assert store.read_inputs(waits.id) == {"image": b"pixels"}
    assert open_store().recover_jobs() == jobs


def test_a_job_that_has_ended_never_changes(open_store: Callable[[], JobStore]) -> None:
    store, job = open_store(), make_job(0)
    store.accept_job(job, {})
    store.save_jobs([end_job(job)])
    failure = Failure(code="timeout", message="too late")
    store.save_jobs([dataclasses.replace(job, state="failed", failure=failure), dataclasses.replace(job, attempts=9)])
    assert [(j.state, j.attempts) for j in store.recover_jobs()] == [("done", 0)]


@pytest.mark.parametrize("name", ["../lock", "/etc/passwd", "image/../../lock"])
def test_only_names_of_the_code_are_files(open_store: Callable[[], JobStore], name: str) -> None:
    store, job = open_store(), make_job(0)
    store.accept_job(job, {"image": b"pixels"})
    with pytest.raises(JobNotFoundError):
        store.read_job_file(job.id, name)
    with pytest.raises(JobNotFoundError):
        store.read_job_file(name, "image")
    with pytest.raises(StateError, match="not a name"):
        store.save_jobs([job], {job.id: {name: b""}})


def test_two_servers_never_share_a_folder(open_store: Callable[[], JobStore], tmp_path: Path) -> None:
    open_store()
    with pytest.raises(StateError, match=r"used by another server \(process \d+\).*--state another folder"):
        JobStore(tmp_path / "state", KEEP)
    open_store()  # the first one has let go of it


def write_newer_database(path: Path) -> None:
    JobStore(path.parent, KEEP).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda path: path.write_bytes(b"not a database" * 100), "not a database of jobs"),
        (write_newer_database, "version 99 and this ditile reads 1"),
        (lambda path: (path.parent / "jobs").write_bytes(b""), "cannot be used"),
    ],
)
def test_what_is_no_state_of_ditile_is_refused(tmp_path: Path, write: Callable[[Path], None], match: str) -> None:
    write(tmp_path / "jobs.db")
    for _ in range(2):  # the lock is let go of
        with pytest.raises(StateError, match=f"{match}.*--state a"):
            JobStore(tmp_path, KEEP)


DYING = """
import os, signal, sys
from pathlib import Path
from ditile.serve import store as module
from tests.serve.test_store import end_job, make_job

state, point = sys.argv[1:]
store = module.JobStore(Path(state), 60.0)

def run(number):
    store.accept_job(make_job(number), {"image": b"pixels"})
    print("accepted", number, flush=True)
    store.save_jobs([end_job(make_job(number))], {make_job(number).id: {"0.mp4": b"film"}})
    print("ended", number, flush=True)
    store.remove_jobs([make_job(number - 1).id] if number else [])

def die_at(what):
    if what.startswith(point):
        os.kill(os.getpid(), signal.SIGKILL)

def write(path, content, write=module.write_atomically):
    die_at(path.name)
    write(path, content)

for number in range(10**6):
    if number == 2:
        store._database.set_trace_callback(die_at)
        module.write_atomically = write
    run(number)
"""


@pytest.mark.parametrize("point", ["image", "COMMIT", "DELETE", "ANY"])
def test_nothing_is_lost_by_kill(tmp_path: Path, point: str) -> None:
    """The process dies before it writes a file or a row, before it commits, or at any moment."""
    command = [sys.executable, "-c", DYING, str(tmp_path), point]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(23)] if point == "ANY" else []
        if lines:
            process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL
    words = [line.split() for line in lines if line.endswith("\n")]
    accepted, ended = ({int(n) for word, n in words if word == wanted} for wanted in ("accepted", "ended"))
    assert accepted
    store = JobStore(tmp_path, KEEP)
    jobs = {int(job.id[-24:]): job for job in store.recover_jobs()}
    # A job that was removed after its end may be gone; the last one is never removed before its end.
    assert accepted - ended <= set(jobs)
    assert all(jobs[n].state == "done" for n in ended if n in jobs)
    assert set(jobs) <= accepted | {max(accepted) + 1}
    assert max(ended) in jobs
    for job in jobs.values():
        assert job.state in ("queued", "done")
        assert store.read_inputs(job.id) == {"image": b"pixels"}
        assert job.state == "queued" or store.read_job_file(job.id, "0.mp4") == b"film"
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {job.id for job in jobs.values()}
    store.close()


def test_pictures_to_start_from_keep_their_order(open_store: Callable[[], JobStore]) -> None:
    """A failure would mean that a prompt's "picture 3" is another picture."""
    names = ["image", *(f"image-{number}" for number in range(1, 13))]
    store, job = open_store(), make_job(0)
    store.accept_job(job, {name: name.encode() for name in names})
    assert list(store.read_inputs(job.id)) == names

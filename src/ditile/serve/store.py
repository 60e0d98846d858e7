"""Jobs and their files on disk: SQLite for the jobs, a folder for each job's files.

    <state>/lock          held by the server that uses the folder
    <state>/jobs.db       a row for each job
    <state>/jobs/<id>/    images to start from, and results

A job is on disk before its client learns that it was accepted or has ended. Files are written before the row that
refers to them, and removed after it. So a server that is killed at any moment leaves only jobs that can run again, or
folders without a row, which are removed at the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ditile.distributed.files import write_atomically
from ditile.plan.errors import ModelError, StateError
from ditile.plan.option_classes import JsonObject
from ditile.serve.jobs import Failure, Files, Job, JobNotFoundError, JobResult, Request

# After this many attempts the video itself is assumed to kill the server.
MAX_ATTEMPTS = 3
# SQLite's application id ("diti"), and the version of the table.
APPLICATION = 0x64697469
VERSION = 1
# Ids and names of requests become paths, so nothing else is allowed.
JOB_ID = re.compile(r"(image|video)_[a-z0-9]{24}")
FILE_NAME = re.compile(r"(image|mask)(-\d{1,4})?|(\d{1,6}|thumbnail|spritesheet)\.(png|jpeg|webp|mp4|gif)")

# AUTOINCREMENT: the number of a job that was removed must not be given to a later one.
_TABLE = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, kind TEXT NOT NULL, request TEXT NOT NULL, created REAL NOT NULL,
    state TEXT NOT NULL, started REAL, ended REAL, expires REAL, attempts INTEGER NOT NULL, failure TEXT, drawn TEXT
)"""
# The column `drawn` holds `Job.result`; databases of earlier servers have it.
_SELECT = """SELECT
    id, owner, kind, request, created, state, started, ended, expires, attempts, failure, drawn AS result
FROM jobs ORDER BY number"""
_DESCRIBE = """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master)
FROM pragma_application_id, pragma_user_version"""
_INSERT = """INSERT INTO jobs
    (id, owner, kind, request, created, state, started, ended, expires, attempts, failure, drawn)
VALUES (:id, :owner, :kind, :request, :created, :state, :started, :ended, :expires, :attempts, :failure, :result)"""
# A job that has ended on disk stays as it is.
_UPDATE = """UPDATE jobs SET
    state = :state, started = :started, ended = :ended, expires = :expires, attempts = :attempts,
    failure = :failure, drawn = :result
WHERE id = :id AND state IN ('queued', 'running')"""


class JobStore:
    """The jobs of one server. All methods but `read_job_file` are called in the thread that made it.

    Args:
        folder: created if it does not exist; readable only by its owner.
        keep_results: seconds after its end until a job expires, for jobs that end because the server was restarted.

    Raises:
        StateError: if another server uses the folder, it cannot be written, or its database is not one of ditile.
    """

    def __init__(self, folder: Path, keep_results: float) -> None:
        self._folder = folder
        self._keep_results = keep_results
        self._path = folder / "jobs.db"
        try:
            (folder / "jobs").mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock_folder(folder)
        except OSError as error:
            raise StateError(
                f"state={str(folder)!r} cannot be used: {error.strerror}; give --state a folder that can be written"
            ) from None
        try:
            self._database = _open_database(self._path)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Release the folder for another server."""
        with self._convert_errors():
            self._database.close()
        os.close(self._lock)

    def recover_jobs(self) -> list[Job]:
        """Settle the jobs of an earlier server, and return all jobs in the order of arrival.

        Videos that had not ended wait again, unless they were begun `MAX_ATTEMPTS` times. Images that had not ended
        fail: their clients have gone. Raises `StateError` if a job cannot be read.
        """
        jobs = []
        changed = []
        with self._convert_errors():
            rows = self._database.execute(_SELECT).fetchall()
        for row in rows:
            job = self._parse_row(row)
            settled = self._settle_job(job)
            jobs.append(settled)
            if settled is not job:
                changed.append(settled)
        self.save_jobs(changed)
        # Remove the folders of jobs without a row, and nothing else that lies beside them.
        for name in {*os.listdir(self._folder / "jobs")} - {job.id for job in jobs}:
            if JOB_ID.fullmatch(name):
                shutil.rmtree(self._folder / "jobs" / name, ignore_errors=True)
        return jobs

    def accept_job(self, job: Job, inputs: Files) -> None:
        """Write a new job and its input files by name. Raises `StateError` if they cannot be written."""
        with self._convert_errors():
            try:
                self._write_files(job.id, inputs)
                with self._database:
                    self._database.execute(_INSERT, _build_row(job))
            except (OSError, sqlite3.Error):
                # The client is told that the job was not accepted, so nothing of it may stay.
                shutil.rmtree(self._find_folder(job.id), ignore_errors=True)
                raise

    def save_jobs(self, jobs: Sequence[Job], files: Mapping[str, Files] | None = None) -> None:
        """Write the new states of jobs in one transaction, after their output files (job id -> name -> content).

        Raises `StateError` if they cannot be written.
        """
        if not jobs:
            return
        with self._convert_errors():
            for job_id, contents in (files or {}).items():
                self._write_files(job_id, contents)
            with self._database:
                self._database.executemany(_UPDATE, [_build_row(job) for job in jobs])

    def remove_jobs(self, ids: Sequence[str]) -> None:
        """Remove rows and files. Raises `StateError` if the rows cannot be removed."""
        # Rows before files: a folder without a row is removed at the next start.
        with self._convert_errors(), self._database:
            self._database.executemany("DELETE FROM jobs WHERE id = ?", [(job_id,) for job_id in ids])
        for job_id in ids:
            shutil.rmtree(self._find_folder(job_id), ignore_errors=True)

    def read_job_file(self, job_id: str, name: str) -> bytes:
        """Return the content of a job's file, in any thread. Raises `JobNotFoundError` if the file does not exist."""
        if FILE_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                return (self._find_folder(job_id) / name).read_bytes()
        raise JobNotFoundError(f"{job_id} has no file {name!r}")

    def read_inputs(self, job_id: str) -> Files:
        """Return the input files by name. Raises `StateError` if they cannot be read."""
        folder = self._find_folder(job_id)
        contents: Files = {}
        if not folder.exists():
            return contents
        with self._convert_errors():
            # The order in which they came: image, image-1, .. image-10.
            for name in sorted(os.listdir(folder), key=lambda name: (len(name), name)):
                if "." not in name:
                    contents[name] = (folder / name).read_bytes()
        return contents

    def _settle_job(self, job: Job) -> Job:
        """Return the new state of a job that an earlier server left."""
        if job.has_ended:
            return job
        if job.kind == "image":
            message = "the server was restarted before this was generated; send it again"
            failure = Failure(code="restarted", message=message)
        elif job.attempts >= MAX_ATTEMPTS:
            message = (
                f"the server ended {job.attempts} times while it generated this; try fewer frames or a smaller size"
            )
            failure = Failure(code="rank_failed", message=message)
        elif job.state == "queued":
            return job
        else:
            return dataclasses.replace(job, state="queued", started=None)
        now = time.time()
        return dataclasses.replace(job, state="failed", ended=now, expires=now + self._keep_results, failure=failure)

    def _parse_row(self, row: sqlite3.Row) -> Job:
        values = dict(row)
        try:
            values["request"] = Request.from_json(json.loads(values["request"]))
            if values["failure"] is not None:
                values["failure"] = Failure(**json.loads(values["failure"]))
            if values["result"] is not None:
                values["result"] = JobResult.from_json(json.loads(values["result"]))
            job = Job(**values)
        except (KeyError, TypeError, ValueError, ModelError) as error:
            raise StateError(
                f"{self._path}: the job {values['id']} was written by another version of ditile ({error}); "
                "give --state another folder"
            ) from None
        if job.state == "done":
            return dataclasses.replace(job, progress=100)
        return job

    def _find_folder(self, job_id: str) -> Path:
        if not JOB_ID.fullmatch(job_id):
            raise JobNotFoundError(f"{job_id!r} is not the id of a job")
        return self._folder / "jobs" / job_id

    def _write_files(self, job_id: str, contents: Files) -> None:
        if not contents:
            return
        folder = self._find_folder(job_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in contents.items():
            if not FILE_NAME.fullmatch(name):
                raise StateError(f"{name!r} is not a name for a file of a job")
            write_atomically(folder / name, content)
            _sync_file(folder / name)
        # After a power failure, a row must not exist without the names of its files.
        _sync_file(folder)
        _sync_file(folder.parent)

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StateError(f"{self._folder}: {error}; make room or give --state another folder") from None


def _build_row(job: Job) -> JsonObject:
    """Return the parameters of `_INSERT` and `_UPDATE`."""
    row = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    row["request"] = json.dumps(job.request.to_json())
    if job.failure is not None:
        row["failure"] = json.dumps(dataclasses.asdict(job.failure))
    if job.result is not None:
        row["result"] = json.dumps(dataclasses.asdict(job.result))
    return row


def _lock_folder(folder: Path) -> int:
    """Lock the folder, and return the lock's descriptor.

    The lock ends when the descriptor is closed, also by the death of this process.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except BlockingIOError:
        owner = os.pread(descriptor, 20, 0).decode(errors="replace")
        os.close(descriptor)
        raise StateError(
            f"state={str(folder)!r} is used by another server (process {owner}); end it, or give --state another folder"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_database(path: Path) -> sqlite3.Connection:
    """Open the database at a path, and create an empty one if there is none."""
    try:
        # The database contains prompts. SQLite gives its journal the same mode.
        path.touch(mode=0o600)
        path.chmod(0o600)
        # IMMEDIATE takes the lock at the start of a transaction instead of in its middle.
        database = sqlite3.connect(path, isolation_level="IMMEDIATE")
    except (OSError, sqlite3.Error) as error:
        raise StateError(f"{path} cannot be opened: {error}; give --state another folder") from None
    database.row_factory = sqlite3.Row
    try:
        # A new file has 0 as application and version. A database of another program must not be changed.
        application, version, num_tables = database.execute(_DESCRIBE).fetchone()
        if num_tables and application != APPLICATION:
            raise StateError(f"{path} is the database of another program; give --state another folder")
        if num_tables and version != VERSION:
            raise StateError(
                f"{path} has version {version} and this ditile reads {VERSION}; remove it, or give --state another "
                "folder"
            )
        # With WAL, readers and the writer do not wait for each other.
        database.execute("PRAGMA journal_mode = WAL")
        # With FULL, each commit is on disk when it returns.
        database.execute("PRAGMA synchronous = FULL")
        if not num_tables:
            with database:
                database.execute(f"PRAGMA application_id = {APPLICATION}")
                database.execute(f"PRAGMA user_version = {VERSION}")
                database.execute(_TABLE)
    except sqlite3.Error as error:
        database.close()
        raise StateError(
            f"{path} is not a database of jobs: {error}; remove it, or give --state another folder"
        ) from None
    except BaseException:
        database.close()
        raise
    return database


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

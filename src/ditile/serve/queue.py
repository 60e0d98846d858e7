"""The jobs that wait: fair between owners, first come first served within one, and in batches of one shape.

Owners take turns. When it is an owner's turn, its oldest job is generated, and the owner moves to the end of the line.
Jobs that differ only in their prompts and seeds join the same batch, whoever owns them. Joining does not change the
order of turns, so an owner's oldest job waits for at most one batch of each other owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Iterator

from ditile.serve.jobs import Job, QueueFullError

# The assumed seconds of a job until one has been measured.
FIRST_GUESS = 5.0
# Options that may differ within a batch.
_DIFFERING = ("prompt", "negative_prompt", "seed", "num_images")


class JobQueue:
    """Jobs that wait, at most `max_jobs`; jobs of an earlier server are taken even above the limit."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        # Owner -> id -> job; owners in the order of their turns, jobs in the order in which they came.
        self._owners: OrderedDict[str, OrderedDict[str, Job]] = OrderedDict()
        self._num_reserved = 0
        self._seconds = 0.0
        self._num_finished = 0

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._owners.values())

    @contextlib.contextmanager
    def reserve_place(self) -> Iterator[None]:
        """Reserve a place for one more job while it is written to disk. Raises `QueueFullError` if there is none."""
        if len(self) + self._num_reserved >= self._max_jobs:
            # The next place is free after about as long as a job took so far.
            seconds = math.ceil(FIRST_GUESS)
            if self._num_finished:
                seconds = max(1, math.ceil(self._seconds / self._num_finished))
            message = f"{self._max_jobs} jobs wait already; try again in {seconds} s"
            raise QueueFullError(message, retry_after=seconds)
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    def add_job(self, job: Job) -> None:
        """Add a job after its owner's other jobs; a new owner goes to the end of the line."""
        self._owners.setdefault(job.owner, OrderedDict())[job.id] = job

    def put_back_job(self, job: Job) -> None:
        """Put a job back at the front of the queue."""
        self.add_job(job)
        self._owners[job.owner].move_to_end(job.id, last=False)
        self._owners.move_to_end(job.owner, last=False)

    def remove_job(self, job: Job) -> bool:
        """Remove a job, and return False if it was not waiting."""
        jobs = self._owners.get(job.owner, OrderedDict())
        if job.id not in jobs:
            return False
        del jobs[job.id]
        if not jobs:
            del self._owners[job.owner]
        return True

    def take_batch(self, limit: int) -> tuple[Job, ...]:
        """Remove and return the next job and waiting jobs of its shape; empty if none waits.

        Args:
            limit: the most images or videos of a batch. A job with more of them gets a batch of its own.
        """
        if not self._owners:
            return ()
        owner = next(iter(self._owners))
        first_job = next(iter(self._owners[owner].values()))
        companions = self._find_companions(first_job, limit - first_job.request.options.num_images)
        batch = (first_job, *companions)
        self._owners.move_to_end(owner)
        for job in batch:
            self.remove_job(job)
        return batch

    def note_seconds(self, seconds: float, num_jobs: int) -> None:
        """Record the seconds of a batch."""
        self._seconds += seconds
        self._num_finished += num_jobs

    def _find_companions(self, first_job: Job, room: int) -> Iterator[Job]:
        """Yield jobs that join the batch of `first_job`. Owners take turns here too."""
        shape = describe_shape(first_job)
        if shape is None:
            return
        waiting = [iter(jobs.values()) for jobs in self._owners.values()]
        while waiting and room > 0:
            for jobs in tuple(waiting):
                # The owner's next job of the same shape.
                alike = (job for job in jobs if job is not first_job and describe_shape(job) == shape)
                job = next(alike, None)
                if job is None:
                    waiting.remove(jobs)
                    continue
                num_images = job.request.options.num_images
                if num_images <= room:
                    room -= num_images
                    yield job


def describe_shape(job: Job) -> str | None:
    """Describe the options that a batch has in common; None for a job that gets a batch of its own."""
    request = job.request
    # Conditions and previews belong to one job's call, and a bound on seconds holds for one job.
    if request.options.image is not None or request.num_previews or request.bounds.seconds is not None:
        return None
    options = request.to_json()["options"]
    # A call has a prompt for every row, or for none.
    has_texts = [options["prompt"] is None, options["negative_prompt"] is None]
    for name in _DIFFERING:
        del options[name]
    bounds = [request.computed_steps, dataclasses.asdict(request.bounds)]
    return json.dumps([job.kind, options, has_texts, request.loras, bounds], sort_keys=True)

"""The jobs that wait: fair between owners, first come first served within one, and in batches of one shape.

Owners take turns. The owner whose turn it is has its oldest job drawn, and goes behind all others. Jobs that differ in
their prompts and seeds alone are drawn with it, whoever owns them; that changes nobody's turn, so an owner's oldest job
waits for at most one batch of each other owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from ditile.serve.jobs import Job, QueueFullError

FIRST_GUESS = 5.0
"""Seconds of a job before any was drawn."""
_DIFFERING = frozenset({"prompt", "negative_prompt", "seed", "num_images"})
"""Options that may differ within a batch."""


class JobQueue:
    """Jobs that wait.

    Args:
        max_jobs: that may wait; jobs of an earlier server come above it.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._owners: OrderedDict[str, OrderedDict[str, Job]] = OrderedDict()
        """Owner -> id -> job; owners in the order of their turns, jobs in the order in which they came."""
        self._num_reserved = 0
        self._seconds = 0.0
        self._num_drawn = 0

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    @contextlib.contextmanager
    def reserve_place(self) -> Iterator[None]:
        """Within, there is a place for one more job, which is written to disk meanwhile.

        Raises:
            QueueFullError: if there is none.
        """
        if len(self) + self._num_reserved >= self._max_jobs:
            seconds = self.estimate_seconds()
            raise QueueFullError(f"{self._max_jobs} jobs wait already; try again in {seconds} s", retry_after=seconds)
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    def add_job(self, job: Job) -> None:
        """Puts a job behind those of its owner, and a new owner behind all others."""
        self._owners.setdefault(job.owner, OrderedDict())[job.id] = job

    def put_back_job(self, job: Job) -> None:
        """Makes a job that was taken out the next one again."""
        self.add_job(job)
        self._owners[job.owner].move_to_end(job.id, last=False)
        self._owners.move_to_end(job.owner, last=False)

    def remove_job(self, job: Job) -> bool:
        """Takes a job out; False if it does not wait."""
        jobs = self._owners.get(job.owner)
        if jobs is None or jobs.pop(job.id, None) is None:
            return False
        if not jobs:
            del self._owners[job.owner]
        return True

    def take_batch(self, limit: int) -> tuple[Job, ...]:
        """Takes out the next job, and others of its shape that wait; empty if none waits.

        Args:
            limit: pictures or videos of a batch. A job that has more is drawn alone.
        """
        if not self._owners:
            return ()
        owner = next(iter(self._owners))
        first = next(iter(self._owners[owner].values()))
        batch = [first, *self._find_companions(first, limit - first.request.options.num_images)]
        self._owners.move_to_end(owner)
        for job in batch:
            self.remove_job(job)
        return tuple(batch)

    def note_seconds(self, seconds: float, num_jobs: int) -> None:
        """Learns how long a batch took."""
        self._seconds += seconds
        self._num_drawn += num_jobs

    def estimate_seconds(self) -> int:
        """Whole seconds until the next place is free, from the mean of the jobs so far; at least 1."""
        return max(1, math.ceil(self._seconds / self._num_drawn if self._num_drawn else FIRST_GUESS))

    def _find_companions(self, first: Job, room: int) -> Iterator[Job]:
        """Jobs that are drawn together with one. Owners take turns here too."""
        shape = describe_shape(first)
        if shape is None:
            return
        waiting = [iter(jobs.values()) for jobs in self._owners.values()]
        while waiting and room > 0:
            for jobs in tuple(waiting):
                job = next((j for j in jobs if j is not first and describe_shape(j) == shape), None)
                if job is None:
                    waiting.remove(jobs)
                elif job.request.options.num_images <= room:
                    room -= job.request.options.num_images
                    yield job


def describe_shape(job: Job) -> Hashable | None:
    """What jobs must have in common to be drawn together; None for a job that is drawn alone.

    A job that starts from a picture or that shows previews is drawn alone.
    """
    request = job.request
    options = job.request.options
    if options.image is not None or request.num_previews:
        return None
    values = tuple(getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in _DIFFERING)
    texts = (options.prompt is None, options.negative_prompt is None)
    return job.kind, values, texts, tuple(sorted(request.loras.items()))

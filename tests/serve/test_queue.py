"""Jobs that wait are taken once, in turn, and together only with their like. A failure means unfair batches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ditile.planner.promise import Bounds
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Job, QueueFullError, Request
from ditile.serve.queue import JobQueue, describe_shape

NUMBERS = itertools.count()


def make_job(owner: str = "", *, loras: Any = None, num_previews: int = 0, **options: Any) -> Job:
    wanted = GenerateOptions(**{"prompt": "a fox", "seed": 0} | options)
    request = Request(options=wanted, loras=loras or {}, num_previews=num_previews)
    return Job(id=f"image_{next(NUMBERS):024d}", owner=owner, kind="image", request=request)


class Turns(RuleBasedStateMachine):
    """Against what must hold of any line in which owners take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = JobQueue(1000)
        self.waiting: list[Job] = []
        self.led_since: dict[str, list[str]] = {}
        """Owner who waits -> owners who have led a batch since its oldest job became its oldest."""

    @rule(owner=st.sampled_from("abc"), width=st.sampled_from([32, 64]), count=st.integers(1, 3), alone=st.booleans())
    def add(self, owner: str, width: int, count: int, alone: bool) -> None:
        job = make_job(owner, width=width, num_images=count, num_previews=int(alone), seed=next(NUMBERS))
        self.queue.add_job(job)
        self.waiting.append(job)
        self.led_since.setdefault(owner, [])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove_job(job)
        assert not self.queue.remove_job(job)
        self.leave([job])

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        batch = self.queue.take_batch(limit)
        assert bool(batch) == bool(self.waiting)
        if not batch:
            return
        first = batch[0]
        assert first is next(job for job in self.waiting if job.owner == first.owner)
        assert all(job in self.waiting for job in batch)
        assert len({job.id for job in batch}) == len(batch)
        assert len(batch) == 1 or sum(job.request.options.num_images for job in batch) <= limit
        assert len(batch) == 1 or len({describe_shape(job) for job in batch} - {None}) == 1
        for owner, led in self.led_since.items():
            if owner != first.owner:
                led.append(first.owner)
                assert len(set(led)) == len(led), f"{owner} waits for two batches of one owner: {led}"
        self.leave(list(batch))
        if first.owner in self.led_since:
            self.led_since[first.owner] = []

    def leave(self, jobs: list[Job]) -> None:
        self.waiting = [job for job in self.waiting if job not in jobs]
        present = {job.owner for job in self.waiting}
        self.led_since = {owner: led for owner, led in self.led_since.items() if owner in present}

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queue) == len(self.waiting)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_batch_is_as_large_as_it_may_be() -> None:
    queue = JobQueue(10)
    jobs = [make_job("ann", num_images=2), make_job("ann"), make_job("bob", prompt="a cat", seed=5), make_job("cid")]
    for job in jobs:
        queue.add_job(job)
    assert queue.take_batch(4) == (jobs[0], jobs[1], jobs[2])
    assert queue.take_batch(4) == (jobs[3],)


@pytest.mark.parametrize(
    "other",
    [
        {"width": 64}, {"steps": 3}, {"guidance": 2.0}, {"negative_prompt": "blur"}, {"loras": {"ink": 1.0}},
        {"image": ("image",)}, {"num_previews": 1}, {"frames": 5},
    ],
    ids=str,
)  # fmt: skip
def test_what_differs_is_drawn_alone(other: dict[str, Any]) -> None:
    queue = JobQueue(10)
    for job in (make_job(), make_job(**other)):
        queue.add_job(job)
    assert [len(queue.take_batch(9)) for _ in range(2)] == [1, 1]


def test_jobs_with_pictures_are_drawn_alone_even_with_their_like() -> None:
    assert describe_shape(make_job(image=("image",))) is None
    job = make_job()
    fewer = dataclasses.replace(job, request=dataclasses.replace(job.request, computed_steps=3))
    assert describe_shape(fewer) not in (None, describe_shape(job))
    late = dataclasses.replace(job, request=dataclasses.replace(job.request, bounds=Bounds(seconds=4.0)))
    assert describe_shape(late) is None
    video = dataclasses.replace(make_job(), kind="video")
    assert describe_shape(video) not in (None, describe_shape(make_job()))


def test_a_full_queue_says_when_to_come_again() -> None:
    queue = JobQueue(2)
    queue.add_job(make_job())
    with queue.reserve_place(), pytest.raises(QueueFullError, match="2 jobs wait already") as refused:
        queue.reserve_place().__enter__()
    assert refused.value.retry_after == 5
    queue.note_seconds(25.0, num_jobs=2)
    queue.add_job(make_job())
    with pytest.raises(QueueFullError, match="try again in 13 s"):
        queue.reserve_place().__enter__()

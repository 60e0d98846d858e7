"""The warm-up of a server records, and a promise of a request switches the cache of its ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from ditile.plan.plan import Plan
from ditile.planner.promise import Bounds
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Request
from ditile.serve.link import BatchJob, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.worker import MAX_WARM_CALLS, RankWorker
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore")


class Answers:
    """A link that keeps the answers of a rank, and their files."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], Any]] = []

    def send_message(self, message: dict[str, Any], files: Any = None) -> None:
        self.sent.append((message, files))

    def receive_message(self) -> Any:
        raise EOFError


def serve_first_user(plan: Plan) -> tuple[int, Any]:
    """How many images the warm-up generates, and what was recorded of the first image after it."""
    engine = ServeOptions(model="shapes-flux", cuda_graphs=True, device="cpu")
    with record_on_cpu():
        setup = WorkerSetup(options=engine, plan=plan, cache=CacheOptions())
        worker = RankWorker(setup, Answers())
    with mock.patch.object(worker, "_generate_jobs", wraps=worker._generate_jobs) as generated:
        worker._warm_up()
    options = GenerateOptions(model="shapes-flux", prompt=worker._facts.example, steps=8, seed=1)
    worker._generate_jobs([BatchJob("image_first", Request(options=options))])
    report = worker._runner.report
    assert report is not None
    return generated.call_count, report.recorded


@pytest.mark.parametrize(("axis", "num_code"), [("pipefusion=1", 0), ("distrifusion=2 warmup=1", 2)])
def test_the_image_of_the_first_user_is_played(pool: Pool, axis: str, num_code: int) -> None:
    """A failure means that the first user waits for recordings."""
    plan = Plan.parse(axis)
    for num_warm, recorded in pool.run(serve_first_user, plan.world, plan):
        assert recorded.recorded == 0
        # The synchronous step makes the keys of two branches, which no tape does.
        assert recorded.played == recorded.calls - num_code
        assert 2 <= num_warm <= MAX_WARM_CALLS


def serve_requests(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last answer of a rank to each of some requests."""
    link = Answers()
    options = ServeOptions(model="shapes-flux", device="cpu")
    setup = WorkerSetup(options=options, plan=Plan(), cache=CacheOptions())
    worker = RankWorker(setup, link)
    answers = []
    for number, changes in enumerate(requests):
        wanted = GenerateOptions(model="shapes-flux", prompt=worker._facts.example, seed=1)
        worker._running_id = f"batch_{number}"
        worker._generate_batch([BatchJob("image_x", Request(options=wanted, **changes))])
        answers.append(link.sent[-1][0])
    return answers


def test_a_promise_that_leaves_no_step_out(pool: Pool) -> None:
    """A bound on PSNR that no schedule keeps is kept by the image of all steps, and the next bound by fewer steps.

    A failure means that a request for the best image is refused, because it has no cache to tell of. A refusal names
    the field that was sent.
    """
    requests = [{"bounds": Bounds(min_psnr=500.0)}, {"bounds": Bounds(min_psnr=40.0)}, {"computed_steps": 30}]
    [(best, fewer, refused)] = pool.run(serve_requests, 1, requests)
    assert best["kind"] == "done", best
    assert best["result"]["facts"]["promise"]["computed_steps"] == 20 and best["result"]["facts"]["left_out"] == []
    assert fewer["result"]["facts"]["promise"]["computed_steps"] < 20 and fewer["result"]["facts"]["left_out"]
    assert refused["failure"]["message"] == "computed_steps=30 is more than the 20 steps of the call; give 20 or less"

"""The warm-up of a server records, so that the image of its first user is played."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Request
from ditile.serve.link import BatchJob, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.worker import MAX_WARM_CALLS, RankWorker
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore")


class NoServer:
    """A link to no server."""

    def send_message(self, message: dict[str, Any], files: Any = None) -> None:
        raise AssertionError("no batch is running")

    def receive_message(self) -> Any:
        raise EOFError


def serve_first_user(plan: Plan) -> tuple[int, Any]:
    """How many images the warm-up generates, and what was recorded of the first image after it."""
    engine = ServeOptions(model="shapes-flux", cuda_graphs=True, device="cpu")
    with record_on_cpu():
        setup = WorkerSetup(options=engine, plan=plan, cache=CacheOptions())
        worker = RankWorker(setup, NoServer())
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

"""A call that nobody sees leaves nothing behind: the picture that follows it is that of a runner which made none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from ditile.plan.plan import Plan
from ditile.runner.requests.prepare import choose_warm_steps, warm_runner
from ditile.runner.runner import Runner, parallelize
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, divided, run, same

STEPS = 9


def draw_warm_and_cold(name: str, plan: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, int]]:
    """On a rank: the steps of the call that nobody sees, and the bytes that each picture sent."""
    more = {"num_inference_steps": STEPS}
    with divided(MAKE[name](), **plan) as runner:
        cold, sent = run(runner, name, **more), runner.report.bytes_sent
    with divided(MAKE[name](), **plan) as runner:
        with mock.patch.object(Runner, "__call__", autospec=True, side_effect=Runner.__call__) as calls:
            warm_runner(runner, call_of(name, **more), is_cached=False)
        same(run(runner, name, **more), cold)
        return calls.call_args.kwargs["num_inference_steps"], runner.report.bytes_sent, sent


@pytest.mark.parametrize(
    ("plan", "steps"),
    [({"pipefusion": 2, "patches": 3, "warmup": 1}, 4), ({"pipefusion": 2, "patches": 2, "warmup": 5}, 7)],
    ids=str,
)
@pytest.mark.parametrize("name", ["flux", "sd3.5 medium"])
def test_nothing_remains_of_a_call_that_nobody_sees(pool: Pool, name: str, plan: dict[str, Any], steps: int) -> None:
    """A failure means that keys, or states of a scheduler, are those of the call before."""
    for taken, warm, cold in pool.run(draw_warm_and_cold, 2, name, plan):
        assert taken == steps and warm == cold


def test_steps_of_a_call_that_nobody_sees() -> None:
    assert choose_warm_steps(Plan(), is_cached=False) == 4
    assert choose_warm_steps(Plan(pipefusion=2, warmup=3), is_cached=False) == 5
    assert choose_warm_steps(Plan(pipefusion=2, warmup=3), is_cached=True) is None
    runner = parallelize(tiny.flux(), Plan())
    with mock.patch.object(Runner, "__call__", autospec=True) as calls:
        warm_runner(runner, {"prompt": "a"}, is_cached=False)
    assert calls.call_args.kwargs["num_inference_steps"] == 4, "of 28, which the class has by default"

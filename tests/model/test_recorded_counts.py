"""Calls of Python, and of C from it, that the host makes in a recorded step of a model with FLUX.1's 57 blocks."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import ditile
from ditile.distributed import env
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.plan import Plan
from tests import tiny
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu

LIMITS = {
    "patches=1": 620,
    "ulysses=2": 4200,
    "ring=2": 3970,
    "tensor=2": 3360,
    "distrifusion=2 warmup=1": 5060,
    "pipefusion=2 patches=4 warmup=1": 3980,
}
"""Of the slowest rank, pipeline and scheduler included. Without tapes `ulysses=2` makes 32,000."""


class CallCounter:
    """A profile function that counts calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")


def count_step_calls(plan: Plan) -> int:
    """The calls of the busiest step after the first two, in which forms are known and the model is looked at."""
    counter = CallCounter()
    counts: list[int] = []
    begin_step = Loop._begin_step

    def note_step(self: Loop, step: int) -> None:
        counts.append(counter.count)
        begin_step(self, step)

    # Checks of ages, which other tests turn on, are calls too.
    unchecked = mock.patch.object(env, "should_check_key_ages", lambda: False)
    with record_on_cpu(), unchecked, mock.patch.object(Loop, "_begin_step", note_step):
        runner = ditile.parallelize(tiny.flux(19, 38), plan, cuda_graphs=True)
        call = tiny.arguments("flux") | {"height": 64, "width": 64, "num_inference_steps": 6, "output_type": "latent"}
        for is_counted in (False, False, True):
            sys.setprofile(counter if is_counted else None)
            try:
                runner(**call | {"generator": torch.Generator().manual_seed(0)})
            finally:
                sys.setprofile(None)
    steps = [after - before for before, after in pairwise(counts[-6:])]
    return max(steps[2:])


@pytest.mark.parametrize("axis", LIMITS)
def test_a_recorded_step_is_a_few_thousand_calls(pool: Pool, axis: str) -> None:
    plan = Plan.parse(axis)
    counts = [count_step_calls(plan)] if plan.world == 1 else pool.run(count_step_calls, plan.world, plan)
    assert max(counts) <= LIMITS[axis]

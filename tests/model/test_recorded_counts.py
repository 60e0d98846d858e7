"""What a recorded step costs: calls of the host for FLUX.1's 57 blocks, and memory of a tape."""

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
from tests.recorded_calls import OperatorSegments, record_on_cpu

LIMITS = {
    "patches=1": 620,
    "ulysses=2": 4200,
    "ring=2": 3970,
    "tensor=2": 3680,
    "distrifusion=2 warmup=1": 5150,
    "pipefusion=2 patches=4 warmup=1": 3850,
}
"""Of the slowest rank, pipeline and scheduler included.

Three calls for each sum and each receive raise the version of its memory: 342 calls of tensor=2."""


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

    # Checks, which other tests turn on, are calls too.
    unchecked = mock.patch.object(env, "should_check_key_ages", lambda: False)
    with record_on_cpu(checks=False), unchecked, mock.patch.object(Loop, "_begin_step", note_step):
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


def measure_tape_memory(plan: Plan, blocks: int) -> int:
    """Bytes of the largest pool of a tape of a model of so many double and single blocks each."""
    made: list[OperatorSegments] = []

    def make_segments() -> OperatorSegments:
        made.append(OperatorSegments())
        return made[-1]

    with record_on_cpu(make_segments):
        runner = ditile.parallelize(tiny.flux(blocks, blocks), plan, cuda_graphs=True)
    for _ in range(2):
        runner(**tiny.arguments("flux", num_inference_steps=5, output_type="latent"))
    return max(segments.peak_bytes for segments in made)


@pytest.mark.parametrize("axis", ["ulysses=2", "distrifusion=2 warmup=1", "pipefusion=2 patches=2 warmup=1"])
def test_the_memory_of_a_tape_does_not_grow_with_the_layers(pool: Pool, axis: str) -> None:
    """As a step without tapes, it holds the messages of one layer and not of all. A failure means gigabytes."""
    plan = Plan.parse(axis)
    few = pool.run(measure_tape_memory, plan.world, plan, 2)
    many = pool.run(measure_tape_memory, plan.world, plan, 4)
    for bytes_of_few, bytes_of_many in zip(few, many, strict=True):
        # The modulation of each of the four more blocks stays for a step, which is less than a message here.
        assert bytes_of_many - bytes_of_few <= 4 * 1024

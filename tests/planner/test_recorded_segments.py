"""The planner's host starts as many segments in a recorded call as a tape has."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ditile.measure.bench.cells import BenchCell
from ditile.measure.bench.options import Workload
from ditile.measure.bench.subjects import RandomSubject
from ditile.plan.plan import Plan
from ditile.plan.schedule import Op, OpKind
from ditile.planner import hardware
from ditile.planner.ops import CacheSkips, OpPricer
from ditile.planner.profile import Profile
from ditile.planner.search import make_pricer
from ditile.runner.runner import parallelize
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu

MODEL = "random-flux blocks=6 heads=4 head_dim=32"
SIDE = 128
STEPS = 6


def make_profile_of_segments() -> Profile:
    """A GPU on which nothing takes time but segments, of a second each."""
    gpu = hardware.load_profile("h200-nvlink")
    link = dataclasses.replace(gpu.link, latency_s=0.0, bandwidth=1e18, call_s=0.0)
    return dataclasses.replace(gpu, link=link, segment_s=1.0)


def count_segments(text: str) -> tuple[int, float]:
    """The segments of this rank's tape that has the most, and those that are priced."""
    subject = RandomSubject(Workload(model=MODEL, steps=STEPS, output="latent"), MODEL)
    plan = Plan.parse(text)
    cell = BenchCell(str(plan), "", SIDE, SIDE)
    with record_on_cpu() as made:
        runner = parallelize(subject.create_pipeline(plan), plan, device="cpu", cuda_graphs=True)
        for _ in range(2):
            runner(**subject.make_call_arguments(runner.pipe, cell, torch.device("cpu")))
    tapes = [call.tape for call in made[0]._tapes._calls.values()]
    recorded = max(tape.num_segments for tape in tapes if tape is not None)
    job = subject.make_cost_job(cell)
    arguments = subject.make_planning_arguments(cell)
    pricer = make_pricer(subject.planner_subject, arguments, make_profile_of_segments(), records=True)
    patch = 0 if plan.pipefusion > 1 else None
    op = Op(OpKind.COMPUTE, STEPS - 2, patch)
    return recorded, OpPricer(pricer, job, CacheSkips()).get_op_seconds(runner.mesh.stage_index, op, free=False)


@pytest.mark.parametrize("text", ["ulysses=2", "ring=2", "tensor=2", "distrifusion=2", "pipefusion=2 patches=2"])
def test_segments_are_priced_as_they_are_recorded(pool: Pool, text: str) -> None:
    """A failure means that a message has become dearer, or that the planner counts on fewer."""
    for recorded, priced in pool.run(count_segments, 2, text):
        assert priced == pytest.approx(recorded, abs=0.1)

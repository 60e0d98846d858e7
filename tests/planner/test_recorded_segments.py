"""The planner's host starts as many segments in a recorded call as a tape has."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ditile
from ditile.cache.config_text import parse_cache_line
from ditile.plan.plan import Plan
from ditile.plan.schedule import Op, OpKind
from ditile.planner import hardware
from ditile.planner.ops import OpPricer
from ditile.planner.profile import Profile
from ditile.planner.search import make_pricer, predict_skipped_steps
from ditile.runner.runner import parallelize
from ditile_lab.bench.cells import BenchCell
from ditile_lab.bench.options import Workload
from ditile_lab.bench.subjects import RandomSubject
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


def count_segments(text: str, line: str) -> tuple[int, float]:
    """Return the segments of this rank's longest tape, and those that are priced."""
    subject = RandomSubject(Workload(model=MODEL, steps=STEPS, output="latent"), MODEL)
    plan = Plan.parse(text)
    cell = BenchCell(str(plan), "", SIDE, SIDE)
    cache = parse_cache_line(line)
    with record_on_cpu() as made:
        pipe = subject.create_pipeline(plan)
        if cache["cache_config"] is not None:
            ditile.enable_cache(pipe, **cache)
        runner = parallelize(pipe, plan, device="cpu", cuda_graphs=True)
        for _ in range(2):
            runner(**subject.make_call_arguments(runner.pipe, cell, torch.device("cpu")))
    most = max(call.tape.num_segments for call in made[0]._tapes._calls.values() if call.tape is not None)
    job = subject.make_cost_job(cell)
    arguments = subject.make_planning_arguments(cell)
    pricer = make_pricer(subject.planner_subject, arguments, make_profile_of_segments(), records=True)
    patch = 0 if plan.pipefusion > 1 else None
    op = Op(OpKind.COMPUTE, STEPS - 2, patch)
    skips = predict_skipped_steps(cache["cache_config"], STEPS, 0.0)
    seconds = OpPricer(pricer, job, skips).get_op_seconds(runner.mesh.stage_index, op, free=False)
    return most, seconds


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ulysses=2", "none"),
        ("ring=2", "none"),
        ("tensor=2", "none"),
        ("distrifusion=2", "none"),
        ("pipefusion=2 patches=2", "none"),
        # Its rules compute the second step from the end.
        ("ulysses=2", "F=1 W=1 R=1 MC=1"),
        ("tensor=2", "F=1 W=1 R=1 MC=1"),
    ],
)
def test_segments_are_priced_as_they_are_recorded(pool: Pool, text: str, line: str) -> None:
    """A failure means that a message has become dearer, or that the planner counts on fewer."""
    for recorded, priced in pool.run(count_segments, 2, text, line):
        assert priced == pytest.approx(recorded, abs=0.1)

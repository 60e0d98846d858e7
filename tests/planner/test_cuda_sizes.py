"""A rank each of published models at real sizes on a simulated GPU, without weights.

A failure means that a GPU would refuse what a rank does or race with it, that the host waits for it in a later step, or
that the planner promises a memory that the call does not keep to. All have four stages and four patches, and one
rank of them runs.

Wan 2.2 at 720p has one frame: of 81 the simulation takes 450 seconds of a core. Its first transformer has one step
here, behind which it keeps no keys, and the planner counts those of both; of one frame that is little, and of 81 frames
in 3 steps it is 1.4 times the peak. That a longer call keeps to the plan is not shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from ditile.plan.plan import Plan
from ditile.planner import hardware
from ditile.planner.memory import count_rank_memory
from ditile.planner.question import PlanQuestion
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import find_model_source
from tests.simulated_gpu.call import simulate_rank
from tests.simulated_gpu.gpu import HostSync, SimulationRecord

PLAN, NEAR = Plan(pipefusion=4, patches=4), 0.1
STEPS = 3
"""One in which nothing is stale, and two of patches."""
GPU = "h100-nvlink"
"""A profile of GPUs; the memory of a call is the same on all of them."""
SQUARE = [
    ("flux.1-dev", 1024, 3),
    ("flux.1-dev", 2048, 0),
    ("flux.1-dev", 4096, 0),
    ("sd3.5-large", 1024, 1),
    ("qwen-image", 1024, 2),
    ("flux.2-dev", 1024, 0),
]


class SimulatedRank(NamedTuple):
    """What a rank did, and the bytes at its peak that the planner predicts, text encoders left out."""

    record: SimulationRecord
    planned_bytes: int


def simulate_one(model: str, rank: int, **size: Any) -> SimulatedRank:
    source = find_model_source(model, weights=False)
    call = PlanQuestion(model=model, steps=STEPS, **size).fill_call_arguments()
    record = simulate_rank(source, PLAN, rank, call, dtype=torch.bfloat16).record
    assert not record.findings
    subject = PlanSubject.from_configs(model, source)
    job = subject.make_plan_job(PLAN, subject.make_call_shape(call, torch.bfloat16.itemsize))
    profile = hardware.load_profile(GPU)
    memory = count_rank_memory(subject, job, profile, rank, subject.count_text_tokens(call))
    return SimulatedRank(record, memory.denoising_peak - memory.text + memory.vae)


def list_late_syncs(record: SimulationRecord) -> list[HostSync]:
    """Waits of the host in steps of patches."""
    return [sync for sync in record.syncs if "patch" in sync.place]


@pytest.mark.parametrize(("model", "side", "rank"), SQUARE, ids=lambda value: str(value))
def test_a_rank_at_real_size(model: str, side: int, rank: int) -> None:
    simulated = simulate_one(model, rank, height=side, width=side)
    assert not list_late_syncs(simulated.record)
    assert simulated.planned_bytes == pytest.approx(simulated.record.peak_bytes, rel=NEAR)


def test_a_rank_of_a_video_model() -> None:
    """The pipeline itself asks the GPU which transformer is next, in each patch; ditile waits for nothing."""
    simulated = simulate_one("wan2.2-t2v-14b", 1, height=720, width=1280, frames=1)
    assert all(
        sync.site.startswith("diffusers/pipelines/wan/pipeline_wan.py") for sync in list_late_syncs(simulated.record)
    )
    assert simulated.planned_bytes == pytest.approx(simulated.record.peak_bytes, rel=NEAR)

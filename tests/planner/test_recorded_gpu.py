"""Recorded steps on simulated GPUs: images as without, nothing that a GPU would mind, and no wait of the host."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.planner.test_simulated_gpu import LARGE, Row, list_late_syncs
from tests.pool import Pool
from tests.recorded_calls import record_on_simulated_gpus
from tests.simulated_gpu.gpu import CALL, SETUP, Finding, SimulatedGpu
from tests.simulated_gpu.messages import GlooMessages, simulate_gpu
from tests.simulated_gpu.tensors import SimulatedTensor

IMAGES = 3
"""Forms of the last step are watched in the first one, recorded in the second, and played in the third."""
STEPS = {"num_inference_steps": 6}
ROWS = [
    Row("flux", "patches=1", STEPS),
    Row("flux", "patches=3", STEPS),
    Row("flux", "pipefusion=2 patches=3", STEPS),
    Row("flux true cfg", "pipefusion=2 patches=2", STEPS),
    Row("flux", "ulysses=2", LARGE | STEPS),
    Row("flux", "ring=2", LARGE | STEPS),
    Row("flux", "tensor=2", STEPS),
    Row("flux", "distrifusion=2", STEPS),
    Row("pixart sigma", "distrifusion=2", STEPS),
    Row("sd3.5 medium", "cfg=2", STEPS),
]


class RecordedImages(NamedTuple):
    """What a rank saw.

    Attributes:
        are_equal: whether the last image of recorded steps is the one without.
        num_played: calls of that image that were played.
        findings: of all images.
        waits: of the host in steps of that image after its first one.
    """

    are_equal: bool
    num_played: int
    findings: list[Finding]
    waits: dict[str, int]


def generate_recorded(row: Row) -> RecordedImages:
    """On a rank: an image without recorded steps, and some with them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan = Plan.parse(row.plan)
    gpu = SimulatedGpu(rank, keeps_numbers=True)
    messages = GlooMessages(gpu) if plan.world > 1 else None
    images = []
    with record_on_simulated_gpus(), torch.no_grad(), simulate_gpu(gpu, messages):
        for cuda_graphs in (False, True):
            runner = parallelize(
                row.make_pipeline(), plan, device=gpu.device, keep_weights=True, cuda_graphs=cuda_graphs
            )
            for _ in range(IMAGES if cuda_graphs else 1):
                gpu.record.syncs.clear()
                gpu.record.enter_place(CALL)
                image = row.draw(runner, gpu.device)
                images.append(image.content if isinstance(image, SimulatedTensor) else image)
            report = runner.report
            gpu.record.enter_place(SETUP)
            runner.restore()
    assert report is not None and report.recorded is not None
    are_equal = torch.equal(images[0], images[-1])
    waits = list_late_syncs(gpu.record)
    return RecordedImages(are_equal, report.recorded.played, [*gpu.record.findings], dict(waits))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.plan}")
def test_recorded_steps_wait_for_nothing(pool: Pool, row: Row) -> None:
    """A failure means a race, or a host that stands still in each step, where recording was to take it out."""
    for images in pool.run(generate_recorded, Plan.parse(row.plan).world, row):
        assert images.are_equal
        assert images.num_played >= STEPS["num_inference_steps"] - 2
        assert not images.findings
        assert not images.waits

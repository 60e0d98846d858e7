"""Recorded steps on simulated GPUs: images as without, nothing that a GPU would mind, and no wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ditile.plan.plan import Plan
from ditile.runner.callbacks import StepWatch
from ditile.runner.runner import parallelize
from tests.planner.test_simulated_gpu import LARGE, Row, list_late_syncs
from tests.pool import Pool
from tests.recorded_calls import record_on_simulated_gpus
from tests.simulated_gpu.gpu import CALL, SETUP, CaptureError, Finding, SimulatedGpu
from tests.simulated_gpu.messages import GlooMessages, SimulatedWork, simulate_gpu
from tests.simulated_gpu.tensors import SimulatedTensor

IMAGES = 3
"""Forms of the last step are watched in the first one, recorded in the second, and played in the third."""
STEPS = {"num_inference_steps": 6}
CHECKED = "has_same_bits"
"""What waits only with `DITILE_CHECK=1`, as in all tests: inputs that are not copied again are compared."""


def keep_latents(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that returns what it is given."""
    return tensors


def note_latents(step: int, latents: Any) -> None:
    """As a preview, which reads the latents of some steps."""


ROWS = [
    Row("flux", "patches=1", STEPS),
    Row("flux", "patches=3", STEPS),
    Row("flux", "pipefusion=2 patches=3", STEPS),
    Row("flux true cfg", "pipefusion=2 patches=2", STEPS),
    Row("flux", "pipefusion=3 patches=3", STEPS),
    Row("flux", "pipefusion=2 patches=2", STEPS | {"callback_on_step_end": keep_latents}),
    Row("flux", "pipefusion=2 patches=2", STEPS | {"watch": StepWatch(on_latents=note_latents, latents_at={1, 3})}),
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
    waits = {site: count for site, count in list_late_syncs(gpu.record).items() if not site.endswith(CHECKED)}
    return RecordedImages(are_equal, report.recorded.played, [*gpu.record.findings], waits)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.plan}")
def test_recorded_steps_wait_for_nothing(pool: Pool, row: Row) -> None:
    """A failure means a race, or a host that stands still in each step, where recording was to take it out."""
    for images in pool.run(generate_recorded, Plan.parse(row.plan).world, row):
        assert images.are_equal
        assert images.num_played >= STEPS["num_inference_steps"] - 2
        assert not images.findings
        assert not images.waits


ILLEGAL: dict[str, Callable[[SimulatedWork], object]] = {
    "item": lambda work: torch.ones(2, device="cuda").sum().item(),
    "copy to the host": lambda work: torch.ones(2, device="cuda").cpu(),
    "mask": lambda work: torch.ones(2, device="cuda").nonzero(),
    "page-locked memory": lambda work: torch.empty(2, pin_memory=True),
    "synchronize": lambda work: torch.cuda.synchronize(),
    "event query": lambda work: torch.cuda.Event().query(),
    "event synchronize": lambda work: torch.cuda.Event().synchronize(),
    "is_completed": lambda work: work.is_completed(),
    "wait": lambda work: work.wait(),
    "generator state": lambda work: torch.cuda.default_generators[0].get_state(),
    "empty_cache": lambda work: torch.cuda.empty_cache(),
    "another capture": lambda work: torch.cuda.CUDAGraph().capture_begin(),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_ends_a_capture_of_a_gpu(name: str) -> None:
    """The capture is of no use, nor is what comes after in it; its end raises too, and leaves torch damaged."""
    with simulate_gpu(SimulatedGpu(keeps_numbers=True)) as gpu:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        with pytest.raises(CaptureError, match="not permitted"):
            ILLEGAL[name](SimulatedWork(gpu, "a message", [], [], lambda: None))
        with pytest.raises(CaptureError, match="previous error"):
            torch.ones(2, device="cuda")
        with pytest.raises(CaptureError, match="previous error"):
            graph.capture_end()
        with pytest.raises(RuntimeError, match="Offset increment"):
            torch.randn(2, device="cuda")
        with pytest.raises(RuntimeError, match="captures_underway"):
            torch.cuda.empty_cache()
        generator: Any = torch.cuda.default_generators[0]
        generator.graphsafe_set_state(generator.clone_state())
        torch._C._cuda_endAllocateToPool(0, None)
        torch._C._cuda_releasePool(0, None)
        torch.randn(2, device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.CUDAGraph().capture_begin()


def test_an_event_of_a_capture_tells_nothing() -> None:
    """As where a trace records its points while a segment is open."""
    with simulate_gpu(SimulatedGpu()):
        graph, event = torch.cuda.CUDAGraph(), torch.cuda.Event(enable_timing=True)
        graph.capture_begin()
        event.record()
        graph.capture_end()
        with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
            event.synchronize()

"""Recorded steps on simulated GPUs: images as without, nothing that a GPU would mind, and no wait of the host."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.model.recording.recorded_steps import LOG
from ditile.plan.plan import Plan
from ditile.runner.callbacks import StepWatch
from ditile.runner.graph_segments import GraphSegments, prepare_capture_stream
from ditile.runner.runner import Runner, parallelize
from ditile_lab.machine.recorded_cases import CASES, compare_recorded_calls
from tests.planner.test_simulated_gpu import LARGE, Row, list_late_syncs
from tests.pool import Pool
from tests.recorded_calls import record_on_simulated_gpus
from tests.simulated_gpu.gpu import CALL, SETUP, Finding, SimulatedGpu
from tests.simulated_gpu.messages import SimulatedMessages, simulate_gpu

STEPS = {"num_inference_steps": 5}
PLAYED = 6
"""The first image in which all steps but the first are played: images before 4 are without recorded steps."""
CHECKED = "has_same_bits"
"""What waits only with `DITILE_CHECK=1`, as in all tests: inputs that are not copied again are compared."""


def note_latents(step: int, latents: Any) -> None:
    """As a preview, which reads the latents of some steps."""


ROWS = [
    Row("flux", "patches=3", STEPS),
    Row("flux true cfg", "pipefusion=2 patches=2", STEPS),
    Row("flux", "pipefusion=3 patches=3", STEPS),
    Row("flux", "pipefusion=2 patches=2", STEPS | {"watch": StepWatch(on_latents=note_latents, latents_at={1, 3})}),
    Row("flux", "ulysses=2", LARGE | STEPS),
    Row("flux", "ring=2", LARGE | STEPS),
    Row("flux", "tensor=2", STEPS),
    Row("flux", "distrifusion=2", STEPS),
    Row("sd3.5 medium", "cfg=2", STEPS),
]


class RecordedImages(NamedTuple):
    """What a rank saw.

    Attributes:
        cases: of `ditile verify --recorded`.
        findings: of all images.
        waits: of the host in steps of an image that is played, after its first one.
        lost_pools: that failed captures left behind.
        warnings: of recorded steps and others, with their arguments.
    """

    cases: list[tuple[str, bool, str]]
    findings: list[Finding]
    waits: dict[str, int]
    lost_pools: int
    warnings: list[str]


def generate_recorded(row: Row) -> RecordedImages:
    """On a rank: the images of `ditile verify --recorded`, some without recorded steps and some with them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan = Plan.parse(row.plan)
    gpu = SimulatedGpu(rank)
    messages = SimulatedMessages(gpu) if plan.world > 1 else None
    warnings: list[str] = []
    waits: list[dict[str, int]] = []

    runners: list[Runner] = []

    def make_runner(recorded: bool) -> Runner:
        gpu.record.enter_place(SETUP)
        for runner in runners:
            runner.restore()
        runners.append(
            parallelize(row.make_pipeline(), plan, device=gpu.device, keep_weights=True, cuda_graphs=recorded)
        )
        return runners[-1]

    def call(runner: Runner, more: Mapping[str, Any]) -> Tensor:
        syncs = list_late_syncs(gpu.record).items()
        waits.append({site: count for site, count in syncs if not site.endswith(CHECKED)})
        gpu.record.syncs.clear()
        gpu.record.enter_place(CALL)
        latents: Tensor = runner(**row.make_arguments(gpu.device) | {"output_type": "latent"} | more)[0]
        return latents

    with ExitStack() as stack:
        stack.enter_context(record_on_simulated_gpus())
        stack.enter_context(torch.no_grad())
        stack.enter_context(simulate_gpu(gpu, messages))
        stack.enter_context(mock.patch.object(LOG, "warning", lambda text, *args: warnings.append(f"{text} {args}")))
        cases = compare_recorded_calls(make_runner, call)
    return RecordedImages(cases, [*gpu.record.findings], waits[PLAYED + 1], gpu.lost_pools, warnings)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.plan}")
def test_recorded_steps_wait_for_nothing(pool: Pool, row: Row) -> None:
    """A failure means a race, or a host that stands still in each step, where recording was to take it out.

    Captures fail on the first rank, where a number is read in the middle of a segment: its images are right, a warning
    says so once, and what was captured after it is played.
    """
    for rank, images in enumerate(pool.run(generate_recorded, Plan.parse(row.plan).world, row)):
        assert [name for name, *_ in images.cases] == [*CASES]
        assert all(is_right for _, is_right, _ in images.cases), images.cases
        assert not images.findings
        assert not images.waits
        assert not images.lost_pools
        warnings = [text for text in images.warnings if "run as code" in text]
        if rank == 0:
            (warning,) = warnings
            assert "a recording failed: CaptureError" in warning
            assert "not permitted when stream is capturing: item" in warning
        else:
            assert not warnings


def trace_recorded(folder: Path) -> tuple[bool, list[str], list[Finding]]:
    """On a rank: whether a traced image is as those before it, why its calls ran as code, and findings."""
    gpu = SimulatedGpu(dist.get_rank())
    row = Row("flux", "pipefusion=2 patches=2", STEPS)
    images = []
    with record_on_simulated_gpus(), torch.no_grad(), simulate_gpu(gpu, SimulatedMessages(gpu)):
        runner = parallelize(row.make_pipeline(), Plan.parse(row.plan), device=gpu.device, cuda_graphs=True)
        for runner.trace in (False, False, True):
            gpu.record.enter_place(CALL)
            images.append(row.draw(runner, gpu.device))
        # It waits for points that were recorded in the call: those of a capture tell nothing.
        runner.write_trace(folder / "trace.json")
        are_equal = all(torch.equal(image, images[0]) for image in images)
    assert runner.report is not None and runner.report.recorded is not None
    assert not runner.report.recorded.recorded and not runner.report.recorded.played
    return are_equal, [*runner.report.recorded.as_code], [*gpu.record.findings]


def test_a_traced_call_records_and_plays_nothing(pool: Pool, tmp_path: Path) -> None:
    """A failure means an error of CUDA when the trace of a run with recorded steps is written."""
    assert pool.run(trace_recorded, 2, tmp_path) == [(True, ["runner.trace is on"], [])] * 2


def test_a_device_has_one_stream_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means 32 MB of cuBLAS for each size of images, in the memory of tapes and for good."""
    with simulate_gpu(SimulatedGpu()) as gpu:
        products = []
        monkeypatch.setattr(torch, "mm", lambda *_: products.append(gpu.graph))
        prepare_capture_stream.cache_clear()
        streams = {GraphSegments(gpu.device)._stream for _ in range(3)}
    prepare_capture_stream.cache_clear()
    assert len(streams) == 1
    assert products == [None], "one, and not in a capture"

"""What ditile does on GPUs, on a GPU that is simulated: no finding, and no wait of the host behind the first step.

A failure of a plan names the line of ditile that a GPU would not forgive. A failure of a planted bug means that the
tests of plans find nothing.
"""

from __future__ import annotations

import torch

from ditile.parallel.pipefusion.block_offload import HostCopies
from ditile.plan.plan import Plan
from ditile.planner.simulation.gpu import AFTER, CALL, REHEARSAL, SETUP, SimulatedGpu, SimulationRecord
from ditile.planner.simulation.messages import SimulatedMessages, simulate_gpu
from ditile.planner.simulation.tensors import PAGE
from ditile.runner.runner import parallelize
from tests.runner.cases import MAKE, call_of

MAY_WAIT = {SETUP, CALL, REHEARSAL, AFTER, "step 0"}


def simulate_tiny_rank(name: str, plan: Plan, rank: int) -> SimulationRecord:
    """What one rank alone does, to which others send what nobody knows."""
    gpu = SimulatedGpu(rank, small=1 << 13)
    with simulate_gpu(gpu, SimulatedMessages(gpu, rank, plan.world)), torch.no_grad():
        runner = parallelize(MAKE[name](), plan, device=gpu.device, keep_weights=True)
        gpu.record.enter_place(CALL)
        runner(**call_of(name, output_type="latent"))
    return gpu.record


def test_a_stage_alone_shows_what_a_gpu_would_be_given():
    for rank in range(2):
        record = simulate_tiny_rank("flux", Plan.parse("pipefusion=2 patches=2"), rank)
        assert not record.findings
        assert {sync.place for sync in record.syncs} <= MAY_WAIT
        micros = [counts for place, counts in record.places.items() if "patch" in place]
        assert len(micros) == 6 and all(counts.kernels and not counts.pinned for counts in micros)
        # Keys and values stay from step to step: what is alive does not grow.
        assert micros[-1].peak_bytes <= max(counts.peak_bytes for counts in micros[:4])


def simulate_memory(offload: str) -> tuple[SimulationRecord, int, list[int]]:
    """What a rank of FLUX does in patches: its record, the bytes of weights on the GPU, and those of each block."""
    gpu = SimulatedGpu(0, small=1 << 13)
    with simulate_gpu(gpu), torch.no_grad():
        pipe = MAKE["flux"]()
        blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
        runner = parallelize(pipe, Plan(patches=2, offload=offload), device=gpu.device)  # type: ignore[arg-type]
        weights, gpu.record.place = gpu.record.live_bytes, CALL
        runner(**call_of("flux", output_type="latent"))
        sizes = [sum(-(-p.nbytes // PAGE) * PAGE for p in block.parameters()) for block in blocks]
    return gpu.record, weights, sizes


def test_offloaded_blocks_take_two_buffers_and_no_wait():
    """The peak by formula: two buffers in place of all blocks, and nothing else changes. A copy is waited for by the
    stream and never by the host; one that is used too early is a race."""
    (kept, weights, sizes), (away, rest, _) = simulate_memory("none"), simulate_memory("blocks")
    assert weights - rest == sum(sizes)
    assert not kept.findings and not away.findings
    waits = [
        sorted((sync.place, times) for sync, times in record.syncs.items() if "step" in sync.place)
        for record in (kept, away)
    ]
    assert waits[0] == waits[1], "the host waits for a block"
    largest = max(sizes)
    saved = kept.peak_bytes - away.peak_bytes
    # In a buffer tensors begin at multiples of 16 bytes and not of a page.
    assert sum(sizes) - 2 * largest <= saved <= sum(sizes) - 2 * largest + 2 * PAGE * 40


def test_a_block_that_does_not_wait_for_its_weights_is_found(monkeypatch):
    monkeypatch.setattr(HostCopies, "wait_for_copy", lambda self, copied: None)
    record, _, _ = simulate_memory("blocks")
    assert any(finding.kind == "race" for finding in record.findings)

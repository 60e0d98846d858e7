"""What ditile does on GPUs, on a GPU that is simulated: no finding, and no wait of the host behind the first step.

A failure of a plan names the line of ditile that a GPU would not forgive. A failure of a planted bug means that the
tests of plans find nothing.
"""

from __future__ import annotations

import torch

from ditile.plan.plan import Plan
from ditile.planner.simulation.gpu import AFTER, CALL, REHEARSAL, SETUP, SimulatedGpu, SimulationRecord
from ditile.planner.simulation.messages import SimulatedMessages, simulate_gpu
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

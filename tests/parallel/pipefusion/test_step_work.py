"""What a step of patches computes and writes, by operators, against a step of one patch, and as a list of kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ditile.distributed.mesh import Communicators
from ditile.plan.plan import Plan
from ditile.planner.question import PlanQuestion
from ditile.runner.load import load
from ditile.runner.model_files import find_model_source
from ditile.runner.runner import parallelize
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from tests.simulated_gpu.call import simulate_rank
from tests.step_counts import COUNTED_STEP, StepCount, StepCounter

SIDE = 1024
STEPS = COUNTED_STEP + 2
FEW_BLOCKS = {"flux.1-dev": {"num_layers": 1, "num_single_layers": 1}, "qwen-image": {"num_layers": 2}}
"""One double block and one single block of FLUX.1; a block for each stage of Qwen-Image."""
STAGES = "pipefusion=2 patches=4 warmup=1"
LISTED = [("flux.1-dev", STAGES), ("qwen-image", STAGES), ("flux.1-dev", "distrifusion=2 warmup=1")]
KERNELS = Path(__file__).with_name("kernels.json")


def make_plan(patches: int) -> Plan:
    return Plan(pipefusion=2, patches=patches, warmup=1)


def count_simulated_step(model: str, rank: int, plan: Plan, config: Mapping[str, Any] | None = None) -> StepCount:
    """A step of a rank of a published model at its real width, in bf16, on the simulated GPU."""
    call = PlanQuestion(model=model, steps=STEPS, height=SIDE, width=SIDE).fill_call_arguments()
    source = find_model_source(model, weights=False)
    counter = StepCounter()
    simulate_rank(source, plan, rank, call, config=config, within=counter.count_steps())
    return counter.count


def count_bundled_step(model: str, rank: int, patches: int) -> StepCount:
    """A step of a rank of a bundled model on the CPU, without its peers."""
    device = torch.device("cpu")
    plan = make_plan(patches)
    counter = StepCounter()
    with replace_torch_distributed(LoneMessages(rank, plan.world, device)):
        runner = parallelize(load(model), plan, device, groups=Communicators())
        random = torch.Generator().manual_seed(0)
        with counter.count_steps():
            runner("a red circle", num_inference_steps=STEPS, output_type="latent", generator=random)
    return counter.count


def check_patches_cost_little(one: list[StepCount], four: list[StepCount]) -> None:
    whole = one[0] + one[1]
    patched = four[0] + four[1]
    assert patched.flops <= 1.01 * whole.flops
    assert patched.bytes <= 1.1 * whole.bytes


def test_four_patches_of_shapes_pixart_cost_what_one_does() -> None:
    """A failure means that something is computed or copied for each patch that is the same for all."""
    one = [count_bundled_step("shapes-pixart", rank, 1) for rank in range(2)]
    four = [count_bundled_step("shapes-pixart", rank, 4) for rank in range(2)]
    check_patches_cost_little(one, four)


@pytest.mark.parametrize("model", list(FEW_BLOCKS))
def test_four_patches_at_real_size_cost_what_one_does(model: str) -> None:
    one = [count_simulated_step(model, rank, make_plan(1)) for rank in range(2)]
    four = [count_simulated_step(model, rank, make_plan(4)) for rank in range(2)]
    check_patches_cost_little(one, four)


def count_ranks(model: str, plan: str) -> list[StepCount]:
    """A step of few blocks on each of two ranks."""
    return [count_simulated_step(model, rank, Plan.parse(plan), FEW_BLOCKS[model]) for rank in range(2)]


@pytest.mark.parametrize(("model", "plan"), LISTED)
def test_a_step_has_no_more_kernels_than_before(model: str, plan: str) -> None:
    """Of each rank, the number of kernels by operator, and the bytes that all of them write.

    A failure means that a step starts kernels or copies tensors that it did not before. Where it has fewer, the file is
    to be written again: `python -m tests.parallel.pipefusion.test_step_work`.
    """
    known = json.loads(KERNELS.read_text("utf-8"))[f"{model}, {plan}"]
    for count, listed in zip(count_ranks(model, plan), known, strict=True):
        assert {name: number for name, number in count.kernels.items() if number > listed["kernels"].get(name, 0)} == {}
        assert count.bytes <= listed["bytes"]


def write_kernels() -> None:
    """Writes the file of kernels."""
    lists: dict[str, list[Any]] = {}
    for model, plan in LISTED:
        of_ranks = lists[f"{model}, {plan}"] = []
        for count in count_ranks(model, plan):
            of_ranks.append({"bytes": count.bytes, "kernels": dict(sorted(count.kernels.items()))})
    KERNELS.write_text(json.dumps(lists, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write_kernels()

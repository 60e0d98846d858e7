"""What a step of patches computes and writes, by operators, against a step of one patch, and as a list of kernels."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ditile.distributed.mesh import Communicators
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.plan import Plan
from ditile.planner.question import PlanQuestion
from ditile.runner.load import load
from ditile.runner.model_files import find_model_source
from ditile.runner.runner import parallelize
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from tests.simulated_gpu.call import simulate_rank
from tests.simulated_gpu.gpu import EMPTY, describe_operator

COUNTED_STEP = 2
"""The first step is synchronous; in the second one modules are looked at."""
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


@dataclass
class StepCount:
    """What was counted in a step.

    Attributes:
        flops: of products and attention.
        written: bytes that kernels write, by the name of their operator.
        kernels: operators that write, by name.
    """

    flops: int = 0
    written: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        return sum(self.written.values())

    def __add__(self, other: StepCount) -> StepCount:
        return StepCount(self.flops + other.flops, self.written + other.written, self.kernels + other.kernels)


class StepCounter(TorchDispatchMode):
    """Counts the operators of the loop's steps.

    Attributes:
        steps: of all calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepCount] = []
        self.paused = False

    @property
    def count(self) -> StepCount:
        """Of the second asynchronous step after a synchronous one, in which all that is found once is known."""
        return self.steps[COUNTED_STEP]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        about = describe_operator(func)
        if not self.steps or self.paused or about.is_view or about.name in EMPTY:
            return result
        name = func._schema.name.removeprefix("aten::")
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        # A cast or a copy that is not needed returns what it was given.
        if outputs and not about.written and all(id(output) in given for output in outputs):
            return result
        self.note_kernel(name, outputs, _count_flops(func, args, kwargs, result))
        return result

    def note_kernel(self, name: str, outputs: list[Tensor], flops: int = 0) -> None:
        count = self.steps[-1]
        count.flops += flops
        count.written[name] += sum(output.numel() * output.element_size() for output in outputs)
        count.kernels[name] += 1

    @contextmanager
    def count_steps(self) -> Iterator[StepCounter]:
        """Counts within it."""
        begin_step = Loop._begin_step

        def note_step(loop: Loop, step: int) -> None:
            self.steps.append(StepCount())
            begin_step(loop, step)

        with mock.patch.object(Loop, "_begin_step", note_step), _FusedNorms(self), self:
            yield self


class _FusedNorms(TorchFunctionMode):
    """Counts `rms_norm` as the one kernel that it is on a GPU; on CPUs it is eight."""

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_norm = func is functional.rms_norm and not self._counter.paused
        if is_norm:
            self._counter.paused = True
        result = func(*args, **(kwargs or {}))
        if is_norm:
            self._counter.paused = False
            if self._counter.steps:
                self._counter.note_kernel("_fused_rms_norm", [result])
        return result


def _count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    name = func._schema.name
    if any(word in name for word in ATTENTION):
        # Two products of matrices, for each query and key.
        q, k, v = args[:3]
        return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if "_linear_pointwise" in name:
        return 2 * args[0].numel() * args[1].shape[0]
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


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

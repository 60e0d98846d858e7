"""What a step of patches computes and writes, by operators, against a step of one patch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ditile.distributed.mesh import Communicators
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.runner import parallelize
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from tests.simulated_gpu.gpu import EMPTY, describe_operator

MODEL = "shapes-pixart"
COUNTED_STEP = 2
"""The first step is synchronous; in the second one modules are looked at."""
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


@dataclass
class StepCount:
    """What was counted in a step: FLOPs of products and attention, and bytes that kernels write."""

    flops: int = 0
    bytes: int = 0


class StepCounter(TorchDispatchMode):
    """Counts the operators of the loop's steps.

    Attributes:
        steps: of all calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepCount] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        about = describe_operator(func)
        if not self.steps or about.is_view or about.name in EMPTY:
            return result
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        # A cast or a copy that is not needed returns what it was given.
        if outputs and not about.written and all(id(output) in given for output in outputs):
            return result
        self.steps[-1].flops += _count_flops(func, args, kwargs, result)
        self.steps[-1].bytes += sum(output.numel() * output.element_size() for output in outputs)
        return result

    @contextmanager
    def count_steps(self) -> Iterator[None]:
        """Counts within it."""
        begin_step = Loop._begin_step

        def note_step(loop: Loop, step: int) -> None:
            self.steps.append(StepCount())
            begin_step(loop, step)

        with mock.patch.object(Loop, "_begin_step", note_step), self:
            yield


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


def count_step(rank: int, patches: int) -> StepCount:
    """A step of a rank on the CPU, without its peers."""
    device, plan = torch.device("cpu"), Plan(pipefusion=2, patches=patches, warmup=1)
    counter = StepCounter()
    with replace_torch_distributed(LoneMessages(rank, plan.world, device)):
        runner = parallelize(load(MODEL), plan, device, groups=Communicators())
        random = torch.Generator().manual_seed(0)
        with counter.count_steps():
            runner("a red circle", num_inference_steps=COUNTED_STEP + 2, output_type="latent", generator=random)
    return counter.steps[COUNTED_STEP]


def test_four_patches_cost_what_one_does() -> None:
    """A failure means that something is computed or copied for each patch that is the same for all."""
    one, four = ([count_step(rank, patches) for rank in range(2)] for patches in (1, 4))
    assert sum(step.flops for step in four) <= 1.01 * sum(step.flops for step in one)
    assert sum(step.bytes for step in four) <= 1.1 * sum(step.bytes for step in one)

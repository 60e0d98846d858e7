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
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.runner import parallelize
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from tests.simulated_gpu.gpu import EMPTY, describe_operator

MODEL = "shapes-pixart"
COUNTED_STEP = 2
"""The first step is synchronous; in the second one modules are looked at."""
KEY_BYTES = 2 * 12 * 2 * 1024 * 128 * 4
"""Keys and values of 12 blocks, for 2 branches of guidance, 1024 tokens and 128 channels in fp32."""
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


@dataclass
class StepCount:
    """What was counted in a step.

    Attributes:
        flops: of products and attention.
        block_bytes: bytes that kernels write within blocks, fresh keys and messages between stages included.
        outer_bytes: bytes that they write outside of blocks: the forward before and after them, and the pipeline.
    """

    flops: int = 0
    block_bytes: int = 0
    outer_bytes: int = 0

    def __add__(self, other: StepCount) -> StepCount:
        return StepCount(
            self.flops + other.flops, self.block_bytes + other.block_bytes, self.outer_bytes + other.outer_bytes
        )


class StepCounter(TorchDispatchMode):
    """Counts the operators of the loop's steps.

    Attributes:
        steps: of all calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepCount] = []
        self._is_in_block = False

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
        num_bytes = sum(output.nbytes for output in outputs)
        if self._is_in_block:
            self.steps[-1].block_bytes += num_bytes
        else:
            self.steps[-1].outer_bytes += num_bytes
        return result

    @contextmanager
    def count_steps(self) -> Iterator[None]:
        """Counts within it."""
        begin_step = Loop._begin_step
        run_block = PipeFusion.run_block

        def note_step(loop: Loop, step: int) -> None:
            self.steps.append(StepCount())
            begin_step(loop, step)

        def note_block(policy: PipeFusion, *args: Any) -> Any:
            self._is_in_block = True
            try:
                return run_block(policy, *args)
            finally:
                self._is_in_block = False

        patched_step = mock.patch.object(Loop, "_begin_step", note_step)
        with patched_step, mock.patch.object(PipeFusion, "run_block", note_block), self:
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


def count_stages(patches: int) -> StepCount:
    """A step of both stages together."""
    return count_step(0, patches) + count_step(1, patches)


def test_four_patches_cost_what_one_does() -> None:
    """A failure means that something is computed or copied for each patch that is the same for all.

    Patches also copy their fresh keys and values over the stale ones, which a whole step need not keep. Outside of the
    blocks the model's own forward has the tokens of the whole image for each patch, and less is made once in a step.
    """
    one = count_stages(1)
    four = count_stages(4)
    assert four.flops <= 1.01 * one.flops
    assert four.block_bytes <= 1.01 * one.block_bytes + KEY_BYTES
    assert four.outer_bytes <= 3.75 * one.outer_bytes

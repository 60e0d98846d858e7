"""What the host calls of torch in one asynchronous micro-step: a GPU that is fast waits for these calls."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ditile
from ditile.model.hooks.kv_store import KeyStore
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.plan.plan import Plan
from tests import tiny
from tests.recorded_calls import record_on_cpu
from tests.zoo import ZOO

BEFORE = 1571
"""Operators of one micro-step of the last of four stages of FLUX.1-dev, 15 single blocks, with 4 patches, as they were
first counted on a simulated GPU."""


class OpCounter(TorchDispatchMode):
    """Counts operators on tensors while it is entered.

    Attributes:
        ops: calls by name.
        paused: nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            self.ops[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class AsOnGPU(TorchFunctionMode):
    """Counts `rms_norm` as the one operator that it is on a GPU; on CPUs it is eight."""

    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.rms_norm and func is not torch.rms_norm or self._counter.paused:
            return func(*args, **(kwargs or {}))
        self._counter.paused = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counter.paused = False
            self._counter.ops["_fused_rms_norm"] += 1


def count_micro_step(pipe: Any) -> collections.Counter[str]:
    """The operators of the last micro-step but one: from one call of the transformer to the next."""
    runner = ditile.parallelize(pipe.to(torch.bfloat16), Plan(patches=4, warmup=1))
    counter, seen = OpCounter(), list[collections.Counter[str]]()
    begin = PipeFusion.begin_transformer_call

    def note_begin(self: PipeFusion, *args: Any, **kwargs: Any) -> Any:
        seen.append(counter.ops.copy())
        return begin(self, *args, **kwargs)

    with mock.patch.object(PipeFusion, "begin_transformer_call", note_begin), AsOnGPU(counter), counter:
        runner(**tiny.arguments("flux", num_inference_steps=3, output_type="latent"))
    return seen[-1] - seen[-2]


def test_two_thirds_of_the_calls_of_a_micro_step() -> None:
    """Of a stage with 15 single blocks, embedders and head: no kernel of ditile's own but the copies of K and V."""
    ops = count_micro_step(tiny.flux(double=0, single=15))
    assert sum(ops.values()) <= BEFORE * 2 // 3, ops
    assert (ops["addmm"], ops["flip"], ops["_fused_rms_norm"], ops["cat"]) == (3 * 15 + 2, 2 * 15, 2 * 15, 2 * 15 + 1)
    assert ops["copy_"] == 2 * 15 + 2  # what comes out, and the latents
    assert not {"neg", "stack", "zeros", "new_zeros"} & set(ops)


def test_keys_and_values_are_written_once() -> None:
    """One copy each, straight into the sequence, from parts of a product of q, k and v. A failure means that they are
    made contiguous or laid side by side before, or that their place is looked for anew."""
    store, runs = KeyStore(8, 2), (range(4, 8),)
    for _ in range(2):
        _, k, v = torch.randn(1, 4, 2, 12).split(4, dim=-1)
        with OpCounter() as counter:
            buffers = store.write_keys(k, v, runs)
    assert counter.ops == {"copy_": 2}
    assert torch.equal(buffers[0][:, 4:], k) and torch.equal(buffers[1][:, 4:], v)
    assert not buffers[0][:, :4].any()


def count_linear_calls(name: str, layer: str, steps: int, recorded: bool) -> int:
    """How often a linear layer is computed in a call of so many steps, and whether it is played is not counted."""
    pipe = ZOO[name].make()
    counted = pipe.transformer.get_submodule(layer)
    calls = 0
    forward = nn.Linear.forward

    def count(module: nn.Linear, x: Tensor) -> Tensor:
        nonlocal calls
        calls += module is counted
        return forward(module, x)

    # Not on the instance: what is around the forward of a module may count its calls, so it is never remembered.
    with record_on_cpu(), mock.patch.object(nn.Linear, "forward", count):
        runner = ditile.parallelize(pipe, Plan(patches=3, warmup=1), cuda_graphs=recorded, trust_code=True)
        runner(**ZOO[name].call() | {"num_inference_steps": steps})
    return calls


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("qwen-image", "transformer_blocks.0.img_mod.1"),
        ("wan-2.1", "blocks.0.attn2.to_k"),
        ("flux", "transformer_blocks.0.norm1.linear"),
    ],
)
def test_blocks_compute_once_in_a_step_what_does_not_see_the_image(name: str, layer: str, recorded: bool) -> None:
    """The third of four steps, which is the one that is recorded: later ones are played.

    A failure means that each patch reads the weights of each modulation, a third of all in Qwen-Image.
    """
    steps = count_linear_calls(name, layer, 3, recorded) - count_linear_calls(name, layer, 2, recorded)
    branches = count_linear_calls(name, layer, 1, recorded)
    assert steps == branches

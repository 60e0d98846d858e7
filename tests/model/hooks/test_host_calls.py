"""What the host calls of torch in one asynchronous micro-step: a GPU that is fast waits for these calls."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import torch

import ditile
from ditile.model.hooks.kv_store import KeyStore
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.plan.plan import Plan
from tests import tiny
from tests.model.hooks.count_ops import AsOnGPU, OpCounter

BEFORE = 1571
"""Operators of one micro-step of the last of four stages of FLUX.1-dev, 15 single blocks, with 4 patches, as they were
first counted on a simulated GPU."""


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
    """Of a stage with 15 single blocks; here it has the embedders and the head too. Not a kernel of ditile's own for
    each block but the copies of K and V."""
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

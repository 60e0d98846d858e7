"""Rotary embeddings in fewer kernels: the same bits as diffusers' own; and how many Python calls attention costs."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from benchmarks.frames import (
    LIMITS,
    MICRO_STEP_LIMIT,
    PLANS,
    FrameCounts,
    count_frames,
    find_attention_frames,
    find_micro_step_frames,
)
from ditile.parallel.attention.rotary import RotaryEmbedding
from tests.model.hooks.count_ops import OpCounter
from tests.pool import Pool


def make_table(tokens: int = 6, channels: int = 8) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(tokens, channels, generator=random), torch.randn(tokens, channels, generator=random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sequence_dim", [1, 2])
@torch.no_grad()
def test_the_bits_are_those_of_diffusers(dtype: torch.dtype, sequence_dim: int) -> None:
    """Two calls with one table, and a part of a wider tensor, as projections that are one product give it."""
    table, rotary = make_table(), RotaryEmbedding()
    shape = (2, 6, 3, 24) if sequence_dim == 1 else (2, 3, 6, 24)
    whole = torch.randn(shape).to(dtype)
    before = whole.clone()
    for part in whole.split(8, dim=-1):
        wanted = apply_rotary_emb(part, table, sequence_dim=sequence_dim)  # type: ignore[arg-type]
        assert torch.equal(rotary.rotate_pairs(part, table, sequence_dim=sequence_dim), wanted)
    assert torch.equal(whole, before), "what is rotated may be read again"


@torch.no_grad()
def test_fewer_calls_of_torch() -> None:
    """6 of them, where diffusers makes 15."""
    table, rotary, x = make_table(), RotaryEmbedding(), torch.randn(1, 6, 3, 8).bfloat16()
    rotary.rotate_pairs(x, table, sequence_dim=1)
    with OpCounter() as ours:
        rotary.rotate_pairs(x, table, sequence_dim=1)
    with OpCounter() as stock:
        apply_rotary_emb(x, table, sequence_dim=1)  # type: ignore[arg-type]
    assert (ours.total, stock.total) == (6, 15)


@torch.no_grad()
def test_another_table_is_another_result() -> None:
    """A table that is written into, one with other cosines, and another kind of pairs. None outlives its own."""
    (cos, sin), rotary, x = make_table(), RotaryEmbedding(), torch.randn(1, 6, 3, 8)
    for table, kind in (((cos, sin), -1), ((cos + 1, sin), -1), ((cos, sin.add_(1)), -1), ((cos, sin), -2)):
        wanted = apply_rotary_emb(x, table, True, kind, 1)  # type: ignore[arg-type]
        assert torch.equal(rotary.rotate_pairs(x, table, True, kind, 1), wanted)
    kept = weakref.ref(vars(sin)["_ditile_rotary"].cos)
    del table, cos, sin
    gc.collect()
    assert kept() is None


def test_only_processors_that_call_it_are_copied() -> None:
    """A failure means that a class of diffusers was changed, or that weights of an adapter are copied."""
    rotary, stock = RotaryEmbedding(), FluxAttnProcessor()
    call = FluxAttnProcessor.__call__
    made = rotary.copy_processor(stock)
    assert rotary.is_applied_by(stock) and isinstance(made, FluxAttnProcessor)
    assert type(rotary.copy_processor(stock)) is type(made), "graphs are kept as long as the class is the same"
    assert type(stock) is FluxAttnProcessor and FluxAttnProcessor.__call__ is call
    assert not rotary.is_applied_by(made)
    assert not rotary.is_applied_by(WanAttnProcessor())
    assert not rotary.is_applied_by(FluxIPAdapterAttnProcessor(8, 8))


def count_without_checks(plan: dict[str, Any]) -> FrameCounts:
    """On a rank: what is counted where no ages are asserted."""
    with mock.patch.dict(os.environ, {"DITILE_CHECK": ""}):
        return count_frames(plan)


@pytest.mark.parametrize("name", list(PLANS))
def test_one_attention_and_one_micro_step_stay_within_their_frames(pool: Pool, name: str) -> None:
    """A failure means that something is derived anew in each layer or call, or a closure made, that could be kept."""
    counts = pool.run(count_without_checks, 2, dict(PLANS[name]))
    for each in counts:
        assert find_attention_frames(each) <= LIMITS[name]
    if name == "pipefusion":
        assert find_micro_step_frames(counts[0]) <= MICRO_STEP_LIMIT

"""Blocks that write into the tokens they are given, as a user's own may, are cached like those that return new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ditile
from ditile import BlockAdapter, DBCacheConfig, DBPruneConfig, ForwardPattern

STEPS = 8


def run_block(block: Any, hidden_states: Tensor) -> Tensor:
    """The forward of a block, whose first parameter may have any name."""
    block.calls += 1
    if block.in_place:
        return hidden_states.mul_(block.factor).add_(1.0)
    return hidden_states * block.factor + 1.0


class Block(nn.Module):
    """Scales, adds a number, and counts its calls."""

    def __init__(self, in_place: bool, factor: float) -> None:
        super().__init__()
        self.in_place, self.factor, self.calls = in_place, factor, 0

    forward = run_block


class Stack(nn.Module):
    """Eight of them. It may add a number to the tokens behind each, in place, as what a ControlNet gives."""

    def __init__(self, in_place: bool, factor: float, adds: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(in_place, factor) for _ in range(8))
        self.adds = adds

    def forward(self, hidden_states: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
            if self.adds:
                hidden_states += self.adds
        return hidden_states


def cached_run(config: Any, in_place: bool, factor: float = 1.0, growth: float = 0.02) -> tuple[list[float], list[int]]:
    """The means of what it returns for tokens that grow, and how often each block was called."""
    model = Stack(in_place, factor)
    ditile.enable_cache(
        BlockAdapter(transformer=model, blocks=model.blocks, forward_pattern=ForwardPattern.Pattern_3), config
    )
    with torch.no_grad():
        means = [float(model(torch.full((1, 3, 2), 10.0) * (1 + growth * step)).mean()) for step in range(STEPS)]
    return means, [block.calls for block in model.blocks]  # type: ignore[union-attr, misc]


CONFIGS = pytest.mark.parametrize(
    "config",
    [
        DBCacheConfig(Fn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=0.05),
        DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.05),
        DBCacheConfig(Fn_compute_blocks=3, Bn_compute_blocks=2, max_warmup_steps=1, residual_diff_threshold=0.05),
        DBCacheConfig(Fn_compute_blocks=2, max_warmup_steps=1, residual_diff_threshold=0.05, store="hidden"),
        DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.05),
    ],
    ids=["F=0", "F=1", "F=3 B=2", "hidden", "DBPrune"],
)


@CONFIGS
def test_a_model_that_adds_in_place_between_blocks(config: Any) -> None:
    """The same input gives the same output in every step. A failure would mean that what is added counts twice where
    blocks are left out: once in what is kept, and once in the tokens in front of them."""
    model = Stack(in_place=False, factor=1.0, adds=10.0)
    ditile.enable_cache(
        BlockAdapter(transformer=model, blocks=model.blocks, forward_pattern=ForwardPattern.Pattern_3),
        config.reset(num_inference_steps=STEPS, residual_diff_threshold=1.0),
    )
    for rows in (1, 2):
        got = [float(model(torch.ones(rows, 3, 2)).mean()) for _ in range(STEPS)]
        assert got == [1.0 + 8 * 11.0] * STEPS
    assert min(block.calls for block in model.blocks) == 2, "the first step of each"  # type: ignore[union-attr, misc]


@CONFIGS
@pytest.mark.parametrize("factor", [1.0, 1.1], ids=["the same is added", "more is added"])
def test_blocks_that_write_in_place(config: Any, factor: float) -> None:
    """A failure would mean that what they add is taken for nothing, or that every step looks like the one before."""
    config = config.reset(num_inference_steps=STEPS)
    means, calls = cached_run(config, in_place=True, factor=factor)
    assert (means, calls) == cached_run(config, in_place=False, factor=factor)
    assert 1 < min(calls) < STEPS or factor == 1.0, "some steps were left out, and not all"
    assert min(calls) < STEPS
    if factor == 1.0 and getattr(config, "store", "residual") == "residual":
        exact = [10.0 * (1 + 0.02 * step) + 8 for step in range(STEPS)]
        assert means == pytest.approx(exact, rel=1e-6), "each adds the same in every step"


def test_a_dynamic_threshold_prunes_blocks_behind_the_fifth() -> None:
    """Every input changes by more than the threshold, and by less than 1.25 times the mean of the first five."""
    config = DBPruneConfig(
        Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.04, num_inference_steps=2 * STEPS,
        max_continuous_cached_steps=1,
    )  # fmt: skip
    growth = 0.08
    _, fixed = cached_run(config, in_place=False, growth=growth)
    _, moved = cached_run(config.reset(enable_dynamic_prune_threshold=True), in_place=False, growth=growth)
    assert fixed[1:6] == moved[1:6]
    assert all(a > b for a, b in zip(fixed[6:], moved[6:], strict=True)), (fixed, moved)

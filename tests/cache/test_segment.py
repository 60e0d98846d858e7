"""Blocks that run for some images of a batch: which rows these are is told on the device, without waiting for it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.cache.forecast import Reuse
from ditile.cache.hooks import CacheHook
from ditile.cache.segment import Residuals, Segment
from ditile.cache.skip_decision import CacheCall, split_into_units
from ditile.model.hooks.protocols import CallPosition, SkipAgreement
from ditile.plan.anatomy import Flow

BLOCKS, IMAGES = 5, 3


class Block(nn.Module):
    """Adds one to its tokens, and counts the rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        self.rows.append(len(hidden_states))
        return hidden_states + temb[:, None, None]


class Operators(TorchDispatchMode):
    """Counts what is asked of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_rows_that_run_are_told_once_a_step_without_a_copy(device: str) -> None:
    """A failure means that every block waits for the GPU, as a copy from pageable memory does: 57 a step in FLUX."""
    blocks = [Block() for _ in range(BLOCKS)]
    hooks = [CacheHook(k, block, Flow(text=None)) for k, block in enumerate(blocks)]
    for hook in hooks:
        hook.install_hook(ExitStack(), None)
    segment = Segment(hooks, Residuals(lambda stream: Reuse()))
    units = split_into_units(2 * IMAGES, IMAGES, "image")
    tokens, temb = torch.zeros(2 * IMAGES, 4, 8, device=device), torch.ones(2 * IMAGES, device=device)

    def step(number: int, skips: list[bool]) -> Tensor:
        segment.apply_decision(CacheCall(CallPosition(number), number, units, 2 * IMAGES), skips, SkipAgreement())
        x = tokens
        for block in blocks:
            x = block(x, temb * (number + 1))
        return x

    step(0, [False] * IMAGES)
    for number, skips in ((1, [False, True, False]), (2, [True, False, True])):
        with Operators() as seen:
            out = step(number, skips)
        assert seen.counts["arange"] == 1 and not seen.counts["_to_copy"], "once, and where the tokens are"
        assert all(block.rows[-1] == 2 * skips.count(False) for block in blocks)
        if device == "cpu":
            wanted = {1: [10.0, 5.0, 10.0], 2: [10.0, 15.0, 10.0]}[number] * 2
            assert out[:, 0, 0].tolist() == wanted

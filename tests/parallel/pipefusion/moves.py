"""What tests of caches without a pipeline share: transformers called for a few steps, and what that leaves behind.

Steps come in groups of almost the same input, so that it is clear which of them are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ditile.cache.config import Calibration, DBCacheConfig
from ditile.model.block_table import read_transformer_table
from ditile.runner import caching
from tests.more_families import EVERY

REFUSED = {name for name, entry in read_transformer_table().items() if entry.refusal}
RUN = [name for name, family in EVERY.items() if family.inputs and name not in REFUSED]
Moves = Sequence[tuple[int, float]]
MOVES: Moves = ((0, 1.0), (0, 1.02), (1, 1.0), (1, 1.02), (2, 1.0))
"""The input of each step: which, and times what."""
STEPS = len(MOVES)


def moved(inputs: dict[str, Any], which: int, times: float) -> dict[str, Any]:
    """The same call with another noisy input: the first of its arguments with numbers."""
    for name, value in inputs.items():
        if isinstance(value, list) and value or (isinstance(value, Tensor) and value.is_floating_point()):
            each = value if isinstance(value, list) else [value]
            now = [x.flatten(1).roll(7 * which, -1).view_as(x) * (-times if which == 1 else times) for x in each]
            return inputs | {name: now if isinstance(value, list) else now[0]}
    raise AssertionError("nothing to move")


def calls(name: str, moves: Moves = MOVES) -> Iterator[dict[str, Any]]:
    """The arguments of each step."""
    inputs = EVERY[name].inputs
    assert inputs is not None
    return (moved(inputs(), *move) for move in moves)


def tensors(out: Any) -> list[Tensor]:
    """All that a model returns."""
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@torch.no_grad()
def outputs(name: str, model: Callable[..., Any], moves: Moves = MOVES) -> list[list[Tensor]]:
    """What each step returns."""
    return [tensors(model(**call)) for call in calls(name, moves)]


def enable(model: Any, config: DBCacheConfig, calibrator: Calibration | None = None) -> Any:
    return caching.enable_cache(
        model, config.reset(num_inference_steps=config.num_inference_steps or STEPS), calibrator
    )


def skipped(model: Any) -> list[list[int]]:
    """Of each image and block that was decided on."""
    return [each.skipped for report in caching.summary(model, logging=False) for each in report.decisions]


def untouched(model: nn.Module) -> None:
    """Nothing of a cache is left on any module."""
    for path, module in model.named_modules():
        left = [key for key in vars(module) if key == "forward" or "ditile" in key]
        assert not left, f"{path}: {left}"

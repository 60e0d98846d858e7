"""Two ways to leave work out: blocks whose work hardly changes, and whole steps that were chosen beforehand.

DBCache is Cache-DiT's: the first blocks decide whether the residual of the others, from an earlier step, is reused.
(Left out here: Cache-DiT can also compute the last blocks in every step, `Bn_compute_blocks`.) A fitted schedule is
ditile's: steps that compute, and fixed weights of their outputs for the others. docs/caching.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model import Context, Model, Tokens
from torch import Tensor


@dataclass
class DBCache:
    """The blocks of a model, some of which may be left out.

    Attributes:
        first: blocks that always compute, and decide.
        threshold: skip the other blocks if the first blocks' residual changed by less than this fraction.
        warmup: first steps that compute everything.
    """

    model: Model
    first: int = 1
    threshold: float = 0.1
    warmup: int = 1
    computed: int = 0
    skipped: int = 0
    _probes: dict[int, Tensor] = field(default_factory=dict)
    _added: dict[int, Tokens] = field(default_factory=dict)

    def run_blocks(self, step: int, branch: int, tokens: Tokens, context: Context) -> Tokens:
        """Return the tokens after the last block, or what they are taken to be."""
        blocks = range(len(self.model.blocks))
        before = self.model.run_blocks(blocks[: self.first], tokens, context)
        probe = before.image - tokens.image
        last = self._probes.get(branch)
        if step >= self.warmup and last is not None and relative_change(last, probe) < self.threshold:
            self.skipped += 1
            added = self._added[branch]
            return Tokens(before.text + added.text, before.image + added.image)
        self.computed += 1
        after = self.model.run_blocks(blocks[self.first :], before, context)
        # Compare with the last *computed* step, so that small changes add up.
        self._probes[branch] = probe
        self._added[branch] = Tokens(after.text - before.text, after.image - before.image)
        return after


def relative_change(before: Tensor, now: Tensor) -> float:
    """Return the mean absolute change over the mean absolute value."""
    return float((now - before).abs().sum() / before.abs().sum())


@dataclass(frozen=True)
class FittedSchedule:
    """Steps that compute, and what stands for the others.

    Both are fitted to a few images computed in full, so they hold for one model and one number of steps.

    Attributes:
        computed: the steps that compute; the first two must, since a forecast needs two outputs.
        weights: other step -> weights of the newest and the second newest output.
    """

    computed: frozenset[int]
    weights: Mapping[int, tuple[float, float]]

    def forecast(self, step: int, outputs: Sequence[Tensor]) -> Tensor:
        """Return the prediction of a step that does not compute, of the outputs computed so far."""
        newest, before = self.weights[step]
        return outputs[-1] * newest + outputs[-2] * before


def read_schedule(path: Path, computed: int) -> FittedSchedule:
    """Read the schedule with a number of computed steps from a file of `ditile fit`."""
    for budget in json.loads(path.read_text("utf-8"))["budgets"]:
        if len(budget["computed"]) == computed:
            weights = {int(step): tuple(pair) for step, pair in budget["weights"].items()}
            return FittedSchedule(frozenset(budget["computed"]), weights)
    raise ValueError(f"{path} has no schedule of {computed} computed steps")


class Outputs:
    """The two newest computed predictions of each branch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}

    def keep(self, branch: int, output: Tensor) -> Tensor:
        """Keep an output, and return it."""
        # The last one kept, and this one.
        self._kept[branch] = [*self._kept.get(branch, [])[-1:], output]
        return output

    def get(self, branch: int) -> list[Tensor]:
        """Return the newest outputs of a branch, the newest last."""
        return self._kept[branch]

"""Steps that are chosen beforehand, and forecasts that are fixed sums of the newest computed outputs."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ditile.cache.calls.policy import CallPolicy, ComputedOutput, ModelCall
from ditile.cache.fitted.schedule import FEWEST_FORECAST_STEPS
from ditile.plan.errors import ModelError

FORCED_STEPS = 3
"""The first steps always compute: they decide what the image shows. Without the third one, some captions give another
image."""

REACH = 0.5
"""A line through the newest two outputs ends this many gaps after the newest, and stays constant from there: it is
right only for the first skipped step."""


class ScheduledSteps(CallPolicy):
    """A policy whose steps and weights are known before the first step.

    Args:
        computed: the steps that compute.
        weights: for each other step, the weights of the newest output and of the second newest.
        check: raises `ModelError` for a first call that the weights do not fit; None accepts any call.
    """

    num_kept = 2

    def __init__(
        self,
        computed: Collection[int],
        weights: Mapping[int, Sequence[float]],
        check: Callable[[ModelCall], None] | None = None,
    ) -> None:
        self._computed = frozenset(computed)
        self._order = sorted(computed)
        self._weights = weights
        self._check = check

    def list_computed_steps(self) -> Collection[int]:
        """Return the steps that compute."""
        return self._computed

    def check_first_call(self, call: ModelCall) -> None:
        """Raise `ModelError` if the steps and weights are for other latents."""
        if self._check is not None:
            self._check(call)

    def computes_call(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> bool:
        """Return whether the call's step is one of those that compute."""
        return call.step in self._computed

    def forecast(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> list[Tensor]:
        """Return the weighted sum of the newest outputs. With only one output or weight, it is the newest output."""
        weights = self._weights.get(call.step, (1.0,))
        if len(kept) < 2 or len(weights) < 2:
            return combine_outputs(kept, (1.0,))
        newest = kept[0].call.step
        before = kept[1].call.step
        # Where the model or its mode changes, further steps compute. Weights hold only for the last two scheduled ones.
        end = bisect.bisect_left(self._order, call.step)
        scheduled = self._order[max(end - 2, 0) : end]
        if weights[1] and [before, newest] != scheduled:
            weights = weigh_line(before, newest, call.step)
        return combine_outputs(kept, weights)


def combine_outputs(kept: Sequence[ComputedOutput], weights: Sequence[float]) -> list[Tensor]:
    """Return the weighted sums of the newest outputs, tensor by tensor. For one output with the weight 1 this is a
    copy."""
    sums: list[Tensor] = []
    for tensors in zip(*[output.tensors for output in kept[: len(weights)]], strict=True):
        newest = tensors[0]
        if tuple(weights) == (1.0,):
            sums.append(newest.clone())
            continue
        # Weights have both signs, so half precision would lose digits.
        total = newest.to(torch.promote_types(newest.dtype, torch.float32)) * weights[0]
        for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
            total.add_(tensor, alpha=weight)
        sums.append(total.to(newest.dtype))
    return sums


def spread_steps(num_steps: int, num_computed: int) -> ScheduledSteps:
    """Spread the computed steps of an unknown model: the first three, then evenly. Lines forecast the other steps.

    With fewer than 8 steps the first ones compute, and the last output is used again.

    Raises:
        ModelError: if the generation cannot compute `num_computed` steps; see `check_num_computed`.
    """
    check_num_computed(num_steps, num_computed)
    if num_steps < FEWEST_FORECAST_STEPS:
        return ScheduledSteps(range(num_computed), {})
    forced = min(FORCED_STEPS, num_computed)
    others = num_computed - forced
    computed = list(range(forced))
    for number in range(1, others + 1):
        # There is a gap before each of these steps, and one after the last.
        computed.append(forced + (number * (num_steps - forced)) // (others + 1))
    return ScheduledSteps(computed, weigh_by_reach(computed, num_steps))


def check_num_computed(num_steps: int, num_computed: int) -> None:
    """Raise `ModelError` unless a generation of `num_steps` steps can compute `num_computed` of them."""
    if num_computed > num_steps:
        raise ModelError(
            f"steps={num_computed} is more than the {num_steps} steps of the call; give {num_steps} or less"
        )
    if num_computed < min(2, num_steps):
        raise ModelError(f"steps={num_computed} of {num_steps} leaves nothing to forecast from; give 2 or more")


def weigh_by_reach(computed: Sequence[int], num_steps: int) -> dict[int, tuple[float, float]]:
    """Return the weights of lines through the newest two computed steps, which end `REACH` gaps after the newest."""
    weights: dict[int, tuple[float, float]] = {}
    for step in range(num_steps):
        earlier = [number for number in computed if number < step]
        if step in computed or len(earlier) < 2:
            continue
        before, newest = earlier[-2:]
        weights[step] = weigh_line(before, newest, step)
    return weights


def weigh_line(before: int, newest: int, step: int) -> tuple[float, float]:
    """Return the weights of the newest two outputs in a line that ends `REACH` gaps after the newest."""
    gap = newest - before
    share = min(step - newest, REACH * gap) / gap
    return 1 + share, -share

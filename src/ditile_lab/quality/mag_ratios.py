"""Measures the ratios of MagCache: the growth from step to step of what all blocks add together (arXiv 2506.09045)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ditile.cache.hooks import CacheHook
from ditile.cache.segment import Residuals
from ditile.cache.step_rules import DecisionRecord
from ditile.cache.unit_decision import CacheCall
from ditile.model.hooks.protocols import SkipAgreement
from ditile.plan.errors import ModelError

SMALLEST_NORM = 1e-8
"""The number that is added to a norm before it divides, as in diffusers."""


class MagCalibration:
    """Measures the ratios of a chain of blocks, all of which run.

    Args:
        hooks: the hooks around the blocks, in order.

    Attributes:
        middle: the blocks that may be left out, which are none.
        memory_bytes: bytes that are kept.
        needs_control: whether sizes of what enters between blocks count.
    """

    middle = range(0)
    memory_bytes = 0
    needs_control = False

    def __init__(self, hooks: Sequence[CacheHook], num_steps: int) -> None:
        self._num_steps = num_steps
        self._first = hooks[0]
        self._last = hooks[-1]
        self._start: Tensor | None = None
        self._norms: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}

    def restrict_to_blocks(self, owned: Collection[nn.Module] | None) -> None:
        """Raise `ModelError` if the blocks are on several stages. None of these knows what all blocks add."""
        if owned is not None:
            raise ModelError(
                "MagCacheConfig(calibrate=True) measures what all blocks add, and pipefusion has them on several "
                "ranks; measure on one rank, or with ulysses, ring, tensor, cfg or data"
            )

    def begin_forward(self, call: CacheCall, agreement: SkipAgreement) -> None:
        """Prepare the hooks of the first and the last block for a call of the model."""
        self._call = call
        self._agreement = agreement
        # The last block may also be the first one, and then needs the handler that measures.
        self._first.handle = self._keep_start
        self._last.handle = self._measure_end

    def bypass_cache(self) -> None:
        """Measure nothing."""
        self._start = None
        self._first.handle = None
        self._last.handle = None

    def describe_call(self) -> None:
        """Return None: the measurements are kept in Python."""

    def iterate_residuals(self) -> Iterator[Residuals]:
        """Return an empty iterator: nothing is reused."""
        return iter(())

    def iterate_records(self) -> Iterator[tuple[int, int, int, DecisionRecord]]:
        """Return an empty iterator: nothing was decided."""
        return iter(())

    @property
    def ratios(self) -> list[float]:
        """Return the mean ratio of each step of the generation, over tokens, images and branches of guidance."""
        # Nothing comes before the first step, and other steps may call another model.
        ratios = [1.0] * self._num_steps
        for step, (total, count) in self._sums.items():
            ratios[step] = float(total / count)
        return ratios

    def _keep_start(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A block may write into its input.
        self._start = hook.read_tokens(args, kwargs).image.clone()
        return hook.forward(*args, **kwargs)

    def _measure_end(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = self._start
        if start is None:
            start = hook.read_tokens(args, kwargs).image.clone()
        self._start = None
        out = hook.forward(*args, **kwargs)
        # The ratio is computed for each token, in float32: it is a mean of quotients, and not a quotient of means.
        norms = (hook.unpack_tokens(out).image - start).float().norm(dim=-1)
        # Guidance by two calls has two series of residuals.
        before = self._norms.get(self._call.moment.branch)
        self._norms[self._call.moment.branch] = norms
        if before is not None:
            ratios = norms / (before + SMALLEST_NORM)
            # Ranks that split the tokens each have a part of the ratios.
            sums = self._agreement.sum_over_ranks(ratios.new_tensor([float(ratios.sum()), ratios.numel()]))
            step = self._call.moment.step
            self._sums[step] = self._sums.get(step, 0) + sums
        return out

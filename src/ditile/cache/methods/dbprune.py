"""DBPrune: decides for each block separately, and skips it if its input has hardly changed since it last ran.

The first F blocks, the last B blocks and the blocks of a given list always run. The probe of a block is its input; its
residual is what it added to the tokens when it last ran. A dynamic threshold rises in a step whose first blocks have
changed slightly more than the threshold allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ditile.cache.hooks import CacheHook
from ditile.cache.segment import Residuals, Segment
from ditile.cache.step_rules import DecisionRecord
from ditile.cache.unit_decision import CacheCall, SkipDecider
from ditile.model.hooks.protocols import SkipAgreement


class PrunableBlock(NamedTuple):
    """A block that may be skipped, with what decides on it and what runs or skips it."""

    decider: SkipDecider
    segment: Segment


class DBPrune:
    """Decides which blocks of one chain run.

    Args:
        hooks: the hooks around the blocks, in order.
        make_decider: makes the decider of a block.
        make_residuals: makes the memory of a block, by its place.
        num_first, num_last: F and B.
        never: the positions of other blocks that always run.
        dynamic: (threshold, differences measured earlier in the step) -> the new threshold; None if it never changes.

    Attributes:
        middle: the positions of the blocks that may be skipped.
    """

    def __init__(
        self,
        hooks: Sequence[CacheHook],
        make_decider: Callable[[], SkipDecider],
        make_residuals: Callable[[int], Residuals],
        num_first: int,
        num_last: int,
        *,
        never: Sequence[int],
        dynamic: Callable[[float, list[float]], float] | None,
    ) -> None:
        self._dynamic = dynamic
        places = range(num_first, max(num_first, len(hooks) - num_last))
        self.middle = [place for place in places if place not in never]
        self._all: dict[int, PrunableBlock] = {}
        for place in self.middle:
            hook = hooks[place]
            self._all[hook.index] = PrunableBlock(make_decider(), Segment([hook], make_residuals(hook.index)))
        self._mine = self._all
        self._seen: list[list[float]] = []

    def restrict_to_blocks(self, owned: Collection[nn.Module] | None) -> None:
        """Keep only the chain's blocks on this rank. None is all blocks."""
        self._mine = {}
        for index, prunable in self._all.items():
            if owned is None or prunable.segment.hooks[0].block in owned:
                self._mine[index] = prunable

    def begin_forward(self, call: CacheCall, agreement: SkipAgreement) -> None:
        """Prepare the hooks for a call of the model."""
        # A ControlNet's residual enters before the block, so it is part of the probe and not of what the block adds.
        self._call = call._replace(control=None)
        self._agreement = agreement
        self._seen = [[] for _ in call.units]
        for prunable in self._mine.values():
            prunable.segment.hooks[0].handle = self._run_or_skip_block

    def bypass_cache(self) -> None:
        """Let all blocks run, and remember nothing."""
        for prunable in self._all.values():
            prunable.segment.bypass_cache()

    def describe_call(self) -> None:
        """Return None: each block decides by its own input."""

    def iterate_residuals(self) -> Iterator[Residuals]:
        """Yield the memory of each block that may be left out."""
        for prunable in self._mine.values():
            yield prunable.segment.residuals

    def iterate_records(self) -> Iterator[tuple[int, int, int, DecisionRecord]]:
        """Yield (branch, patch, unit, record) for each decision, block by block."""
        for prunable in self._all.values():
            yield from prunable.decider.iterate_records()

    @property
    def needs_control(self) -> bool:
        """Return False. What a ControlNet adds enters before a block, so it is part of the probe."""
        return False

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        kept_bytes = 0
        for prunable in self._all.values():
            kept_bytes += prunable.decider.memory_bytes + prunable.segment.residuals.memory_bytes
        return kept_bytes

    def _run_or_skip_block(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        decider, segment = self._mine[hook.index]
        probe = hook.read_tokens(args, kwargs).image
        thresholds = None
        if self._dynamic is not None:
            thresholds = [self._dynamic(decider.rules.threshold, seen) for seen in self._seen]
        skips = decider.decide_skips(probe, self._call, self._agreement, thresholds)
        if not all(skips):
            # The probe is copied because a block may write into its input.
            decider.store_probes(probe.clone(), self._call, skips)
        # The threshold of the next block depends on the differences so far.
        for seen, difference in zip(self._seen, decider.get_last_differences(self._call), strict=True):
            if difference is not None:
                seen.append(difference)
        segment.apply_decision(self._call, skips, self._agreement)
        assert hook.handle is not None
        return hook.handle(hook, args, kwargs)

"""DBCache: the first F blocks say whether the image has changed; if not, all others but the last B are left out.

The blocks are a probe (F blocks, always run), a middle (run or forecast) and a tail (B blocks, always run). F = 1 and
B = 0 is first-block caching. The probe's value is what its blocks add to the image tokens. It is compared with its
value in the last computed step. The probe and the residual of the middle are stored only when the middle runs.

With F = 0 no block runs to decide: the probe's value is the input of the first block. Where only the rules decide (a
static mask, a threshold of 1) nothing is compared, kept for a comparison, or sent: each rank knows every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ditile.cache.hooks import CacheHook
from ditile.cache.segment import Residuals, Segment
from ditile.cache.step_rules import DecisionRecord
from ditile.cache.unit_decision import CacheCall, SkipDecider
from ditile.model.hooks.protocols import SkipAgreement


class DBCache:
    """The cache of a list of blocks that run one after the other.

    Args:
        hooks: the hooks around the blocks, in order.
        make_residuals: makes a memory for a segment, by the place of its first block.
        first, last: F and B.
        hidden: whether the probe is the tokens themselves, and not what is added to them.

    Attributes:
        middle: the blocks that may be left out.
    """

    def __init__(
        self,
        hooks: Sequence[CacheHook],
        decider: SkipDecider,
        make_residuals: Callable[[int], Residuals],
        first: int,
        last: int,
        *,
        hidden: bool = False,
    ) -> None:
        self._hooks = hooks
        self.decider = decider
        self._make_residuals = make_residuals
        self._hidden = hidden
        self.middle = range(first, max(first, len(hooks) - last))
        self._rules_decide = decider.rules.decide_alone
        # With F = 0 the input of the first block is the probe, and no block runs to decide.
        self._decides_at_input = first == 0
        self._probe_hooks = hooks[:first]
        self._skips: Sequence[bool] | None = None
        self._probe_end: CacheHook | None = None
        if self.middle:
            self._probe_end = hooks[max(first, 1) - 1]  # with F = 0 the first block
        self._segments: list[Segment] = []
        self._before: Tensor | None = None
        self.restrict_to_blocks(None)

    def restrict_to_blocks(self, owned: Collection[nn.Module] | None) -> None:
        """Keep memory only for the chain's blocks on this rank. None is all blocks."""
        own_hooks = [hook for hook in self._hooks if owned is None or hook.block in owned]
        middle = self._hooks[self.middle.start : self.middle.stop]
        # Neighbours that pass on the same streams are a segment, with one residual.
        runs: list[list[CacheHook]] = []
        for hook in middle:
            if hook not in own_hooks:
                continue
            last = runs[-1][-1] if runs else None
            if last is not None and last.has_text == hook.has_text and last.index + 1 == hook.index:
                runs[-1].append(hook)
            else:
                runs.append([hook])
        self._segments = [Segment(run, self._make_residuals(run[0].index)) for run in runs]
        self._starts = False
        self._decides = False
        self._waits_for_decision = False
        if self._probe_end is not None and own_hooks:
            self._starts = own_hooks[0] is self._hooks[0]
            self._decides = self._probe_end in own_hooks
            self._waits_for_decision = own_hooks[0].index > self._probe_end.index

    def begin_forward(self, call: CacheCall, agreement: SkipAgreement) -> None:
        """Prepare the hooks for a call of the model. A stage after the probe waits here for the decision."""
        self._call = call
        self._agreement = agreement
        self._before = None
        self._skips = None
        # Nobody waits for a decision, as each stage has the rules.
        if self._rules_decide:
            self._apply_skips(self.decider.decide_by_rules(call))
            return
        for hook in self._probe_hooks:
            hook.handle = None
        if self._starts and self._decides_at_input:
            self._hooks[0].handle = self._decide_at_first_block
            return
        if self._starts:
            self._hooks[0].handle = self._run_probe_start
        if self._decides and self._probe_end is not None:
            # If the probe is one block, this replaces the handler set above.
            self._probe_end.handle = self._run_probe_end
        elif self._waits_for_decision:
            skips = agreement.receive_skip_decision(len(call.units))
            self._send_and_apply_skips(self.decider.decide_by_rules(call, skips))

    def bypass_cache(self) -> None:
        """Let all blocks run, and remember nothing."""
        self._before = None
        for hook in self._hooks:
            hook.handle = None
        for segment in self._segments:
            segment.bypass_cache()

    def describe_call(self) -> Hashable | None:
        """Describe what decides, apart from their inputs, what the blocks do in the prepared call.

        None if that is a difference which is measured during the call.
        """
        has_probe = self._starts or self._decides
        if self._skips is None and has_probe:
            return None
        states = [segment.residuals.describe_state(self._call) for segment in self._segments]
        if None in states:
            return None
        return tuple(self._skips or ()), tuple(states)

    def iterate_residuals(self) -> Iterator[Residuals]:
        """Yield the memory of each run of blocks that may be left out."""
        for segment in self._segments:
            yield segment.residuals

    def iterate_records(self) -> Iterator[tuple[int, int, int, DecisionRecord]]:
        """Yield (branch, patch, unit, record) for each decision."""
        return self.decider.iterate_records()

    @property
    def needs_control(self) -> bool:
        """Return whether inputs that enter after the probe, such as a ControlNet's, must be measured."""
        return not self._rules_decide

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        return self.decider.memory_bytes + sum(segment.residuals.memory_bytes for segment in self._segments)

    def _decide_at_first_block(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide at the first block from its input, and then run it or leave it out (F = 0)."""
        probe = hook.read_tokens(args, kwargs).image
        skips = self.decider.decide_skips(probe, self._call, self._agreement)
        if not all(skips):
            # A block may write into its input.
            self.decider.store_probes(probe.clone(), self._call, skips)
        self._send_and_apply_skips(skips)
        assert hook.handle is not None  # the segment has just replaced this method as the handler
        return hook.handle(hook, args, kwargs)

    def _run_probe_start(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first block of a probe, and keep its input or send it to the stage that decides."""
        before = hook.read_tokens(args, kwargs).image.clone()
        if self._decides:
            self._before = before
        elif not self._hidden and self._probe_end is not None:
            self._agreement.send_probe_input(before, self._probe_end.block)
        return hook.forward(*args, **kwargs)

    def _run_probe_end(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the last block of a probe, which may be its first, and decide."""
        before = self._before
        if before is None:
            before = hook.read_tokens(args, kwargs).image.clone()
        self._before = None
        out = hook.forward(*args, **kwargs)
        after = hook.unpack_tokens(out).image
        # The first block of the probe may be on an earlier stage.
        if not self._starts and not self._hidden:
            before = self._agreement.receive_probe_input(after, self._hooks[0].block)
        probe = after.clone() if self._hidden else after - before
        skips = self.decider.decide_skips(probe, self._call, self._agreement)
        # Probes of left out steps are not stored, because nothing is compared with them.
        if not all(skips):
            self.decider.store_probes(probe, self._call, skips)
        self._send_and_apply_skips(skips)
        return out

    def _send_and_apply_skips(self, skips: Sequence[bool]) -> None:
        # The next stage waits for the decision before it computes anything.
        self._agreement.send_skip_decision(skips)
        self._apply_skips(skips)

    def _apply_skips(self, skips: Sequence[bool]) -> None:
        self._skips = skips
        for segment in self._segments:
            segment.apply_decision(self._call, skips, self._agreement)

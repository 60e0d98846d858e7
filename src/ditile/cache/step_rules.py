"""The rules for skipping a step of one image: masks, warmup, limits and the threshold. Pure functions.

The rules apply in this order, and the first rule with an answer decides:

    nothing remembered yet, warmup, mask, number of skipped steps, skipped steps in a row, budget, threshold

Steps are counted from the first call of the cached blocks, so that a second transformer (as in Wan 2.2) has its own
warmup. A mask counts from the first step of the generation, whichever transformer a step calls. A branch of guidance
that is a separate call has a separate history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ditile.cache.config import DBCacheConfig

ALWAYS = 1.0
"""With a threshold of at least this, steps are skipped without measuring their difference."""

DYNAMIC_DIFFERENCES = 5
"""How many of a step's first differences set its dynamic threshold, as in cache-dit."""


class RuleVerdict(Enum):
    """The verdict of the rules before anything is measured."""

    COMPUTE = "compute"
    SKIP = "skip"
    # The difference must be measured, and decides.
    MEASURE = "measure"


@dataclass(slots=True)
class DecisionRecord:
    """The decisions for one image (and patch, and branch) so far.

    Attributes:
        computed: the last step that was computed; None before the first.
        skipped: the steps that were left out.
        streak: how many of the last steps in a row were left out.
        spent: the sum of the differences of steps that were left out.
        differences: step -> difference, where one was measured.
    """

    computed: int | None = None
    skipped: list[int] = field(default_factory=list)
    streak: int = 0
    spent: float = 0.0
    differences: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SkipRules:
    """The rules of one generation.

    Attributes:
        config: warmup, threshold, limits and so on.
        mask: the config's mask for this generation: 1 for each step that must be computed; None without a mask.
    """

    config: DBCacheConfig
    mask: tuple[int, ...] | None = None

    def decide_without_difference(self, step: int, record: DecisionRecord, place: int | None = None) -> RuleVerdict:
        """Return the verdict before anything is measured. `place` is the step's place in the generation if that
        differs."""
        config = self.config
        if place is None:
            place = step
        warmup = config.max_warmup_steps
        start = place - step  # the place of the first call of the cached blocks
        # The first 0 of a mask ends the warmup.
        if self.mask is not None and 0 in self.mask[start:]:
            warmup = min(warmup, self.mask.index(0, start) - start)
        is_warmup = step < warmup and step % config.warmup_interval == 0
        if record.computed is None or is_warmup:
            return RuleVerdict.COMPUTE
        if self.mask is not None and self.mask[place]:
            return RuleVerdict.COMPUTE
        if self.mask is not None and self.is_static:
            return RuleVerdict.SKIP
        # A limit of -1 never applies.
        if 0 <= config.max_cached_steps <= len(record.skipped):
            return RuleVerdict.COMPUTE
        if 0 <= config.max_continuous_cached_steps <= record.streak:
            return RuleVerdict.COMPUTE
        if self.threshold <= 0:
            return RuleVerdict.COMPUTE
        # A budget counts differences, so they must be known.
        if self.threshold >= ALWAYS and self._active_budget is None:
            return RuleVerdict.SKIP
        return RuleVerdict.MEASURE

    def should_skip_step(self, difference: float, record: DecisionRecord, threshold: float | None = None) -> bool:
        """Return whether a step of this difference is left out, by the threshold of the rules or by another one."""
        limit = threshold
        if limit is None:
            limit = self.threshold
        # Comparisons with NaN are false, so such a step computes unless the limit lets every step be skipped.
        within_budget = self._active_budget is None or record.spent + difference < self._active_budget
        return within_budget and (difference < limit or limit >= ALWAYS)

    def record_decision(self, step: int, record: DecisionRecord, *, skipped: bool, difference: float | None) -> None:
        """Record a decision. `difference` is None where nothing was measured."""
        if difference is not None:
            record.differences[step] = difference
        if not skipped:
            record.computed = step
            record.streak = 0
            if self.config.accumulated_resets:
                record.spent = 0.0
            return
        record.skipped.append(step)
        record.streak += 1
        record.spent += difference or 0.0

    @property
    def threshold(self) -> float:
        """Return the threshold. A step with a smaller difference may be left out."""
        hidden = self.config.l1_hidden_states_diff_threshold
        if hidden is None:
            return self.config.residual_diff_threshold
        return hidden

    @property
    def is_static(self) -> bool:
        """Return whether only the mask decides."""
        return self.config.steps_computation_policy == "static"

    @property
    def decide_alone(self) -> bool:
        """Return whether nothing is ever measured, so that every rank knows each decision without a message."""
        if self.mask is not None and self.is_static:
            return True
        return self.threshold <= 0 or (self.threshold >= ALWAYS and self._active_budget is None)

    @property
    def never_skips(self) -> bool:
        """Return whether nothing is ever left out."""
        return self.threshold <= 0 and (self.mask is None or not self.is_static)

    def can_skip_any(self, steps: int) -> bool:
        """Return whether the rules let any of `steps` steps be skipped if its difference is small enough."""
        record = DecisionRecord()
        for step in range(steps):
            if self.decide_without_difference(step, record) is not RuleVerdict.COMPUTE:
                return True
            self.record_decision(step, record, skipped=False, difference=None)
        return False

    @property
    def _active_budget(self) -> float | None:
        # A budget of 0 is none, as in cache-dit.
        return self.config.max_accumulated_residual_diff_threshold or None


def relax_threshold(threshold: float, differences: list[float], ratio: float, most: float) -> float:
    """Return the threshold of DBPrune for the rest of a step, once its first blocks were measured.

    It is `ratio` times the mean of those of the first five that are not 0, if between `threshold` and `most`.
    """
    first = [difference for difference in differences[:DYNAMIC_DIFFERENCES] if difference > 0]
    if len(differences) < DYNAMIC_DIFFERENCES or not first:
        return threshold
    relaxed = ratio * sum(first) / len(first)
    if relaxed >= most:
        return threshold
    return max(threshold, relaxed)

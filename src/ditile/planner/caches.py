"""What a cache is expected to leave out: its own rules, played over the steps before anything is measured."""

from __future__ import annotations

from ditile.cache.build import build_skip_rules
from ditile.cache.config import DBCacheConfig
from ditile.cache.rules import DecisionRecord, RuleVerdict
from ditile.errors import PlanError
from ditile.planner.ops import CacheSkips


def predict_skipped_steps(config: DBCacheConfig | None, steps: int, hit_rate: float | None = None) -> CacheSkips:
    """The steps that a cache leaves out.

    Args:
        config: the cache; None leaves nothing out.
        steps: of the generation.
        hit_rate: of the steps that are decided by what is measured, the share that is left out, from 0 to 1. Caches
            whose rules alone decide (a threshold of 1, a static mask) need none.

    Raises:
        PlanError: if there is a hit rate to say and none is given.
    """
    if config is None:
        return CacheSkips()
    rules, record, hits = build_skip_rules(config, steps), DecisionRecord(), 0.0
    for step in range(steps):
        verdict = RuleVerdict.COMPUTE if rules.never_skips else rules.decide_without_difference(step, record)
        if verdict is RuleVerdict.MEASURE:
            if hit_rate is None:
                raise PlanError(
                    f"a threshold of {rules.limits.threshold:g} decides by what it measures; say which share of those "
                    "steps it is expected to leave out, such as --hit-rate 0.5"
                )
            hits += hit_rate
        skipped = verdict is RuleVerdict.SKIP or (verdict is RuleVerdict.MEASURE and hits >= 1 - 1e-9)
        hits -= skipped and verdict is RuleVerdict.MEASURE
        rules.record_decision(step, record, skipped=skipped, difference=None)
    return CacheSkips(steps=frozenset(record.skipped), first=config.Fn_compute_blocks, last=config.Bn_compute_blocks)

"""Builds chains, which leave blocks out, from settings. A context is some blocks and their config; it builds a chain
for each generation.

If a config can never leave out a block or a step, this module explains why, and what would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ditile.cache.config import (
    BlockCacheConfig,
    CacheConfig,
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    format_cache_config,
)
from ditile.cache.forecast import build_forecaster
from ditile.cache.hooks import CacheHook
from ditile.cache.methods.dbcache import DBCache
from ditile.cache.methods.dbprune import DBPrune
from ditile.cache.methods.easycache import EasyCacheConfig
from ditile.cache.methods.magcache import MagCacheConfig
from ditile.cache.methods.seacache import SeaCacheConfig, SpectralFeature
from ditile.cache.segment import KeepMemory, Residuals
from ditile.cache.step_mask import resolve_step_mask
from ditile.cache.step_rules import SkipRules, relax_threshold
from ditile.cache.unit_decision import Difference, SkipDecider
from ditile.model.hooks.protocols import SkipAgreement
from ditile.plan.extras import import_lab

Chain = DBCache | DBPrune
"""Decides which blocks of a context are left out in one generation, and leaves them out."""


@dataclass(frozen=True, slots=True)
class CacheContext:
    """Blocks that are decided on together, with their settings.

    Attributes:
        hooks: the hooks around the blocks, in order.
        calibrator: forecasts what is left out; None uses what was computed last.
    """

    name: str
    hooks: Sequence[CacheHook]
    config: BlockCacheConfig
    calibrator: Calibration | None

    @property
    def text(self) -> str:
        """Return the settings in one word."""
        return format_cache_config(self.config, self.calibrator)

    @property
    def settings(self) -> str:
        """Return all settings. Ranks with equal texts decide alike."""
        return f"{self.config!r} {self.calibrator!r}"

    @property
    def idle(self) -> str | None:
        """Return the reason why no block can ever be left out, and a setting that would work. None if a block can
        be."""
        config = self.config
        # Other methods leave out all blocks of a step, so none of them is idle.
        if not isinstance(config, DBCacheConfig):
            return None
        blocks = len(self.hooks)
        never: Sequence[int] = ()
        if isinstance(config, DBPruneConfig):
            never = config.non_prune_block_ids
        middle = range(config.Fn_compute_blocks, blocks - config.Bn_compute_blocks)
        if any(place not in never for place in middle):
            return None
        settings = f"Fn_compute_blocks={config.Fn_compute_blocks}, Bn_compute_blocks={config.Bn_compute_blocks}"
        if never:
            settings += f", non_prune_block_ids={list(never)}"
        return (
            f"{settings}: all {blocks} blocks of {self.name} always compute then, so nothing can be left out; try "
            f"Fn_compute_blocks={max(1, round(blocks / 8))}"
        )

    def build_chain(self, steps: int, agreement: SkipAgreement, keep: KeepMemory | None) -> Chain | None:
        """Build the chain of a generation. None if no block is ever left out. Raises `ModelError` if a mask is too
        short.

        Args:
            agreement: the agreement with other ranks.
            keep: gives memory that stays from generation to generation, if calls are recorded.
        """
        if isinstance(self.config, MagCacheConfig) and self.config.calibrate:
            chain: Chain = import_lab("quality.mag_ratios").MagCalibration(self.hooks, steps)
            return chain
        config, calibrator = self.config.resolve_for(steps, self.calibrator)
        rules = build_skip_rules(config, steps)
        difference = Difference(config.important_condition_threshold, config.downsample_factor)
        dtype = None if config.store_dtype is None else getattr(torch, config.store_dtype)
        # SeaCache compares latents in place of tokens.
        feature = None
        if isinstance(self.config, SeaCacheConfig):
            feature = SpectralFeature(self.config)
        shares = not config.cfg_diff_compute_separate
        decider = partial(SkipDecider, rules, difference, dtype, shares=shares, feature=feature)
        # A forecast that looks at all of a stream needs the sums of all ranks.
        total = agreement.sum_over_ranks
        forecaster = partial(build_forecaster, calibrator, store_dtype=config.store_dtype, total=total)
        # Either config may say that the output of the middle blocks is stored.
        stores_hidden = config.store == "hidden"
        if calibrator is not None and calibrator.calibrator_cache_type == "hidden_states":
            stores_hidden = True

        def make_residuals(place: int) -> Residuals:
            own_memory = None
            if keep is not None:
                own_memory = partial(keep, self.name, place)
            return Residuals(forecaster, hidden=stores_hidden, keep=own_memory)

        num_first = config.Fn_compute_blocks
        num_last = config.Bn_compute_blocks
        if isinstance(config, DBPruneConfig):
            dynamic = None
            if config.enable_dynamic_prune_threshold:
                ratio = config.dynamic_prune_threshold_relax_ratio
                dynamic = partial(relax_threshold, ratio=ratio, most=config.highest_threshold)
            never = config.non_prune_block_ids
            chain = DBPrune(self.hooks, decider, make_residuals, num_first, num_last, never=never, dynamic=dynamic)
        else:
            hidden = config.l1_hidden_states_diff_threshold is not None
            # One decider for all blocks; DBPrune makes one for each.
            chain = DBCache(self.hooks, decider(), make_residuals, num_first, num_last, hidden=hidden)
        if rules.never_skips or not chain.middle:
            return None
        return chain


def explain_idle_steps(config: CacheConfig, steps: int) -> str | None:
    """Explain why no step of a generation can be skipped with some settings. None if a step can be.

    Raises:
        ModelError: if a mask has fewer steps than `steps`.
    """
    if isinstance(config, EasyCacheConfig) and config.threshold > 0 and config.retention_steps + 1 >= steps:
        return f"{config}: all {steps} steps compute then, so nothing can be left out; {config.HINT}"
    # The settings of other methods for whole calls say themselves how much is left out.
    if not isinstance(config, BlockCacheConfig):
        return None
    rules = build_skip_rules(config, steps)
    if rules.never_skips or steps < 2 or rules.can_skip_any(steps):
        return None
    hint = config.HINT
    if isinstance(config, DBCacheConfig) and config.max_warmup_steps >= steps:
        hint = f"try max_warmup_steps={max(1, steps // 4)}"
    return f"{format_cache_config(config)}: all {steps} steps compute then, so nothing can be left out; {hint}"


def build_skip_rules(config: BlockCacheConfig, steps: int) -> SkipRules:
    """Build the rules for a generation of `steps` steps. Raises `ModelError` if a mask has fewer steps."""
    rules, _ = config.resolve_for(steps, None)
    return SkipRules(rules, resolve_step_mask(rules.steps_computation_mask, steps))

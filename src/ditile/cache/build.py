"""(lists of blocks, settings) -> the slots around them, and what is decided apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ditile.cache.cached import CacheContext, Chain, TransformerCache
from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    ParamsModifier,
    choose_stored_value,
    format_cache_config,
)
from ditile.cache.dbcache import DBCache
from ditile.cache.dbprune import DBPrune, DynamicThreshold
from ditile.cache.forecast import build_forecaster
from ditile.cache.hooks import CacheHook
from ditile.cache.judge import Difference, SkipJudge
from ditile.cache.rules import CacheLimits, SkipRules
from ditile.cache.segment import Residuals
from ditile.cache.step_mask import resolve_step_mask
from ditile.errors import ModelError
from ditile.hooks.protocols import SkipAgreement
from ditile.plan.spec import BlockList


def build_transformer_cache(
    transformer: torch.nn.Module,
    lists: Sequence[BlockList],
    config: DBCacheConfig,
    calibrator: Calibration | None = None,
    modifiers: Sequence[ParamsModifier] = (),
    *,
    has_rows: bool = True,
) -> TransformerCache:
    """A transformer with slots around the blocks of some lists, not installed yet.

    Args:
        transformer: whose they are.
        lists: in the order of execution.
        config: for all of them.
        calibrator: forecasts what is left out; None uses what was computed last.
        modifiers: one for each list, which is decided on by itself then; one for all; or none, and one decision
            is taken for all lists.
        has_rows: whether the rows of what blocks are given are those of the batch; else the batch decides as one.

    Raises:
        ModelError: if there are no blocks, or modifiers for other lists.
    """
    if not lists or not any(len(block_list.blocks) for block_list in lists):
        raise ModelError(f"{type(transformer).__name__} has no blocks that could be left out")
    if len(modifiers) not in (0, 1, len(lists)):
        raise ModelError(
            f"{len(modifiers)} params_modifiers were given for {len(lists)} lists of blocks; give one each"
        )
    hooks: list[CacheHook] = []
    hooks_by_list: dict[str, list[CacheHook]] = {}
    for block_list in lists:
        start = len(hooks)
        new_hooks = [CacheHook(start + k, block, block_list.flow) for k, block in enumerate(block_list.blocks)]
        hooks_by_list[block_list.name] = hooks_by_list.get(block_list.name, []) + new_hooks
        hooks += new_hooks

    def build_context(
        name: str, context_hooks: Sequence[CacheHook], config: DBCacheConfig, calibrator: Calibration | None
    ) -> CacheContext:
        return _build_context(name, context_hooks, config if has_rows else config.reset(couple="batch"), calibrator)

    def build_contexts(changed: DBCacheConfig) -> list[CacheContext]:
        if len(modifiers) < 2:
            whole = modifiers[0].over(changed, calibrator) if modifiers else (changed, calibrator)
            return [build_context("+".join(hooks_by_list), hooks, *whole)]
        pairs = zip(hooks_by_list.items(), modifiers, strict=True)
        return [
            build_context(name, context_hooks, *modifier.over(changed, calibrator))
            for (name, context_hooks), modifier in pairs
        ]

    return TransformerCache(transformer, hooks, build_contexts, config)


def _build_context(
    name: str, hooks: Sequence[CacheHook], config: DBCacheConfig, calibrator: Calibration | None
) -> CacheContext:
    make = partial(_build_chain, hooks, config, calibrator)
    idle = _explain_idle_blocks(name, len(hooks), config)
    settings = f"{config!r} {calibrator!r}"
    text = format_cache_config(config, calibrator)
    return CacheContext(
        name, len(hooks), make, config.couple, text, idle, partial(explain_idle_steps, config), settings
    )


def explain_idle_steps(config: DBCacheConfig, steps: int) -> str | None:
    """Why settings that want to leave steps out can leave out none of so many, and what would work; None if they can.

    Raises:
        ModelError: if a mask has fewer steps.
    """
    rules = build_skip_rules(config, steps)
    if rules.never_skips or steps < 2 or rules.can_skip_any(steps):
        return None
    warmup = config.max_warmup_steps
    hint = f"try max_warmup_steps={max(1, steps // 4)}" if warmup >= steps else "let mask and limits leave some out"
    return f"{format_cache_config(config)}: all {steps} steps compute then, so nothing can be left out; {hint}"


def _explain_idle_blocks(name: str, blocks: int, config: DBCacheConfig) -> str | None:
    """Why settings leave no block of so many to be left out, and what would work; None if they do."""
    first, last = config.Fn_compute_blocks, config.Bn_compute_blocks
    never = config.non_prune_block_ids if isinstance(config, DBPruneConfig) else ()
    if any(k not in never for k in range(first, blocks - last)):
        return None
    settings = f"Fn_compute_blocks={first}" + (f" and Bn_compute_blocks={last}" if last else "")
    settings += f" and non_prune_block_ids={list(never)}" if first + last < blocks else ""
    if blocks < 2:
        hint = "there is nothing that a cache could do here"
    elif first + last < blocks:
        hint = "name fewer of them"
    else:
        hint = f"try Fn_compute_blocks={max(1, round(blocks / 8))}" + (" and Bn_compute_blocks=0" if last else "")
    return f"{settings}: all {blocks} blocks of {name} always compute then, so nothing can be left out; {hint}"


def _build_chain(
    hooks: Sequence[CacheHook],
    config: DBCacheConfig,
    calibrator: Calibration | None,
    steps: int,
    agreement: SkipAgreement,
) -> Chain | None:
    """What leaves blocks out in a generation of so many steps; None if nothing ever is."""
    rules = build_skip_rules(config, steps)
    difference = Difference(config.important_condition_threshold, config.downsample_factor)
    dtype = None if config.store_dtype is None else getattr(torch, config.store_dtype)
    judge = partial(SkipJudge, rules, difference, dtype, shares=not config.cfg_diff_compute_separate)
    make = partial(build_forecaster, calibrator, store_dtype=config.store_dtype, total=agreement.sum_over_ranks)
    residuals = partial(Residuals, make, hidden=choose_stored_value(config, calibrator) == "hidden")
    first, last = config.Fn_compute_blocks, config.Bn_compute_blocks
    chain: Chain
    if isinstance(config, DBPruneConfig):
        ratio, most = config.dynamic_prune_threshold_relax_ratio, config.highest_threshold
        dynamic = DynamicThreshold(ratio, most) if config.enable_dynamic_prune_threshold else None
        chain = DBPrune(hooks, judge, residuals, first, last, never=config.non_prune_block_ids, dynamic=dynamic)
    else:
        chain = DBCache(
            hooks, judge(), residuals, first, last, hidden=config.l1_hidden_states_diff_threshold is not None
        )
    return None if rules.never_skips or not chain.middle else chain


def build_skip_rules(config: DBCacheConfig, steps: int) -> SkipRules:
    """When settings allow a step of a generation to be left out."""
    hidden_limit = config.l1_hidden_states_diff_threshold
    limits = CacheLimits(
        threshold=config.residual_diff_threshold if hidden_limit is None else hidden_limit,
        max_warmup_steps=config.max_warmup_steps,
        warmup_interval=config.warmup_interval,
        max_cached_steps=config.max_cached_steps,
        max_continuous_cached_steps=config.max_continuous_cached_steps,
        budget=config.max_accumulated_residual_diff_threshold,
        budget_resets=config.accumulated_resets,
        static=config.steps_computation_policy == "static",
    )
    return SkipRules(limits, resolve_step_mask(config.steps_computation_mask, steps))

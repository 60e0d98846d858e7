"""(lists of blocks, settings) -> the slots around them, and what is decided apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ditile.cache.cached import Cached, Chain, Context
from ditile.cache.config import Calibration, DBCacheConfig, DBPruneConfig, ParamsModifier, kept, strify
from ditile.cache.dbcache import DBCache
from ditile.cache.dbprune import DBPrune, Dynamic
from ditile.cache.difference import Difference
from ditile.cache.forecast import forecast
from ditile.cache.hooks import Slot
from ditile.cache.judge import Judge
from ditile.cache.residuals import Residuals
from ditile.cache.rules import Limits, Rules
from ditile.cache.step_mask import resolve
from ditile.errors import ModelError
from ditile.hooks.protocols import Agreement
from ditile.plan.spec import BlockList


def cached_transformer(
    transformer: torch.nn.Module, lists: Sequence[BlockList], config: DBCacheConfig,
    calibrator: Calibration | None = None, modifiers: Sequence[ParamsModifier] = (), *, has_rows: bool = True,
) -> Cached:  # fmt: skip
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
    if not lists or not any(len(found.blocks) for found in lists):
        raise ModelError(f"{type(transformer).__name__} has no blocks that could be left out")
    if len(modifiers) not in (0, 1, len(lists)):
        raise ModelError(
            f"{len(modifiers)} params_modifiers were given for {len(lists)} lists of blocks; give one each"
        )
    slots: list[Slot] = []
    of_list: dict[str, list[Slot]] = {}
    for found in lists:
        start = len(slots)
        made = [Slot(start + k, block, found.flow) for k, block in enumerate(found.blocks)]
        of_list[found.name] = of_list.get(found.name, []) + made
        slots += made

    def context(name: str, own: Sequence[Slot], config: DBCacheConfig, calibrator: Calibration | None) -> Context:
        return _context(name, own, config if has_rows else config.reset(couple="batch"), calibrator)

    def contexts(changed: DBCacheConfig) -> list[Context]:
        if len(modifiers) < 2:
            whole = modifiers[0].over(changed, calibrator) if modifiers else (changed, calibrator)
            return [context("+".join(of_list), slots, *whole)]
        pairs = zip(of_list.items(), modifiers, strict=True)
        return [context(name, own, *modifier.over(changed, calibrator)) for (name, own), modifier in pairs]

    return Cached(transformer, slots, contexts, config)


def _context(name: str, slots: Sequence[Slot], config: DBCacheConfig, calibrator: Calibration | None) -> Context:
    make = partial(_chain, slots, config, calibrator)
    idle = _idle(name, len(slots), config)
    said = f"{config!r} {calibrator!r}"
    text = strify(config, calibrator)
    return Context(name, len(slots), make, config.couple, text, idle, partial(idle_in, config), said)


def idle_in(config: DBCacheConfig, steps: int) -> str | None:
    """Why settings that want to leave steps out can leave out none of so many, and what would work; None if they can.

    Raises:
        ModelError: if a mask has fewer steps.
    """
    rules = rules_of(config, steps)
    if rules.never or steps < 2 or rules.leaves(steps):
        return None
    warmup = config.max_warmup_steps
    hint = f"try max_warmup_steps={max(1, steps // 4)}" if warmup >= steps else "let mask and limits leave some out"
    return f"{strify(config)}: all {steps} steps compute then, so nothing can be left out; {hint}"


def _idle(name: str, blocks: int, config: DBCacheConfig) -> str | None:
    """Why settings leave no block of so many to be left out, and what would work; None if they do."""
    first, last = config.Fn_compute_blocks, config.Bn_compute_blocks
    never = config.non_prune_block_ids if isinstance(config, DBPruneConfig) else ()
    if any(k not in never for k in range(first, blocks - last)):
        return None
    said = f"Fn_compute_blocks={first}" + (f" and Bn_compute_blocks={last}" if last else "")
    said += f" and non_prune_block_ids={list(never)}" if first + last < blocks else ""
    if blocks < 2:
        hint = "there is nothing that a cache could do here"
    elif first + last < blocks:
        hint = "name fewer of them"
    else:
        hint = f"try Fn_compute_blocks={max(1, round(blocks / 8))}" + (" and Bn_compute_blocks=0" if last else "")
    return f"{said}: all {blocks} blocks of {name} always compute then, so nothing can be left out; {hint}"


def _chain(
    slots: Sequence[Slot], config: DBCacheConfig, calibrator: Calibration | None, steps: int, agreement: Agreement
) -> Chain | None:
    """What leaves blocks out in a generation of so many steps; None if nothing ever is."""
    rules = rules_of(config, steps)
    difference = Difference(config.important_condition_threshold, config.downsample_factor)
    dtype = None if config.store_dtype is None else getattr(torch, config.store_dtype)
    judge = partial(Judge, rules, difference, dtype, shares=not config.cfg_diff_compute_separate)
    make = partial(forecast, calibrator, store_dtype=config.store_dtype, total=agreement.add)
    residuals = partial(Residuals, make, hidden=kept(config, calibrator) == "hidden")
    first, last = config.Fn_compute_blocks, config.Bn_compute_blocks
    chain: Chain
    if isinstance(config, DBPruneConfig):
        ratio, most = config.dynamic_prune_threshold_relax_ratio, config.highest_threshold
        dynamic = Dynamic(ratio, most) if config.enable_dynamic_prune_threshold else None
        chain = DBPrune(slots, judge, residuals, first, last, never=config.non_prune_block_ids, dynamic=dynamic)
    else:
        chain = DBCache(
            slots, judge(), residuals, first, last, hidden=config.l1_hidden_states_diff_threshold is not None
        )
    return None if rules.never or not chain.middle else chain


def rules_of(config: DBCacheConfig, steps: int) -> Rules:
    """When settings allow a step of a generation to be left out."""
    hidden_limit = config.l1_hidden_states_diff_threshold
    limits = Limits(
        threshold=config.residual_diff_threshold if hidden_limit is None else hidden_limit,
        max_warmup_steps=config.max_warmup_steps, warmup_interval=config.warmup_interval,
        max_cached_steps=config.max_cached_steps, max_continuous_cached_steps=config.max_continuous_cached_steps,
        budget=config.max_accumulated_residual_diff_threshold, budget_resets=config.accumulated_resets,
        static=config.steps_computation_policy == "static",
    )  # fmt: skip
    return Rules(limits, resolve(config.steps_computation_mask, steps))

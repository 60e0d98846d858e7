"""(lists of blocks, settings) -> the slots around them, and what is decided apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ditile.errors import ModelError
from ditile.spec import BlockList
from ditile.steps.cached import Cached, Chain, Context
from ditile.steps.config import (
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    ParamsModifier,
    TaylorSeerCalibratorConfig,
    merged,
    strify,
)
from ditile.steps.dbcache import DBCache
from ditile.steps.dbprune import DBPrune, Dynamic
from ditile.steps.difference import Difference
from ditile.steps.forecast import DMD, FoCa, Reuse, TaylorSeer
from ditile.steps.judge import Judge
from ditile.steps.residuals import Forecast, Residuals
from ditile.steps.rules import Limits, Rules
from ditile.steps.slots import Slot
from ditile.steps.step_mask import resolve

Config = DBCacheConfig | DBPruneConfig
Calibrator = TaylorSeerCalibratorConfig | FoCaCalibratorConfig | DMDCalibratorConfig | None


def cached_transformer(
    transformer: torch.nn.Module, lists: Sequence[BlockList], config: Config, calibrator: Calibrator = None,
    modifiers: Sequence[ParamsModifier] = (),
) -> Cached:  # fmt: skip
    """A transformer with slots around the blocks of some lists, not installed yet.

    Args:
        transformer: whose they are.
        lists: in the order of execution.
        config: for all of them.
        calibrator: forecasts what is left out; None uses what was computed last.
        modifiers: one for each list, which is decided on by itself then; one for all; or none, and one decision
            is taken for all lists.

    Raises:
        ModelError: if there are no blocks, or modifiers for other lists.
    """
    if not lists or not any(len(found.blocks) for found in lists):
        raise ModelError(f"{type(transformer).__name__} has no blocks that could be left out")
    if len(modifiers) not in (0, 1, len(lists)):
        raise ModelError(f"{len(modifiers)} params_modifiers were given for {len(lists)} lists of blocks; give one each")
    slots: list[Slot] = []
    of_list: list[list[Slot]] = []
    for found in lists:
        start = len(slots)
        of_list.append([Slot(start + k, block, found.flow) for k, block in enumerate(found.blocks)])
        slots += of_list[-1]
    if len(modifiers) < 2:
        whole = merged(config, calibrator, modifiers[0]) if modifiers else (config, calibrator)
        name = "+".join(found.name for found in lists)
        return Cached(transformer, slots, [_context(name, slots, *whole)])
    contexts = [
        _context(found.name, own, *merged(config, calibrator, modifier))
        for found, own, modifier in zip(lists, of_list, modifiers, strict=True)
    ]
    return Cached(transformer, slots, contexts)


def _context(name: str, slots: Sequence[Slot], config: Config, calibrator: Calibrator) -> Context:
    make = partial(_chain, slots, config, calibrator)
    return Context(name, len(slots), make, config.couple, strify(config, calibrator))


def _chain(slots: Sequence[Slot], config: Config, calibrator: Calibrator, steps: int) -> Chain | None:
    """What leaves blocks out in a generation of so many steps; None if nothing ever is."""
    hidden_limit = config.l1_hidden_states_diff_threshold
    budget = config.max_accumulated_residual_diff_threshold
    limits = Limits(
        threshold=config.residual_diff_threshold if hidden_limit is None else hidden_limit,
        max_warmup_steps=config.max_warmup_steps, warmup_interval=config.warmup_interval,
        max_cached_steps=config.max_cached_steps, max_continuous_cached_steps=config.max_continuous_cached_steps,
        budget=budget, budget_resets=config.accumulated_resets, static=config.steps_computation_policy == "static",
    )  # fmt: skip
    mask = config.steps_computation_mask
    rules = Rules(limits, None if mask is None else tuple(resolve(mask, steps)))
    dtype = None if config.store_dtype is None else getattr(torch, config.store_dtype)
    difference = Difference(config.important_condition_threshold, config.downsample_factor)
    judge = partial(Judge, rules, difference, dtype)
    residuals = partial(Residuals, _forecasts(calibrator, dtype), hidden=config.store == "hidden")
    first, last = config.Fn_compute_blocks, config.Bn_compute_blocks
    chain: Chain
    if isinstance(config, DBPruneConfig):
        ratio, most = config.dynamic_prune_threshold_relax_ratio, config.max_dynamic_prune_threshold
        dynamic = Dynamic(ratio, most) if config.enable_dynamic_prune_threshold else None
        never = config.non_prune_block_ids
        chain = DBPrune(slots, judge, residuals, first, last, never=never, dynamic=dynamic)
    else:
        chain = DBCache(slots, judge(), residuals, first, last, hidden=hidden_limit is not None)
    return None if rules.never or not chain.middle else chain


def _forecasts(calibrator: Calibrator, dtype: torch.dtype | None) -> Callable[[str], Forecast]:
    """Makes the forecast of a stream."""

    def make(stream: str) -> Forecast:
        wanted: Any = calibrator
        if wanted is not None and not (
            wanted.enable_encoder_calibrator if stream == "text" else wanted.enable_calibrator
        ):
            wanted = None
        if isinstance(wanted, TaylorSeerCalibratorConfig):
            return TaylorSeer(wanted.taylorseer_order, dtype)
        if isinstance(wanted, FoCaCalibratorConfig):
            return FoCa(dtype)
        if isinstance(wanted, DMDCalibratorConfig):
            return DMD(wanted.dmd_history, wanted.dmd_rank, wanted.dmd_ridge, dtype)
        return Reuse(dtype)

    return make

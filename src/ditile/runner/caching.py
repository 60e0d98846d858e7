"""One line that makes a pipeline do less: enable_cache, disable_cache, refresh_context, summary.

    ditile.enable_cache(pipe)
    image = pipe(prompt).images[0]
    ditile.summary(pipe)
    ditile.disable_cache(pipe)

The names are those of cache-dit, so that a script for it runs. A cache overrides methods of the pipeline's instances
and of no class. `disable_cache` restores them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ditile.cache.cache_dit import ParallelismConfig
from ditile.cache.cached import (
    CacheClock,
    IdleCacheWarning,
    TransformerCache,
    build_transformer_cache,
    find_transformer_cache,
)
from ditile.cache.clock import CallClock, SchedulerClock
from ditile.cache.config import Calibration, DBCacheConfig, ParamsModifier
from ditile.cache.config import format_cache_config as config_text
from ditile.cache.report import ContextReport, build_report_table, merge_rank_reports
from ditile.distributed.transport import gather_json
from ditile.errors import ModelError, StateError
from ditile.hooks.attention_processors import find_attention_processors
from ditile.hooks.compile import find_compiler
from ditile.models.adapter import (
    BlockAdapter,
    TransformerBlockLists,
    find_pipeline_block_lists,
    find_transformers,
    resolve_adapter,
)
from ditile.models.block_lists import find_model_entry
from ditile.models.source import unwrap_module
from ditile.parallel.attention.kernel import choose_kernel
from ditile.plan.plan import Plan
from ditile.runner.quantize import quantize_models
from ditile.runner.runner import Runner, parallelize

_ENABLED = "_enabled_by_ditile"
"""The attribute of a transformer that holds the `ExitStack` which undoes `enable_cache`."""

_PIPED = 160
"""Columns of a table that goes to a file or a pipe, and not to a terminal."""

_NOTHING = "there is no cache on it; call ditile.enable_cache first"


def enable_cache(
    pipe_or_adapter: Any,
    cache_config: DBCacheConfig | None = None,
    calibrator_config: Calibration | None = None,
    params_modifiers: Sequence[ParamsModifier] | ParamsModifier | None = None,
    parallelism_config: ParallelismConfig | None = None,
    attention_backend: str | None = None,
    quantize_config: Mapping[str, Any] | None = None,
) -> Any:
    """Leaves out blocks whose work hardly changed since the last step that was computed.

    Args:
        pipe_or_adapter: a pipeline (before or after `parallelize`), a runner, a transformer, or a `BlockAdapter` that
            says where blocks are. A new cache replaces one that is there.
        cache_config: a `DBCacheConfig` or `DBPruneConfig`. By default that of `build_default_config`, or no cache if
            one of the last three arguments is given.
        calibrator_config: forecasts what was left out; None takes what was computed last.
        params_modifiers: what is different in some lists of blocks; with one for each list, each decides by itself.
        parallelism_config: divides the pipeline over the ranks that are running. Every rank then calls the pipeline as
            before. `ditile.parallelize` offers more.
        attention_backend: the attention kernel, as diffusers names it.
        quantize_config: arguments of `ditile.quantize`. `disable_cache` does not take this back.

    Returns:
        What it was given.

    Raises:
        ModelError: if the blocks are not known and cannot be found, a setting does not fit them, or a kernel or type of
            quantization is not available here. Nothing was changed then.
        PlanError: if the ranks cannot be divided so.

    Warns:
        IdleCacheWarning: if the settings leave no block that could be left out.
    """
    # It raises where one of them is no config.
    ParamsModifier(cache_config=cache_config, calibrator_config=calibrator_config)
    pipe = _unwrap_pipeline(pipe_or_adapter)
    runner = pipe_or_adapter if isinstance(pipe_or_adapter, Runner) else None
    adapter = pipe_or_adapter if isinstance(pipe_or_adapter, BlockAdapter) else None
    others = (parallelism_config, attention_backend, quantize_config)
    if runner is not None and parallelism_config is not None:
        raise ModelError("a runner has its plan already; leave parallelism_config out")
    wants_cache = cache_config is not None or all(other is None for other in others)
    made: list[TransformerCache] = []
    adapted: list[TransformerBlockLists] = []
    if wants_cache or adapter is not None:
        adapted = resolve_adapter(adapter) if adapter is not None else find_pipeline_block_lists(pipe)
    if wants_cache:
        made = [_build_model_cache(each, cache_config, calibrator_config, params_modifiers) for each in adapted]
    kernel = attention_backend or (parallelism_config.attention_backend if parallelism_config is not None else None)
    transformers = [unwrap_module(transformer) for transformer in find_transformers(pipe)]
    if kernel is not None:
        _check_attention_kernel(kernel, transformers)
    _warn_of_idle_caches(made)
    # Behind all that may refuse: a refusal leaves the earlier cache as it was.
    disable_cache(pipe)
    with ExitStack() as stack:
        for each in adapted:
            stack.callback(each.undo)
        if quantize_config is not None:
            quantize_models(transformers, **quantize_config)
        if parallelism_config is not None:
            _divide_pipeline(stack, pipe, parallelism_config, kernel)
        elif kernel is not None:
            _set_attention_kernel(stack, transformers, kernel)
        _install_caches(stack, pipe, made, adapted, cache_config)
        vars(transformers[0])[_ENABLED] = stack.pop_all()
    return pipe_or_adapter


def build_default_config(blocks: int) -> DBCacheConfig:
    """The default `cache_config` of `enable_cache`, for so many blocks: an eighth of them are always computed."""
    return DBCacheConfig(Fn_compute_blocks=max(1, round(blocks / 8)))


def disable_cache(pipe_or_adapter: Any) -> Any:
    """Undoes `enable_cache`, quantization apart; the pipeline is bit for bit what it was. Returns its argument.

    Raises:
        StateError: if the pipeline was divided, and its weights were changed or freed since.
    """
    for transformer in find_transformers(_unwrap_pipeline(pipe_or_adapter)):
        stack = vars(unwrap_module(transformer)).pop(_ENABLED, None)
        if stack is not None:
            stack.close()
    return pipe_or_adapter


def refresh_context(transformer: Any, num_inference_steps: int | None = None, **changes: Any) -> None:
    """Drops what was remembered, for a new picture. Only a transformer without a pipeline needs it.

    Args:
        transformer: what `enable_cache` was given.
        num_inference_steps: the steps of the picture; in a pipeline the scheduler says them.
        changes: fields of the `cache_config` that are different from now on, or a whole `cache_config`.

    Raises:
        StateError: if there is no cache.
        ModelError: if a field is not known, or a value is out of its range.
    """
    caches = _require_caches(transformer)
    config = changes.pop("cache_config", None)
    steps = num_inference_steps or (config.num_inference_steps if config is not None else None)
    for each in caches:
        each.refresh_settings(steps, config, changes)
    _warn_of_idle_caches(caches)


def summary(pipe_or_adapter: Any, details: bool = False, logging: bool = True) -> list[ContextReport]:
    """What was left out in the last generation: one report for each context, and in a runner for each stage.

    Args:
        pipe_or_adapter: what `enable_cache` was given, or a runner, whose ranks must all call it.
        details: print each image, branch and patch, with percentiles of the differences.
        logging: print a table; a runner prints it only on rank 0.

    Raises:
        StateError: if there is no cache.
    """
    caches = _require_caches(pipe_or_adapter)
    reports = [report for each in caches for report in each.reports]
    if isinstance(pipe_or_adapter, Runner):
        mesh = pipe_or_adapter.mesh
        place = [mesh["data"].index, mesh["cfg"].index, mesh.stage_index]
        rank_reports = gather_json([place, [report.to_dict() for report in reports]], mesh.everyone)
        reports = merge_rank_reports(
            [(place, [ContextReport.from_dict(one) for one in own]) for place, own in rank_reports]
        )
        logging = logging and mesh.rank == 0
    if logging:
        console = Console()
        (console if console.is_terminal else Console(width=_PIPED)).print(build_report_table(reports, details=details))
    return reports


def strify(what: Any, calibrator_config: Calibration | None = None) -> str:
    """The settings of a cache in one word, such as `DBCache_F1B0_W8I1M0MC3_R0.08_T1O1`.

    Args:
        what: what `enable_cache` was given, a runner, what `summary` returned, or a config.
        calibrator_config: the calibrator beside a config.

    Raises:
        StateError: if there is no cache.
    """
    if isinstance(what, DBCacheConfig):
        return config_text(what, calibrator_config)
    if isinstance(what, list):
        return ", ".join(dict.fromkeys(report.settings for report in what))
    return ", ".join(dict.fromkeys(context.text for each in _require_caches(what) for context in each.contexts))


def _unwrap_pipeline(target: Any) -> Any:
    """The pipeline, or the transformer that has none."""
    if isinstance(target, Runner):
        return target.pipe
    if not isinstance(target, BlockAdapter):
        return target
    if target.pipe is None and not isinstance(target.transformer, nn.Module):
        raise ModelError(
            "BlockAdapter has a list of transformers and no pipe whose steps count; give the pipe, or each an adapter"
        )
    return target.transformer if target.pipe is None else target.pipe


def _require_caches(target: Any) -> list[TransformerCache]:
    caches_or_none = [
        find_transformer_cache(unwrap_module(transformer))
        for transformer in find_transformers(_unwrap_pipeline(target))
    ]
    caches = [each for each in caches_or_none if each is not None]
    if not caches:
        raise StateError(f"{type(target).__name__}: {_NOTHING}")
    return caches


def _build_model_cache(
    adapted: TransformerBlockLists,
    config: DBCacheConfig | None,
    calibrator: Calibration | None,
    modifiers: Sequence[ParamsModifier] | ParamsModifier | None,
) -> TransformerCache:
    given = [modifiers] if isinstance(modifiers, ParamsModifier) else list(modifiers or adapted.params_modifiers)
    config = config or build_default_config(sum(len(block_list.blocks) for block_list in adapted.lists))
    row = find_model_entry(adapted.transformer)
    if row.mirrored and config.Bn_compute_blocks > config.Fn_compute_blocks:
        raise ModelError(
            f"Bn_compute_blocks={config.Bn_compute_blocks}: the last blocks of {type(adapted.transformer).__name__} "
            f"read what the first ones return, of which {config.Fn_compute_blocks} are computed; try "
            f"Bn_compute_blocks={config.Fn_compute_blocks} or less"
        )
    return build_transformer_cache(adapted.transformer, adapted.lists, config, calibrator, given, has_rows=row.has_rows)


def _warn_of_idle_caches(caches: Sequence[TransformerCache]) -> None:
    for reason in dict.fromkeys(context.idle for each in caches for context in each.contexts if context.idle):
        warnings.warn(reason, IdleCacheWarning, stacklevel=3)


def _install_caches(
    stack: ExitStack,
    pipe: Any,
    made: Sequence[TransformerCache],
    adapted: Sequence[TransformerBlockLists],
    config: DBCacheConfig | None,
) -> None:
    """Installs the caches, with one clock for all of a pipeline."""

    def begin_caches(steps: int) -> None:
        for each in made:
            each.begin_generation(steps)

    def end_caches() -> None:
        for each in made:
            each.end_generation()

    if not made:
        return
    clock: CacheClock
    if isinstance(pipe, nn.Module):
        said = [
            config.enable_separate_cfg if config is not None else None,
            *(each.has_separate_cfg for each in adapted),
        ]
        steps = config.num_inference_steps if config is not None else None
        clock = CallClock(begin_caches, end_caches, steps, separate_cfg=any(said))
    else:
        clock = SchedulerClock(pipe, begin_caches, end_caches)
    clock.start_watching()
    for each in made:
        each.install_hooks(clock, functools.partial(find_compiler, pipe, each.transformer))
        stack.callback(each.remove_hooks)


def _divide_pipeline(stack: ExitStack, pipe: Any, config: ParallelismConfig, kernel: str | None) -> None:
    """Makes a call of this pipeline a call of a runner: the instance gets a subclass of its own."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    plan = config.to_plan(world)
    if plan == Plan() and kernel is None:
        return
    runner = parallelize(pipe, plan, keep_weights=True, attention=kernel, cp_plan=config.cp_plan)
    kind = type(pipe)

    @functools.wraps(kind.__call__)
    def call_runner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return runner(*args, **kwargs)

    pipe.__class__ = type(kind.__name__, (kind,), {"__call__": call_runner, "__module__": kind.__module__})
    stack.callback(runner.restore)
    stack.callback(setattr, pipe, "__class__", kind)


def _check_attention_kernel(kernel: str, transformers: Sequence[nn.Module]) -> None:
    for transformer in transformers:
        parameter = next(transformer.parameters())
        choose_kernel(kernel, parameter.device, parameter.dtype, lse=False)


def _set_attention_kernel(stack: ExitStack, transformers: Sequence[nn.Module], kernel: str) -> None:
    for transformer in transformers:
        for _, _, processor in find_attention_processors(transformer):
            if hasattr(processor, "_attention_backend"):
                stack.callback(setattr, processor, "_attention_backend", processor._attention_backend)
                processor._attention_backend = kernel

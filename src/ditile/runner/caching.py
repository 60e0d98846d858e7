"""Caches for a pipeline: enable_cache, disable_cache, refresh_context, summary.

    ditile.enable_cache(pipe)
    image = pipe(prompt).images[0]
    ditile.summary(pipe)
    ditile.disable_cache(pipe)

The names are cache-dit's, so that its scripts run. A cache overrides methods of the pipeline's instances, never of
classes. `disable_cache` restores the methods.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ditile.cache.cache_dit import QuantizeConfig, RankDivision, parse_quantize_config
from ditile.cache.cached import (
    IdleCacheWarning,
    ModelCache,
    build_transformer_cache,
    find_model_cache,
)
from ditile.cache.calls.call_cache import CallCache, prepare_policy
from ditile.cache.clock import CallClock
from ditile.cache.config import (
    BlockCacheConfig,
    CacheConfig,
    Calibration,
    CallCacheConfig,
    DBCacheConfig,
    ParamsModifier,
    check_one_forecast,
)
from ditile.cache.config import format_cache_config as config_text
from ditile.cache.config_text import load_configs, parse_cache_line
from ditile.cache.report import ContextReport, build_report_parts, merge_rank_reports
from ditile.distributed import cpus
from ditile.distributed.transport import gather_json
from ditile.model.adapter import (
    BlockAdapter,
    TransformerBlockLists,
    find_pipeline_block_lists,
    find_transformers,
    resolve_adapter,
)
from ditile.model.block_lists import find_model_entry
from ditile.model.block_table import unwrap_module
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.overrides import override_attribute, replace_pipeline_call
from ditile.model.pipeline_calls import list_pipeline_parts
from ditile.parallel.attention.kernel import choose_kernel
from ditile.parallel.tensor.sharding import find_share
from ditile.plan.errors import ModelError, StateError
from ditile.plan.option_classes import checked, drop_missing
from ditile.plan.plan import Plan
from ditile.runner.compose import check_pipeline, find_loop_models
from ditile.runner.runner import Runner, build_single_runner, parallelize
from ditile.runner.weights.quantize import quantize

LOG = logging.getLogger("ditile")
_ENABLED = "_enabled_by_ditile"
"""The attribute of a pipeline and of its transformers that holds the `_Enabled` of `enable_cache`."""

_NOTHING = "there is no cache on it; call ditile.enable_cache first"


@checked()
def enable_cache(
    pipe_or_adapter: Any,
    cache_config: CacheConfig | Mapping[str, Any] | str | None = None,
    calibrator_config: Calibration | Mapping[str, Any] | None = None,
    params_modifiers: Sequence[ParamsModifier] | ParamsModifier | None = None,
    parallelism_config: RankDivision | Mapping[str, Any] | None = None,
    attention_backend: str | None = None,
    quantize_config: QuantizeConfig | Mapping[str, Any] | None = None,
) -> Any:
    """Leave out blocks whose work hardly changed since their last computed step.

    Each config may be a dict, as in a config file (`load_configs`).

    Args:
        pipe_or_adapter: a pipeline (before or after `parallelize`), a runner, a transformer, or a `BlockAdapter` with
            the location of its blocks. A new cache replaces the present one.
        cache_config: a config of a method that leaves out whole calls of the model, such as `FittedScheduleConfig`, or
            blocks, such as `DBCacheConfig`; or a line as in `--cache-line`, such as "F=1 W=4 R=0.12". The default is a
            `DBCacheConfig` with an eighth of the blocks as its probe, or no cache if one of the last three arguments is
            given.
        calibrator_config: forecasts the outputs of skipped blocks; None reuses the last computed ones.
        params_modifiers: changes for some lists of blocks. With a modifier for each list, each list decides by itself.
        parallelism_config: divides the pipeline over the running ranks, which then all call the pipeline as before.
            `ditile.parallelize` offers more.
        attention_backend: the attention kernel, as diffusers names it.
        quantize_config: the arguments of `ditile.quantize`, applied after the division if there is one. `disable_cache`
            does not undo it.

    Returns:
        The first argument.

    Raises:
        ModelError: if the blocks are not known and cannot be found, a setting does not fit them, or a kernel or type of
            quantization is not available here. Nothing was changed then.
        PlanError: if `parallelism_config` does not fit the ranks.

    Warns:
        IdleCacheWarning: if no block can be skipped under these settings.
    """
    config, calibrator, division, quantization = _parse_mappings(
        cache_config=cache_config,
        calibrator_config=calibrator_config,
        parallelism_config=parallelism_config,
        quantize_config=quantize_config,
    ).values()
    pipe = _unwrap_pipeline(pipe_or_adapter)
    if isinstance(pipe_or_adapter, Runner) and division is not None:
        raise ModelError("a runner has its plan already; leave parallelism_config out")
    has_cache = config is not None or (division is None and attention_backend is None and quantization is None)
    adapted: list[TransformerBlockLists] = []
    with ExitStack() as edits:
        if isinstance(pipe_or_adapter, BlockAdapter) and not isinstance(config, CallCacheConfig):
            adapted = resolve_adapter(pipe_or_adapter, edits)
        # Division and quantization need no list of blocks, and work on models without one.
        elif has_cache and not isinstance(config, CallCacheConfig):
            adapted = find_pipeline_block_lists(pipe)
        caches = _build_caches(pipe, adapted, config, calibrator, params_modifiers) if has_cache else []
        kernel = attention_backend or getattr(division, "attention_backend", None)
        transformers = _list_called_models(pipe, config)
        _check_devices(transformers, kernel)
        _warn_of_idle_caches(caches)
        # The caches are built: from here on the pipeline changes.
        # After a refusal these are enabled again: those with a cache, a division or a kernel (the last two arguments).
        earlier = [one for one in _find_enabled(pipe) if one.caches or any(one.arguments[4:])]
        disable_cache(pipe)
        accepted_edits = edits.pop_all()
    try:
        with accepted_edits as stack:
            runner = _divide_and_quantize(stack, pipe, transformers, division, kernel, quantization)
            _install_caches(stack, pipe, caches, adapted, config, runner)
            arguments = (pipe_or_adapter, config, calibrator, params_modifiers, division, attention_backend)
            enabled = _Enabled(stack.pop_all(), arguments, runner, caches)
            # The attribute on the pipeline survives the replacement of a transformer.
            for owner in (pipe, *transformers):
                override_attribute(enabled.stack, owner, _ENABLED, enabled)
    except BaseException:
        for before in earlier:
            enable_cache(*before.arguments)
        raise
    return pipe_or_adapter


def _check_devices(transformers: Sequence[nn.Module], kernel: str | None) -> None:
    """Warn of threads that spin on CPUs. Raises `ModelError` if an attention kernel is not available."""
    devices: set[str] = set()
    for transformer in transformers:
        devices |= {parameter.device.type for parameter in transformer.parameters()}
        if kernel is not None:
            parameter = next(transformer.parameters())
            choose_kernel(kernel, parameter.device, parameter.dtype, lse=False)
    if devices <= {"cpu"}:
        cpus.warn_of_spinning_threads()


@dataclass(frozen=True, slots=True, eq=False)
class _Enabled:
    """One call of `enable_cache`: its arguments, except for quantization, and the stack that undoes it.

    Attributes:
        runner: runs the calls of the pipeline, if it was divided.
        caches: the caches of its transformers.
    """

    stack: ExitStack
    arguments: tuple[Any, ...]
    runner: Runner | None
    caches: Sequence[ModelCache]

    @property
    def is_in_call(self) -> bool:
        """Return whether a call of the pipeline is under way. Such a call needs the cache."""
        if self.runner is not None and self.runner.is_running:
            return True
        return any(cache.is_in_call for cache in self.caches)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: nothing is enabled on a copy."""


def _find_enabled(pipe: Any) -> list[_Enabled]:
    """Return everything enabled on a pipeline and on its present transformers."""
    owners = [pipe, *list_cached_models(pipe)]
    found: list[_Enabled] = []
    for owner in owners:
        enabled = getattr(owner, _ENABLED, None)
        if enabled is not None and enabled not in found:
            found.append(enabled)
    return found


def _parse_mappings(**configs: Any) -> dict[str, Any]:
    """Return configs by name, in order. A dict is read like a section of a config file, a text like `--cache-line`.

    Raises:
        ModelError: if a value is neither a config nor a dict, or is not allowed.
    """
    parsed = dict(configs)
    if isinstance(configs["cache_config"], str):
        parsed |= parse_cache_line(configs["cache_config"])
        if configs["calibrator_config"] is not None and parsed["calibrator_config"] is not configs["calibrator_config"]:
            raise ModelError("the line of the cache and calibrator_config name a forecast each; leave one out")
    mappings = {name: config for name, config in configs.items() if isinstance(config, Mapping)}
    if mappings:
        loaded = load_configs(mappings)
        parsed |= drop_missing(loaded)
    block_config = None if isinstance(parsed["cache_config"], CallCacheConfig) else parsed["cache_config"]
    # The modifier is made only because that checks the two configs.
    ParamsModifier(cache_config=block_config, calibrator_config=parsed["calibrator_config"])
    if parsed.get("quantize_config") is not None:
        parsed["quantize_config"] = parse_quantize_config(parsed["quantize_config"])
    return parsed


@checked()
def disable_cache(pipe_or_adapter: Any) -> Any:
    """Undo `enable_cache`, except for quantization, and return the argument.

    The pipeline is then bit for bit as before.

    Raises:
        StateError: if a call is under way, or the pipeline was divided, and its weights were changed or freed since.
    """
    # Check all of them before the first is closed.
    for enabled in _list_unused(pipe_or_adapter):
        enabled.stack.close()
    return pipe_or_adapter


def _list_unused(pipe_or_adapter: Any) -> list[_Enabled]:
    """Return everything enabled on a pipeline. Raises `StateError` while a call of a pipeline uses it."""
    found = _find_enabled(_unwrap_pipeline(pipe_or_adapter))
    if any(enabled.is_in_call for enabled in found):
        raise StateError("the pipeline is in the middle of a call, which uses its cache; change it after the call")
    return found


@checked()
def refresh_context(
    transformer: Any,
    num_inference_steps: int | None = None,
    *,
    cache_config: CacheConfig | Mapping[str, Any] | None = None,
    calibrator_config: Calibration | Mapping[str, Any] | None = None,
    verbose: bool = False,
    **changes: Any,
) -> None:
    """Drop everything remembered, for a new image. Only a transformer without a pipeline needs it.

    Args:
        transformer: the argument of `enable_cache`.
        num_inference_steps: the steps of the image; in a pipeline the scheduler has the number.
        cache_config: a config of the present one's class changes only the fields it sets; one of another replaces it.
        calibrator_config: changes or replaces the calibrator in the same way.
        verbose: log the settings.
        changes: fields of the `cache_config` that are different from now on.

    Raises:
        StateError: if there is no cache, or a call of a pipeline is under way.
        ModelError: if a field is not known, or a value is out of its range.
        LoadError: if a file that the settings name cannot be read.
    """
    caches = _require_caches(transformer)
    # Raise during a call: with new settings the cache would be idle for the rest of the call.
    _list_unused(transformer)
    configs = _parse_mappings(cache_config=cache_config, calibrator_config=calibrator_config)
    config = configs["cache_config"]
    calibrator = configs["calibrator_config"]
    steps = num_inference_steps
    if not steps and config is not None:
        steps = config.num_inference_steps
    if isinstance(cache_config, Mapping) and config is not None:
        # A dict changes fields; it has no class.
        changes = {name: getattr(config, name) for name in config.given} | changes
        config = None
    for cache in caches:
        cache.refresh_settings(steps, config, calibrator, changes)
    if verbose:
        LOG.info("%s: %s", type(transformer).__name__, strify(transformer))
    _warn_of_idle_caches(caches)


@checked()
def summary(pipe_or_adapter: Any, details: bool = False, logging: bool = True) -> list[ContextReport]:
    """Report the work skipped in the last generation, for each context and, in a runner, for each stage.

    Args:
        pipe_or_adapter: the argument of `enable_cache`, or a runner. All ranks of a runner must call it.
        details: print each image, branch and patch, with percentiles of the differences.
        logging: print a table; a runner prints it only on rank 0.

    Raises:
        StateError: if there is no cache.
    """
    reports: list[ContextReport] = []
    for cache in _require_caches(pipe_or_adapter):
        cache.update_reports()
        reports += cache.reports
    if isinstance(pipe_or_adapter, Runner):
        # Stages have different blocks, and replicas have different images.
        mesh = pipe_or_adapter.mesh
        place = [mesh["data"].index, mesh["cfg"].index, mesh.stage_index]
        reports_by_rank = []
        for rank_place, values in gather_json([place, [report.to_dict() for report in reports]], mesh.everyone):
            reports_by_rank.append((rank_place, list(map(ContextReport.from_dict, values))))
        reports = merge_rank_reports(reports_by_rank)
        logging = logging and mesh.rank == 0
    if logging:
        console = Console(highlight=False, markup=False)
        for part in build_report_parts(reports, details=details):
            console.print(part, soft_wrap=isinstance(part, str))
    return reports


@checked()
def strify(what: Any, calibrator_config: Calibration | None = None) -> str:
    """Write the settings of a cache in one word, such as `DBCache_F1B0_W8I1M0MC3_R0.08_T1O1`.

    Args:
        what: the argument of `enable_cache`, a runner, the result of `summary`, or a config.
        calibrator_config: the calibrator that goes with a config.

    Raises:
        StateError: if there is no cache.
    """
    if isinstance(what, CacheConfig):
        return config_text(what, calibrator_config)
    if isinstance(what, list) and all(isinstance(report, ContextReport) for report in what):
        return ", ".join(dict.fromkeys(report.settings for report in what))
    texts: list[str] = []
    for cache in _require_caches(what):
        texts += [context.text for context in cache.contexts]
    return ", ".join(dict.fromkeys(texts))


def _unwrap_pipeline(target: Any) -> Any:
    """Return the pipeline of a target, or its transformer if there is no pipeline."""
    if isinstance(target, Runner):
        return target.pipe
    if not isinstance(target, BlockAdapter):
        return target
    if target.pipe is None and not isinstance(target.transformer, nn.Module):
        raise ModelError(
            "BlockAdapter has a list of transformers and no pipe whose steps count; give the pipe, or each an adapter"
        )
    if target.pipe is not None:
        return target.pipe
    return target.transformer


def _require_caches(target: Any) -> list[ModelCache]:
    caches: list[ModelCache] = []
    for transformer in list_cached_models(_unwrap_pipeline(target)):
        cache = find_model_cache(transformer)
        if cache is not None:
            caches.append(cache)
    if not caches:
        raise StateError(f"{type(target).__name__}: {_NOTHING}")
    return caches


def list_cached_models(pipe: Any) -> list[nn.Module]:
    """List the models of a pipeline on which a cache may be, or a model without a pipeline."""
    if isinstance(pipe, nn.Module):
        return [unwrap_module(pipe)]
    parts = list_pipeline_parts(pipe).values()
    models = list(dict.fromkeys(unwrap_module(part) for part in parts if isinstance(part, nn.Module)))
    if not models and not hasattr(pipe, _ENABLED):
        # This raises for anything but a pipeline; an enabled one may have lost its models since.
        find_transformers(pipe)
    return models


def _list_called_models(pipe: Any, config: CacheConfig | None) -> list[nn.Module]:
    """List the models that a config is for: any of the loop for a cache of whole calls, otherwise transformers."""
    if not isinstance(config, CallCacheConfig):
        return list(map(unwrap_module, find_transformers(pipe)))
    if isinstance(pipe, nn.Module):
        return [unwrap_module(pipe)]
    return list(map(unwrap_module, find_loop_models(pipe)))


def _build_caches(
    pipe: Any,
    adapted: Sequence[TransformerBlockLists],
    config: CacheConfig | None,
    calibrator: Calibration | None,
    modifiers: Sequence[ParamsModifier] | ParamsModifier | None,
) -> list[ModelCache]:
    """Build a cache for each model, of its blocks or of its calls."""
    caches: list[ModelCache] = []
    if isinstance(config, CallCacheConfig):
        check_one_forecast(config, calibrator)
        if modifiers is not None:
            raise ModelError(
                f"params_modifiers is for caches that leave out blocks, and {config} leaves out whole calls"
            )
        models = _list_called_models(pipe, config)
        prepare = functools.partial(prepare_policy, pipe, models, _list_later_shares)
        caches += [CallCache(model, config, prepare) for model in models]
        return caches
    assert config is None or isinstance(config, BlockCacheConfig)
    if isinstance(modifiers, ParamsModifier):
        modifiers = [modifiers]
    for adapter in adapted:
        transformer = adapter.transformer
        num_blocks = sum(len(block_list.blocks) for block_list in adapter.lists)
        own_config = config or DBCacheConfig(Fn_compute_blocks=max(1, round(num_blocks / 8)))
        entry = find_model_entry(transformer)
        if entry.mirrored and isinstance(own_config, DBCacheConfig):
            probe = own_config.Fn_compute_blocks
            if own_config.Bn_compute_blocks > probe:
                raise ModelError(
                    f"Bn_compute_blocks={own_config.Bn_compute_blocks}: the last blocks of {type(transformer).__name__}"
                    f" read what the first ones return, of which {probe} are computed; try Bn_compute_blocks={probe}"
                )
        own_modifiers = list(modifiers or adapter.params_modifiers)
        cache = build_transformer_cache(
            transformer, adapter.lists, own_config, calibrator, own_modifiers, has_rows=entry.has_rows
        )
        caches.append(cache)
    return caches


def _list_later_shares(model: nn.Module) -> Collection[str]:
    """Return the paths of modules whose first weights are on another rank, as this one has a later part of them."""
    share = find_share(model)
    if share is None or share.cuts.index == 0:
        return ()
    return share.cuts.styles.keys()


def _warn_of_idle_caches(caches: Sequence[ModelCache]) -> None:
    reasons: list[str | None] = []
    for cache in caches:
        reasons += [context.idle for context in cache.contexts]
    # Contexts with the same reason warn once.
    for reason in dict.fromkeys(reasons):
        if reason:
            warnings.warn(reason, IdleCacheWarning, stacklevel=3)


def _install_caches(
    stack: ExitStack,
    pipe: Any,
    caches: Sequence[ModelCache],
    adapted: Sequence[TransformerBlockLists],
    config: CacheConfig | None,
    runner: Runner | None,
) -> None:
    """Install the caches. If the pipeline was not divided, its calls become calls of a runner of one rank."""
    if not caches:
        return
    clock = None
    if not _has_known_loop(pipe):
        separate_cfg = any(adapter.has_separate_cfg for adapter in adapted)
        steps = None
        if config is not None:
            separate_cfg = separate_cfg or bool(config.enable_separate_cfg)
            steps = config.num_inference_steps
        clock = CallClock(caches, steps=steps, separate_cfg=separate_cfg)
    for cache in caches:
        cache.install_cache(stack, pipe, clock)
    if runner is not None or not callable(pipe) or isinstance(pipe, nn.Module):
        return
    lock = threading.RLock()
    # Each call has a new runner, which gives no advice that an earlier runner gave.
    advised: set[str | None] = set()

    def call_pipeline(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not lock.acquire(blocking=False):
            raise StateError(
                f"two threads run one cached {type(pipe).__name__} at the same time, and its blocks remember one "
                "image; give each thread a pipeline and a transformer of its own, or make one call after the other"
            )
        try:
            # The pipeline may call itself.
            if any(cache.is_in_call for cache in caches):
                return stock(*args, **kwargs)
            for cache in caches:
                _warn_of_replaced_model(pipe, cache.transformer)
            if clock is not None:
                return _call_with_clock(clock, caches, stock, args, kwargs)
            # A user may have moved the pipeline, or changed its parts, since the last call.
            runner_of_one = build_single_runner(pipe, Plan(), advised)
            # No other rank waits for this call, so it goes around `note_shared_call`.
            return inspect.unwrap(Runner.__call__)(runner_of_one, *args, **kwargs)
        finally:
            lock.release()

    replace_pipeline_call(stack, pipe, call_pipeline)


def _has_known_loop(pipe: Any) -> bool:
    """Return whether a runner can drive the loop of a pipeline."""
    # These pipelines step a copy of their scheduler for each frame, with separate counts.
    if type(pipe).__name__.startswith("SkyReelsV2DiffusionForcing"):
        return False
    try:
        check_pipeline(pipe)
    except ModelError:
        return False
    return True


def _call_with_clock(
    clock: CallClock, caches: Sequence[ModelCache], stock: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call a pipeline, and tell the clock how many steps an image has."""
    call = inspect.signature(stock).bind_partial(*args, **kwargs)
    # The number of steps may be the pipeline's default.
    call.apply_defaults()
    steps = call.arguments.get("num_inference_steps")
    strength = call.arguments.get("strength")
    if isinstance(steps, int) and isinstance(strength, float):
        # A loop that starts from an image runs only the last steps of its schedule.
        steps = max(1, int(steps * strength))
    clock.restart_clock(steps if isinstance(steps, int) else None)
    for cache in caches:
        if isinstance(cache, CallCache):
            cache.check_pipeline_call({**call.arguments, **kwargs})
    try:
        return stock(*args, **kwargs)
    finally:
        clock.end_generation()


def _warn_of_replaced_model(pipe: Any, transformer: nn.Module) -> None:
    """Warn if a cached model is no longer part of the pipeline."""
    for part in list_pipeline_parts(pipe).values():
        if isinstance(part, nn.Module) and any(transformer is module for module in unwrap_module(part).modules()):
            return
    warnings.warn(
        f"the {type(transformer).__name__} that was cached is no longer in the {type(pipe).__name__}, and what "
        "replaced it is not cached; call ditile.enable_cache again, or disable_cache to free it",
        IdleCacheWarning,
        stacklevel=2,
    )


def _divide_and_quantize(
    stack: ExitStack,
    pipe: Any,
    transformers: Sequence[nn.Module],
    division: RankDivision | None,
    kernel: str | None,
    quantization: QuantizeConfig | None,
) -> Runner | None:
    """Divide a pipeline over the ranks, set its kernel, and quantize its weights.

    The instance of a divided pipeline gets a subclass, whose calls are calls of its runner.

    Returns:
        The runner; None if nothing is divided.
    """
    runner = None
    plan = Plan()
    if division is not None:
        plan = division.to_plan(torch.distributed.get_world_size() if torch.distributed.is_initialized() else None)
    if division is not None and (plan != Plan() or kernel is not None):
        # The weights are kept, because `disable_cache` gives the whole pipeline back.
        divided = runner = parallelize(pipe, plan, keep_weights=True, attention=kernel)
        stack.callback(runner.restore)

        replace_pipeline_call(stack, pipe, lambda _, *args, **kwargs: divided(*args, **kwargs))
    elif division is None and kernel is not None:
        for transformer in transformers:
            for _, _, processor in find_attention_processors(transformer):
                if hasattr(processor, "_attention_backend"):
                    override_attribute(stack, processor, "_attention_backend", kernel)
    # Quantize after the division, which cannot split quantized weights.
    if quantization is not None:
        quantize(pipe, quantize_config=quantization)
    return runner

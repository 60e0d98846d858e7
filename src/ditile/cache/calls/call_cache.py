"""A cache that leaves out whole calls of one model, under its pipeline or under a runner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from ditile.cache.cached import ModelCache
from ditile.cache.calls.forecasts import CallForecasts
from ditile.cache.calls.policy import CallAgreement, CallPolicy, ModelCall
from ditile.cache.config import (
    CacheConfig,
    Calibration,
    CallCacheConfig,
    FittedScheduleConfig,
    check_one_forecast,
    format_cache_config,
)
from ditile.cache.fitted.fitted_pipeline import FittedPolicies
from ditile.cache.fitted.identity import ListShares
from ditile.cache.methods.easycache import EasyCacheConfig, EasyCachePolicy
from ditile.cache.methods.gating import GatedGuidance, GuidanceGateConfig, GuidedModel
from ditile.cache.report import ContextReport, Decisions
from ditile.model.anatomies import find_anatomy
from ditile.model.hooks.batch_rows import BatchDimFinder
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.overrides import find_latents_parameter, list_parameter_names
from ditile.model.hooks.protocols import CallPosition
from ditile.plan.anatomy import Anatomy
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan

MakePolicy = Callable[[CallCacheConfig, int], CallPolicy]
"""(settings, steps of a generation) -> the policy of that generation."""


class CallCache(ModelCache):
    """The cache of the calls of one model.

    Args:
        transformer: the model; a U-Net, or a model whose blocks are not known, will do.
        prepare: settings -> the function that makes the policy of each generation.

    Attributes:
        forecasts: the forecasts of the generation under way, if there is one.
        idle: None, because only the beginning of a generation shows whether nothing can be left out.
    """

    idle: str | None = None
    _config: CallCacheConfig

    def __init__(
        self, transformer: nn.Module, config: CallCacheConfig, prepare: Callable[[CallCacheConfig], MakePolicy]
    ) -> None:
        super().__init__(transformer, config)
        self._prepare = prepare
        self._make_policy = prepare(config)
        self._names = list_parameter_names(transformer)
        self._latents = find_latents_parameter(transformer)
        self.forecasts: CallForecasts | None = None

    @property
    def contexts(self) -> Sequence[Any]:
        """Return only this cache: it decides on all calls in one way, and has the attributes of a context."""
        return [self]

    @property
    def text(self) -> str:
        """Return the settings in one word, with the source of the schedule."""
        text = format_cache_config(self._config)
        if isinstance(self._make_policy, FittedPolicies):
            text += f"_{self._make_policy.source}"
        return text

    @property
    def settings(self) -> str:
        """Return all settings. Ranks with equal texts decide alike."""
        if not isinstance(self._make_policy, FittedPolicies):
            return repr(self._config)
        # The content comes first: an error quotes the beginning, and a schedule is long.
        return f"{self._make_policy.content} {self._config!r}"

    def explain_plan_refusal(self, plan: Plan) -> str | None:
        """Explain why a plan cannot use this cache, or return None."""
        return self._config.explain_plan_refusal(plan)

    @property
    def memory_bytes(self) -> int:
        """Return the number of remembered bytes."""
        if self.forecasts is None:
            return 0
        return self.forecasts.memory_bytes

    def _change_settings(self, config: CacheConfig, calibrator: Calibration | None) -> None:
        check_one_forecast(self._config, calibrator)
        if not isinstance(config, CallCacheConfig):
            raise ModelError(f"a {type(config).__name__} leaves out blocks; call enable_cache with it")
        has_same_source = getattr(config, "schedule", None) == getattr(self._config, "schedule", None)
        if type(config) is not type(self._config) or not has_same_source:
            self._make_policy = self._prepare(config)

    def check_pipeline_call(self, call: Mapping[str, Any]) -> None:
        """Let the fitted policies, if any, refuse the arguments of a call."""
        if isinstance(self._make_policy, FittedPolicies):
            self._make_policy.check_call(call)

    def begin_generation(self, steps: int) -> None:
        """Begin a generation of `steps` steps, with an empty cache."""
        self.end_generation()
        self._forget_reports()
        self._num_steps = steps
        self.forecasts = CallForecasts(self._make_policy(self._config, steps))

    def _drop_memory(self) -> None:
        self.forecasts = None

    def update_reports(self) -> None:
        """Report the generation under way, if there is one."""
        forecasts = self.forecasts
        if forecasts is None or not forecasts.steps:
            return
        self._forget_reports()
        self.kept_bytes = forecasts.memory_bytes
        decisions: list[Decisions] = []
        for number, branch in forecasts.branches.items():
            decisions.append(Decisions(number, 0, 0, sorted(branch.skipped), []))
        name = type(self.transformer).__name__
        self.reports.append(ContextReport(name, self.text, 1, 1, len(forecasts.steps), self.kept_bytes, decisions))

    def find_latents(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the noisy input among the arguments of a call."""
        if self._latents in kwargs:
            return kwargs[self._latents]
        place = self._names.index(self._latents)
        if place < len(args):
            return args[place]
        return next(iter((*args, *kwargs.values())), None)

    def _run_call(self, moment: CallPosition | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forecasts = self.forecasts
        if moment is None or forecasts is None:
            return forward(*args, **kwargs)
        call = ModelCall(moment.step, moment.branch, self.find_latents(args, kwargs), images=moment.images)
        if forecasts.decide_call(call):
            return forecasts.compute_call(call, functools.partial(forward, *args, **kwargs))
        return forecasts.forecast_call(call)


def prepare_policy(
    pipe: Any, models: Sequence[nn.Module], list_later_shares: ListShares, config: CallCacheConfig
) -> MakePolicy:
    """Return the function that makes the policy of each generation under these settings.

    Args:
        pipe: the pipeline; the model itself, if it has none.
        models: the models that the pipeline calls in its loop.
        list_later_shares: lists the modules of a model whose leading weights are on another rank.

    Raises:
        LoadError: if the file of a schedule cannot be read.
        ModelError: if a setting does not fit the pipeline.
    """
    if isinstance(config, FittedScheduleConfig):
        return cast(MakePolicy, FittedPolicies(pipe, models, config, list_later_shares))
    if isinstance(config, EasyCacheConfig):
        return cast(MakePolicy, EasyCachePolicy)
    if isinstance(config, GuidanceGateConfig):
        model = models[0]
        anatomy = find_anatomy(model) or Anatomy({}, "none")
        finder = BatchDimFinder(model, anatomy.inputs)
        guided = GuidedModel(pipe, list_parameter_names(model), find_latents_parameter(model), finder)
        return cast(MakePolicy, functools.partial(GatedGuidance, model=guided))
    raise ModelError(f"{type(config).__name__} is not a method that leaves out calls; try FittedScheduleConfig()")


@dataclass(frozen=True)
class LoopForecasts:
    """The call caches of a pipeline's models during a runner's call.

    Attributes:
        caches: one for each model.
        now: the generation under way.
        steps_scheduler: returns whether this rank steps the scheduler; other ranks forecast nothing.
        agreement, images: as in `ModelCall`.
    """

    caches: Sequence[CallCache]
    now: Generation
    steps_scheduler: Callable[[], bool]
    agreement: CallAgreement
    images: int

    def begin_generation(self, steps: int) -> Collection[int] | None:
        """Begin a generation. Returns the steps that compute, if they are known."""
        policies: list[CallPolicy] = []
        for cache in self.caches:
            cache.begin_generation(steps)
            assert cache.forecasts is not None
            policies.append(cache.forecasts.policy)
        # A step counts as computed if some model computes in it.
        computed: set[int] = set()
        for policy in policies:
            own = policy.list_computed_steps()
            if own is None:
                return None
            computed.update(own)
        return frozenset(computed)

    def end_generation(self) -> None:
        """End the generation before the decoder needs the memory."""
        for cache in self.caches:
            cache.end_generation()

    def wrap_forward(self, cache: CallCache, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's forward, outside of everything with which a runner has wrapped it."""
        now = self.now

        def compute_or_forecast(*args: Any, **kwargs: Any) -> Any:
            forecasts = cache.forecasts
            if forecasts is None or not now.is_under_way or now.is_dry or now.is_surveyed:
                return forward(*args, **kwargs)
            latents = cache.find_latents(args, kwargs)
            call = ModelCall(now.loop_step, now.branch, latents, self.agreement, self.images)
            if forecasts.decide_call(call, now.computes):
                run = functools.partial(forward, *args, **kwargs)
                return forecasts.compute_call(call, run, keeps=self.steps_scheduler())
            # A step counts as forecast if its first call is forecast.
            now.is_forecast = now.is_forecast or not now.branch
            result = forecasts.forecast_call(call)
            now.advance_branch()
            return result

        return functools.update_wrapper(compute_or_forecast, forward)

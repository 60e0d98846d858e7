"""What decides, and forecasts, for each config of a cache that leaves out whole calls of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ditile.cache.calls.call_cache import MakePolicy
from ditile.cache.calls.policy import CallPolicy
from ditile.cache.calls.scheduled import spread_steps
from ditile.cache.config import CallCacheConfig, FittedScheduleConfig
from ditile.plan.errors import ModelError


def prepare_policy(pipe: Any, models: Sequence[nn.Module], config: CallCacheConfig) -> MakePolicy:
    """What makes the policy of each generation of a pipeline, with these settings.

    Args:
        pipe: the pipeline, or a model that has none.
        models: that it calls in its loop.
        config: the settings.

    Raises:
        ModelError: if a setting does not fit the pipeline.
    """
    if isinstance(config, FittedScheduleConfig):
        return make_scheduled_policy
    raise ModelError(f"{type(config).__name__} is no method that leaves out calls; try FittedScheduleConfig()")


def make_scheduled_policy(config: CallCacheConfig, num_steps: int) -> CallPolicy:
    """The policy of a generation of so many steps."""
    assert isinstance(config, FittedScheduleConfig)
    num_computed = config.steps or -(-num_steps // 2)
    return spread_steps(num_steps, num_computed)

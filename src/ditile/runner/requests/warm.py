"""A warm-up call: it allocates, connects and compiles, so that the next call takes as long as later ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ditile.model.pipeline_calls import list_call_parameters
from ditile.plan.plan import Plan
from ditile.runner.runner import Runner

LEAST_STEPS = 4
STALE_STEPS = 2
"""Steps after the synchronous ones: the first of them differs from those that follow."""


def choose_warm_steps(plan: Plan, *, is_cached: bool) -> int | None:
    """The steps of a call that meets all shapes of a longer one; None for all of its steps, on which a cache counts."""
    if is_cached:
        return None
    return max(LEAST_STEPS, plan.least_warmup + STALE_STEPS)


def warm_runner(runner: Runner, call: Mapping[str, Any], *, is_cached: bool) -> None:
    """Makes a call of few steps, and throws its result away; every rank calls it.

    Args:
        runner: what is warmed.
        call: the arguments of the call that follows. Nothing remains of its prompt, seed or numbers.
        is_cached: whether a cache is enabled.

    Raises:
        DitileError: as the call itself.
    """
    warm_steps = choose_warm_steps(runner.plan, is_cached=is_cached)
    steps = call.get("num_inference_steps")
    # With `strength` only a part of the steps runs, and a list of sigmas has its own length.
    has_fixed_steps = "strength" in list_call_parameters(runner.pipe) or call.get("sigmas") is not None
    if warm_steps is not None and steps is not None and not has_fixed_steps:
        call = {**call, "num_inference_steps": min(steps, warm_steps)}
    runner(**call, output_on="first")

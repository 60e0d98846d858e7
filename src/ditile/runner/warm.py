"""A call that nobody sees: it allocates, connects and compiles, so that the next one takes as long as the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ditile.model.pipeline_calls import list_call_parameters
from ditile.plan.plan import Plan
from ditile.runner.runner import Runner

LEAST_STEPS = 4
STALE_STEPS = 2
"""Steps behind the synchronous ones: the first of them is not yet like those that follow."""


def choose_warm_steps(plan: Plan, *, is_cached: bool) -> int | None:
    """The steps of a call that meets all shapes which a longer one meets. None: as many as that, where a cache counts
    on their number.
    """
    return None if is_cached else max(LEAST_STEPS, plan.least_warmup + STALE_STEPS)


def warm_runner(runner: Runner, call: Mapping[str, Any], *, is_cached: bool) -> None:
    """Makes a call of few steps, and throws its result away; every rank calls it.

    Args:
        runner: what is warmed.
        call: the arguments of the call that follows. Nothing remains of its prompt, seed or numbers.
        is_cached: whether a cache is enabled.

    Raises:
        DitileError: as the call itself.
    """
    steps = choose_warm_steps(runner.plan, is_cached=is_cached)
    given = call.get("num_inference_steps")
    # With `strength` a part of the steps is taken, and a list of them has its own length.
    is_whole = "strength" in list_call_parameters(runner.pipe) or call.get("sigmas") is not None
    if steps is not None and given is not None and not is_whole:
        call = {**call, "num_inference_steps": min(given, steps)}
    runner(**call, output_on="first")

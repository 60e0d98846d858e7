"""Captures a call of a transformer: the arguments that a pipeline gives it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from ditile.model.hooks.overrides import bind_arguments, override_attribute
from ditile.model.pipeline_calls import hide_block_tracebacks
from ditile.plan.anatomy import describe_mode
from ditile.plan.errors import ModelError

Call = Mapping[str, Any]
"""The arguments of a call of the transformer, by parameter."""


class StopAfterCall(Exception):  # noqa: N818
    """Raised to leave a pipeline after the call has been captured."""


class CapturedCall(dict[str, Any]):
    """The arguments of a call, by parameter.

    Attributes:
        before: the call of the step before, if it had another mode: this call reads the keys that it kept.
    """

    before: Call | None = None


def capture_call(
    pipe: Any, transformer: nn.Module, arguments: Mapping[str, Any], run: Callable[..., Any] | None = None
) -> CapturedCall:
    """Capture the arguments of a pipeline's first call of a transformer, by parameter, and leave the pipeline there.

    If the call has a mode, the first step is run, and if the mode differs in the next step, that call counts.

    Args:
        run: computes a call of the model, if the model itself should not run.

    Raises:
        ModelError: if the pipeline never calls it, or with arguments that it does not take.
    """
    captured = list[CapturedCall]()
    stepped = list[bool]()
    forward: Callable[..., Any] = run or transformer.forward

    @functools.wraps(transformer.forward)
    def forward_to_capture(*args: Any, **kwargs: Any) -> Any:
        try:
            call = CapturedCall(bind_arguments(transformer, args, kwargs))
        except TypeError as error:
            raise ModelError(
                f"{type(transformer).__name__} does not fit its pipeline: {type(pipe).__name__} could not be called to "
                f"look at it, as it gives its model other arguments than this takes ({error}); give it its own model"
            ) from error
        # A call in another mode reads the keys that the call in the step before kept.
        if stepped and describe_mode(call) != describe_mode(captured[0]):
            call.before = captured[0]
            captured.insert(0, call)
        captured.append(call)
        if stepped or not describe_mode(call):
            raise StopAfterCall
        return forward(**call)

    def step_and_note(*args: Any, **kwargs: Any) -> Any:
        stepped.append(True)
        assert step is not None
        return step(*args, **kwargs)

    with ExitStack() as stack:
        override_attribute(stack, transformer, "forward", forward_to_capture)
        step: Callable[..., Any] | None = getattr(getattr(pipe, "scheduler", None), "step", None)
        if step is not None:
            override_attribute(stack, pipe.scheduler, "step", functools.wraps(step)(step_and_note))
        stack.enter_context(torch.no_grad())
        # Blocks of a modular pipeline log every error that passes through them.
        hide_block_tracebacks(stack)
        with suppress(StopAfterCall):
            pipe(**arguments)
    if not captured:
        raise ModelError(f"{type(pipe).__name__} did not call its {type(transformer).__name__}")
    return captured[0]

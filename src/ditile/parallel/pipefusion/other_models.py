"""Other models that a pipeline calls in its loop, such as a ControlNet: every rank computes them whole, once in a step.

In an asynchronous step they are computed in the micro-step of the first patch, from the latents that every stage has
then: the first patch's are new, and the other patches' one step older. The later patches get the same results. A dry
iteration gets the results of an earlier computation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ditile.model.fingerprint import fingerprint
from ditile.model.hooks.compile import wrap_model_call
from ditile.model.hooks.generation import Generation


class OtherModels:
    """The results of the other models, kept from patch to patch.

    Args:
        now: the generation under way.

    Attributes:
        results: results of calls that may come again, by the name of the model, the branch, and the number of the call.
        inputs: the inputs of calls in dry iterations, as fingerprints of their shapes.
    """

    def __init__(self, now: Generation) -> None:
        self._now = now
        self._calls = Counter[tuple[str, int]]()
        self.results: dict[tuple[str, int, int], Any] = {}
        self.inputs: dict[tuple[str, int, int], Hashable] = {}

    def install_hooks(self, stack: ExitStack, pipe: Any, divided: Collection[nn.Module]) -> None:
        """Wrap all models of a pipeline except the divided ones, until the stack is closed."""
        for name, model in pipe.components.items():
            if isinstance(model, nn.Module) and model not in divided:
                wrap_model_call(stack, pipe, model, functools.partial(self._wrap_forward, name))
        stack.callback(self.forget_results)

    def begin_iteration(self) -> None:
        """Begin an iteration of the pipeline's loop."""
        self._calls.clear()
        now = self._now
        # The transformer is not called, so nobody would read the other models' results of this step.
        if now.computes is False:
            return
        if now.schedule.is_first_of_step(now.micro_step) and not now.is_dry:
            self.forget_results()

    def forget_results(self) -> None:
        """Forget the results and inputs of all calls."""
        self.results.clear()
        self.inputs.clear()

    def _wrap_forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def forward_once(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if not now.is_under_way:
                return forward(*args, **kwargs)
            # The model may be given the latents, so every stage needs them.
            now.findings.reads_latents_everywhere = True
            self._calls[name, now.branch] += 1
            key = (name, now.branch, self._calls[name, now.branch])
            inputs: Hashable = None
            if now.is_dry:
                inputs = fingerprint((args, kwargs), "shape")
            # A known call may have had a prompt of another length, and so results of other shapes.
            if key in self.results and inputs == self.inputs.get(key):
                return self.results[key]
            # The model may share modules with the transformer, like Z-Image's: their results must not be remembered.
            was_surveyed = now.is_surveyed
            now.is_surveyed = True
            try:
                result = forward(*args, **kwargs)
            finally:
                now.is_surveyed = was_surveyed
            # A synchronous step calls the model only once, so nobody asks for the result again.
            if now.is_dry or now.micro_step.patch is not None:
                self.results[key] = result
            if now.is_dry:
                self.inputs[key] = inputs
            return result

        return forward_once

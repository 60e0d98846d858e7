"""Outputs that are constant in a generation, or in a step, are computed once; a patch embeds its own tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ditile.hooks.generation import Generation
from ditile.hooks.overrides import match_modules, override_attribute
from ditile.plan.spec import ModelSpec


class OutputMemoizer:
    """Remembers the outputs of modules that a family declares constant, in a generation or in a step."""

    def __init__(self, spec: ModelSpec, current: Callable[[], Generation], label: str = "") -> None:
        self._spec, self._current, self._label = spec, current, label

    def install_hooks(
        self, stack: ExitStack, transformer: nn.Module, *, first: bool, compiled: Sequence[str] = ()
    ) -> None:
        """Overrides the forwards of those modules until the stack is closed.

        Args:
            first: whether this rank has the first stage, which reads the embedded latents.
            compiled: blocks within which nothing is remembered: what they call is part of their graph.
        """
        # Other stages never read the embedded latents, so those of the first step will do.
        constant = self._spec.constant if first else (*self._spec.constant, self._spec.image_tokens)
        for patterns, wrap in ((constant, self._memoize_constant), (self._spec.per_step, self._memoize_per_step)):
            for pattern in patterns:
                for name, module in match_modules(transformer, pattern):
                    path = f"{self._label}{name}"
                    if not any(path.startswith(f"{block}.") for block in compiled):
                        override_attribute(stack, module, "forward", wrap(path, module.forward))

    def _memoize_constant(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_once(*args: Any, **kwargs: Any) -> Any:
            now = self._current()
            shapes = tuple(arg.shape for arg in args if isinstance(arg, Tensor))
            return now.get_branch_constant((name, shapes), lambda: forward(*args, **kwargs))

        return forward_once

    def _memoize_per_step(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_once_per_step(*args: Any, **kwargs: Any) -> Any:
            now = self._current()
            if now.micro_step.patch is None:
                return forward(*args, **kwargs)
            return now.memory.get_step_constant((name, now.branch), lambda: forward(*args, **kwargs))

        return forward_once_per_step

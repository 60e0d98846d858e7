"""Counts the steps of a model by its calls, where no runner drives its loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ditile.model.hooks.protocols import CallPosition, LabelledModel
from ditile.plan.errors import StateError


class CountedCache(Protocol):
    """A cache whose generations a clock begins and ends."""

    def begin_generation(self, steps: int) -> None: ...

    def end_generation(self) -> None: ...


class CallClock:
    """A clock that counts a transformer's steps by its calls.

    If a pipeline labels its calls of the model, a step ends when a label is repeated, whatever the number of calls.

    Args:
        caches: the caches of the models that are called in a step.
        steps: the steps of every image; None until `restart_clock` gives them.
        separate_cfg: whether each step has two calls, one for each branch of guidance.
    """

    def __init__(self, caches: Sequence[CountedCache], *, steps: int | None, separate_cfg: bool) -> None:
        self._caches = caches
        self._calls_per_step = 1 + separate_cfg
        self._max_calls = 0
        self._step = 0
        self._branch = 0
        self._steps = steps
        self._labels: set[str] = set()
        self._live = False

    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None:
        """Prepare for a new image; values that are not given stay as they were."""
        self.end_generation()
        self._steps = steps or self._steps
        if separate_cfg is not None:
            self._calls_per_step = 1 + separate_cfg

    def end_generation(self) -> None:
        """End the generation."""
        if self._live:
            self._live = False
            for cache in self._caches:
                cache.end_generation()

    def begin_model_call(self, model: LabelledModel) -> CallPosition:
        """Return the step and branch of a call of the transformer.

        Raises:
            StateError: if the number of steps is unknown.
        """
        if self._steps is None:
            raise StateError(
                "this transformer is cached without a pipeline that steps its scheduler, so the number of steps is not "
                "known; call ditile.refresh_context(transformer, num_inference_steps=N) before each image, or set "
                "num_inference_steps in the cache_config"
            )
        has_ended = model.label in self._labels
        if model.label is None:
            has_ended = self._branch >= self._calls_per_step
        if self._live and has_ended:
            self._max_calls = max(self._max_calls, self._branch)
            self._step += 1
            self._branch = 0
            self._labels.clear()
            if self._step >= self._steps:
                self.end_generation()
        if not self._live:
            self._step = 0
            self._branch = 0
            self._max_calls = 0
            self._labels.clear()
            for cache in self._caches:
                cache.begin_generation(self._steps)
            self._live = True
        if model.label is not None:
            self._labels.add(model.label)
        return CallPosition(self._step, self._branch)

    def end_model_call(self, model: LabelledModel) -> None:
        """Count a call of the model that has returned; the last one of an image ends the generation."""
        self._branch += 1
        # A step of labelled calls has as many of them as the longest step before it.
        calls = self._max_calls if self._labels else self._calls_per_step
        if self._steps is not None and self._step + 1 >= self._steps and self._branch >= calls:
            self.end_generation()

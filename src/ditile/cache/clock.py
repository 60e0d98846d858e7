"""Finds out from its scheduler where a pipeline is: a generation begins at `set_timesteps` and ends at the last `step`.

A generation also ends when the pipeline's call returns or raises. Methods of schedulers are overridden on the
instances. The pipeline instance gets its own subclass, because Python looks up `__call__` on the class. A cache needs
only the scheduler's steps and the model's calls between them: a step with two calls has two branches of guidance.
"""

from __future__ import annotations

import abc
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from ditile.model.hooks.overrides import WatchedMethod, give_own_class, override_attribute
from ditile.model.hooks.protocols import CallPosition, LabelledModel
from ditile.model.pipeline_calls import list_pipeline_parts
from ditile.plan.errors import StateError

MAX_CALLS_PER_STEP = 32
"""No guidance makes this many calls of a model in one step."""


def find_schedulers(pipe: Any) -> dict[str, Any]:
    """Return the schedulers of a pipeline by name, `scheduler` first. Some pipelines have others too, such as
    `prior_scheduler`."""
    schedulers = {}
    for name, part in list_pipeline_parts(pipe).items():
        if all(hasattr(part, method) for method in _WATCHED):
            schedulers[name] = part
    return dict(sorted(schedulers.items(), key=lambda item: item[0] != "scheduler"))


_WATCHED = ("set_timesteps", "step")
"""The methods of a scheduler whose calls show where a pipeline is."""


def _watch_pipeline_call(stack: ExitStack, pipe: Any, enter: Callable[..., AbstractContextManager[None]]) -> None:
    """Give a pipeline its own subclass, whose call runs within `enter(..)`, until the stack is closed."""
    if not callable(pipe):
        return

    # A wrapped function, so that a runner can unwrap it and find the pipeline's own code.
    pipeline_call = type(pipe).__call__

    @functools.wraps(pipeline_call)
    def run_pipeline_call(this: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy of the pipeline has this class too, and must not be watched.
        if this is not pipe:
            return pipeline_call(this, *args, **kwargs)
        with enter(*args, **kwargs):
            return pipeline_call(this, *args, **kwargs)

    give_own_class(stack, pipe, {"__call__": run_pipeline_call})


class CacheClock(abc.ABC):
    """The clock of a pipeline's caches where no runner gives them one.

    Args:
        pipe: the pipeline; None for a transformer without one.
        on_begin: called with the number of steps when a generation begins.
        on_end: called when a generation ends, also by an error.
        on_call: called with the arguments by name when the pipeline is called.

    Attributes:
        is_in_call: whether the pipeline's call is under way.
    """

    is_in_call = False

    def __init__(
        self,
        pipe: Any,
        on_begin: Callable[[int], None],
        on_end: Callable[[], None],
        on_call: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._pipe = pipe
        self._begun = on_begin
        self._ended = on_end
        self._called = on_call
        self._stack = ExitStack()
        self._live = False

    @abc.abstractmethod
    def start_watching(self) -> None:
        """Watch the pipeline."""

    def stop_watching(self) -> None:
        """End the generation, and leave the pipeline as it was."""
        self.end_generation()
        self._stack.close()

    @abc.abstractmethod
    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None:
        """Prepare for a new image; values that are not given stay as they were."""

    def end_generation(self) -> None:
        """End the generation."""
        if self._live:
            self._live = False
            self._ended()

    @abc.abstractmethod
    def begin_model_call(self, model: LabelledModel) -> CallPosition | None:
        """Return the step and branch of a call of the model; None if it does not count."""

    @abc.abstractmethod
    def end_model_call(self, model: LabelledModel) -> None:
        """Count a call of the model that has returned."""


class SchedulerClock(CacheClock):
    """The clock of one pipeline, whose schedulers may be replaced at any time, and of all the models that it calls.

    A model may belong to several pipelines. A call in which none of this pipeline's schedulers is used is not counted.
    The arguments are those of `CacheClock`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._schedulers: dict[str, Any] = {}
        self._scheduler: Any = None
        self._is_counted = False
        self._steps = 0
        self._step = 0
        self._images: int | None = None
        self._calls: dict[LabelledModel, int] = {}
        self._labels: set[tuple[LabelledModel, str]] = set()
        self._timed = False
        self._apart = False
        # Timesteps may have been set before the clock watched; `_unseen` counts the steps since then.
        self._presets = False
        self._unseen = 0
        self._thread: int | None = None
        self._busy = threading.RLock()
        self._depth = 0

    def start_watching(self) -> None:
        """Watch the schedulers, and the pipeline's call."""
        if self._schedulers and not self._are_schedulers_replaced():
            return
        self._stack.close()
        self._schedulers = find_schedulers(self._pipe)
        self._scheduler = next(iter(self._schedulers.values()))
        # A pipeline may have one scheduler under two names.
        for scheduler in {id(scheduler): scheduler for scheduler in self._schedulers.values()}.values():
            names = list(inspect.signature(scheduler.step).parameters)
            sample_at = names.index("sample") if "sample" in names else len(names)
            handlers = {
                "set_timesteps": functools.partial(self._handle_set_timesteps, scheduler),
                "step": functools.partial(self._handle_scheduler_step, scheduler, sample_at),
            }
            for name, handler in handlers.items():
                watched = WatchedMethod(handler, getattr(scheduler, name), self._record_scheduler_copy)
                override_attribute(self._stack, scheduler, name, watched, yields_to_newer=True)
        _watch_pipeline_call(self._stack, self._pipe, self._enter_pipeline_call)

    def stop_watching(self) -> None:
        """Restore the schedulers and the pipeline."""
        super().stop_watching()
        self._schedulers = {}

    def end_generation(self) -> None:
        """End the generation."""
        self._unseen = 0
        super().end_generation()

    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None:
        """End the generation. The arguments are not needed: this clock reads steps and branches from the scheduler."""
        self.end_generation()

    def begin_model_call(self, model: LabelledModel) -> CallPosition | None:
        """Return the step and branch of a call of the model.

        None before the pipeline has set its timesteps, as when it encodes an image, or if another pipeline makes the
        call.

        Raises:
            StateError: if another thread runs the pipeline, or the scheduler is not stepped.
        """
        # A user may give the pipeline another scheduler at any time.
        if self._are_schedulers_replaced():
            self.start_watching()
            self.end_generation()
            if self._depth:
                self._begin_generation()
        if not self._live:
            if not (self._presets or (self._depth and self._timed)):
                return None
            self._begin_generation(self._unseen)
        self._check_thread()
        if model.label is not None:
            self._record_label(model, model.label)
        if not self._is_counted:
            self._steps = self._count_steps()
            self._begun(self._steps)
            self._is_counted = True
        branch = self._calls.get(model, 0)
        if branch >= MAX_CALLS_PER_STEP and not self._depth:
            # Another pipeline makes these calls, although the timesteps of this one were set.
            self._presets = False
            self.end_generation()
            return None
        if branch >= MAX_CALLS_PER_STEP:
            raise StateError(
                f"a cached model was called {branch} times, and no scheduler of the {type(self._pipe).__name__} was "
                "stepped, so its steps cannot be counted; call disable_cache"
            )
        return CallPosition(self._step, branch, images=self._images)

    def end_model_call(self, model: LabelledModel) -> None:
        """Count a call of the model that has returned."""
        if self._live:
            self._calls[model] = self._calls.get(model, 0) + 1

    def _are_schedulers_replaced(self) -> bool:
        present = {name: getattr(self._pipe, name, None) for name in self._schedulers}
        return any(present[name] is not scheduler for name, scheduler in self._schedulers.items())

    def _count_steps(self) -> int:
        # Image-to-image pipelines begin in the middle of the timesteps.
        skipped = getattr(self._scheduler, "begin_index", None) or 0
        return len(self._scheduler.timesteps) - skipped

    def _record_label(self, model: LabelledModel, label: str) -> None:
        """End a step when a label is repeated, if the pipeline steps only copies of the scheduler."""
        if self._apart and (model, label) in self._labels:
            self._advance_step()
            if not self._live:
                self._begin_generation()
                self._apart = True
        self._labels.add((model, label))

    def _record_scheduler_copy(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Note that the pipeline copied its scheduler: it may step only the copies, such as one for each frame."""
        self._apart = self._live and not self._step
        return stock

    @contextmanager
    def _enter_pipeline_call(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Surround one call of the pipeline, which makes one image, and refuse a second call at the same time."""
        # An RLock, as the pipeline of this thread may call itself.
        if not self._busy.acquire(blocking=False):
            raise self._make_thread_error()
        self._depth += 1
        self.is_in_call = True
        self._timed = self._timed and self._depth > 1
        try:
            if self._depth == 1:
                self._unseen = 0
                # Arguments may be given by position too.
                call = inspect.signature(self._pipe.__call__).bind_partial(*args, **kwargs)
                self._called({**call.arguments, **kwargs})
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.is_in_call = False
                self.end_generation()
            self._busy.release()

    def _handle_set_timesteps(self, scheduler: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if self._depth:
                # Another thread must not set the timesteps of a call.
                stack.enter_context(self._enter_pipeline_call())
            result = stock(*args, **kwargs)
        self._timed = True
        self._scheduler = scheduler
        self._begin_generation()
        return result

    def _begin_generation(self, step: int = 0) -> None:
        self.end_generation()
        self._live = True
        self._is_counted = False
        self._step = step
        self._images = None
        self._apart = False
        self._calls.clear()
        self._labels.clear()
        # Blocks remember one image, so no other thread may call them meanwhile.
        self._thread = threading.get_ident()

    def _handle_scheduler_step(
        self, scheduler: Any, sample_at: int, stock: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._live and self._calls:
            self._check_thread()
        result = stock(*args, **kwargs)
        if not self._live:
            # Timesteps were set before the call, or before the cache.
            self._presets |= not (self._depth and self._timed)
            self._scheduler = scheduler
            self._unseen = self._unseen + 1
        if not self._live or not self._calls:
            return result
        if scheduler is not self._scheduler and self._step:
            return result
        if scheduler is not self._scheduler:
            # If the timesteps of several schedulers were set, the first one that is stepped counts.
            self._scheduler = scheduler
            self._steps = self._count_steps()
        sample = kwargs.get("sample")
        if sample is None and len(args) > sample_at:
            sample = args[sample_at]
        self._images = None if sample is None else int(sample.shape[0])
        self._apart = False
        self._advance_step()
        return result

    def _advance_step(self) -> None:
        """End a step; the last step ends the generation."""
        self._step += 1
        self._calls.clear()
        self._labels.clear()
        if self._step >= self._steps:
            self.end_generation()

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise self._make_thread_error()

    def _make_thread_error(self) -> StateError:
        return StateError(
            f"two threads run one cached {type(self._pipe).__name__} at the same time, and its blocks remember one "
            "image; give each thread a pipeline and a transformer of its own, or make one call after the other"
        )


class CallClock(CacheClock):
    """The clock of a transformer without a scheduler: it counts the calls of each step.

    If a pipeline names its calls of the model, a step ends when a name is repeated, whatever the number of calls.

    Args:
        args: those of `CacheClock`; the `num_inference_steps` of a pipeline's call are the steps of an image.
        steps: the steps of every image; None until `restart_clock` or the pipeline's call gives them.
        separate_cfg: whether each step has two calls, one for each branch of guidance.
    """

    def __init__(self, *args: Any, steps: int | None, separate_cfg: bool) -> None:
        super().__init__(*args)
        self._of_step = 1 + separate_cfg
        self._most = 0
        self._step = 0
        self._branch = 0
        self._steps = steps
        self._labels: set[str] = set()

    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None:
        """Prepare for a new image; values that are not given stay as they were."""
        self.end_generation()
        self._steps = steps or self._steps
        if separate_cfg is not None:
            self._of_step = 1 + separate_cfg

    def start_watching(self) -> None:
        """Watch the pipeline's call, if there is a pipeline."""
        self._stack.close()
        if self._pipe is not None:
            _watch_pipeline_call(self._stack, self._pipe, self._enter_pipeline_call)

    def begin_model_call(self, model: LabelledModel) -> CallPosition:
        """Return the step and branch of a call of the transformer. Raises `StateError` if the number of steps is
        unknown."""
        if self._steps is None:
            missing = "a scheduler" if self._pipe else "a pipeline"
            raise StateError(
                f"this transformer is cached without {missing}, so the number of "
                "steps is not known; call ditile.refresh_context(transformer, num_inference_steps=N) before each "
                "image, or set num_inference_steps in the cache_config"
            )
        has_ended = model.label in self._labels
        if model.label is None:
            has_ended = self._branch >= self._of_step
        if self._live and has_ended:
            self._most = max(self._most, self._branch)
            self._step = self._step + 1
            self._branch = 0
            self._labels.clear()
            if self._step >= self._steps:
                self.end_generation()
        if not self._live:
            self._step = 0
            self._branch = 0
            self._most = 0
            self._labels.clear()
            self._begun(self._steps)
            self._live = True
        if model.label is not None:
            self._labels.add(model.label)
        return CallPosition(self._step, self._branch)

    def end_model_call(self, model: LabelledModel) -> None:
        """Count a call of the model that has returned; the last one of an image ends the generation."""
        self._branch += 1
        calls = self._most if self._labels else self._of_step
        if self._steps is not None and self._step + 1 >= self._steps and self._branch >= calls:
            self.end_generation()

    @contextmanager
    def _enter_pipeline_call(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Surround one call of the pipeline, which makes one image."""
        call = inspect.signature(self._pipe.__call__).bind_partial(*args, **kwargs)
        # The number of steps may be the pipeline's default.
        call.apply_defaults()
        steps = call.arguments.get("num_inference_steps")
        if not isinstance(steps, int):
            steps = None
        self.restart_clock(steps)
        self._called({**call.arguments, **kwargs})
        try:
            yield
        finally:
            self.end_generation()

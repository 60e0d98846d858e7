"""Where the pipeline is, read off its scheduler: a generation begins at `set_timesteps` and ends with the last `step`.

A generation also ends when the pipeline's call returns or raises. Methods of the scheduler are overridden on the
instance. The pipeline gets a class of its own, because Python looks up `__call__` on the class. A cache needs to know
only the scheduler's steps and the model's calls between them: a step with two calls has two branches of guidance.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ditile.errors import StateError
from ditile.hooks.overrides import WatchedMethod, override_attribute
from ditile.hooks.protocols import CallPosition, LabelledModel

MAX_CALLS_PER_STEP = 32  # calls of a model in one step that no guidance needs


class SchedulerClock:
    """The clock of one pipeline, and of all the models that it calls.

    Args:
        pipe: the pipeline; the scheduler is the one that it has at the time.
        on_begin: called when a generation begins, with its steps.
        on_end: called when it is over, or was left by an error.
    """

    def __init__(self, pipe: Any, on_begin: Callable[[int], None], on_end: Callable[[], None]) -> None:
        self._pipe, self._begun, self._ended = pipe, on_begin, on_end
        self._stack = ExitStack()
        self._scheduler: Any = None
        self._live, self._steps, self._step = False, 0, 0
        self._images: int | None = None
        self._calls: dict[LabelledModel, int] = {}
        self._labels: set[tuple[LabelledModel, str]] = set()
        self._timed, self._apart, self._presets = False, False, False
        self._thread: int | None = None
        self._busy, self._depth = threading.RLock(), 0

    def start_watching(self) -> None:
        """Watches the scheduler, and the pipeline's call."""
        if self._scheduler is self._pipe.scheduler:
            return
        self._stack.close()
        self._scheduler = self._pipe.scheduler
        for name, mine in (("set_timesteps", self._handle_set_timesteps), ("step", self._handle_scheduler_step)):
            override_attribute(
                self._stack,
                self._scheduler,
                name,
                WatchedMethod(mine, getattr(self._scheduler, name), self._record_scheduler_copy),
            )
        names = list(inspect.signature(self._scheduler.step).parameters)
        self._sample_at = names.index("sample") if "sample" in names else len(names)
        self._watch_pipeline_call()

    def stop_watching(self) -> None:
        """Leaves scheduler and pipeline as they were."""
        self.end_generation()
        self._stack.close()
        self._scheduler = None

    def end_generation(self) -> None:
        """The generation is over."""
        if self._live:
            self._live = False
            self._ended()

    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None:
        """Ends the generation; the scheduler says the steps of the next one, and its calls are counted as branches."""
        self.end_generation()

    def begin_model_call(self, model: LabelledModel) -> CallPosition | None:
        """The place of a model's call; None before the pipeline has set its timesteps, as when it encodes an image.

        Raises:
            StateError: if another thread runs the pipeline, or the scheduler is not stepped.
        """
        # A user may give the pipeline another scheduler at any time.
        if self._pipe.scheduler is not self._scheduler:
            self.start_watching()
            self._begin_generation()
        if not self._live:
            if self._depth and not (self._timed or self._presets):
                return None
            self._begin_generation()
        self._check_thread()
        if model.label is not None:
            self._record_label(model, model.label)
        if self._step == 0 and not self._calls:
            skipped = getattr(self._scheduler, "begin_index", None) or 0
            self._steps = len(self._scheduler.timesteps) - skipped
            self._begun(self._steps)
        branch = self._calls.get(model, 0)
        if branch >= MAX_CALLS_PER_STEP:
            raise StateError(
                f"a cached model was called {branch} times, and the scheduler of the {type(self._pipe).__name__} that "
                "it was cached with was not stepped; call enable_cache on the pipeline that runs"
            )
        return CallPosition(self._step, branch, images=self._images)

    def end_model_call(self, model: LabelledModel) -> None:
        """Counts a call of the model that has returned."""
        if self._live:
            self._calls[model] = self._calls.get(model, 0) + 1

    def _record_label(self, model: LabelledModel, label: str) -> None:
        """Ends a step when a label comes again, where the pipeline steps copies and not the scheduler itself."""
        if self._apart and (model, label) in self._labels:
            self._advance_step()
            if not self._live:
                self._begin_generation()
                self._apart = True
        self._labels.add((model, label))

    def _record_scheduler_copy(self) -> None:
        """Notes that the pipeline copied its scheduler: it may step copies, one for each frame, and never the first."""
        self._apart = self._live and not self._step

    def _watch_pipeline_call(self) -> None:
        """Overrides the pipeline's call, which makes one picture, and refuses a second call at the same time."""
        pipe, kind = self._pipe, type(self._pipe)
        if not callable(pipe):
            return

        @functools.wraps(kind.__call__)
        def run_pipeline_call(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self._enter_pipeline_call() if this is pipe else ExitStack():
                return kind.__call__(this, *args, **kwargs)

        names = {"__call__": run_pipeline_call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        pipe.__class__ = type(kind.__name__, (kind,), names)
        self._stack.callback(setattr, pipe, "__class__", kind)

    @contextmanager
    def _enter_pipeline_call(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise self._make_thread_error()
        self._depth += 1
        self._timed = self._timed and self._depth > 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.end_generation()
            self._busy.release()

    def _handle_set_timesteps(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._enter_pipeline_call() if self._depth else ExitStack():
            result = stock(*args, **kwargs)
        self._timed = True
        self._begin_generation()
        return result

    def _begin_generation(self) -> None:
        self.end_generation()
        self._live, self._step, self._images, self._apart = True, 0, None, False
        self._calls.clear()
        self._labels.clear()
        self._thread = threading.get_ident()

    def _handle_scheduler_step(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._live and self._calls:
            self._check_thread()
        # The scheduler is stepped in a call that set no timesteps: they were set before the call.
        self._presets |= self._depth > 0 and not self._timed
        result = stock(*args, **kwargs)
        if not self._live or not self._calls:
            return result
        sample = kwargs.get("sample", args[self._sample_at] if len(args) > self._sample_at else None)
        self._images, self._apart = None if sample is None else int(sample.shape[0]), False
        self._advance_step()
        return result

    def _advance_step(self) -> None:
        """Ends a step, and after the last step the generation."""
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
            "picture; give each thread a pipeline and a transformer of its own, or make one call after the other"
        )


class CallClock:
    """The clock of a transformer without a pipeline: each step has so many calls.

    Args:
        on_begin, on_end: as in `SchedulerClock`.
        steps: of every picture; None waits for `restart_clock`.
        separate_cfg: whether each step has two calls, one for each branch of guidance.
    """

    def __init__(
        self,
        on_begin: Callable[[int], None],
        on_end: Callable[[], None],
        steps: int | None = None,
        *,
        separate_cfg: bool = False,
    ) -> None:
        self._begun, self._ended, self._of_step = on_begin, on_end, 2 if separate_cfg else 1
        self._count, self._steps, self._live = 0, steps, False

    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None:
        """Prepares for a new picture; steps and calls that are not given are those of the last picture."""
        self.end_generation()
        self._steps, self._count = steps or self._steps, 0
        if separate_cfg is not None:
            self._of_step = 2 if separate_cfg else 1

    def start_watching(self) -> None:
        """Does nothing: there is no pipeline to watch."""

    def stop_watching(self) -> None:
        """Forgets the generation."""
        self.end_generation()

    def end_generation(self) -> None:
        """The generation is over."""
        if self._live:
            self._live = False
            self._ended()

    def begin_model_call(self, model: LabelledModel) -> CallPosition:
        """The place of a call of the transformer. Raises `StateError` if the number of steps is not known."""
        if self._steps is None:
            raise StateError(
                "this transformer is cached without a pipeline, so the number of steps is not known; call "
                "ditile.refresh_context(transformer, num_inference_steps=N) before each picture, or set "
                "num_inference_steps in the cache_config"
            )
        if not self._live:
            self._live, self._count = True, 0
            self._begun(self._steps)
        return CallPosition(self._count // self._of_step, self._count % self._of_step)

    def end_model_call(self, model: LabelledModel) -> None:
        """Counts a call of the model that has returned; the last one of a picture ends the generation."""
        self._count += 1
        if self._steps is not None and self._count >= self._steps * self._of_step:
            self.end_generation()

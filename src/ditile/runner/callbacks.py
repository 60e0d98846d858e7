"""Calls the pipeline's callbacks and its progress bar at the end of each step, not of each micro-step.

A callback without tensors sends nothing. One with tensors makes the end of its steps a synchronisation point: every
rank gets the whole latents and calls its callback, and all ranks use the result of rank 0's callback. After any
callback, remembered outputs are computed again: the callback may have changed the prompt or the scale of a LoRA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import length_hint
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ditile.distributed import env
from ditile.distributed.heartbeat import note_local_work
from ditile.distributed.launch import mark_open_line
from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import broadcast_named_tensors, gather_json
from ditile.model.hooks.overrides import override_attribute
from ditile.model.pipeline_calls import explain_ended_guidance, iterate_blocks, list_call_parameters
from ditile.parallel import rng_state
from ditile.parallel.pipefusion.loop import Loop
from ditile.parallel.pipefusion.step_agreement import StepCallbacks
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments, check_values
from ditile.runner.report import CallMeter

StepNumber = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWatch:
    """Watches the steps of one call without changing it: reports progress, and latents for previews.

    Steps are those that progress bars show, counted from 0. An error in one of the functions ends the call.

    Attributes:
        on_step: called with (step, number of steps) at the end of each step, on each rank that sets it. It needs no
            message and no wait for the device.
        on_latents: called on rank 0 with (step, latents) at the end of the steps `latents_at`. It gets the latents of
            all images in the pipeline's layout. It must not change them, and must copy any it keeps.
        latents_at: the steps for `on_latents`. At their ends the ranks exchange latents, so all ranks must give the
            same steps.
        on_decode: called in place of a component's `decode`, such as the VAE's, on ranks that decode: with (name of the
            component, that method, *its arguments), and must return its result.
    """

    on_step: Callable[[int, int], None] | None = None
    on_latents: Callable[[int, Tensor], None] | None = None
    latents_at: set[StepNumber] | frozenset[StepNumber] = frozenset()
    on_decode: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_values(StepWatch, {name: getattr(self, name) for name in StepWatch.__slots__})


NOBODY = StepWatch()


class StepEndCallbacks:
    """The actions at the end of each step of one call.

    Args:
        call: the call's arguments; `install_callbacks` replaces the callbacks in it.
        device: the device for tensors that callbacks return.
        meter: records each step.
        is_stopped: returns whether `Runner.stop` has been called.
        watcher: the functions that watch the steps.
    """

    loop: Loop
    decodes_alone = False
    """Whether ranks exchange nothing more after the last step."""
    refuses_other_guidance = False
    """Whether guidance must not begin or end in mid-run."""

    def __init__(
        self,
        pipe: Any,
        mesh: Mesh,
        call: CallArguments,
        device: torch.device,
        meter: CallMeter,
        is_stopped: Callable[[], bool],
        watcher: StepWatch,
    ) -> None:
        self._pipe = pipe
        self._mesh = mesh
        self._device = device
        self._meter = meter
        self._is_stopped = is_stopped
        self._watcher = watcher
        self._generator = call.get("generator")
        self._callback = call.get("callback_on_step_end")
        names = getattr(self._callback, "tensor_inputs", None) or call.get("callback_on_step_end_tensor_inputs")
        self._tensor_names = ["latents"] if names is None else list(names)
        # Older pipelines take this callback instead, and call it with the latents in every n-th step.
        self._legacy_callback = call.get("callback")
        self._legacy_period = call.get("callback_steps", 1)
        asks_for_tensors = bool(self._callback and self._tensor_names)
        period = self._legacy_period if self._legacy_callback else 0
        # If any rank has a callback, all ranks gather the latents for it.
        everyone = gather_json([asks_for_tensors, period or 0], mesh.within_calls)
        self._gathers_tensors = any(asks for asks, _ in everyone)
        self._gather_period = max(period for _, period in everyone)
        # The iterations in the loop, and in a step: two-stage schedulers have two per step, but one in the last step.
        self._num_iterations = 0
        self._order = 1
        self._bar: Any = None

    def install_callbacks(self, stack: ExitStack, call: CallArguments) -> StepCallbacks:
        """Replace the callbacks in `call` and the pipeline's progress bar until the stack is closed."""
        if self._callback is not None or self._gathers_tensors:
            call["callback_on_step_end"] = self._handle_micro_step_end
            # A user's pipeline class may lack this argument, and always pass the same tensors.
            name = "callback_on_step_end_tensor_inputs"
            if name in list_call_parameters(self._pipe):
                call[name] = self._tensor_names
        if self._legacy_callback is not None:
            call["callback"] = None

        # The pipeline's loop updates this bar in each micro-step. The real bar counts steps, on rank 0.
        silent_bar = SimpleNamespace(update=lambda _=1: None)

        @contextmanager
        def open_progress_bar(stock: Callable[..., Any], total: int | None) -> Iterator[SimpleNamespace]:
            if self._mesh.rank != 0:
                yield silent_bar
                return
            with stock(total=total) as self._bar:
                is_shown = not getattr(self._bar, "disable", False)
                with mark_open_line(shown=is_shown):
                    yield silent_bar

        def iterate_with_bar(stock: Callable[..., Any], iterable: Iterable[Any]) -> Iterator[Any]:
            # The hint is 0 for a generator: its bar shows steps without a total.
            with open_progress_bar(stock, length_hint(iterable)):
                yield from iterable

        def progress_bar(stock: Callable[..., Any], iterable: Any = None, total: int | None = None) -> Any:
            if iterable is None:
                return open_progress_bar(stock, total)
            return iterate_with_bar(stock, iterable)

        # In a modular pipeline, the blocks run the loop and its progress bar.
        for owner in (self._pipe, *iterate_blocks(self._pipe)):
            if hasattr(owner, "progress_bar"):
                override_attribute(stack, owner, "progress_bar", functools.partial(progress_bar, owner.progress_bar))
        return StepCallbacks(
            self._handle_loop_begin,
            self._handle_step_end,
            self._wants_latents,
            env.report_progress,
            self._is_stopped,
            rng_state.list_generators(self._generator, self._device),
        )

    def _handle_loop_begin(self, num_iterations: int) -> None:
        self._num_iterations = num_iterations
        self._order = getattr(self._pipe.scheduler, "order", 1)
        self._meter.mark_loop_begin()

    def _wants_latents(self, iteration: int) -> bool:
        """Return whether the whole latents are gathered at the end of an iteration."""
        if self._gathers_tensors or self._is_watched(iteration):
            return True
        return self._gather_period > 0 and self._ends_step(iteration) and iteration % self._gather_period == 0

    def _is_watched(self, iteration: int) -> bool:
        """Return whether the watcher of rank 0 gets the latents of an iteration."""
        return self._ends_step(iteration) and iteration // self._order in self._watcher.latents_at

    def _handle_step_end(self, iteration: int, timestep: Any, latents: Tensor) -> None:
        generation = self.loop.generation
        text_tokens = None
        reference_tokens = 0
        # Each branch of guidance has its own layout; the report takes the first one.
        if generation.layouts:
            layout = next(iter(generation.layouts.values())).layout
            text_tokens = layout.text
            reference_tokens = layout.count_reference_tokens()
        computed = not generation.is_forecast and generation.schedule.computes_references(generation.micro_step.step)
        self._meter.record_step_end(generation.memory.key_bytes, text_tokens, reference_tokens, computed=computed)
        if self.decodes_alone and iteration == self._num_iterations - 1:
            note_local_work()
        if not self._ends_step(iteration):
            return
        step = iteration // self._order
        if self._bar is not None:
            self._bar.update()
        if self._watcher.on_step is not None:
            num_steps = -(-self._num_iterations // self._order)
            self._watcher.on_step(step, num_steps)
        if self._watcher.on_latents is not None and self._is_watched(iteration) and self._mesh.rank == 0:
            self._watcher.on_latents(step, latents)
        if self._legacy_callback is not None and iteration % self._legacy_period == 0:
            self._legacy_callback(step, timestep, latents)
            self.loop.forget_remembered()

    def _ends_step(self, iteration: int) -> bool:
        """Return whether an iteration ends a step, so that stock pipelines show it: every second one does with
        two-stage schedulers, otherwise each."""
        return iteration == self._num_iterations - 1 or (iteration + 1) % self._order == 0

    def _handle_micro_step_end(self, pipe: Any, _: int, timestep: Any, tensors: CallArguments) -> CallArguments:
        step = self.loop.closing_step
        if step is None:
            return {}
        answer: CallArguments = {}
        if self._callback:
            is_guided = getattr(pipe, "do_classifier_free_guidance", None)
            returned = self._callback(pipe, step, timestep, dict(tensors))
            has_changed = getattr(pipe, "do_classifier_free_guidance", None) != is_guided
            if has_changed and self.refuses_other_guidance and step < self._num_iterations - 1:
                name = getattr(self._callback, "__name__", type(self._callback).__name__)
                raise ModelError(explain_ended_guidance(name))
            if isinstance(returned, dict):
                answer = returned
        # The callback may have changed the prompt, or the scale of a LoRA.
        self.loop.forget_remembered()
        if not self._gathers_tensors:
            return answer
        mesh = self._mesh
        changed = {name: value for name, value in answer.items() if isinstance(value, Tensor)}
        group = mesh.image.group
        if mesh["data"].num_ranks > 1:
            group = mesh.within_calls
        return answer | broadcast_named_tensors(changed, group, mesh.within_calls, self._device, mesh.traffic)

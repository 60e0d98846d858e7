"""Ends of steps: the pipeline's callbacks and progress bar, mapped back from micro-steps to steps.

A callback that asks for no tensors sends nothing. One that asks for any makes the end of its steps a synchronisation
point: every rank gets the whole latents, every rank's callback is called, and what rank 0's returns is used on all.
After either, what was remembered as constant is made anew: it may have changed the prompt, or the scale of a LoRA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from ditile.distributed import env
from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import broadcast_named_tensors, gather_json
from ditile.hooks.overrides import override_attribute
from ditile.parallel.pipefusion.loop import Loop, StepCallbacks
from ditile.runner.report import CallMeter


class _SilentBar:
    """Stands for the pipeline's progress bar; the real one counts steps, on rank 0."""

    def __enter__(self) -> _SilentBar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, _: int = 1) -> None:
        """Micro-steps are not shown."""


class StepEndCallbacks:
    """What happens at the ends of the steps of one call.

    Args:
        pipe: the pipeline.
        mesh: its ranks.
        call: the call's arguments; the callbacks in it are replaced by `install`.
        device: where tensors that callbacks return go.
        watch: told of each step.
    """

    loop: Loop

    def __init__(self, pipe: Any, mesh: Mesh, call: dict[str, Any], device: torch.device, watch: CallMeter) -> None:
        self._pipe, self._mesh, self._device, self._watch = pipe, mesh, device, watch
        self._callback = call.get("callback_on_step_end")
        self._legacy, self._every = call.get("callback"), call.get("callback_steps", 1)
        names = getattr(self._callback, "tensor_inputs", None) or call.get("callback_on_step_end_tensor_inputs")
        self._names = ["latents"] if names is None else list(names)
        asks = [bool(self._callback and self._names), self._every if self._legacy and self._every else 0]
        everyone = gather_json(asks, mesh.everyone)
        self._tensors = any(tensors for tensors, _ in everyone)
        self._legacy_every = max(every for _, every in everyone)
        self._steps, self._bar = 0, None

    def install_callbacks(self, stack: ExitStack, call: dict[str, Any]) -> StepCallbacks:
        """Replaces the callbacks in `call` and the pipeline's progress bar until the stack is closed."""
        if self._callback is not None or self._tensors:
            call["callback_on_step_end"] = self._handle_micro_step_end
            call["callback_on_step_end_tensor_inputs"] = self._names
        if self._legacy is not None:
            call["callback"] = None
        stock = self._pipe.progress_bar

        @contextmanager
        def open_progress_bar(total: int | None) -> Iterator[_SilentBar]:
            if self._mesh.rank != 0:
                yield _SilentBar()
                return
            with stock(total=total) as self._bar:
                yield _SilentBar()

        def iterate_with_bar(iterable: Iterable[Any]) -> Iterator[Any]:
            with open_progress_bar(length_hint(iterable)):  # 0 of a generator, whose bar tells steps alone
                yield from iterable

        def progress_bar(iterable: Any = None, total: int | None = None) -> Any:
            return open_progress_bar(total) if iterable is None else iterate_with_bar(iterable)

        override_attribute(stack, self._pipe, "progress_bar", progress_bar)
        return StepCallbacks(self._handle_loop_begin, self._handle_step_end, self._wants_latents, self._report_progress)

    def _handle_loop_begin(self, steps: int) -> None:
        self._steps = steps
        self._watch.mark_loop_begin()

    def _wants_latents(self, step: int) -> bool:
        return self._tensors or (
            self._legacy_every > 0 and self._is_step_visible(step) and step % self._legacy_every == 0
        )

    def _handle_step_end(self, step: int, timestep: Any, latents: Tensor) -> None:
        now = self.loop.get_generation()
        text = next((layout.text for layout in now.layouts.values()), None)
        self._watch.record_step_end(now.memory.key_bytes, text)
        if self._bar is not None and self._is_step_visible(step):
            self._bar.update()
        if self._legacy is not None and self._is_step_visible(step) and step % self._every == 0:
            self._legacy(step // getattr(self._pipe.scheduler, "order", 1), timestep, latents)
            self.loop.forget_constants()

    def _is_step_visible(self, step: int) -> bool:
        """Whether the stock pipelines show this iteration: every one, or every second with two-stage schedulers."""
        order = getattr(self._pipe.scheduler, "order", 1)
        return step == self._steps - 1 or (step + 1) % order == 0

    def _handle_micro_step_end(self, pipe: Any, _: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        step = self.loop.closing_step
        if step is None:
            return {}
        answer = self._callback(pipe, step, timestep, dict(tensors)) if self._callback else {}
        answer = answer if isinstance(answer, dict) else {}
        self.loop.forget_constants()
        if not self._tensors:
            return answer
        given = {name: value for name, value in answer.items() if isinstance(value, Tensor)}
        replicas = self._mesh["data"].num_ranks > 1
        group = self._mesh.everyone if replicas else self._mesh.image.group
        return answer | broadcast_named_tensors(
            given, 0, group, self._mesh.everyone, self._device, self._mesh.traffic, "callback"
        )

    def _report_progress(self) -> None:
        env.report_progress()

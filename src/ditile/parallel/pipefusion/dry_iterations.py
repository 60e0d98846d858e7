"""Dry iterations: the pipeline runs its loop, but no block is computed; see `model/hooks/block_calls.py`.

Before the first step they show which latents belong to a patch, and how the pipeline passes latents on
(`rehearsal.py`). A pipeline for in-painting needs some between micro-steps too. It blends the latents of a step with
those of a noised image, by an amount that depends on the step. By itself it would give all patches the noise of the
next step as soon as one of them was stepped. So it gets further iterations, which look to it like the step before the
step of the next patch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.guiders.guider_utils import BaseGuidance
from torch import Tensor

from ditile.model.hooks.generation import Generation
from ditile.parallel import rng_state
from ditile.parallel.pipefusion.stepped_latents import SteppedLatents
from ditile.plan.errors import StateError
from ditile.plan.schedule import MicroStep


class DryIterations:
    """The dry iterations of one generation.

    Args:
        generators: the generators that the pipeline may use.

    Attributes:
        streams: the latents that schedulers step; before the first step the loop adds each when it is first stepped.
        pipeline: the name of the pipeline's class, for messages.
    """

    def __init__(
        self,
        now: Generation,
        streams: Sequence[SteppedLatents],
        pipe: Any,
        timesteps: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        self.now = now
        self.streams = streams
        self.pipeline = type(pipe).__name__
        self._timesteps = timesteps
        self._generators = generators
        self._random_states = rng_state.read_generator_states(generators)
        # A guider may average predictions over steps, like adaptive projected guidance; dry ones are NaN or zero.
        self._guiders: list[tuple[BaseGuidance, dict[str, Any]]] = []
        for part in vars(pipe).values():
            if isinstance(part, BaseGuidance):
                self._guiders.append((part, copy.deepcopy(vars(part))))

    def begin(self, step: int, patch: int) -> Tensor:
        """Begin an iteration that rehearses a patch in a step; return the timestep for the pipeline."""
        self.now.enter_micro_step(MicroStep(step, None))
        # The pipeline counts this iteration, and may choose models or end guidance by its number.
        self.now.loop_step = step
        self.now.dry.patch = patch
        self.now.dry.called_models.clear()
        for stream in self.streams:
            stream.rehearsed_piece = None
            stream.is_stepped = False
            stream.set_step_index(step)
        return self._timesteps[step]

    def check_stepped(self) -> None:
        """Check that the pipeline stepped all its schedulers in the iteration."""
        if not self.streams or not all(stream.is_stepped for stream in self.streams):
            raise StateError(f"{self.pipeline} went on without stepping its scheduler")

    def is_plain_loop(self) -> bool:
        """Return whether the first iteration was no rehearsal, because it stepped no scheduler and called no model."""
        if self.streams:
            return False
        # A model was called, and its blocks were not computed: the pipeline cannot go on with that.
        if self.now.branch:
            self.check_stepped()
        self.now.dry.patch = None
        return True

    def end(self) -> None:
        """End the dry iterations; the first step is next."""
        for stream in self.streams:
            stream.set_step_index(0)
        self.now.loop_step = 0
        self.now.dry.patch = None
        self.now.is_whole = False

    @property
    def are_blends_needed(self) -> bool:
        """Return whether the pipeline blends latents."""
        return any(stream.is_blended for stream in self.streams)

    def blend_for_step(self, step: int) -> Iterator[Tensor]:
        """Yield the timestep of an iteration that leaves the pipeline with a step's first latents."""
        self.now.dry.blended_step = step
        for stream in self.streams:
            stream.is_stepped = False
        # There is no step before step 0: the pipeline gets the timestep of step 0, and takes the iteration for number
        # -1.
        yield self._timesteps[max(step - 1, 0)]
        self.check_stepped()
        self.now.dry.blended_step = None

    def restore_first_latents(self) -> Iterator[Tensor]:
        """Make the pipeline blend its first latents again after a rehearsal, and check that nothing changed."""
        # The latents that an iteration passes on are seen in the next one.
        yield from self.blend_for_step(0)
        yield from self.blend_for_step(0)
        for stream in self.streams:
            stream.check_first_latents()

    def restore_state(self) -> None:
        """Restore the random states, and the memory of guiders, from before the iterations."""
        rng_state.restore_generators(self._generators, self._random_states)
        for guider, state in self._guiders:
            vars(guider).clear()
            vars(guider).update(state)

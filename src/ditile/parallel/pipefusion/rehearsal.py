"""Iterations of a pipeline's loop before its first step, in which no block is run: see `hooks/block_calls.py`.

The pipeline's own code between the transformer and the scheduler says which latents belong to a patch, and whether it
hands on the latents that a step returned, or a copy of them. A pipeline that calls another model in some steps, or its
model in another mode, says so in an iteration for each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ditile.errors import StateError
from ditile.hooks.generation import Generation
from ditile.parallel.pipefusion.stepped_latents import SteppedLatents
from ditile.plan.schedule import MicroStep


class Rehearsal:
    """The rehearsal of one generation.

    Args:
        now: the generation.
        streams: what schedulers step, each added by the loop when it is first stepped.
        pipeline: the name of the pipeline's class.

    Attributes:
        changed_steps: steps that must be synchronous: they call another model than the one before, or in another mode,
            or compute a whole.
    """

    def __init__(self, now: Generation, streams: Sequence[SteppedLatents], pipeline: str) -> None:
        self._now, self._streams, self._pipeline = now, streams, pipeline
        self.changed_steps: frozenset[int] = frozenset()

    def iterate_calls(self, timesteps: Sequence[Tensor], steps: int, patches: int) -> Iterator[Tensor]:
        """The timestep of each iteration; it ends behind the first one if that did not step a scheduler.

        Args:
            timesteps: of the loop.
            steps: how many of its steps are rehearsed.
            patches: how many pieces of the latents are to be found.

        Raises:
            StateError: if a later iteration steps no scheduler.
        """
        now, called = self._now, list[frozenset[tuple[object, bool]]]()
        for step in range(steps):
            yield self._begin_iteration(step, 0, timesteps[step])
            if not self._streams:
                now.rehearsed_patch = None
                return
            self._check_iteration()
            called.append(frozenset(now.called_models))
        now.whole_steps = frozenset(step for step, models in enumerate(called) if any(whole for _, whole in models))
        unlike = {step for step in range(1, len(called)) if called[step] != called[step - 1]}
        self.changed_steps = now.whole_steps | unlike
        # Pieces are those of a step that is computed in patches.
        divided = next((step for step in range(steps) if step not in now.whole_steps), 0)
        for patch in range(patches):
            if patch or divided:
                yield self._begin_iteration(divided, patch, timesteps[divided])
            self._check_iteration()
            for each in self._streams:
                each.keep_rehearsed_piece()
        for each in self._streams:
            each.set_step_index(0)
        now.rehearsed_patch, now.is_whole = None, False

    @property
    def is_stepped(self) -> bool:
        """Whether all schedulers were stepped in the iteration at hand."""
        return bool(self._streams) and all(each.rehearsed_piece is not None for each in self._streams)

    def _begin_iteration(self, step: int, patch: int, timestep: Tensor) -> Tensor:
        self._now.enter_micro_step(MicroStep(step, None))
        self._now.rehearsed_patch = patch
        self._now.called_models.clear()
        for each in self._streams:
            each.rehearsed_piece = None
            each.set_step_index(step)
        return timestep

    def _check_iteration(self) -> None:
        if not self.is_stepped:
            raise StateError(f"{self._pipeline} went on without stepping its scheduler")

"""Latents that a pipeline steps in its loop, with the scheduler that steps them.

Most pipelines have one pair. One that makes a video and its sound steps the sound by a copy of its scheduler, or by
another one, in the same iteration: see `Loop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ditile.model.hooks.generation import Generation
from ditile.model.hooks.pieces import Piece
from ditile.parallel.pipefusion.patch_schedulers import (
    PatchSchedulers,
    StepSignature,
    is_custom_scheduler,
)
from ditile.plan.errors import StateError

OVERRIDES = ("set_timesteps", "step", "scale_model_input")


class SteppedLatents:
    """One scheduler and what it steps.

    Args:
        scheduler: as the pipeline has it.
        pipe_name: the class of the pipeline, for messages.

    Attributes:
        signature: of the scheduler's step.
        is_custom: whether the scheduler may have code of the user's own.
        latents: of all images, as steps make them; None before the first step.
        pieces: which of them belong to each patch; none where they are not cut.
        predicted_shape: of the prediction that was rehearsed last.
        rehearsed_piece: of the patch that is rehearsed, once the scheduler was stepped.
        is_stepped: whether the scheduler was stepped in the micro-step at hand.
        marked_piece: of the latents that are handed on as NaN in a dry iteration, if any.
        is_probed: whether what is stepped in a dry iteration says nothing of pieces.
        stepped_patches: what was stepped in the micro-step at hand, by patch.
        held_patches: stepped patches that are not in the latents yet.
        hands_on_copies: whether the pipeline makes something of the latents, instead of handing them on.
        is_blended: whether the pipeline writes something else into the latents between steps, as in-painting does with
            what is kept of a picture.
    """

    def __init__(self, scheduler: Any, pipe_name: str) -> None:
        self.scheduler, self._name = scheduler, pipe_name
        # Of its own step, not of what a pipeline may have put around it.
        self.signature = StepSignature(scheduler)
        self.is_custom = is_custom_scheduler(scheduler)
        self._first_index = getattr(scheduler, "_step_index", None)
        self.latents: Tensor | None = None
        self.pieces: list[Piece] = []
        self.rehearsed_piece: Piece | None = None
        self.is_stepped = self.hands_on_copies = self.is_blended = self.is_probed = False
        self.marked_piece: Piece | None = None
        self.stepped_patches: dict[int, Tensor] = {}
        self.held_patches: dict[int, Tensor] = {}
        self._samples: list[Tensor] = []
        self._handed_on: Tensor | None = None
        self._blended: Tensor | None = None
        self.predicted_shape: tuple[int, ...] = ()
        self._copies: PatchSchedulers | None = None

    def get_copies(self, patches: int, timesteps: Tensor, steps: int) -> PatchSchedulers:
        """The scheduler's copies, one for each patch, made when they are first asked for.

        Args:
            patches: how many.
            timesteps: the plain ones.
            steps: how many will be made.
        """
        if self._copies is None:
            self._copies = PatchSchedulers(self.scheduler, OVERRIDES, timesteps, patches, steps)
        return self._copies

    def note_rehearsal(self, prediction: Tensor, sample: Tensor, *, is_cut: bool) -> None:
        """Where NaN came out are the latents of the rehearsed patch, where latents are cut.

        Raises:
            StateError: if the prediction is of another shape, or the scheduler was stepped already.
        """
        if self.is_probed:
            self.is_stepped = True
            return
        if is_cut and prediction.shape != sample.shape:
            raise StateError(
                f"{self._name} steps latents of shape {tuple(sample.shape)} with predictions of shape "
                f"{tuple(prediction.shape)}, so these cannot be cut into patches; use a plan without pipefusion and "
                "patches"
            )
        if is_cut and self.rehearsed_piece is not None:
            raise StateError(
                f"{self._name} steps its scheduler more than once in a step, so its latents cannot be cut "
                "into patches; use a plan without pipefusion and patches"
            )
        self.rehearsed_piece, self.is_stepped = Piece.from_mask(torch.isnan(prediction)), True
        if self.latents is None:
            self.latents = sample.clone()
        is_same = sample is self._handed_on or not self._samples
        # The pipeline may write into the tensor that it has.
        self._samples.append(sample.clone())
        self.predicted_shape = tuple(prediction.shape)
        self.hands_on_copies = self.hands_on_copies or not is_same

    @property
    def sample(self) -> Tensor:
        """The latents of all images that the next step is made of, as far as they are this rank's to know."""
        sample = self._blended if self._blended is not None else self.latents
        assert sample is not None
        return sample

    def hand_on(self, *, is_dry: bool) -> Tensor:
        """What the pipeline is given as the result of a step; a tensor of its own where it writes into it."""
        assert self.latents is not None
        self._handed_on = self.latents.clone() if is_dry or self.is_blended else self.latents
        if is_dry and self.marked_piece is not None:
            marked = self.marked_piece.take(self._handed_on)
            self.marked_piece.put(self._handed_on, torch.full_like(marked, float("nan")))
        return self._handed_on

    def set_step_index(self, steps: int) -> None:
        """The scheduler looks as if it had made so many steps, for what a pipeline asks it between two of them."""
        if "_step_index" in vars(self.scheduler):
            self.scheduler._step_index = (getattr(self.scheduler, "begin_index", None) or 0) + steps

    def restore_step_index(self) -> None:
        """The scheduler itself is stepped from now on, as if there had been no rehearsal."""
        if "_step_index" in vars(self.scheduler):
            self.scheduler._step_index = self._first_index

    def make_element_numbers(self) -> Tensor:
        """A zero for each element of the prediction that was rehearsed last, on the CPU."""
        return torch.zeros(self.predicted_shape, dtype=torch.int32)

    def keep_rehearsed_piece(self) -> None:
        """Keeps what the rehearsal of a patch found."""
        assert self.rehearsed_piece is not None
        self.pieces.append(self.rehearsed_piece)

    def select_stepped_patches(self, patches: Sequence[int]) -> Sequence[int]:
        """Those of some patches that have latents, or else any one that has: others' schedulers count no steps."""
        if not self.pieces:
            return patches
        stepped = [patch for patch, piece in enumerate(self.pieces) if not piece.is_empty]
        return [patch for patch in patches if patch in stepped] or stepped[:1] or patches

    def end_rehearsal(self, patches: int, references: int, *, adaptive: bool, rows_differ: bool) -> None:
        """Checks what the rehearsals of all patches found.

        Args:
            patches: how many there are.
            references: how many of them, the first ones, are of reference pictures.
            adaptive: whether the latents may have to be brought up to date before any step.
            rows_differ: whether a patch has other places in one row of a prediction than in another one.

        Raises:
            StateError: if patches overlap in the latents, or leave some out, or the pipeline changes latents itself
                otherwise than the same ones in the same way.
        """
        first = self._samples[0]
        owners = self.make_element_numbers()
        for piece in self.pieces:
            piece.put(owners, piece.take(owners) + 1)
        is_mixed = any(not piece.is_empty for piece in self.pieces[:references])
        if is_mixed or int(owners.min()) < 1 or int(owners.max()) > 1 or len(self.pieces) != patches:
            cause, remedy = "its transformer mixes tokens behind its blocks", "use"
            if rows_differ:
                cause = "one call has prompts of unlike length in front of their pictures"
                remedy = "give prompts, and a negative prompt, of one length, or use"
            raise StateError(
                f"the patches of {self._name} overlap in its latents, or leave some out, as {cause}; {remedy} a plan "
                "without pipefusion and patches"
            )
        second = self._samples[1]
        self.is_blended = not torch.equal(first, second)
        if any(not torch.equal(second, sample) for sample in self._samples[2:]):
            raise StateError(
                f"{self._name} makes other latents of the same ones whenever it changes them between steps, so it "
                "cannot be divided into patches; use a plan without pipefusion and patches"
            )
        if (self.hands_on_copies or self.is_blended) and adaptive:
            raise StateError(
                f"{self._name} keeps a copy of the latents, which warmup=auto cannot bring up to date; give a number "
                "of steps"
            )
        if not (self.hands_on_copies or self.is_blended):
            self.latents = self._handed_on
        self._samples = []

    def note_blend(self, sample: Tensor, steps: int) -> None:
        """The scheduler was stepped in an iteration in which nothing is computed.

        Args:
            sample: what the pipeline has.
            steps: how many it has made.
        """
        self._blended, self.is_stepped = sample, True
        self.set_step_index(steps)

    def check_first_latents(self) -> None:
        """Checks that a pipeline that blends has made its first latents again of those that it was given.

        Raises:
            StateError: if it has not.
        """
        assert self.latents is not None
        if not torch.equal(self.sample, self.latents):
            raise StateError(
                f"{self._name} changes the latents between steps, behind the scheduler, and makes others of its first "
                "ones, so it cannot be divided into patches; use a plan without pipefusion and patches"
            )

    def release_patches(self, patches: Iterable[int]) -> None:
        """Writes stepped patches that are held back into the latents.

        The first of several stages gets a stepped patch when its turn comes. The last one, and one alone, hold it back
        as long, so that what is computed of all latents is the same for any number of stages.
        """
        for patch in patches:
            held = self.held_patches.pop(patch, None)
            if held is not None and self.latents is not None:
                self.pieces[patch].put(self.latents, held)

    def copy_new_latents(self, sample: Tensor, now: Generation, *, synced: int) -> None:
        """Takes over the latents that the pipeline begins with, or that a callback gave it; never the user's own.

        Args:
            sample: the latents that the scheduler is stepped with.
            now: where the pipeline is.
            synced: the last step after which every rank had the whole latents.

        Raises:
            StateError: if the pipeline replaced the latents.
        """
        micro = now.micro_step
        after_callback = synced == micro.step - 1 and micro == now.schedule.list_micro_steps(micro.step)[0]
        if self.is_blended and not (after_callback and micro.step):
            self._blended = sample
            return
        self._blended = None
        if sample is self.latents or (self.hands_on_copies and not self.is_blended and self.latents is not None):
            return
        if self.latents is not None and not after_callback:
            raise StateError(
                f"{self._name} replaced the latents between steps, behind the scheduler, at {micro}; such a pipeline "
                "cannot be divided into patches"
            )
        self.latents = sample.clone()

"""Latents that a pipeline steps in its loop, with the scheduler that steps them.

Most pipelines have one pair. A pipeline for a video with sound steps the latents of the sound with a copy of its
scheduler, or with another one, in the same iteration: see `Loop`.
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
from ditile.plan.plan import suggest_whole_images


class SteppedLatents:
    """One scheduler and the latents that it steps.

    Args:
        pipe_name: the name of the pipeline's class, for messages.

    Attributes:
        is_custom: whether the scheduler may have code of the user's own.
        latents: the latents of all images, as steps return them; None before the first step.
        pieces: the piece of the latents that belongs to each patch; empty if the latents are not cut.
        predicted_shape: the shape of the prediction in the last dry iteration.
        rehearsed_piece: the piece of the rehearsed patch, once the scheduler was stepped.
        is_stepped: whether the scheduler was stepped in the current iteration.
        marked_piece: the piece that the pipeline gets as NaN in the next dry iteration, if any.
        is_probed: whether dry iterations follow the NaN of `marked_piece`, and so do not show pieces.
        stepped_patches: the patches that the current micro-step denoised, by number.
        held_patches: denoised patches that are not in the latents yet.
        passes_copies: whether the pipeline steps a copy of the latents, not the tensor that it got.
        is_blended: whether the pipeline writes something else into the latents between steps, as in-painting does with
            the part of an image that it keeps.
    """

    def __init__(self, scheduler: Any, pipe_name: str) -> None:
        self.scheduler = scheduler
        self._name = pipe_name
        # This is the signature of the class's `step`, not of an override on the instance.
        self.signature = StepSignature(scheduler)
        self.is_custom = is_custom_scheduler(scheduler)
        self._first_index = getattr(scheduler, "_step_index", None)
        self.latents: Tensor | None = None
        self.pieces: list[Piece] = []
        self.rehearsed_piece: Piece | None = None
        self.is_stepped = False
        self.passes_copies = False
        self.is_blended = False
        self.is_probed = False
        self.marked_piece: Piece | None = None
        self.stepped_patches: dict[int, Tensor] = {}
        self.held_patches: dict[int, Tensor] = {}
        self._samples: list[Tensor] = []  # the latents that the scheduler got, in each dry iteration
        self._handed_on: Tensor | None = None  # the last result for the pipeline
        self._blended: Tensor | None = None  # what a blending pipeline made of the latents
        self.predicted_shape: tuple[int, ...] = ()
        self._copies: PatchSchedulers | None = None

    def get_copies(self, patches: int, timesteps: Tensor, steps: int) -> PatchSchedulers:
        """Return the scheduler's copies, one for each patch, made at the first call."""
        if self._copies is None:
            self._copies = PatchSchedulers(self.scheduler, timesteps, patches, steps)
        return self._copies

    def note_rehearsal(self, prediction: Tensor, sample: Tensor, *, is_cut: bool) -> None:
        """Note where the prediction is NaN: these are the places of the rehearsed patch in the latents."""
        if self.is_probed:
            self.is_stepped = True
            return
        if is_cut and prediction.shape != sample.shape:
            raise StateError(
                f"{self._name} steps latents with predictions of another shape, so these cannot be cut into patches; "
                f"use {suggest_whole_images()}"
            )
        if is_cut and self.rehearsed_piece is not None:
            raise StateError(
                f"{self._name} steps its scheduler more than once in a step, so its latents cannot be cut "
                f"into patches; use {suggest_whole_images()}"
            )
        self.rehearsed_piece = Piece.from_mask(torch.isnan(prediction))
        self.is_stepped = True
        self.predicted_shape = tuple(prediction.shape)
        if self.latents is None:
            self.latents = sample.clone()
        if self._samples and sample is not self._handed_on:
            self.passes_copies = True
        # A clone, because the pipeline may write into the tensor that it has.
        self._samples.append(sample.clone())

    @property
    def sample(self) -> Tensor:
        """Return the latents of all images for the next step, as far as this rank has them."""
        sample = self.latents if self._blended is None else self._blended
        assert sample is not None
        return sample

    def hand_on(self, *, is_dry: bool) -> Tensor:
        """Return a step's result for the pipeline: the latents, or a copy if it may write into them."""
        assert self.latents is not None
        self._handed_on = self.latents
        if is_dry or self.is_blended:
            self._handed_on = self.latents.clone()
        if is_dry and self.marked_piece is not None:
            marked = self.marked_piece.take(self._handed_on)
            self.marked_piece.put(self._handed_on, torch.full_like(marked, float("nan")))
        return self._handed_on

    def set_step_index(self, steps: int) -> None:
        """Set the scheduler's index as if it had made `steps` steps: pipelines read it between steps."""
        if "_step_index" in vars(self.scheduler):
            self.scheduler._step_index = (getattr(self.scheduler, "begin_index", None) or 0) + steps

    def restore_step_index(self) -> None:
        """Set the scheduler's index back to that before the rehearsal, because the scheduler itself is stepped next."""
        if "_step_index" in vars(self.scheduler):
            self.scheduler._step_index = self._first_index

    def make_element_numbers(self) -> Tensor:
        """Make a zero for each element of the last dry iteration's prediction, on the CPU."""
        return torch.zeros(self.predicted_shape, dtype=torch.int32)

    def list_owning_patches(self) -> list[int]:
        """List the patches that have some of these latents."""
        return [patch for patch, piece in enumerate(self.pieces) if not piece.is_empty]

    def select_stepped_patches(self, patches: Sequence[int]) -> Sequence[int]:
        """Return the patches among `patches` that have latents; if there are none, another patch with latents.

        Only the schedulers of patches with latents count steps.
        """
        owning = self.list_owning_patches()
        return [patch for patch in patches if patch in owning] or owning[:1] or patches

    def end_rehearsal(self, patches: int, references: int, *, rows_differ: bool) -> None:
        """Check that the rehearsed patches divide the latents, and note how the pipeline changes them between steps.

        Args:
            references: how many of the first patches are of reference images.
            rows_differ: whether the places of a patch differ from row to row of a prediction.

        Raises:
            StateError: if patches overlap in the latents, or leave some out, or the pipeline does not always change
                the same latents in the same way.
        """
        num_owners = self.make_element_numbers()
        for piece in self.pieces:
            piece.put(num_owners, piece.take(num_owners) + 1)
        # References are not denoised, so they must not have latents.
        is_mixed = any(not piece.is_empty for piece in self.pieces[:references])
        has_one_owner = bool((num_owners == 1).all())
        if is_mixed or not has_one_owner or len(self.pieces) != patches:
            cause = "its transformer mixes tokens after its blocks"
            remedy = "use"
            if rows_differ:
                cause = "one call has prompts of different lengths before their images"
                remedy = "give prompts, and a negative prompt, of one length, or use"
            raise StateError(
                f"the patches of {self._name} overlap in its latents, or leave some out, as {cause}; {remedy} "
                f"{suggest_whole_images()}"
            )
        # The first sample has the initial latents; the others have the pipeline's changes to the same latents.
        first, second, *later = self._samples
        self.is_blended = not torch.equal(first, second)
        if any(not torch.equal(second, sample) for sample in later):
            raise StateError(
                f"{self._name} makes different latents of the same ones each time it changes them between steps, so it "
                f"cannot be divided into patches; use {suggest_whole_images()}"
            )
        if not self.passes_copies and not self.is_blended:
            self.latents = self._handed_on  # the tensor that the pipeline now has
        self._samples = []

    def note_blend(self, sample: Tensor, steps: int) -> None:
        """Note the latents that the pipeline has blended, in a dry iteration after `steps` steps."""
        self._blended = sample
        self.is_stepped = True
        self.set_step_index(steps)

    def check_first_latents(self) -> None:
        """Check that a blending pipeline makes the same first latents again from its first latents."""
        assert self.latents is not None
        if not torch.equal(self.sample, self.latents):
            raise StateError(
                f"{self._name} changes the latents between steps, without its scheduler, and makes others of its first "
                f"ones, so it cannot be divided into patches; use {suggest_whole_images()}"
            )

    def release_patches(self, patches: Iterable[int]) -> None:
        """Write denoised patches that were held back into the latents."""
        # The first of several stages gets a denoised patch in its turn. The last one, and a single stage, hold it back
        # as long, so that results computed from all latents are the same for any number of stages.
        for patch in patches:
            denoised = self.held_patches.pop(patch, None)
            if denoised is not None and self.latents is not None:
                self.pieces[patch].put(self.latents, denoised)

    def copy_new_latents(self, sample: Tensor, now: Generation, *, synced: int) -> None:
        """Copy the latents with which the pipeline begins, or a callback's replacement; never take the user's tensor.

        Args:
            sample: the latents that the scheduler is stepped with.
            synced: the last step after which every rank had the whole latents.

        Raises:
            StateError: if the pipeline replaced the latents.
        """
        micro = now.micro_step
        # A callback runs between steps, and is given whole latents, which it may replace.
        after_callback = now.schedule.is_first_of_step(micro) and synced == now.loop_step - 1
        if self.is_blended and not (after_callback and now.loop_step):
            self._blended = sample
            return
        self._blended = None
        if sample is self.latents:
            return
        if self.latents is not None:
            if self.passes_copies and not self.is_blended:
                return
            if not after_callback:
                raise StateError(
                    f"{self._name} replaced the latents between steps, without its scheduler, at {micro}; such a "
                    "pipeline cannot be divided into patches"
                )
        self.latents = sample.clone()

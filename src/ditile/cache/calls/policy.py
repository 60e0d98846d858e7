"""The interface of a method that leaves out whole calls of a model.

A new method is a `CallPolicy`, its config (a `CallCacheConfig`), a row of `CACHE_METHODS`, and a line in
`prepare_policy`, which makes the policy of a config for each generation. `CallForecasts` handles for all methods the
clock, branches, batches, two transformers in turns, every plan, reports and errors. A method must decide alike on every
rank that has the same latents. If it does not list its steps beforehand, it must compute the last step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

# The settings of methods are read also where torch is missing.
if TYPE_CHECKING:
    from torch import Tensor


class CallAgreement:
    """The agreement of an image's ranks on a call. In this base class one rank has all images, and decides alone."""

    def select_own_rows(self, batch: Tensor) -> Tensor:
        """Select the rows of this rank's images from a tensor `[rows, ...]`. Rows of other images may have any
        value."""
        return batch

    def take_first_number(self, number: Tensor) -> float:
        """Return the number that the image's first rank measured. The numbers of other ranks differ only by
        rounding."""
        return float(number)


class ModelCall(NamedTuple):
    """A call of the model that a pipeline makes.

    Attributes:
        step: the step of the pipeline's loop, from 0.
        branch: the number of earlier calls of the model since the scheduler last stepped.
        latents: the noisy input: a tensor with the rows of the batch, or a list of them.
        agreement: the agreement of the image's ranks.
        images: the number of images in the batch, if it is known.
    """

    step: int
    branch: int
    latents: Any
    agreement: CallAgreement = CallAgreement()
    images: int | None = None


class ComputedOutput(NamedTuple):
    """The result of a computed call.

    Attributes:
        tensors: the tensors that it returned, in order. They are copies: the pipeline may write into its own.
    """

    call: ModelCall
    tensors: Sequence[Tensor]


class CallPolicy(Protocol):
    """The decisions and forecasts of a method for one model in one generation.

    Attributes:
        num_kept: how many of a branch's newest computed outputs are kept for `forecast`.
        keeps_latents: whether the latents of those calls are kept too; otherwise their `latents` are None.
    """

    num_kept: int
    keeps_latents: bool = False

    def list_computed_steps(self) -> Collection[int] | None:
        """Return the steps that compute. None if each step is decided at its first call.

        PipeFusion and DistriFusion need the steps, to know which messages follow.
        """
        return None

    def check_first_call(self, call: ModelCall) -> None:
        """Check the first call of a generation before it is made. Raises `ModelError` if such calls do not fit."""
        return

    def computes_call(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> bool:
        """Return whether a call is made. The first call of a branch, and a call with latents of another shape than the
        one before, are made without asking.

        Args:
            kept: the branch's newest computed outputs, the newest first; empty on a rank that steps no scheduler.
        """

    def note_output(self, call: ModelCall, output: ComputedOutput) -> None:
        """Note the result of a call that was made. `call` has its latents, even if latents are not kept.

        On a rank that steps no scheduler, only the shapes in `output` are right.
        """
        return

    def forecast(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> list[Tensor]:
        """Return the forecast result of a call that is left out: a new tensor for each one of the newest output."""

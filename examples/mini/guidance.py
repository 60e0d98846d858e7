"""Classifier-free guidance: two predictions of each step, on one rank or on two. docs/batch.md."""

from __future__ import annotations

from dataclasses import dataclass

from mesh import ALONE, Axis
from model import Prompt
from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """The branches of a step, and what becomes of them.

    Attributes:
        scale: how far the prediction goes from the negative prompt to the prompt; 1 needs no negative prompt.
        axis: the ranks that compute a branch each; a rank that is alone computes all.
    """

    scale: float = 1.0
    axis: Axis = ALONE

    def select_own(self, prompts: list[Prompt]) -> list[Prompt]:
        """Select the branches that this rank computes, of the prompt and the negative one."""
        if self.axis.size == 1:
            return prompts
        if len(prompts) != self.axis.size:
            raise ValueError(
                f"cfg={self.axis.size} needs {self.axis.size} prompts, got {len(prompts)} (no negative prompt?)"
            )
        return [prompts[self.axis.index]]

    def combine(self, predictions: list[Tensor]) -> Tensor:
        """Combine the predictions of this rank's branches, and those of the other ranks, into the guided one."""
        if self.axis.size > 1:
            (own,) = predictions
            predictions = self.axis.gather(own)
        if len(predictions) == 1:
            return predictions[0]
        positive, negative = predictions
        return negative + self.scale * (positive - negative)

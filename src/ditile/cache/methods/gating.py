"""Gating of guidance: after a share of the steps, only the branch with the caption runs (LinearAG, arXiv 2312.12487).

What guidance adds hardly changes in late steps. So the difference of both branches in the last step that computes both
is kept. Afterwards the branch without the caption is the branch with the caption minus that difference. The pipeline
gets it in place of a prediction, so the pipeline's own guidance, its rescaling and its norms stay as they are.
Branches may be two calls, or the two halves of a batch. A second transformer computes both branches in its first step.

Cost: a difference of the size of the latents is kept. Nothing is compared or sent, because every rank knows the step. A
gate of 1 changes nothing. Plans with cfg=2 are refused, because the half without work would wait; so are plans with
stages or stale keys, which must know how many rows a call has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ditile.cache.calls.policy import CallPolicy
from ditile.cache.config import CallCacheConfig
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import checked
from ditile.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from ditile.cache.calls.policy import ComputedOutput, ModelCall
    from ditile.model.hooks.batch_rows import BatchDimFinder

CAPTION_FIRST = ("AceStep", "DiT", "Lumina", "OmniGen", "StableCascade", "Wuerstchen")
"""Beginnings of pipeline names: these pipelines put the rows with the caption before the rows without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceGateConfig(CallCacheConfig):
    """Gating of guidance: after a share of the steps, only the branch with the caption runs.

    Attributes:
        gate: the share of the steps, from the first, that compute both branches; 1 is all of them.

    Other attributes are as in `CacheConfig`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    WORDS = {"gate": "gate"}

    gate: Annotated[float, Field(ge=0, le=1)] = 0.8

    @checked()
    def count_full_steps(self, steps: int) -> int:
        """Return the number of first steps that compute both branches."""
        # The product is rounded first, because 0.29 x 100 is less than 29 in floating point.
        return int(round(self.gate * steps, 9))

    @checked()
    def explain_plan_refusal(self, plan: Plan) -> str | None:
        """Explain why a plan cannot gate guidance, or return None."""
        if plan.cfg > 1:
            return f"gate={self.gate:g} leaves one half of cfg={plan.cfg} without work; use cfg=1, as with ulysses=2"
        if plan.cuts_latents or plan.attends_to_stale_keys:
            return (
                f"gate={self.gate:g} changes how many rows a call has, which stages and stale keys must know before; "
                "use ulysses, ring, tensor or data"
            )
        return None


class GatedGuidance(CallPolicy):
    """Gates the guidance of one model in one generation.

    Args:
        model: the model, which finds and splits the rows of a call.

    Attributes:
        differences: branch -> output with the caption minus output without it, in the last step that computed both.
    """

    num_kept = 1

    def __init__(self, config: GuidanceGateConfig, num_steps: int, model: GuidedModel) -> None:
        self._first_gated = config.count_full_steps(num_steps)
        self.model = model
        self._with_caption: Sequence[Tensor] = []
        self.differences: dict[int, list[Tensor]] = {}

    def check_first_call(self, call: ModelCall) -> None:
        """Raise `ModelError` if the halves of the batch may not be the branches of guidance."""
        pipe = self.model.pipe
        # With perturbed attention a batch has two rows for each image if guidance is off, like an ordinary guided
        # batch, and three if guidance is on.
        if getattr(pipe, "do_perturbed_attention_guidance", False):
            raise ModelError(
                f"the gate of guidance needs a batch with and without the caption, and pag_scale={pipe.pag_scale:g} "
                "adds rows of perturbed attention; leave gate out, or set pag_scale=0"
            )

    def computes_call(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> bool:
        """Return whether a call is made. The first call of a step always is, because it has the caption."""
        return call.branch == 0 or not self._is_gated(call, call.branch)

    def note_output(self, call: ModelCall, output: ComputedOutput) -> None:
        """Keep the output of the branch with the caption, or the difference of another branch from it."""
        if self._is_doubled(call):
            pairs = list(map(self.model.split_rows, output.tensors))
            # An additional call, such as one that skips layers, is compared with the half that has the caption.
            self._with_caption = [with_caption for _, with_caption in pairs]
            if not self._is_gated(call, 0):
                self.differences[0] = [with_caption - without for without, with_caption in pairs]
        elif call.branch == 0:
            self._with_caption = output.tensors
        else:
            both = zip(self._with_caption, output.tensors, strict=True)
            self.differences[call.branch] = [with_caption - without for with_caption, without in both]

    def forecast(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> list[Tensor]:
        """Return the output of the branch with the caption, minus the kept difference."""
        pairs = zip(self._with_caption, self.differences[call.branch], strict=True)
        return [with_caption - difference for with_caption, difference in pairs]

    def run_half(self, call: ModelCall, run: partial[Any]) -> Any:
        """Run a call on the rows with the caption if guidance is gated; return None if all rows must run."""
        if not self._is_doubled(call):
            return None
        # This raises if the rows cannot be told apart, even before guidance is gated.
        arguments, dims = self.model.find_dims(run)
        if not self._is_gated(call, 0):
            return None
        return run.func(**dims.slice_arguments(arguments, lambda rows: self.model.split_rows(rows)[1]))

    def _is_doubled(self, call: ModelCall) -> bool:
        """Return whether a call has a row of each branch for each image."""
        return call.images is not None and len(call.latents) == 2 * call.images

    def _is_gated(self, call: ModelCall, branch: int) -> bool:
        """Return whether guidance is gated in the call's step, and the branch's difference is known."""
        return call.step >= self._first_gated and branch in self.differences


class GuidedModel:
    """A model that gets both branches of guidance in one batch.

    Args:
        pipe: the pipeline that calls it, or the model itself.
        names: the names of the model's arguments.
        latents: the name of the noisy input.
        finder: finds which dimension of each argument is the batch.
    """

    def __init__(self, pipe: Any, names: Sequence[str], latents: str, finder: BatchDimFinder) -> None:
        self.pipe = pipe
        self._name = type(pipe).__name__
        self._is_caption_first = self._name.startswith(CAPTION_FIRST)
        self._names = names
        self._latents = latents
        self._finder = finder

    def find_dims(self, run: partial[Any]) -> tuple[dict[str, Any], Any]:
        """Return the arguments of a call by name, and the batch dimension of each."""
        arguments = dict(zip(self._names, run.args, strict=False)) | run.keywords
        latents = arguments[self._latents]
        dims = None
        # A list has rows, but no batch dimension.
        if not isinstance(latents, list | tuple):
            dims = self._finder.find_dims(arguments, self._latents, len(latents))
        if dims is None:
            raise ModelError(
                f"the gate of guidance calls the model on half of its rows, and those of a {self._name} cannot be told "
                "apart; leave gate out"
            )
        return arguments, dims

    def split_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows into those without the caption, and those with it."""
        first, second = rows.chunk(2)
        if self._is_caption_first:
            return second, first
        return first, second

    def join_rows(self, with_caption: Tensor, difference: Tensor) -> Tensor:
        """Join the rows with the caption and the rows without it, which are computed by the difference."""
        both = [with_caption - difference, with_caption]
        if self._is_caption_first:
            both.reverse()
        joined = with_caption.new_empty((2 * len(with_caption), *with_caption.shape[1:]))
        for rows, part in zip(joined.chunk(2), both, strict=True):
            rows.copy_(part)
        return joined

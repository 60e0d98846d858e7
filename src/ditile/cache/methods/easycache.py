"""EasyCache: a call of the model is left out while its output should have changed little (arXiv 2507.02860).

Between the last two computed steps, k is the change of the output divided by the change of the input. Each step adds
k x (change of the input since the last step) / (size of the last computed output) to a sum. While the sum is below a
threshold the model is not called, and the output is the last computed one plus the change of the input since then. The
first branch of guidance decides for all. EasyCache needs no blocks, so it also works for U-Nets and unknown models.

Cost: two inputs and outputs of each branch and the last input are kept; 8 bytes are sent for each step that is
measured, because the first rank of an image decides for all. A threshold of 0 leaves nothing out. Stages and stale keys
must know beforehand which steps compute, so plans with distrifusion, or several stages or patches, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ditile.cache.calls.policy import CallPolicy
from ditile.cache.config import Amount, CallCacheConfig, Count
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import checked
from ditile.plan.plan import Plan, suggest_whole_images

if TYPE_CHECKING:
    from torch import Tensor

    from ditile.cache.calls.policy import ComputedOutput, ModelCall


@dataclass(frozen=True, kw_only=True, slots=True)
class EasyCacheConfig(CallCacheConfig):
    """EasyCache: a call of the model is left out while its output should have changed little.

    Attributes:
        threshold: a step computes where the sum of expected changes since the last computed step reaches this; 0 leaves
            nothing out. The authors take 0.05 for a small loss, and 0.1 and 0.2 for two and three times the speed.
        retention_steps: the first steps, which compute; the last one does too.

    Other attributes are as in `CacheConfig`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    WORDS = {"easy": "threshold", "W": "retention_steps"}
    HINT = "lower retention_steps"

    threshold: Amount = 0.05
    retention_steps: Count = 10

    @checked()
    def explain_plan_refusal(self, plan: Plan) -> str | None:
        """Explain why a plan excludes EasyCache, or return None."""
        if not plan.cuts_latents and not plan.attends_to_stale_keys:
            return None
        return (
            f"{self} decides in each step whether the model is called, which stages and stale keys must know before; "
            f"use a schedule, as steps=10 in a cache line, or {suggest_whole_images(stale_keys=True)}"
        )


class EasyCachePolicy(CallPolicy):
    """The decisions of EasyCache in one generation."""

    num_kept = 2
    keeps_latents = True

    def __init__(self, config: EasyCacheConfig, num_steps: int) -> None:
        self._config = config
        self._last_step = num_steps - 1
        self._last_input: Any = None
        self._expected_sum = 0.0
        self._decision = (-1, True)

    def computes_call(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> bool:
        """Return whether the sum of expected changes has reached the threshold. Later branches follow the first."""
        # A rank without images keeps no outputs, and its calls compute nothing.
        if not kept:
            return True
        step, computes = self._decision
        if call.branch and step == call.step:
            return computes
        # Without a call of the first branch in this step, the next branch decides.
        computes = self._decide(call, kept)
        self._decision = (call.step, computes)
        return computes

    def note_output(self, call: ModelCall, output: ComputedOutput) -> None:
        """Refuse outputs to which the input cannot be added."""
        _find_channels(call.latents, output.tensors)

    def forecast(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> list[Tensor]:
        """Return the last computed output, plus the change of the input since then."""
        newest = kept[0]
        outputs = [tensor.clone() for tensor in newest.tensors]
        dim, num_channels = _find_channels(call.latents, outputs)
        inputs = zip(_list_inputs(call.latents), _list_inputs(newest.call.latents), strict=True)
        # The output for a sound beside a video has no latents in this list, and stays unchanged.
        for output, (now, before) in zip(outputs, inputs, strict=False):
            # Further channels are left out: those of an input are conditions, which do not change, and those of an
            # output are variances.
            output.narrow(dim, 0, num_channels).add_((now - before).narrow(dim, 0, num_channels))
        return outputs

    def _decide(self, call: ModelCall, kept: Sequence[ComputedOutput]) -> bool:
        before = self._last_input
        # A step that computes without a decision, such as the first, has its input in what is kept.
        if before is None or kept[0].call.step == call.step - 1:
            before = kept[0].call.latents
        # These are copies, because the scheduler of some pipelines writes into the latents.
        self._last_input = [latents.clone() for latents in _list_inputs(call.latents)]
        if call.step < self._config.retention_steps or call.step >= self._last_step or len(kept) < 2:
            return True
        newest, older = kept
        moved = _measure_change(newest.call.latents, older.call.latents, call)
        # A quotient of zeros is NaN, and does not raise because it is a Tensor.
        rate = _measure_change(newest.tensors, older.tensors, call) / moved
        size = _measure_change(newest.tensors, [tensor * 0 for tensor in newest.tensors], call)
        expected = rate * _measure_change(call.latents, before, call) / size
        self._expected_sum += call.agreement.take_first_number(expected)
        # Comparisons with NaN are false, so that such a step computes.
        if self._expected_sum < self._config.threshold:
            return False
        self._expected_sum = 0.0
        return True


def _list_inputs(latents: Any) -> list[Tensor]:
    """Return the latents of a call as a list: some models take one for each image."""
    if isinstance(latents, list | tuple):
        return list(latents)
    return [latents]


def _measure_change(now: Any, before: Any, call: ModelCall) -> Tensor:
    """Return the mean absolute change of this rank's images, summed over a list of tensors."""
    means = []
    for tensor, earlier in zip(_list_inputs(now), _list_inputs(before), strict=True):
        change = call.agreement.select_own_rows(tensor - earlier)
        means.append(change.abs().double().mean())
    return sum(means[1:], start=means[0])


def _find_channels(latents: Any, outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Find the dimension in which inputs and outputs differ, and the shorter of its two lengths."""
    first = _list_inputs(latents)[0]
    output = outputs[0]
    unlike = []
    for dim in range(output.ndim):
        if first.ndim != output.ndim or first.shape[dim] != output.shape[dim]:
            unlike.append(dim)
    if len(unlike) > 1:
        raise ModelError(
            f"EasyCacheConfig adds latents {list(first.shape)} to what the model returns, which is "
            f"{list(output.shape)}; use a schedule, as steps=10 in a cache line"
        )
    # Where all dimensions are alike, any of them will do.
    [dim] = unlike or [0]
    return dim, min(first.shape[dim], output.shape[dim])

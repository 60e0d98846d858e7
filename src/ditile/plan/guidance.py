"""Rules for when a step of a pipeline has a second branch of guidance, so that `cfg` has branches to divide.

Pipelines decide it by their arguments: a scale, a negative prompt, or both. Guidance that is embedded in the model, or
distilled into it, is not a branch. `model/assets/guidance.json` has the rule of each class.
"""

from __future__ import annotations

from dataclasses import dataclass

from ditile.plan.numbers import is_number
from ditile.plan.option_classes import CallArguments

FLAGS = {
    "true_cfg_scale": "--true-cfg",
    "guidance_scale": "--guidance",
    "num_inference_steps": "--steps",
    "num_frames": "--frames",
}
"""Arguments of a call -> the flags that set them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceRule:
    """The rule for when a call of a class of pipelines has a second branch of guidance.

    Attributes:
        scales: arguments, one of which must be above `above`; empty if no call of the class has a second branch.
        above: the largest scale without guidance.
        needs_negative_prompt: whether the call must have a negative prompt too, or embeddings of one. Other pipelines
            take an empty prompt by default.
    """

    scales: tuple[str, ...] = ("guidance_scale",)
    above: float = 1.0
    needs_negative_prompt: bool = False

    def is_guided(self, call: CallArguments) -> bool:
        """Return whether a call has a second branch.

        Args:
            call: the call's arguments, and the defaults of those that it leaves out.
        """
        return self._is_scale_enough(call) and self._has_prompt_enough(call)

    def explain_cfg_refusal(self, cfg: int, pipeline: str, call: CallArguments) -> str | None:
        """Explain why the branches of a call cannot be divided over `cfg` groups, and what would work. None if they
        can.

        Args:
            cfg: the degree of the plan.
            pipeline: the name of the class.
            call: as in `is_guided`.
        """
        if cfg == 1 or self.is_guided(call):
            return None
        divides = f"cfg={cfg} divides the branches of guidance, and"
        if not self.scales:
            return f"{divides} {pipeline} has no second one: its guidance is embedded or distilled; use cfg=1"
        if not self._is_scale_enough(call):
            scale = self.scales[0]
            remedy = scale
            if scale in FLAGS:
                remedy += f" ({FLAGS[scale]})"
            remedy += f" above {self.above:g}"
            if not self._has_prompt_enough(call):
                remedy += " and a negative_prompt (--negative-prompt)"
            return f"{divides} {pipeline} has no second one at {scale}={call.get(scale)}; give {remedy}, or use cfg=1"
        return (
            f"{divides} {pipeline} has no second one without a negative prompt; give negative_prompt "
            '(--negative-prompt " "), or use cfg=1'
        )

    def _is_scale_enough(self, call: CallArguments) -> bool:
        for name in self.scales:
            value = call.get(name)
            # A value that is not a number passes here, because the pipeline refuses it.
            if value is not None and (not is_number(value) or value > self.above):
                return True
        return False

    def _has_prompt_enough(self, call: CallArguments) -> bool:
        if not self.needs_negative_prompt:
            return True
        return call.get("negative_prompt") is not None or call.get("negative_prompt_embeds") is not None

"""What a model's calls take, as JSON: collected where the model is loaded, asked where neither torch nor diffusers is.

Most requests that a pipeline would refuse are refused by its facts, before anything is drawn. Nothing here imports
torch, but `collect_facts` and `collect_call_facts` are called where diffusers is.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ditile.plan.checks import is_number, is_whole_number
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.flags import format_flag
from ditile.plan.guidance import GuidanceRule
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS, check_image_size
from ditile.runner.requests.conditions import check_picture_count, find_pipeline_class_for, read_call_conditions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import (
    FRAME_RATES,
    check_frame_count,
    find_frames_ratio,
    name_pipeline,
    returns_videos,
)

_NOISE_STRENGTH = "denoise_strength"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """What the call of a class of pipelines takes.

    Attributes:
        pipeline: the class's name.
        defaults: its arguments -> their defaults; None also for a default that is no plain value.
        required: the arguments without a default.
        needed: what it cannot draw without, as options of a request.
        guidance: when it has a second branch of guidance; None if that is not known.
        max_pictures: how many pictures it starts from at most.
    """

    pipeline: str
    defaults: dict[str, Any]
    required: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    guidance: GuidanceRule | None = None
    max_pictures: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CallFacts:
        """What was made JSON of."""
        rule = values["guidance"]
        if rule is None:
            return cls(**values)
        return cls(**{**values, "guidance": GuidanceRule(**{**rule, "scales": tuple(rule["scales"])})})

    def find_argument(self, names: tuple[str, ...]) -> str | None:
        """The first of these names that the call takes."""
        return next((name for name in names if name in self.defaults), None)

    def merge_arguments(self, wanted: GenerateOptions, base: Mapping[str, Any]) -> dict[str, Any]:
        """The call arguments that are plain values: the model's own options, overridden by the given ones.

        Raises:
            ModelError: if this pipeline does not take an argument that is given, or starts from what is not given.
        """
        given = self._rename_video_arguments(wanted, collect_request_arguments(wanted, base))
        self._check_conditions(wanted)
        if refused := sorted(set(given) - set(self.defaults)):
            raise ModelError(f"{self.pipeline} takes no {', '.join(map(_flag_of_argument, refused))}; leave it out")
        call = {name: value for name, value in base.items() if name in self.defaults} | given
        call = fill_negative_prompt(call)
        if wanted.negative_prompt is not None:
            self._check_negative_prompt(call)
        self._check_strength(call)
        return call

    def _check_conditions(self, wanted: GenerateOptions) -> None:
        for name in self.needed:
            if getattr(wanted, name) is None:
                what = {"image": "picture", "mask": "mask", "video": "video"}.get(name, "picture for its ControlNet")
                raise ModelError(f"{self.pipeline} starts from a {what}; add {format_flag(name)} FILE")
        check_picture_count(self.pipeline, self.max_pictures, len(wanted.image or ()))
        without_prompt = wanted.prompt is None and wanted.prompts_file is None
        if wanted.conditions and without_prompt and "prompt" in self.defaults:
            what = "a picture" if wanted.video is None else "a video"
            raise ModelError(f"{self.pipeline} draws from {what} and a prompt; give a PROMPT, or --prompts-file FILE")

    def _rename_video_arguments(self, wanted: GenerateOptions, given: dict[str, Any]) -> dict[str, Any]:
        """With the frames and the rate under the names of this class, if it is told the rate at all.

        Where a class has two strengths, that of noise is how far a video is left behind, and not that of conditions.
        """
        count, rate = self.find_argument(FRAME_COUNTS), self.find_argument(FRAME_RATES)
        if wanted.video is not None and count is None:
            given.pop("num_frames", None)  # as many as the video has
        if "strength" in given and _NOISE_STRENGTH in self.defaults:
            given[_NOISE_STRENGTH] = given.pop("strength")
        if "num_frames" in given and count is not None:
            given = {count if name == "num_frames" else name: value for name, value in given.items()}
        if wanted.fps is not None and rate is not None:
            given[rate] = int(wanted.fps) if float(wanted.fps).is_integer() else wanted.fps
        return given

    def heeds_negative_prompt(self, base: Mapping[str, Any], guidance: float | None = None) -> bool:
        """Whether a negative prompt changes what is drawn.

        Args:
            base: the model's own options.
            guidance: as a request gives it.
        """
        given = (
            {} if guidance is None else {"true_cfg_scale" if "true_cfg_scale" in base else "guidance_scale": guidance}
        )
        call = {**self.defaults, **base, **given, "negative_prompt": ""}
        rule = self._find_negative_rule()
        return "negative_prompt" in self.defaults and (rule is None or rule.is_guided(call))

    def _find_negative_rule(self) -> GuidanceRule | None:
        """When a negative prompt is heeded; None where a component of the pipeline decides it."""
        if self.guidance is not None:
            return self.guidance
        scale = self.find_argument(("true_cfg_scale", "guidance_scale"))
        return None if scale is None else GuidanceRule(scales=(scale,))

    def _check_negative_prompt(self, call: Mapping[str, Any]) -> None:
        rule = self._find_negative_rule()
        values = {**self.defaults, **call}
        if rule is None or rule.is_guided(values):
            return
        if not rule.scales:
            raise ModelError(f"{self.pipeline} heeds no negative prompt, as its model is distilled; leave it out")
        flag_name, value = _flag_of_argument(rule.scales[0]), values[rule.scales[0]]
        if is_number(value):
            raise ModelError(
                f"{self.pipeline} ignores a negative prompt at {flag_name} {value:g}; try {flag_name} above "
                f"{rule.above:g}, or leave it out"
            )

    def check_cfg(self, plan: Plan, call: Mapping[str, Any]) -> None:
        """Raises `PlanError` for a call without the branches of guidance that a plan divides, where that is known."""
        if self.guidance is None:
            return
        if reason := self.guidance.explain_cfg_refusal(plan.cfg, self.pipeline, {**self.defaults, **call}):
            raise PlanError(reason)

    def _check_strength(self, call: Mapping[str, Any]) -> None:
        name = self.find_argument((_NOISE_STRENGTH, "strength"))
        if name is None:
            return
        strength, steps = (call.get(name, self.defaults.get(name)) for name in (name, "num_inference_steps"))
        if is_number(strength) and is_whole_number(steps) and int(steps * strength) < 1:
            raise ModelError(f"strength={strength} of {steps} steps is less than one step; raise either")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a served model is and takes, in the types of JSON.

    Attributes:
        name: of the model.
        plan: the plan's text.
        is_video: whether it draws videos.
        call: of its own pipeline.
        edit: of the pipeline that starts from a picture; None if there is none. It may be `call`.
        inpaint: of the pipeline that also takes a mask; None if there is none.
        base: the model's own arguments of a call, which override defaults.
        size: width and height by default; empty if nothing says it.
        size_multiple: of which height and width must be multiples.
        frames_ratio: a video has 1 + a multiple of it frames, or as many as the class has by default.
        fps: frames a second by default.
        example: a prompt that it can draw.
    """

    name: str
    plan: str
    is_video: bool
    call: CallFacts
    edit: CallFacts | None = None
    inpaint: CallFacts | None = None
    base: dict[str, Any] = field(default_factory=dict)
    size: list[int] = field(default_factory=list)
    size_multiple: int = 1
    frames_ratio: int = 1
    fps: float = 16.0
    example: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelFacts:
        """What `to_json` gave."""
        names = [name for name in ("call", "edit", "inpaint") if values[name] is not None]
        calls = {name: CallFacts.from_json(values[name]) for name in names}
        return cls(**{**values, **calls})

    def takes(self, argument: str) -> bool:
        """Whether the call of any of its pipelines takes an argument, by its name in diffusers."""
        return any(call is not None and argument in call.defaults for call in (self.call, self.edit, self.inpaint))

    @property
    def needs_picture(self) -> bool:
        """Whether it draws nothing without a picture to start from."""
        return "image" in self.call.needed

    @property
    def max_pictures(self) -> int:
        """How many pictures an edit starts from at most; 0 without edits."""
        return 0 if self.edit is None else self.edit.max_pictures

    def find_default(self, *names: str) -> Any:
        """The value of an argument, which may have several names, where a request does not give it."""
        for values in (self.base, self.call.defaults):
            if (value := next((values[name] for name in names if values.get(name) is not None), None)) is not None:
                return value
        return None

    def count_frames(self, seconds: float, fps: float | None = None) -> int:
        """The number of frames that the model can make whose length is nearest to some seconds."""
        frames = seconds * (fps or self.fps)
        return 1 + max(0, round((frames - 1) / self.frames_ratio)) * self.frames_ratio

    def check_options(self, wanted: GenerateOptions) -> None:
        """Raises `ModelError` for what the model cannot draw, as far as that is known before a rank tries."""
        call = self._choose_call(wanted)
        merged = call.merge_arguments(wanted, self.base)
        call.check_cfg(Plan.parse(self.plan), merged)
        check_image_size(merged, self.size_multiple)
        if (name := call.find_argument(FRAME_COUNTS)) is not None and is_whole_number(frames := merged.get(name)):
            check_frame_count(call.pipeline, frames, self.frames_ratio, call.defaults[name])

    def _choose_call(self, wanted: GenerateOptions) -> CallFacts:
        if wanted.image is None:
            return self.call
        if self.edit is None:
            what = "draws videos from text alone" if self.is_video else "has no relative that starts from a picture"
            raise ModelError(f"{self.call.pipeline} {what}; leave the picture out, or serve a model that takes one")
        if wanted.mask is None:
            return self.edit
        if self.inpaint is None:
            raise ModelError(f"{self.call.pipeline} has no relative that takes a mask; leave the mask out")
        return self.inpaint


def collect_facts(pipe: Any, model: str, plan: Plan | str) -> ModelFacts:
    """The facts of a loaded pipeline; diffusers is at hand.

    Args:
        pipe: the pipeline that draws from text, or the model's only one.
        model: its name, by which its own options are found.
        plan: the plan, or its text.
    """
    from ditile.model.known import find_known_model
    from ditile.model.pipeline_calls import find_call_owner
    from ditile.runner.model_files import defaults
    from ditile.runner.requests.results import choose_fps

    own = find_call_owner(pipe)
    config = dict(getattr(pipe, "config", {}))  # a modular pipeline may have none
    base, call, known = defaults(model), collect_call_facts(own, config), find_known_model(model)
    edit = find_pipeline_class_for(own, ["image"], config)
    inpaint = find_pipeline_class_for(own, ["image", "mask"], config)
    is_video = returns_videos(own)
    return ModelFacts(
        name=model,
        plan=str(plan),
        is_video=is_video,
        call=call,
        edit=None if edit is None else collect_call_facts(edit, config),
        inpaint=None if inpaint is None else collect_call_facts(inpaint, config),
        base={name: value for name, value in base.items() if name in call.defaults},
        size=_find_default_size(pipe, {**call.defaults, **base}),
        size_multiple=find_size_multiple(pipe),
        frames_ratio=find_frames_ratio(pipe),
        fps=choose_fps(pipe, GenerateOptions(model=model), base),
        example="" if known is None else known.example,
    )


def collect_call_facts(pipeline: Any, config: Mapping[str, Any] | None = None) -> CallFacts:
    """The arguments of the call of a class of pipelines with some config, or of a modular pipeline."""
    from ditile.model.pipeline_calls import list_call_parameters, read_guidance_rule

    known = list_call_parameters(pipeline).values()
    plain, taken = (bool, int, float, str), read_call_conditions(pipeline)
    return CallFacts(
        pipeline=name_pipeline(pipeline),
        defaults={p.name: p.default if isinstance(p.default, plain) else None for p in known},
        required=[p.name for p in known if p.default is inspect.Parameter.empty],
        needed=[*taken.needed],
        guidance=read_guidance_rule(pipeline, config or {}),
        max_pictures=taken.max_pictures,
    )


def collect_request_arguments(wanted: GenerateOptions, base: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments. --guidance sets true guidance if the model's own options do and --true-cfg is not given."""
    given = wanted.to_call_arguments()
    if wanted.guidance is None:
        return given
    true = "true_cfg_scale" in base and wanted.true_cfg is None
    return given | {"true_cfg_scale" if true else "guidance_scale": wanted.guidance}


def build_dry_run_call(wanted: GenerateOptions, base: Mapping[str, Any]) -> dict[str, Any]:
    """The call of a dry run or of the planner, which have no pipeline to ask."""
    call = {**base, **collect_request_arguments(wanted, base), "num_images_per_prompt": wanted.num_images}
    return fill_negative_prompt(call)


def fill_negative_prompt(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with an empty negative prompt where it has a scale of true guidance, for which pipelines want one."""
    return {"negative_prompt": "", **call} if "true_cfg_scale" in call else dict(call)


def _flag_of_argument(argument: str) -> str:
    """The flag that sets an argument of a pipeline's call."""
    names = {"true_cfg_scale": "true_cfg", "guidance_scale": "guidance", "num_inference_steps": "steps"}
    names["num_frames"] = "frames"
    return format_flag(names.get(argument, argument))


def _find_default_size(pipe: Any, call: Mapping[str, Any]) -> list[int]:
    """Width and height where a request has neither; empty if the pipeline decides by other things."""
    width, height = call.get("width"), call.get("height")
    if is_whole_number(width) and is_whole_number(height):
        return [width, height]
    side = getattr(getattr(getattr(pipe, "transformer", None), "config", None), "sample_size", None)
    side = getattr(pipe, "default_sample_size", side)
    scale = getattr(pipe, "vae_scale_factor", None)
    return [side * scale, side * scale] if is_whole_number(side) and is_whole_number(scale) else []


def find_size_multiple(pipe: Any) -> int:
    """Pixels of a token's side; of a transformer without a `ModelSpec`, by what its config calls a patch."""
    from ditile.model.registry import find_model_spec

    transformer: Any = getattr(pipe, "transformer", None)
    scale = next(
        (getattr(pipe, name) for name in ("vae_scale_factor_spatial", "vae_scale_factor") if hasattr(pipe, name)), 1
    )
    spec = find_model_spec(transformer)
    if spec is not None:
        return int(pipe.vae_scale_factor * spec.latent_per_token(transformer.config))
    patch = getattr(getattr(transformer, "config", None), "patch_size", 1)
    patch = patch[-1] if isinstance(patch, list | tuple) and patch else patch
    return scale * patch if is_whole_number(scale) and is_whole_number(patch) else 1

"""Facts about a model's calls, as JSON: collected where the model is loaded, read by processes without torch.

Most requests that a pipeline would refuse are refused by its facts, before anything runs. Nothing here imports
torch, but `collect_facts` and `collect_call_facts` are called where diffusers is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.flag_parser import format_flag
from ditile.plan.guidance import FLAGS, GuidanceRule
from ditile.plan.numbers import is_number, is_whole_number
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS, check_image_size
from ditile.runner.requests.conditions import check_picture_count, read_call_conditions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipeline_choice import choose_requested_class, find_pipeline_class_for
from ditile.runner.requests.pipelines import (
    FRAME_RATES,
    SOUND_LENGTHS,
    check_frame_count,
    check_prompt_cleaner,
    find_frames_ratio,
    find_output_kind,
    name_pipeline,
)

NOISE_STRENGTH = "denoise_strength"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """The arguments and inputs of a class of pipelines.

    Attributes:
        pipeline: the class's name.
        defaults: its arguments -> their defaults; None also for a default that is not a plain value.
        needed: what it cannot run without, as options of a request.
        guidance: when it has a second branch of guidance; None if that is not known.
        max_pictures: how many images it starts from at most.
    """

    pipeline: str
    defaults: JsonObject
    needed: list[str] = field(default_factory=list)
    guidance: GuidanceRule | None = None
    max_pictures: int = 0

    def find_argument(self, names: tuple[str, ...]) -> str | None:
        """Find the first of these names that the call takes."""
        return next((name for name in names if name in self.defaults), None)

    def merge_arguments(self, request: GenerateOptions, base: CallArguments) -> CallArguments:
        """Merge the plain values of the call arguments: the model's own options, overridden by the request.

        Raises:
            ModelError: if this pipeline does not take an argument of the request, or needs an input that is not given.
        """
        # The model's own options may be meant for a related class; the options of a request must all be taken.
        requested = dict(collect_request_arguments(request, base))
        length_name = self.find_argument(SOUND_LENGTHS)
        if length_name is not None and "sound_seconds" in requested:
            requested[length_name] = requested.pop("sound_seconds")
        count_name = self.find_argument(FRAME_COUNTS)
        if count_name is not None and "num_frames" in requested:
            requested[count_name] = requested.pop("num_frames")
        elif request.video is not None:
            # The class takes as many frames as the video has.
            requested.pop("num_frames", None)
        # If a class has two strengths, the strength of the noise says how far the result may depart from a video.
        if "strength" in requested and NOISE_STRENGTH in self.defaults:
            requested[NOISE_STRENGTH] = requested.pop("strength")
        rate_name = self.find_argument(FRAME_RATES)
        if request.fps is not None and rate_name is not None:
            requested[rate_name] = request.fps
            # Some classes refuse a float, so a whole rate is passed as an int.
            if request.fps == int(request.fps):
                requested[rate_name] = int(request.fps)
        for name in self.needed:
            if getattr(request, name) is None:
                raise ModelError(f"{self.pipeline} cannot start without {format_flag(name)} FILE")
        check_picture_count(self.pipeline, self.max_pictures, len(request.image or ()))
        has_prompt = request.prompt is not None or request.prompts_file is not None
        if request.conditions and not has_prompt and "prompt" in self.defaults:
            raise ModelError(f"{self.pipeline} needs a prompt too; give a PROMPT, or --prompts-file FILE")
        refused = sorted(requested.keys() - self.defaults.keys())
        if refused:
            flags = [FLAGS.get(name, format_flag(name)) for name in refused]
            raise ModelError(f"{self.pipeline} takes no {', '.join(flags)}; leave it out")
        call = {name: value for name, value in base.items() if name in self.defaults}
        call = fill_negative_prompt(call | requested)
        if request.negative_prompt is not None:
            self._check_negative_prompt(call)
        values = {**self.defaults, **call}
        strength = values.get(self.find_argument((NOISE_STRENGTH, "strength")) or "")
        steps = values.get("num_inference_steps")
        if is_number(strength) and is_whole_number(steps) and int(steps * strength) < 1:
            raise ModelError(f"strength={strength} of {steps} steps is less than one step; raise either")
        return call

    def _check_negative_prompt(self, call: CallArguments) -> None:
        rule = self.guidance
        if rule is None:
            scale_name = self.find_argument(("true_cfg_scale", "guidance_scale"))
            if scale_name is None:
                # A component of the pipeline decides when a negative prompt has an effect.
                return
            rule = GuidanceRule(scales=(scale_name,))
        values = {**self.defaults, **call}
        if rule.is_guided(values):
            return
        refusal = f"{self.pipeline} ignores a negative prompt"
        if not rule.scales:
            raise ModelError(f"{refusal}, as its model is distilled; leave --negative-prompt out")
        flag = FLAGS.get(rule.scales[0], format_flag(rule.scales[0]))
        value = values[rule.scales[0]]
        if is_number(value):
            raise ModelError(f"{refusal} at {flag} {value:g}; try {flag} above {rule.above:g}, or leave it out")

    def check_cfg(self, plan: Plan, call: CallArguments) -> None:
        """Raise `PlanError` for a call without the branches of guidance that a plan divides. Calls with an unknown rule
        pass."""
        if self.guidance is None:
            return
        reason = self.guidance.explain_cfg_refusal(plan.cfg, self.pipeline, {**self.defaults, **call})
        if reason is not None:
            raise PlanError(reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The facts about a served model and its calls, in the types of JSON.

    Attributes:
        plan: the plan's text.
        is_video: whether it makes videos.
        call: the facts of its own pipeline.
        edit: the facts of the pipeline that starts from an image; None if there is none. It may be `call`.
        inpaint: the facts of the pipeline that also takes a mask; None if there is none.
        base: the model's own arguments of a call, which override defaults.
        size: width and height by default; empty if nothing says it.
        size_multiple: the number that must divide height and width.
        frames_ratio: a video has 1 + N * frames_ratio frames, or as many as the class has by default.
        fps: frames a second by default.
        example: a prompt that it knows.
        components: component -> the file with its weights, as images name it; only components with a file of their own.
        has_second_transformer: whether it calls two transformers in turns, each with LoRAs of its own.
    """

    name: str
    plan: str
    is_video: bool
    call: CallFacts
    edit: CallFacts | None = None
    inpaint: CallFacts | None = None
    base: CallArguments = field(default_factory=dict)
    size: list[int] = field(default_factory=list)
    size_multiple: int = 1
    frames_ratio: int = 1
    fps: float = 16.0
    example: str = ""
    components: dict[str, str] = field(default_factory=dict)
    has_second_transformer: bool = False

    def to_json(self) -> JsonObject:
        """Return the facts in JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: JsonObject) -> ModelFacts:
        """Build the facts from the result of `to_json`."""
        return TypeAdapter(cls).validate_python(values)

    def takes(self, argument: str) -> bool:
        """Return whether the call of any pipeline of the model takes an argument of this name."""
        calls = filter(None, (self.call, self.edit, self.inpaint))
        return any(argument in call.defaults for call in calls)

    @property
    def max_pictures(self) -> int:
        """Return the largest number of images for an edit. 0 without edits."""
        return 0 if self.edit is None else self.edit.max_pictures

    def find_default(self, *names: str) -> Any:
        """Find the value of an argument in requests without it. The argument may have several names."""
        for values in (self.base, self.call.defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        return None

    def count_frames(self, seconds: float, fps: float | None = None) -> int:
        """Return the possible number of frames that is nearest to a length in seconds."""
        frames = seconds * (fps or self.fps)
        return 1 + max(0, round((frames - 1) / self.frames_ratio)) * self.frames_ratio

    def check_options(self, request: GenerateOptions) -> None:
        """Raise `ModelError` for options that the model cannot serve, before a rank tries. The rank finds the
        others."""
        call_facts = self._choose_call(request)
        call = call_facts.merge_arguments(request, self.base)
        call_facts.check_cfg(Plan.parse(self.plan), call)
        check_image_size(call, self.size_multiple)
        name = call_facts.find_argument(FRAME_COUNTS)
        if name is not None and is_whole_number(call.get(name)):
            check_frame_count(call_facts.pipeline, call[name], self.frames_ratio, call_facts.defaults[name])

    def _choose_call(self, request: GenerateOptions) -> CallFacts:
        if request.image is None:
            return self.call
        if self.edit is None:
            raise ModelError(f"{self.call.pipeline} has no relative that starts from an image; leave the image out")
        if request.mask is None:
            return self.edit
        if self.inpaint is None:
            raise ModelError(f"{self.call.pipeline} has no relative that takes a mask; leave the mask out")
        return self.inpaint


def collect_facts(pipe: Any, model: str, plan: Plan | str) -> ModelFacts:
    """Collect the facts of a loaded pipeline. This imports diffusers.

    Args:
        pipe: the pipeline that starts from text, or the model's only pipeline.
        model: its name, by which its own options are found.
        plan: the plan, or its text.
    """
    from ditile.model.known import find_known_model
    from ditile.model.pipeline_calls import find_call_owner
    from ditile.runner.lora import has_second_transformer
    from ditile.runner.model_files import defaults
    from ditile.runner.requests.results import choose_fps

    owner = find_call_owner(pipe)
    # A modular pipeline may have no config.
    config = dict(getattr(pipe, "config", {}))
    base = defaults(model)
    call = collect_call_facts(owner, config)
    check_prompt_cleaner(owner)
    kind = find_output_kind(owner)
    if kind == "sound":
        raise ModelError(
            f"{name_pipeline(owner)} makes sounds, and a server answers images and videos; ditile generate writes a WAV"
        )
    related: dict[str, CallFacts] = {}
    for name, conditions in {"edit": ["image"], "inpaint": ["image", "mask"]}.items():
        pipeline_class = find_pipeline_class_for(owner, conditions, config)
        # Some families do not generate from images.
        if pipeline_class is not None:
            related[name] = collect_call_facts(pipeline_class, config)
    known = find_known_model(model)
    example = "" if known is None else known.example
    return ModelFacts(
        name=model,
        plan=str(plan),
        is_video=kind == "video",
        call=call,
        edit=related.get("edit"),
        inpaint=related.get("inpaint"),
        base={name: value for name, value in base.items() if name in call.defaults},
        size=_find_default_size(pipe, {**call.defaults, **base}),
        size_multiple=find_size_multiple(pipe),
        frames_ratio=find_frames_ratio(pipe),
        fps=choose_fps(pipe, GenerateOptions(model=model), base),
        example=example,
        has_second_transformer=has_second_transformer(pipe),
    )


def collect_call_facts(pipeline: Any, config: JsonObject | None = None) -> CallFacts:
    """Collect the call arguments for a class of pipelines with some config, or for a modular pipeline."""
    from ditile.model.pipeline_calls import list_call_parameters, read_guidance_rule

    conditions = read_call_conditions(pipeline)
    guidance = read_guidance_rule(pipeline, config or {})
    call_defaults = {}
    for parameter in list_call_parameters(pipeline).values():
        is_plain = isinstance(parameter.default, bool | int | float | str)
        call_defaults[parameter.name] = parameter.default if is_plain else None
    return CallFacts(
        pipeline=name_pipeline(pipeline),
        defaults=call_defaults,
        needed=[*conditions.needed],
        guidance=guidance,
        max_pictures=conditions.max_pictures,
    )


def collect_request_arguments(request: GenerateOptions, base: CallArguments) -> CallArguments:
    """Collect the given arguments. --guidance sets true guidance if the model's own options do and --true-cfg is not
    given."""
    arguments = request.to_call_arguments()
    if request.guidance is not None:
        scale_name = "guidance_scale"
        if "true_cfg_scale" in base and request.true_cfg is None:
            scale_name = "true_cfg_scale"
        arguments[scale_name] = request.guidance
    return arguments


def build_dry_run_call(request: GenerateOptions, base: CallArguments) -> CallArguments:
    """Build the call of a dry run or of the planner, which have no pipeline to ask."""
    call = {**base, **collect_request_arguments(request, base), "num_images_per_prompt": request.num_images}
    return fill_negative_prompt(call)


def count_request_steps(request: GenerateOptions) -> int:
    """Count the steps of a request: its own, its model's, or its pipeline's default, for which diffusers is imported.

    Raises:
        LoadError, ModelError: if the model's files cannot be read, or name no class of diffusers' that has steps.
    """
    from ditile.runner.model_files import defaults

    steps = build_dry_run_call(request, defaults(request.model)).get("num_inference_steps")
    if steps is None:
        pipeline, config = choose_requested_class(request)
        if pipeline is not None:
            steps = collect_call_facts(pipeline, config).defaults.get("num_inference_steps")
    if not is_whole_number(steps):
        raise ModelError(f"{request.model}: its files do not say how many steps an image has; give --steps")
    return steps


def fill_negative_prompt(call: CallArguments) -> CallArguments:
    """Add the empty negative prompt that pipelines require for true guidance, if a call has a scale of it."""
    if "true_cfg_scale" in call:
        return {"negative_prompt": "", **call}
    return dict(call)


def _find_default_size(pipe: Any, call: CallArguments) -> list[int]:
    """Find the width and height for a request without them. Empty if the pipeline decides by other things."""
    width = call.get("width")
    height = call.get("height")
    if is_whole_number(width) and is_whole_number(height):
        return [width, height]
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    side = getattr(pipe, "default_sample_size", getattr(config, "sample_size", None))
    scale = getattr(pipe, "vae_scale_factor", None)
    if is_whole_number(side) and is_whole_number(scale):
        return [side * scale, side * scale]
    return []


def find_size_multiple(pipe: Any) -> int:
    """Return the pixels of a token's side, by the family of the transformer or by the patch in its config."""
    from ditile.model.call_families import find_call_family

    transformer: Any = getattr(pipe, "transformer", None)
    family = find_call_family(transformer)
    if family is not None:
        return int(pipe.vae_scale_factor * family.latent_per_token(transformer.config))
    scale = getattr(pipe, "vae_scale_factor_spatial", getattr(pipe, "vae_scale_factor", 1))
    patch = getattr(getattr(transformer, "config", None), "patch_size", 1)
    # For a video the patch is (frames, rows, columns).
    if isinstance(patch, list | tuple) and patch:
        patch = patch[-1]
    if is_whole_number(scale) and is_whole_number(patch):
        return scale * patch
    return 1

"""Checks a request before weights are read: on the command line first, and then on each rank.

A server asks `ModelFacts.check_options`, which has the same checks without diffusers. All of these checks know a class
of pipelines by its `CallFacts`.
"""

from __future__ import annotations

from ditile.model.known import find_known_model
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.runner.model_files import check_weight_source, defaults, find_model_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.facts import NOISE_STRENGTH, collect_call_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions
from ditile.runner.requests.pictures import read_picture
from ditile.runner.requests.pipeline_choice import choose_requested_class


def check_options(request: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> None:
    """Check options together, and the files that they name, without torch.

    Raises:
        LoadError: if files cannot be read.
        ModelError: if options contradict each other, or the model is not known.
        PlanError: if the plan does not fit a model that is known by name.
    """
    has_prompt = request.prompt is not None or request.prompts_file is not None
    # Some classes start only from an image; the call facts refuse the others.
    if not has_prompt and not request.conditions and not run.dry_run:
        raise ModelError("there is nothing to generate; give a PROMPT, or --prompts-file FILE")
    if run.dry_run and run.json is not None:
        raise ModelError(f"json={run.json!r} is for what a run measured, and dry_run=True runs nothing; leave one out")
    if run.out_dir is not None and request.prompts_file is None:
        raise ModelError(f"out_dir={run.out_dir!r} is for a file of prompts; use --out, or add --prompts-file FILE")
    if run.save_latents is not None and (request.prompts_file is not None or cache.perf):
        raise ModelError(f"save_latents={run.save_latents!r} is for one call, and this run makes several; leave it out")
    if run.text_after == "free" and (request.prompts_file is not None or cache.perf or run.warm):
        raise ModelError("text_after='free': this run encodes prompts several times, and freed encoders do so once")
    find_model_source(request.model, weights=not run.dry_run, components=request.components)
    for choice in cache.loras.values():
        check_weight_source(choice.source, "lora")
    if request.controlnet is not None:
        check_weight_source(request.controlnet, "controlnet")
    if request.conditions:
        read_condition_files(request)
    check_known_model(request, plan)


def read_condition_files(request: GenerateOptions) -> CallArguments:
    """Read the inputs of a request: condition -> its image; a list of images for `image`, of frames for `video`.

    Raises:
        ModelError: if a file is not an image or video, or the mask has another size than its image.
    """
    # `videos` needs numpy, which the process of a server does without.
    from ditile.runner.requests.videos import read_video

    contents: CallArguments = {}
    for name, value in request.conditions.items():
        if name == "image":
            contents[name] = [read_picture(path, name) for path in value]
        elif name == "video":
            contents[name] = read_video(value, name, request.frames)
        else:
            contents[name] = read_picture(value, name, is_mask=name == "mask")
    if "mask" in contents:
        mask = contents["mask"]
        image = contents["image"][0]
        if mask.size != image.size:
            raise ModelError(
                f"mask={request.mask!r} is {mask.width}x{mask.height}, and its image {image.width}x{image.height}; "
                "give both in one size"
            )
    return contents


def check_known_model(request: GenerateOptions, plan: Plan) -> None:
    """Raise `ModelError` or `PlanError` for a call that a model known by name cannot make."""
    known = find_known_model(request.model)
    if known is not None:
        known.check_call(plan, defaults(request.model) | request.to_call_arguments())


def check_request_by_files(request: GenerateOptions, plan: Plan, cache: CacheOptions) -> None:
    """Check a request against the class of pipelines that the model's files name. This imports diffusers.

    Raises:
        LoadError: if the files cannot be read.
        ModelError: if the class does not take an argument, lacks an input that it needs, or a cache has too few steps.
        PlanError: if the plan divides branches of guidance that the call does not have.
    """
    pipeline, config = choose_requested_class(request)
    if pipeline is None:
        return
    facts = collect_call_facts(pipeline, config)
    call = facts.merge_arguments(request, defaults(request.model))
    facts.check_cfg(plan, call)
    check_cache_steps(cache, call)


def check_cache_steps(cache: CacheOptions, call: CallArguments) -> None:
    """Raise `ModelError` for a step mask that is too short, or if the cache must compute all steps."""
    from ditile.cache.build import explain_idle_steps

    config = cache.build_cache_arguments()["cache_config"]
    steps = call.get("num_inference_steps")
    if config is None or steps is None:
        return
    # With a strength below 1, the denoising loop has fewer steps.
    strength = call.get(NOISE_STRENGTH, call.get("strength")) or 1
    reason = explain_idle_steps(config, max(1, min(steps, int(steps * strength))))
    if reason is not None:
        raise ModelError(reason)

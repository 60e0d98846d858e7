"""The work of one rank of `ditile generate`: load, divide, run, and on rank 0 write the pictures."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ditile
from ditile.cli.cache_options import CacheOptions
from ditile.cli.options import GenerateOptions, RunOptions
from ditile.cli.outcome import NUM_PERF_CALLS, Outcome, compute_median_reports, sum_reports, summarize_cache_reports
from ditile.cli.pipelines import (
    FRAME_COUNTS,
    FRAME_RATES,
    VIDEO_FIELDS,
    check_num_frames,
    check_prompt_cleaner,
    convert_to_image_to_image,
    convert_value_errors,
    enable_required_tiling,
    find_argument,
    find_frame_rate,
    find_pipeline_class,
    returns_videos,
)
from ditile.cli.prompts import PromptLine, describe_request, list_prompt_lines
from ditile.distributed import env
from ditile.distributed.console import show_progress_bar
from ditile.distributed.mesh import join_torchrun
from ditile.distributed.pulse import is_out_of_memory
from ditile.distributed.transport import gather_json
from ditile.errors import DitileError, ModelError
from ditile.models.probe import COUNTS
from ditile.plan.flags import format_flag
from ditile.plan.plan import Plan
from ditile.plan.shape import check_image_size
from ditile.runner.load import FRAME_RATE, defaults, find_model_source, load, read_generation_defaults

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch.distributed import ProcessGroup

    from ditile.cache.report import ContextReport
    from ditile.cli.videos import Video
    from ditile.runner.runner import Runner


def draw_pictures(wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> Outcome | None:
    """Runs this rank's part. Rank 0 returns the outcome, the others None.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):  # the standard output is for the summary alone
        pipe, runner = _prepare_runner(wanted, run, plan, cache)
        seed = _agree_on_seed(wanted.seed, runner.mesh.everyone)
        call = build_call_arguments(pipe, wanted, defaults(wanted.model))
        _check_cache_steps(cache, call)
        seeds = range(seed, seed + wanted.num_images)
        num_videos = wanted.num_images * (1 + NUM_PERF_CALLS if cache.perf else 1)
        with _show_decoded_frames(pipe, call, num_videos, shown=runner.mesh.rank == 0):
            call_result = _call_and_report(runner, lambda: call | _build_object_arguments(pipe, wanted, seeds), cache)
        drawn = _list_drawn(call_result.result)
        files = [str(path) for path in run.list_image_paths(len(drawn))] if drawn else []
        texts, fps = _build_png_texts(wanted, plan, cache, call), _choose_fps(pipe, wanted, call)
        for k, (one, path) in enumerate(zip(drawn, files, strict=True)):
            _write_drawn(one, path, fps, texts | {"prompt": wanted.prompt or "", "seed": str(seed + k)})
        # Behind the pictures, which a trace that cannot be written must not cost.
        _write_trace(runner, run.trace)
        if call_result.result is None:
            return None
        return build_outcome(wanted, plan, cache, [call_result], seed=seed, images=files)


def draw_prompt_lines(
    wanted: GenerateOptions,
    run: RunOptions,
    plan: Plan,
    cache: CacheOptions,
    missing_lines: Sequence[PromptLine],
    total: int,
) -> Outcome | None:
    """Draws some lines, as many at once as there are replicas. Rank 0 returns the outcome, the others None.

    Args:
        wanted, run, plan, cache: as in `draw_pictures`.
        missing_lines: the lines to draw; every rank takes those of rank 0.
        total: the number of lines in the file.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):
        pipe, runner = _prepare_runner(wanted, run, plan, cache)
        pipe.set_progress_bar_config(disable=True)
        everyone, first = runner.mesh.everyone, runner.mesh.rank == 0
        missing_lines = [PromptLine(*line) for line in gather_json(list(missing_lines), everyone)[0]]
        base = build_call_arguments(pipe, wanted, defaults(wanted.model))
        _check_cache_steps(cache, base)
        request_text = describe_request(wanted, run, plan, cache, defaults(wanted.model))
        texts, fps = _build_png_texts(wanted, plan, cache, base), _choose_fps(pipe, wanted, base)
        texts |= {"request": request_text}
        call_results: list[RunnerCallResult] = []
        with show_progress_bar("prompts", total, completed=total - len(missing_lines), shown=first) as advance:
            for start in range(0, len(missing_lines), plan.data):
                lines = missing_lines[start : start + plan.data]
                call_result = _call_and_report(
                    runner, functools.partial(_build_lines_call, pipe, base, lines, wanted, plan), cache
                )
                call_results.append(call_result._replace(result=None))
                for line, one in zip(lines, _list_drawn(call_result.result), strict=first):
                    _write_drawn(one, line.path, fps, texts | {"prompt": line.prompt, "seed": str(line.seed)})
                advance(len(lines))
        if missing_lines:
            _write_trace(runner, run.trace)
    if not first:
        return None
    files, seed = [line.path for line in list_prompt_lines(wanted, run)], wanted.seed or 0
    skipped = len(files) - len(missing_lines)
    return build_outcome(wanted, plan, cache, call_results, seed=seed, images=files, skipped=skipped)


def build_outcome(
    wanted: GenerateOptions,
    plan: Plan,
    cache: CacheOptions,
    call_results: Sequence[RunnerCallResult],
    *,
    seed: int,
    images: list[str],
    skipped: int = 0,
) -> Outcome:
    """The outcome of some calls; `skipped` is how many of the images were there before."""
    return Outcome(
        plan=str(plan),
        model=wanted.model,
        seed=seed,
        images=images,
        reports=sum_reports([call_result.reports for call_result in call_results]),
        skipped=skipped,
        settings=cache.describe_settings(),
        left_out=summarize_cache_reports([call_result.saved for call_result in call_results]),
        totals=[total for call_result in call_results for total in call_result.totals],
        tracks_memory=cache.track_memory,
    )


class RunnerCallResult(NamedTuple):
    """A call of a runner: its result on rank 0, reports of all ranks, reports of caches, and the seconds of --perf."""

    result: Any
    reports: list[dict[str, Any]]
    saved: list[ContextReport]
    totals: list[float]


def _call_and_report(runner: Runner, make: Callable[[], dict[str, Any]], cache: CacheOptions) -> RunnerCallResult:
    """Calls a runner once, or as often as --perf wants; `make` makes new arguments for each call."""
    reports = []
    for _ in range(1 + NUM_PERF_CALLS if cache.perf else 1):
        with convert_value_errors(runner.pipe):
            result = runner(**make(), output="first")
        reports.append(runner.reports())
    saved = ditile.summary(runner, logging=False) if cache.build_cache_arguments()["cache_config"] is not None else []
    if not cache.perf:
        return RunnerCallResult(result, reports[0], saved, [])
    return RunnerCallResult(
        result, compute_median_reports(reports[1:]), saved, [of_rank[0]["seconds"]["total"] for of_rank in reports[1:]]
    )


def _prepare_runner(wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> tuple[Any, Runner]:
    silence_libraries()
    if run.threads is not None:
        _set_num_threads(run.threads)
    pipeline = find_pipeline_class(find_model_source(wanted.model))
    returns_videos(pipeline)  # or refuses it
    check_prompt_cleaner(pipeline)
    # A LoRA needs whole weights; tensor parallelism then cuts its factors with them.
    needs_whole_model = cache.lora is not None and plan.tensor > 1
    pipe: Any = load(wanted.model, dtype=run.dtype, plan=None if needs_whole_model else plan)
    enable_required_tiling(pipe)
    if wanted.image is not None:
        pipe = convert_to_image_to_image(pipe)
    if cache.lora is not None:
        _load_lora_weights(pipe, cache.lora, fuse=cache.fuse_lora)
    if run.compile:
        ditile.set_compile_configs(compute_comm_overlap=not cache.disable_compute_comm_overlap)
    join_torchrun(run.stall_timeout)
    runner = ditile.parallelize(
        pipe,
        plan,
        device=run.device,
        text_after=run.text_after,
        attention=run.attention,
        cp_plan=cache.cp_plan,
        compile=run.compile,
        cuda_graphs=run.cuda_graphs,
    )
    runner.trace = run.trace is not None
    _enable_cache_and_quantization(runner, cache)
    return pipe, runner


def _load_lora_weights(pipe: Any, source: str, *, fuse: bool) -> None:
    """Loads a LoRA into this rank's modules, and fuses it if that is wanted."""
    import safetensors

    path = Path(source)
    place = {"weight_name": path.name} if path.is_file() else {}
    try:
        ditile.load_lora(pipe, str(path.parent) if place else source, **place)
        if fuse:
            pipe.fuse_lora()
            pipe.unload_lora_weights()
    except DitileError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, safetensors.SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"lora={source!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def _enable_cache_and_quantization(runner: Runner, cache: CacheOptions) -> None:
    """Quantizes this rank's weights, and enables the cache.

    Raises:
        ModelError: also if nothing could be left out, for which the API only warns.
    """
    from ditile.cache.cached import IdleCacheWarning

    wanted = cache.build_cache_arguments()
    wanted.pop("attention_backend", None)  # `parallelize` has set it
    if wanted["cache_config"] is None and "quantize_config" not in wanted:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleCacheWarning)
            ditile.enable_cache(runner, **wanted)
    except IdleCacheWarning as warning:
        raise ModelError(str(warning)) from warning


def _check_cache_steps(cache: CacheOptions, call: Mapping[str, Any]) -> None:
    """Raises `ModelError`, before a step is made, for a step mask that is too short or steps that must all compute."""
    from ditile.cache.build import explain_idle_steps

    config = cache.build_cache_arguments()["cache_config"]
    if config is not None and "num_inference_steps" in call:
        steps = call["num_inference_steps"]
        if reason := explain_idle_steps(config, max(1, min(steps, int(steps * call.get("strength", 1))))):
            raise ModelError(reason)


def _build_lines_call(
    pipe: DiffusionPipeline, base: dict[str, Any], lines: Sequence[PromptLine], wanted: GenerateOptions, plan: Plan
) -> dict[str, Any]:
    """The call that makes the pictures of some lines: one on its own, or a batch over the replicas."""
    objects = _build_object_arguments(pipe, wanted, [line.seed for line in lines], alone=plan.data == 1)
    if plan.data == 1:
        return base | objects | {"prompt": lines[0].prompt}
    call = base | objects | {"prompt": [line.prompt for line in lines]}
    if "negative_prompt" in base:
        call["negative_prompt"] = [base["negative_prompt"]] * len(lines)
    return call


def build_call_arguments(pipe: DiffusionPipeline, wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The call arguments that are plain values: the model's own options, overridden by the given ones.

    Raises:
        ModelError: if this pipeline does not take an argument that is given, or cannot make the size or the frames.
    """
    call = merge_call_arguments(type(pipe), wanted, base)
    _check_picture_size(pipe, call)
    check_num_frames(pipe, call)
    return call


def merge_call_arguments(pipeline: type, wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The same for a class of pipelines, without a check of the size."""
    known = inspect.signature(pipeline.__call__).parameters
    kind, given = pipeline.__name__, _collect_request_arguments(wanted, base)
    given = _rename_video_arguments(pipeline, wanted, given)
    if wanted.image is None and _needs_picture(known):
        raise ModelError(f"{kind} starts from a picture; add --image FILE")
    if wanted.image is not None and wanted.prompt is None and wanted.prompts_file is None and "prompt" in known:
        raise ModelError(f"{kind} draws from a picture and a prompt; give a PROMPT, or --prompts-file FILE")
    if refused := sorted(set(given) - set(known)):
        raise ModelError(f"{kind} takes no {', '.join(map(_flag_of_argument, refused))}; leave it out")
    call = {name: value for name, value in base.items() if name in known} | given
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")  # without one, diffusers does no true guidance
    if wanted.negative_prompt is not None:
        _check_negative_prompt(kind, call, known)
    _check_strength(call, known)
    return call


def _collect_request_arguments(wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The given arguments. --guidance sets true guidance if the model's own options do and --true-cfg is not given."""
    given = wanted.to_call_arguments()
    if wanted.guidance is None:
        return given
    true = "true_cfg_scale" in base and wanted.true_cfg is None
    return given | {"true_cfg_scale" if true else "guidance_scale": wanted.guidance}


def _rename_video_arguments(pipeline: type, wanted: GenerateOptions, given: dict[str, Any]) -> dict[str, Any]:
    """The given arguments with the frames and the rate under the names of this class, if it is told the rate at all."""
    count, rate = find_argument(pipeline, FRAME_COUNTS), find_argument(pipeline, FRAME_RATES)
    if "num_frames" in given and count is not None:
        given = {count if name == "num_frames" else name: value for name, value in given.items()}
    if wanted.fps is not None and rate is not None:
        given[rate] = int(wanted.fps) if float(wanted.fps).is_integer() else wanted.fps
    return given


def _needs_picture(known: Mapping[str, inspect.Parameter]) -> bool:
    return "image" in known and known["image"].default is inspect.Parameter.empty


def build_dry_run_call(wanted: GenerateOptions, base: dict[str, Any]) -> dict[str, Any]:
    """The call of a dry run, which has no pipeline to ask."""
    call = base | _collect_request_arguments(wanted, base) | {"num_images_per_prompt": wanted.num_images}
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")
    return call


def _check_negative_prompt(kind: str, call: dict[str, Any], known: Any) -> None:
    scale = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    value, flag_name = call.get(scale, known[scale].default if scale in known else 1.0), _flag_of_argument(scale)
    if value <= 1:
        raise ModelError(
            f"{kind} ignores a negative prompt at {flag_name} {value:g}; try {flag_name} above 1, or leave it out"
        )


def _flag_of_argument(argument: str) -> str:
    """The flag that sets an argument of a pipeline's call."""
    names = {"true_cfg_scale": "true_cfg", "guidance_scale": "guidance", "num_inference_steps": "steps"}
    names["num_frames"] = "frames"
    return format_flag(names.get(argument, argument))


def _check_picture_size(pipe: Any, call: dict[str, Any]) -> None:
    """Checks the size if a `ModelSpec` knows a token's side; other pipelines check it (see `convert_value_errors`)."""
    from ditile.models.registry import find_model_spec

    transformer: Any = getattr(pipe, "transformer", None)
    spec = find_model_spec(transformer)
    if spec is not None:
        check_image_size(call, pipe.vae_scale_factor * spec.latent_per_token(transformer.config))


def _check_strength(call: dict[str, Any], known: Any) -> None:
    if "strength" in known:
        strength = call.get("strength", known["strength"].default)
        steps = call.get("num_inference_steps", known["num_inference_steps"].default)
        if int(steps * strength) < 1:
            raise ModelError(f"strength={strength} of {steps} steps is less than one step; raise either")


def _build_object_arguments(
    pipe: DiffusionPipeline, wanted: GenerateOptions, seeds: Sequence[int], *, alone: bool | None = None
) -> dict[str, Any]:
    """The call arguments that are objects: generators, which every rank makes alike, and the picture to start from.

    With several generators the call makes as many pictures, each with the noise of its own generator.
    """
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {"generator": generators[0] if len(seeds) == 1 and alone is not False else generators}
    if wanted.num_images > 1:
        call[find_argument(type(pipe), COUNTS) or COUNTS[0]] = wanted.num_images
    if wanted.image is not None:
        from ditile.cli.pictures import read_picture

        picture = read_picture(wanted.image, "image")
        several = isinstance(call["generator"], list)
        call["image"] = [picture] * len(seeds) if several else picture
    return call


def _build_png_texts(wanted: GenerateOptions, plan: Plan, cache: CacheOptions, call: dict[str, Any]) -> dict[str, str]:
    """The texts in a picture's file that say how it was made, without its prompt and seed."""
    from ditile.cli.pictures import hide_local_path

    settings = cache.describe_settings()
    if "lora" in settings:
        settings["lora"] = hide_local_path(settings["lora"])
    return {
        "Software": f"ditile {ditile.__version__}",
        "model": hide_local_path(wanted.model),
        "plan": str(plan),
        "settings": json.dumps(call),
    } | ({"cache": json.dumps(settings)} if settings else {})


def _list_drawn(result: Any) -> Sequence[Image.Image | Video]:
    """The pictures or the videos of a pipeline's result; none of None, which the other ranks have."""
    from ditile.cli.videos import convert_to_videos

    if result is None:
        return []
    images: Sequence[Image.Image] | None = getattr(result, "images", None)
    if images is not None:
        return images
    return convert_to_videos(next(getattr(result, name) for name in VIDEO_FIELDS if hasattr(result, name)))


def _choose_fps(pipe: DiffusionPipeline, wanted: GenerateOptions, call: Mapping[str, Any]) -> float:
    """Frames a second of a video: as given, else as the model or its class has it."""
    from ditile.cli.videos import DEFAULT_FPS

    own = read_generation_defaults(wanted.model).get(FRAME_RATE) or find_frame_rate(type(pipe), call)
    return float(wanted.fps or own or DEFAULT_FPS)


@contextlib.contextmanager
def _show_decoded_frames(pipe: Any, call: Mapping[str, Any], count: int, *, shown: bool) -> Iterator[None]:
    """Shows how many frames of a call's videos the decoder has made, behind the progress of the steps."""
    name, decoder = find_argument(type(pipe), FRAME_COUNTS), getattr(getattr(pipe, "vae", None), "decoder", None)
    frames = None if name is None else call.get(name, inspect.signature(type(pipe).__call__).parameters[name].default)
    if decoder is None or not isinstance(frames, int):
        yield
        return
    with contextlib.ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        left = frames * count

        def count_frames(_: Any, __: Any, out: Any) -> None:
            nonlocal advance, left
            out = out[0] if isinstance(out, tuple) else out
            if advance is None:
                advance = stack.enter_context(show_progress_bar("decoded frames", left, shown=shown))
            # [B, 3, F, H, W] or [B F, 3, H, W]; pieces that overlap are more than all.
            done = min(left, out.shape[0] * (out.shape[2] if out.ndim == 5 else 1))
            left -= done
            advance(done)

        hook = decoder.register_forward_hook(count_frames)
        stack.callback(hook.remove)
        yield


def _write_drawn(drawn: Image.Image | Video, path: str, fps: float, texts: dict[str, str]) -> None:
    """Writes a picture, or a video and its poster."""
    from PIL import Image

    from ditile.cli.pictures import save_png_with_texts
    from ditile.cli.videos import save_video_with_poster

    try:
        Path(path).parent.mkdir(exist_ok=True)
        if isinstance(drawn, Image.Image):
            save_png_with_texts(drawn, Path(path), texts)
        else:
            save_video_with_poster(drawn, Path(path), fps, texts)
    except OSError as error:
        raise ModelError(f"out={path!r} cannot be written: {error}") from error


def _write_trace(runner: Runner, path: str | None) -> None:
    """Writes the trace of the last call, if one is wanted; all ranks call it."""
    try:
        if path is not None:
            runner.write_trace(path)
    except OSError as error:
        raise ModelError(f"trace={path!r} cannot be written: {error.strerror}; the pictures are there") from error


def _agree_on_seed(seed: int | None, control: ProcessGroup | None) -> int:
    """The given seed; without one, a random seed of rank 0, which it sends to all ranks."""
    if seed is not None:
        return seed
    return int(gather_json(secrets.randbelow(2**31), control)[0])


def _set_num_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def silence_libraries() -> None:
    """Silences the progress bars of libraries, and the log of diffusers on all ranks but rank 0."""
    env.silence_library_imports()
    # diffusers gives this argument to huggingface_hub, which warns of it.
    warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument")
    from transformers.utils import logging

    # Before diffusers is imported, which transformers would warn about.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    place = env.read_torchrun_place()
    if place is not None and place.rank:
        diffusers_logging.set_verbosity_error()

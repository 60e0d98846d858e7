"""The work of one rank of `ditile generate`: load, divide, run, and on rank 0 write the images."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import ditile
from ditile.cli.latents import LatentsFacts, LatentsKeeper, Part, describe_config, explain_unkept, find_cut_size
from ditile.cli.outcome import NUM_PERF_CALLS, RunnerCallResult, compute_median_reports, summarize_outcome
from ditile.distributed.transport import describe_dtype, gather_json
from ditile.model.pipeline_calls import find_call_owner, list_call_parameters
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.callbacks import StepWatch
from ditile.runner.model_files import defaults
from ditile.runner.requests.arguments import (
    build_batch_call,
    build_call_arguments,
    build_object_arguments,
    check_guidance,
)
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions
from ditile.runner.requests.pipelines import (
    OutputKind,
    check_frame_count,
    convert_value_errors,
    find_argument,
    find_frames_ratio,
    name_pipeline,
)
from ditile.runner.requests.preflight import check_request_by_files, read_condition_files
from ditile.runner.requests.prepare import prepare_runner, silence_libraries, warm_runner
from ditile.runner.requests.prompts import PromptLine, describe_request
from ditile.runner.requests.results import build_png_texts, choose_fps, describe_settings
from ditile.runner.runner import Runner


def generate_images(
    request: GenerateOptions,
    run: RunOptions,
    plan: Plan,
    cache: CacheOptions,
    lines: Sequence[PromptLine],
    missing: Sequence[PromptLine],
    promise: JsonObject,
    kind: OutputKind,
) -> JsonObject | None:
    """Run this rank's part. Rank 0 returns the summary, the others None.

    Args:
        lines: all images; every rank uses the list of rank 0.
        missing: the images to make: for a file of prompts one on each replica at a time, otherwise all in one call.
        promise: the promise of bounds, in the form of `Promise.to_json_dict`; empty without bounds.
        kind: what the model makes.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    # The standard output is only for the summary.
    with contextlib.redirect_stdout(sys.stderr):
        pipe, runner, conditions = _prepare_runner(request, run, plan, cache)
        is_first = runner.mesh.rank == 0
        lists_of_rank_0 = gather_json([lines, missing], runner.mesh.everyone)[0]
        lines = [PromptLine(*line) for line in lists_of_rank_0[0]]
        missing = [PromptLine(*line) for line in lists_of_rank_0[1]]
        base = build_call_arguments(pipe, request, defaults(request.model))
        texts = build_png_texts(request, plan, cache, base, conditions, promise)
        if request.prompts_file is not None:
            pipe.set_progress_bar_config(disable=True)
            texts["request"] = describe_request(request, run, plan, cache, defaults(request.model))
        num_made = len(lines) - len(missing)
        shows_prompts = is_first and request.prompts_file is not None
        call_results = []
        with show_progress_bar("prompts", len(lines), completed=num_made, shown=shows_prompts) as advance:
            num_in_call = len(missing) if request.prompts_file is None else plan.data
            for start in range(0, len(missing), num_in_call):
                part = missing[start : start + num_in_call]
                build_call = functools.partial(_build_call, pipe, base, part, request, plan, conditions)
                if run.warm and start == 0:
                    is_cached = cache.build_cache_arguments()["cache_config"] is not None
                    with convert_value_errors(pipe):
                        warm_runner(runner, build_call(), is_cached=is_cached)
                keeper = _build_keeper(pipe, request, run, kind, part, base, texts)
                paths = [line.path for line in part]
                shows_frames = is_first and not shows_prompts
                call_results.append(_call_and_report(runner, build_call, cache, keeper, paths, shown=shows_frames))
                advance(len(part))
        # Written after the images, which must not be lost if the trace cannot be written.
        if missing and run.trace is not None:
            try:
                runner.write_trace(run.trace)
            except OSError as error:
                message = f"trace={run.trace!r} cannot be written: {error.strerror}; the images are there"
                raise ModelError(message) from error
    if not is_first:
        return None
    return summarize_outcome(request, plan, cache, lines, call_results, skipped=num_made, kind=kind, promise=promise)


def _prepare_runner(
    request: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Any, Runner, CallArguments]:
    """Load the pipeline, and return it with its runner and the conditions of its calls."""
    from ditile.runner.load import choose_text_workflow

    silence_libraries()
    check_request_by_files(request, plan, cache)
    conditions = read_condition_files(request)
    # A modular pipeline need not read the transformer that calls with only a prompt do not use.
    workflow = None if conditions else choose_text_workflow(request.model, request.components)
    pipe, runner = prepare_runner(
        request.model,
        run,
        plan,
        cache,
        conditions=list(conditions),
        controlnet=request.controlnet,
        components=request.components,
        workflow=workflow,
    )
    runner.trace = run.trace is not None
    check_guidance(pipe, request, defaults(request.model))
    if "video" in conditions:
        check_frame_count(type(pipe).__name__, len(conditions["video"]), find_frames_ratio(pipe), None)
    if conditions and runner.mesh.rank == 0:
        print(f"pipeline: {name_pipeline(find_call_owner(pipe))}", file=sys.stderr)
    return pipe, runner, conditions


def _build_keeper(
    pipe: Any,
    request: GenerateOptions,
    run: RunOptions,
    kind: OutputKind,
    lines: Sequence[PromptLine],
    call: CallArguments,
    texts: dict[str, str],
) -> LatentsKeeper:
    """Build the keeper of a call's latents. Raises `ModelError` if they were asked for and cannot be kept."""
    refusal = explain_unkept(pipe, call)
    if run.save_latents is not None and refusal is not None:
        raise ModelError(f"save_latents={run.save_latents!r}: {refusal}")
    parts = {}
    dtype = ""
    if refusal is None:
        parts = {name: describe_config(part) for name, part in pipe.components.items() if name in get_args(Part)}
        dtype = describe_dtype(pipe.vae)
    frames = 0
    frames_name = find_argument(pipe, FRAME_COUNTS)
    if frames_name is not None:
        frames = call.get(frames_name, list_call_parameters(pipe)[frames_name].default) or 0
    facts = LatentsFacts(
        model=request.model,
        components={name: file for name, file in request.components.items() if name in parts},
        dtype=dtype,
        parts=parts,
        kind=kind,
        fps=choose_fps(pipe, request, call),
        frames=frames,
        size=find_cut_size(pipe, call),
        pictures=[(line.prompt, line.seed) for line in lines],
        settings=describe_settings(pipe, call, texts),
        texts=texts,
    )
    return LatentsKeeper(facts, Path(lines[0].path), run.save_latents)


def _call_and_report(
    runner: Runner,
    build_call: Callable[[], CallArguments],
    cache: CacheOptions,
    keeper: LatentsKeeper,
    paths: Sequence[str],
    *,
    shown: bool,
) -> RunnerCallResult:
    """Call a runner once, or several times for --perf, and write what it draws.

    Args:
        build_call: builds new arguments for each call.
        shown: whether the progress of decoding frames is shown.
    """
    reports = []
    num_calls = 1
    if cache.perf:
        # The first call builds what later calls reuse, and is not counted.
        num_calls += NUM_PERF_CALLS
    vae = getattr(runner.pipe, "vae", None)
    num_frames = keeper.facts.frames * len(paths) * num_calls
    with keeper.keep_on_failure():
        with show_decoded_frames(vae, num_frames, shown=shown):
            for _ in range(num_calls):
                with convert_value_errors(runner.pipe):
                    result = runner(**build_call(), output_on="first", watch=StepWatch(on_decode=keeper.decode))
                reports.append(runner.reports())
        saved = []
        if cache.build_cache_arguments()["cache_config"] is not None:
            saved = ditile.summary(runner, logging=False)
        keeper.facts.write_outputs(runner.pipe, result, paths)
    if not cache.perf:
        return RunnerCallResult(reports[0], saved, [])
    measured = reports[1:]
    totals = [rank_reports[0]["seconds"]["total"] for rank_reports in measured]
    return RunnerCallResult(compute_median_reports(measured), saved, totals)


def _build_call(
    pipe: Any,
    base: CallArguments,
    lines: Sequence[PromptLine],
    request: GenerateOptions,
    plan: Plan,
    conditions: CallArguments,
) -> CallArguments:
    """Build the call for some images: those of one prompt, or a batch of prompts over the replicas."""
    seeds = [line.seed for line in lines]
    if request.prompts_file is not None:
        bases = [base | {"prompt": line.prompt} for line in lines]
        if plan.data > 1:
            return build_batch_call(pipe, bases, request, seeds, conditions=conditions)
        base = bases[0]
    return base | build_object_arguments(pipe, request, seeds, conditions=conditions)


@contextlib.contextmanager
def show_decoded_frames(vae: Any, left: int, *, shown: bool) -> Iterator[None]:
    """Show the progress of decoding `left` frames of videos, after the progress of the steps."""
    decoder = getattr(vae, "decoder", None)
    if decoder is None or left == 0:
        yield
        return
    advance: Callable[[int], None] | None = None
    with contextlib.ExitStack() as stack:

        def count_decoded(_module: Any, _inputs: Any, output: Any) -> None:
            # The output is [B, 3, F, H, W] or [B F, 3, H, W].
            nonlocal left, advance
            if isinstance(output, tuple):
                output = output[0]
            if advance is None:
                # The bar appears with the first frame.
                advance = stack.enter_context(show_progress_bar("decoded frames", left, shown=shown))
            decoded = output.shape[0]
            if output.ndim == 5:
                decoded *= output.shape[2]
            # Overlapping tiles have more frames in total than the videos.
            decoded = min(left, decoded)
            left -= decoded
            advance(decoded)

        hook = decoder.register_forward_hook(count_decoded)
        stack.callback(hook.remove)
        yield

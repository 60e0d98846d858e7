"""The work of one rank of `ditile generate`: load, divide, run, and on rank 0 write the images."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ditile
from ditile.cache.report import summarize_cache_reports
from ditile.cli.latents import PARTS, LatentsFacts, LatentsKeeper, describe_config, explain_unkept, find_cut_size
from ditile.cli.outcome import NUM_PERF_CALLS, compute_median_reports, sum_reports, summarize_outcome
from ditile.distributed.transport import gather_json
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
from ditile.runner.requests.prompts import PromptLine, describe_request, list_prompt_lines
from ditile.runner.requests.results import build_png_texts, choose_fps, describe_settings
from ditile.runner.requests.seeds import choose_random_seed

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from ditile.cache.report import ContextReport
    from ditile.runner.runner import Runner


def generate_images(
    request: GenerateOptions,
    run: RunOptions,
    plan: Plan,
    cache: CacheOptions,
    promise: JsonObject,
    kind: OutputKind,
) -> JsonObject | None:
    """Run this rank's part. Rank 0 returns the summary, the others None.

    Args:
        promise: the promise of bounds, in the form of `Promise.to_json_dict`; empty without bounds.
        kind: what the model makes.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    # The standard output is only for the summary.
    with contextlib.redirect_stdout(sys.stderr):
        pipe, runner, conditions = _prepare_runner(request, run, plan, cache)
        seed = request.seed
        if seed is None:
            # Rank 0 chooses for all ranks.
            seed = int(gather_json(choose_random_seed(), runner.mesh.everyone)[0])
        seeds = range(seed, seed + request.num_images)
        call = build_call_arguments(pipe, request, defaults(request.model))

        def make_call() -> CallArguments:
            return call | build_object_arguments(pipe, request, seeds, conditions=conditions)

        if run.warm:
            _warm(runner, make_call(), cache)
        num_outputs = request.num_images
        if cache.perf:
            num_outputs *= 1 + NUM_PERF_CALLS
        texts = build_png_texts(request, plan, cache, call, conditions, promise)
        files = [str(path) for path in run.list_image_paths(request.num_images, seed, request.model)]
        lines = [PromptLine(request.prompt or "", *place) for place in zip(seeds, files, strict=True)]
        keeper = _build_keeper(pipe, request, run, kind, lines, call, texts)
        with keeper.keep_on_failure():
            vae = getattr(pipe, "vae", None)
            with show_decoded_frames(vae, keeper.facts.frames * num_outputs, shown=runner.mesh.rank == 0):
                call_result = _call_and_report(runner, make_call, cache, keeper)
            keeper.facts.write_outputs(pipe, call_result.result, files)
        # Written after the images, which must not be lost if the trace cannot be written.
        _write_trace(runner, run.trace)
        if call_result.result is None:
            return None
        return build_outcome(request, plan, cache, [call_result], seed=seed, images=files, promise=promise, kind=kind)


def generate_prompt_lines(
    request: GenerateOptions,
    run: RunOptions,
    plan: Plan,
    cache: CacheOptions,
    missing_lines: Sequence[PromptLine],
    total: int,
    promise: JsonObject,
    kind: OutputKind,
) -> JsonObject | None:
    """Generate the images of some lines, one on each replica at a time. Rank 0 returns the summary, the others None.

    Args:
        request, run, plan, cache, promise, kind: as in `generate_images`.
        missing_lines: the lines; all ranks use the list of rank 0.
        total: the number of lines in the file.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):
        pipe, runner, conditions = _prepare_runner(request, run, plan, cache)
        pipe.set_progress_bar_config(disable=True)
        is_first = runner.mesh.rank == 0
        missing_lines = [PromptLine(*line) for line in gather_json(list(missing_lines), runner.mesh.everyone)[0]]
        base = build_call_arguments(pipe, request, defaults(request.model))
        texts = build_png_texts(request, plan, cache, base, conditions, promise)
        texts["request"] = describe_request(request, run, plan, cache, defaults(request.model))
        call_results = []
        with show_progress_bar("prompts", total, completed=total - len(missing_lines), shown=is_first) as advance:
            for start in range(0, len(missing_lines), plan.data):
                lines = missing_lines[start : start + plan.data]
                make_call = functools.partial(_build_lines_call, pipe, base, lines, request, plan, conditions)
                if run.warm and start == 0:
                    _warm(runner, make_call(), cache)
                keeper = _build_keeper(pipe, request, run, kind, lines, base, texts)
                with keeper.keep_on_failure():
                    call_result = _call_and_report(runner, make_call, cache, keeper)
                    # The images are dropped, because they would fill the memory.
                    call_results.append(call_result._replace(result=None))
                    keeper.facts.write_outputs(pipe, call_result.result, [line.path for line in lines])
                advance(len(lines))
        if missing_lines:
            _write_trace(runner, run.trace)
    if not is_first:
        return None
    files = [line.path for line in list_prompt_lines(request, run)]
    return build_outcome(
        request,
        plan,
        cache,
        call_results,
        seed=request.seed or 0,
        images=files,
        skipped=len(files) - len(missing_lines),
        promise=promise,
        kind=kind,
    )


def build_outcome(
    request: GenerateOptions,
    plan: Plan,
    cache: CacheOptions,
    call_results: Sequence[RunnerCallResult],
    *,
    seed: int,
    images: list[str],
    skipped: int = 0,
    promise: JsonObject | None = None,
    kind: OutputKind,
) -> JsonObject:
    """Summarize some calls; `skipped` is the number of images that were there before."""
    return summarize_outcome(
        plan=str(plan),
        model=request.model,
        seed=seed,
        images=images,
        kind=kind,
        reports=sum_reports([call_result.reports for call_result in call_results]),
        skipped=skipped,
        settings=cache.describe_settings(),
        left_out=summarize_cache_reports([call_result.saved for call_result in call_results]),
        totals=list(itertools.chain.from_iterable(call_result.totals for call_result in call_results)),
        tracks_memory=cache.track_memory,
        promise=promise,
        components=request.components,
    )


def _prepare_runner(
    request: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Any, Runner, CallArguments]:
    """Load the pipeline, and return it with its runner and the conditions of its calls."""
    from ditile.runner.load import choose_text_workflow

    silence_libraries()
    check_request_by_files(request, plan, cache)
    conditions = read_condition_files(request)
    # Its transformer for other calls need not be read.
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
    """Build what keeps the latents of a call. Raises `ModelError` if the class's cannot be kept on request."""
    refusal = explain_unkept(pipe, call)
    if run.save_latents is not None and refusal is not None:
        raise ModelError(f"save_latents={run.save_latents!r}: {refusal}")
    parts = {}
    dtype = ""
    if refusal is None:
        parts = {name: describe_config(part) for name, part in pipe.components.items() if name in PARTS}
        dtype = str(pipe.vae.dtype).removeprefix("torch.")
    facts = LatentsFacts(
        model=request.model,
        components={name: file for name, file in request.components.items() if name in parts},
        dtype=dtype,
        parts=parts,
        kind=kind,
        fps=choose_fps(pipe, request, call),
        frames=_count_frames(pipe, call),
        size=find_cut_size(pipe, call),
        pictures=[(line.prompt, line.seed) for line in lines],
        settings=describe_settings(pipe, call, texts),
        texts=texts,
    )
    return LatentsKeeper(facts, Path(lines[0].path), run.save_latents)


class RunnerCallResult(NamedTuple):
    """A runner's call: its result on rank 0, reports of all ranks, reports of caches, and the seconds of --perf."""

    result: Any
    reports: list[JsonObject]
    saved: list[ContextReport]
    totals: list[float]


def _warm(runner: Runner, call: CallArguments, cache: CacheOptions) -> None:
    with convert_value_errors(runner.pipe):
        warm_runner(runner, call, is_cached=cache.build_cache_arguments()["cache_config"] is not None)


def _call_and_report(
    runner: Runner, make: Callable[[], CallArguments], cache: CacheOptions, keeper: LatentsKeeper
) -> RunnerCallResult:
    """Call a runner once, or several times for --perf. `make` builds new arguments for each call."""
    reports = []
    num_calls = 1
    if cache.perf:
        # The first call builds what later calls reuse, and is not counted.
        num_calls += NUM_PERF_CALLS
    for _ in range(num_calls):
        with convert_value_errors(runner.pipe):
            result = runner(**make(), output_on="first", watch=StepWatch(on_decode=keeper.decode))
        reports.append(runner.reports())
    saved = []
    if cache.build_cache_arguments()["cache_config"] is not None:
        saved = ditile.summary(runner, logging=False)
    if not cache.perf:
        return RunnerCallResult(result, reports[0], saved, [])
    measured = reports[1:]
    totals = [rank_reports[0]["seconds"]["total"] for rank_reports in measured]
    return RunnerCallResult(result, compute_median_reports(measured), saved, totals)


def _build_lines_call(
    pipe: DiffusionPipeline,
    base: CallArguments,
    lines: Sequence[PromptLine],
    request: GenerateOptions,
    plan: Plan,
    conditions: CallArguments,
) -> CallArguments:
    """Build the call for the images of some lines: one line, or a batch over the replicas."""
    seeds = [line.seed for line in lines]
    bases = [base | {"prompt": line.prompt} for line in lines]
    if plan.data == 1:
        return bases[0] | build_object_arguments(pipe, request, seeds, conditions=conditions)
    return build_batch_call(pipe, bases, request, seeds, conditions=conditions)


def _count_frames(pipe: Any, call: CallArguments) -> int:
    """Count the frames of each video of a call; 0 if they are not known."""
    name = find_argument(pipe, FRAME_COUNTS)
    if name is None:
        return 0
    frames = call.get(name, list_call_parameters(pipe)[name].default)
    return frames if isinstance(frames, int) else 0


@contextlib.contextmanager
def show_decoded_frames(vae: Any, left: int, *, shown: bool) -> Iterator[None]:
    """Show the progress of decoding so many frames of videos, after the progress of the steps."""
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


def _write_trace(runner: Runner, path: str | None) -> None:
    """Write the trace of the last call if there is a path; all ranks call it."""
    try:
        if path is not None:
            runner.write_trace(path)
    except OSError as error:
        raise ModelError(f"trace={path!r} cannot be written: {error.strerror}; the images are there") from error

"""The work of one rank of `ditile generate`: load, divide, run, and on rank 0 write the pictures."""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ditile
from ditile.cache.report import summarize_cache_reports
from ditile.cli.outcome import NUM_PERF_CALLS, Outcome, compute_median_reports, sum_reports
from ditile.distributed.transport import gather_json
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.model_files import defaults, find_model_source
from ditile.runner.requests.arguments import (
    build_batch_call,
    build_call_arguments,
    build_object_arguments,
    check_cache_steps,
    check_request_by_files,
)
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.command_options import RunOptions
from ditile.runner.requests.conditions import describe_choice, read_condition_files
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import (
    check_frame_count,
    convert_value_errors,
    draws_videos,
    find_argument,
    find_frames_ratio,
)
from ditile.runner.requests.prepare import prepare_runner, silence_libraries
from ditile.runner.requests.prompts import PromptLine, describe_request, list_prompt_lines
from ditile.runner.requests.results import add_picture_texts, build_png_texts, choose_fps, list_drawn, write_drawn
from ditile.runner.requests.warm import warm_runner

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch.distributed import ProcessGroup

    from ditile.cache.report import ContextReport
    from ditile.runner.runner import Runner


def draw_pictures(wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> Outcome | None:
    """Runs this rank's part. Rank 0 returns the outcome, the others None.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):  # the standard output is for the summary alone
        pipe, runner, started_from = _prepare_runner(wanted, run, plan, cache)
        seed = _agree_on_seed(wanted.seed, runner.mesh.everyone)
        call = build_call_arguments(pipe, wanted, defaults(wanted.model))
        check_cache_steps(cache, call)
        _say_chosen_class(wanted, pipe, runner)
        seeds = range(seed, seed + wanted.num_images)

        def make_call() -> dict[str, Any]:
            return call | build_object_arguments(pipe, wanted, seeds, conditions=started_from)

        num_videos = wanted.num_images * (1 + NUM_PERF_CALLS if cache.perf else 1)
        if run.warm:
            _warm(runner, make_call(), cache)
        with _show_decoded_frames(pipe, call, num_videos, shown=runner.mesh.rank == 0):
            call_result = _call_and_report(runner, make_call, cache)
        drawn = list_drawn(call_result.result)
        files = [str(path) for path in run.list_image_paths(len(drawn), seed, wanted.model)]
        texts, fps = build_png_texts(wanted, plan, cache, call, started_from), choose_fps(pipe, wanted, call)
        for k, (one, path) in enumerate(zip(drawn, files, strict=True)):
            write_drawn(one, path, fps, add_picture_texts(texts, pipe, call, wanted.prompt, seed + k, one))
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
        pipe, runner, started_from = _prepare_runner(wanted, run, plan, cache)
        pipe.set_progress_bar_config(disable=True)
        everyone, first = runner.mesh.everyone, runner.mesh.rank == 0
        missing_lines = [PromptLine(*line) for line in gather_json(list(missing_lines), everyone)[0]]
        base = build_call_arguments(pipe, wanted, defaults(wanted.model))
        check_cache_steps(cache, base)
        _say_chosen_class(wanted, pipe, runner)
        request_text = describe_request(wanted, run, plan, cache, defaults(wanted.model))
        texts, fps = build_png_texts(wanted, plan, cache, base, started_from), choose_fps(pipe, wanted, base)
        texts |= {"request": request_text}
        call_results: list[RunnerCallResult] = []
        with show_progress_bar("prompts", total, completed=total - len(missing_lines), shown=first) as advance:
            for start in range(0, len(missing_lines), plan.data):
                lines = missing_lines[start : start + plan.data]
                make_call = functools.partial(_build_lines_call, pipe, base, lines, wanted, plan, started_from)
                if run.warm and start == 0:
                    _warm(runner, make_call(), cache)
                call_result = _call_and_report(runner, make_call, cache)
                call_results.append(call_result._replace(result=None))
                for line, one in zip(lines, list_drawn(call_result.result), strict=first):
                    own_texts = add_picture_texts(texts, pipe, base, line.prompt, line.seed, one)
                    write_drawn(one, line.path, fps, own_texts)
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
        has_videos=draws_videos(wanted.model),
        reports=sum_reports([call_result.reports for call_result in call_results]),
        skipped=skipped,
        settings=cache.describe_settings(),
        left_out=summarize_cache_reports([call_result.saved for call_result in call_results]),
        totals=[total for call_result in call_results for total in call_result.totals],
        tracks_memory=cache.track_memory,
    )


def _prepare_runner(
    wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Any, Runner, dict[str, Any]]:
    """The pipeline, its runner, and what its calls start from."""
    silence_libraries()
    check_request_by_files(wanted, plan)
    started_from = read_condition_files(wanted)
    pipe, runner = prepare_runner(
        wanted.model, run, plan, cache, conditions=[*started_from], controlnet=wanted.controlnet
    )
    runner.trace = run.trace is not None
    if (video := started_from.get("video")) is not None:
        check_frame_count(type(pipe).__name__, len(video), find_frames_ratio(pipe), None)
    return pipe, runner, started_from


def _say_chosen_class(wanted: GenerateOptions, pipe: Any, runner: Runner) -> None:
    """Says on rank 0 which class draws from what is given, and why."""
    from ditile.model.pipeline_calls import find_call_owner
    from ditile.runner.load import find_pipeline_kind

    if wanted.conditions and runner.mesh.rank == 0:
        own = find_pipeline_kind(find_model_source(wanted.model)) or type(pipe)
        print(f"pipeline: {describe_choice(find_call_owner(pipe), own, [*wanted.conditions])}", file=sys.stderr)


class RunnerCallResult(NamedTuple):
    """A call of a runner: its result on rank 0, reports of all ranks, reports of caches, and the seconds of --perf."""

    result: Any
    reports: list[dict[str, Any]]
    saved: list[ContextReport]
    totals: list[float]


def _warm(runner: Runner, call: Mapping[str, Any], cache: CacheOptions) -> None:
    with convert_value_errors(runner.pipe):
        warm_runner(runner, call, is_cached=cache.build_cache_arguments()["cache_config"] is not None)


def _call_and_report(runner: Runner, make: Callable[[], dict[str, Any]], cache: CacheOptions) -> RunnerCallResult:
    """Calls a runner once, or as often as --perf wants; `make` makes new arguments for each call."""
    reports = []
    for _ in range(1 + NUM_PERF_CALLS if cache.perf else 1):
        with convert_value_errors(runner.pipe):
            result = runner(**make(), output_on="first")
        reports.append(runner.reports())
    saved = ditile.summary(runner, logging=False) if cache.build_cache_arguments()["cache_config"] is not None else []
    if not cache.perf:
        return RunnerCallResult(result, reports[0], saved, [])
    return RunnerCallResult(
        result, compute_median_reports(reports[1:]), saved, [of_rank[0]["seconds"]["total"] for of_rank in reports[1:]]
    )


def _build_lines_call(
    pipe: DiffusionPipeline,
    base: dict[str, Any],
    lines: Sequence[PromptLine],
    wanted: GenerateOptions,
    plan: Plan,
    started_from: Mapping[str, Any],
) -> dict[str, Any]:
    """The call that makes the pictures of some lines: one on its own, or a batch over the replicas."""
    seeds = [line.seed for line in lines]
    if plan.data == 1:
        return base | build_object_arguments(pipe, wanted, seeds, conditions=started_from) | {"prompt": lines[0].prompt}
    bases = [base | {"prompt": line.prompt} for line in lines]
    return build_batch_call(pipe, bases, wanted, seeds, conditions=started_from)


@contextlib.contextmanager
def _show_decoded_frames(pipe: Any, call: Mapping[str, Any], count: int, *, shown: bool) -> Iterator[None]:
    """Shows how many frames of a call's videos the decoder has made, behind the progress of the steps."""
    from ditile.model.pipeline_calls import list_call_parameters

    name, decoder = find_argument(pipe, FRAME_COUNTS), getattr(getattr(pipe, "vae", None), "decoder", None)
    frames = None if name is None else call.get(name, list_call_parameters(pipe)[name].default)
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

"""What one rank of `ditile generate` does: load, divide, run, and on rank 0 write the pictures."""

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
from ditile.cli.cache_options import Cache
from ditile.cli.image_to_image import image_to_image
from ditile.cli.options import Generate, Run
from ditile.cli.outcome import MEASURED, Outcome, left_out, medians, summed
from ditile.cli.pipelines import check_pictures, class_of, refusals
from ditile.cli.prompts import Line, request
from ditile.cli.prompts import lines as all_lines
from ditile.distributed import env
from ditile.distributed.mesh import join_torchrun
from ditile.distributed.transport import gather_json
from ditile.errors import DitileError, ModelError
from ditile.plan.flags import flag
from ditile.plan.plan import Plan
from ditile.plan.shape import check_size
from ditile.runner.load import defaults, find, load

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch.distributed import ProcessGroup

    from ditile.cache.report import ContextReport
    from ditile.runner.runner import Runner


def draw(wanted: Generate, run: Run, plan: Plan, cache: Cache) -> Outcome | None:
    """Runs this rank's part. Rank 0 returns the outcome, the others None.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):  # the standard output is for the summary alone
        pipe, runner = _prepared(wanted, run, plan, cache)
        seed = _agreed_seed(wanted.seed, runner.mesh.everyone)
        call = arguments(pipe, wanted, defaults(wanted.model))
        _check_steps(cache, call)
        drawn = _drawn(runner, lambda: call | _objects(wanted, range(seed, seed + wanted.num_images)), cache)
        if run.trace is not None:
            runner.write_trace(run.trace)
        if drawn.result is None:
            return None
        files = [str(path) for path in run.images(len(drawn.result.images))]
        texts = _texts(wanted, plan, cache, call)
        for k, (image, path) in enumerate(zip(drawn.result.images, files, strict=True)):
            _write(image, path, texts | {"prompt": str(wanted.prompt), "seed": str(seed + k)})
        return Outcome(
            plan=str(plan), model=wanted.model, seed=seed, images=files, reports=drawn.reports,
            settings=cache.settings(), left_out=left_out([drawn.saved]), totals=drawn.totals,
            tracks_memory=cache.track_memory,
        )  # fmt: skip


def draw_lines(
    wanted: Generate, run: Run, plan: Plan, cache: Cache, todo: Sequence[Line], total: int
) -> Outcome | None:
    """Makes the pictures of some lines, as many at once as there are replicas. Rank 0 returns the outcome, others None.

    Args:
        wanted, run, plan, cache: as in `draw`.
        todo: the lines; rank 0's count.
        total: lines of the file.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):
        pipe, runner = _prepared(wanted, run, plan, cache)
        pipe.set_progress_bar_config(disable=True)
        everyone, first = runner.mesh.everyone, runner.mesh.rank == 0
        todo = [Line(*line) for line in gather_json(list(todo), everyone)[0]]
        base = arguments(pipe, wanted, defaults(wanted.model))
        _check_steps(cache, base)
        asked = request(wanted, run, plan, cache, defaults(wanted.model))
        texts = _texts(wanted, plan, cache, base) | {"request": asked}
        every: list[Drawn] = []
        with _bar(total, total - len(todo), shown=first) as advance:
            for start in range(0, len(todo), plan.data):
                lines = todo[start : start + plan.data]
                drawn = _drawn(runner, functools.partial(_of_lines, base, lines, wanted, plan), cache)
                every.append(drawn._replace(result=None))
                for line, image in zip(lines, drawn.result.images if drawn.result is not None else [], strict=first):
                    _write(image, line.path, texts | {"prompt": line.prompt, "seed": str(line.seed)})
                advance(len(lines))
        if run.trace is not None and todo:
            runner.write_trace(run.trace)
    return outcome_of_lines(wanted, run, plan, cache, len(todo), every) if first else None


def outcome_of_lines(
    wanted: Generate, run: Run, plan: Plan, cache: Cache, made: int, every: Sequence[Drawn]
) -> Outcome:
    """The outcome of a file of prompts of which some pictures were made now."""
    files = [line.path for line in all_lines(wanted, run)]
    return Outcome(
        plan=str(plan), model=wanted.model, seed=wanted.seed or 0, images=files,
        reports=summed([drawn.reports for drawn in every]), skipped=len(files) - made, settings=cache.settings(),
        left_out=left_out([drawn.saved for drawn in every]), totals=[t for drawn in every for t in drawn.totals],
        tracks_memory=cache.track_memory,
    )  # fmt: skip


class Drawn(NamedTuple):
    """A call of a runner: its result on rank 0, the reports of all ranks, what caches saved, seconds of --perf."""

    result: Any
    reports: list[dict[str, Any]]
    saved: list[ContextReport]
    totals: list[float]


def _drawn(runner: Runner, make: Callable[[], dict[str, Any]], cache: Cache) -> Drawn:
    """Calls a runner with arguments that are made anew for each call: once, or as often as --perf wants."""
    reports = []
    for _ in range(1 + MEASURED if cache.perf else 1):
        with refusals(runner.pipe):
            result = runner(**make(), output="first")
        reports.append(runner.reports())
    saved = ditile.summary(runner, logging=False) if cache.configs()["cache_config"] is not None else []
    if not cache.perf:
        return Drawn(result, reports[0], saved, [])
    return Drawn(result, medians(reports[1:]), saved, [of_rank[0]["seconds"]["total"] for of_rank in reports[1:]])


def _prepared(wanted: Generate, run: Run, plan: Plan, cache: Cache) -> tuple[Any, Runner]:
    quiet()
    if run.threads is not None:
        _set_threads(run.threads)
    check_pictures(class_of(find(wanted.model)))
    whole = cache.lora is not None and plan.tensor > 1  # whose factors are cut with the weights
    pipe: Any = load(wanted.model, dtype=run.dtype, plan=None if whole else plan)
    if wanted.image is not None:
        pipe = image_to_image(pipe)
    if cache.lora is not None:
        _add_lora(pipe, cache.lora, fuse=cache.fuse_lora)
    if run.compile:
        ditile.set_compile_configs(compute_comm_overlap=not cache.disable_compute_comm_overlap)
    join_torchrun(run.stall_timeout)
    runner = ditile.parallelize(
        pipe, plan, device=run.device, text_after=run.text_after, attention=run.attention, cp_plan=cache.cp_plan,
        compile=run.compile,
    )  # fmt: skip
    runner.trace = run.trace is not None
    _do_less(runner, cache)
    return pipe, runner


def _add_lora(pipe: Any, source: str, *, fuse: bool) -> None:
    """Loads a LoRA into what this rank holds, and fuses it if that is wanted."""
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
        raise ModelError(f"lora={source!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def _do_less(runner: Runner, cache: Cache) -> None:
    """Quantizes what this rank holds, and leaves blocks out.

    Raises:
        ModelError: also if nothing could be left out, of which the API warns.
    """
    from ditile.cache.cached import IdleCacheWarning

    wanted = cache.configs()
    wanted.pop("attention_backend", None)  # the runner has it
    if wanted["cache_config"] is None and "quantize_config" not in wanted:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleCacheWarning)
            ditile.enable_cache(runner, **wanted)
    except IdleCacheWarning as warning:
        raise ModelError(str(warning)) from warning


def _check_steps(cache: Cache, call: Mapping[str, Any]) -> None:
    """Raises `ModelError`, before a step is made, for a step mask that is too short or steps that must all compute."""
    from ditile.cache.build import idle_in

    config = cache.configs()["cache_config"]
    if config is not None and "num_inference_steps" in call:
        steps = call["num_inference_steps"]
        if reason := idle_in(config, max(1, min(steps, int(steps * call.get("strength", 1))))):
            raise ModelError(reason)


def _of_lines(base: dict[str, Any], lines: Sequence[Line], wanted: Generate, plan: Plan) -> dict[str, Any]:
    """The call that makes the pictures of some lines: one on its own, or a batch over the replicas."""
    objects = _objects(wanted, [line.seed for line in lines], alone=plan.data == 1)
    if plan.data == 1:
        return base | objects | {"prompt": lines[0].prompt}
    call = base | objects | {"prompt": [line.prompt for line in lines]}
    if "negative_prompt" in base:
        call["negative_prompt"] = [base["negative_prompt"]] * len(lines)
    return call


@contextlib.contextmanager
def _bar(total: int, done: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over the prompts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda count: progress.advance(task, count)


def arguments(pipe: DiffusionPipeline, wanted: Generate, base: dict[str, Any]) -> dict[str, Any]:
    """The plain call arguments: the model's own, overridden by what was asked for.

    Raises:
        ModelError: if this pipeline has no use for something that was asked for, or no room for the size.
    """
    call = taken(type(pipe), wanted, base)
    _check_size(pipe, call)
    return call


def taken(pipeline: type, wanted: Generate, base: dict[str, Any]) -> dict[str, Any]:
    """The same of a class of pipelines; whether the size will do is not known of it."""
    known = inspect.signature(pipeline.__call__).parameters
    kind, given = pipeline.__name__, _given(wanted, base)
    if refused := sorted(set(given) - set(known)):
        raise ModelError(f"{kind} takes no {', '.join(map(_flag, refused))}; leave it out")
    call = {name: value for name, value in base.items() if name in known} | given
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")  # without one, diffusers does no true guidance
    if wanted.negative_prompt is not None:
        _check_negative(kind, call, known)
    _check_strength(call, known)
    return call


def _given(wanted: Generate, base: dict[str, Any]) -> dict[str, Any]:
    """What was asked for. --guidance sets true guidance where the model's own options do and --true-cfg does not."""
    given = wanted.call()
    if wanted.guidance is None:
        return given
    true = "true_cfg_scale" in base and wanted.true_cfg is None
    return given | {"true_cfg_scale" if true else "guidance_scale": wanted.guidance}


def planned_call(wanted: Generate, base: dict[str, Any]) -> dict[str, Any]:
    """The call of a dry run, which has no pipeline to ask."""
    call = base | _given(wanted, base) | {"num_images_per_prompt": wanted.num_images}
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")
    return call


def _check_negative(kind: str, call: dict[str, Any], known: Any) -> None:
    scale = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    value, said = call.get(scale, known[scale].default if scale in known else 1.0), _flag(scale)
    if value <= 1:
        raise ModelError(f"{kind} ignores a negative prompt at {said} {value:g}; try {said} above 1, or leave it out")


def _flag(argument: str) -> str:
    """The flag that says an argument of a pipeline's call."""
    names = {"true_cfg_scale": "true_cfg", "guidance_scale": "guidance", "num_inference_steps": "steps"}
    return flag(names.get(argument, argument))


def _check_size(pipe: Any, call: dict[str, Any]) -> None:
    """Where there is a `ModelSpec`, which knows a token's side; other pipelines check themselves: see `refusals`."""
    from ditile.models.registry import known_spec

    transformer: Any = getattr(pipe, "transformer", None)
    spec = known_spec(transformer)
    if spec is not None:
        check_size(call, pipe.vae_scale_factor * spec.latent_per_token(transformer.config))


def _check_strength(call: dict[str, Any], known: Any) -> None:
    if "strength" in known:
        strength = call.get("strength", known["strength"].default)
        steps = call.get("num_inference_steps", known["num_inference_steps"].default)
        if int(steps * strength) < 1:
            raise ModelError(f"strength={strength} of {steps} steps is less than one step; raise either")


def _objects(wanted: Generate, seeds: Sequence[int], *, alone: bool | None = None) -> dict[str, Any]:
    """The call arguments that are objects: generators, which every rank makes alike, and the picture.

    With several generators there are as many pictures: each draws the noise of its own.
    """
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {"generator": generators[0] if len(seeds) == 1 and alone is not False else generators}
    if wanted.num_images > 1:
        call["num_images_per_prompt"] = wanted.num_images
    if wanted.image is not None:
        from PIL import Image

        with Image.open(wanted.image) as image:
            picture = image.convert("RGB")
        several = isinstance(call["generator"], list)
        call["image"] = [picture] * len(seeds) if several else picture
    return call


def _texts(wanted: Generate, plan: Plan, cache: Cache, call: dict[str, Any]) -> dict[str, str]:
    """What a picture says about how it was made, its prompt and seed apart."""
    settings = cache.settings()
    return {
        "Software": f"ditile {ditile.__version__}", "model": wanted.model, "plan": str(plan),
        "settings": json.dumps(call),
    } | ({"cache": json.dumps(settings)} if settings else {})  # fmt: skip


def _write(image: Image.Image, path: str, texts: dict[str, str]) -> None:
    from ditile.cli import png

    try:
        Path(path).parent.mkdir(exist_ok=True)
        png.save(image, Path(path), texts)
    except OSError as error:
        raise ModelError(f"out={path!r} cannot be written: {error}") from error


def _agreed_seed(seed: int | None, control: ProcessGroup | None) -> int:
    """The given seed; without one, rank 0's own, which torchrun's ranks have yet to hear."""
    if seed is not None:
        return seed
    return int(gather_json(secrets.randbelow(2**31), control)[0])


def _set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def quiet() -> None:
    """Leaves the terminal to one progress bar; what diffusers has to say is said by rank 0."""
    env.hush()
    from transformers.utils import logging

    logging.set_verbosity_error()  # before diffusers is imported, which is what it would warn about
    logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    place = env.torchrun()
    if place is not None and place.rank:
        diffusers_logging.set_verbosity_error()

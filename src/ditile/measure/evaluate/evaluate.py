"""`ditile evaluate`: measures how plans and caches change pictures, and their latency.

Every caption is drawn by the original pipeline (one process, no cache) and by each plan with each cache, with the same
seed. Pictures are compared with those of the original and with their captions; sets of pictures are compared with the
original's and with reference pictures. The results are a table, `evaluation.json` (from which `ditile generate
--min-psnr` chooses), a sheet of pictures side by side, and a figure of quality over latency (docs/evaluation.md).
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from ditile.distributed import cpus, env, files
from ditile.distributed.launch import launch
from ditile.distributed.torchrun import leave_process_group
from ditile.measure.bench.turns import read_load_average
from ditile.measure.evaluate.captions import Caption, load_captions
from ditile.measure.evaluate.draw import CaptionTurn, EvaluationTask, draw_session
from ditile.measure.evaluate.figures import ROWS, draw_contact_sheet, draw_tradeoff
from ditile.measure.evaluate.metrics import check_torchmetrics
from ditile.measure.evaluate.options import ORIGINAL, EvaluateOptions, EvaluationSetting, JudgeOptions, SessionOptions
from ditile.measure.evaluate.scores import Judgement, MetricPanel
from ditile.measure.evaluate.store import (
    JOB_FILE,
    EvaluationFolder,
    PictureKey,
    PictureRow,
    list_complete_settings,
    summarize_settings,
)
from ditile.model.registry import list_model_specs
from ditile.plan.errors import ModelError
from ditile.plan.extras import is_installed
from ditile.plan.plan import Plan
from ditile.plan.version import __version__
from ditile.planner.budget import FILE
from ditile.planner.dry_run import build_dry_run_job
from ditile.runner.load import defaults, find_model_source
from ditile.runner.requests.console import is_writing_process, make_numbered_tables
from ditile.runner.requests.facts import build_dry_run_call
from ditile.runner.requests.pictures import save_picture_with_texts
from ditile.runner.requests.prepare import silence_libraries

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_NUM_CAPTIONS = 10
CONTACT_SHEET_FILE, PARETO_FILE = "contact-sheet.png", "pareto.png"
INTERLEAVED = (
    "each caption by the original and all settings in turn, one session for each number of ranks, in an order that "
    "rotates; seconds of the whole call (text, denoising, decoding), ratios within a turn, medians over captions"
)
ONE_AT_A_TIME = (
    "one plan after another, the original first; seconds of the whole call (text, denoising, decoding), ratios to the "
    "same caption of the original, medians over captions"
)


def run_evaluation(wanted: EvaluateOptions, judge: JudgeOptions, session: SessionOptions) -> dict[str, Any] | None:
    """Draws missing pictures, judges all, and writes the files. Rank 0 returns the content of `evaluation.json`.

    Raises:
        DitileError: if a plan, a cache or an option does not fit; nothing was written then.
    """
    silence_libraries()
    check_torchmetrics()
    settings = wanted.candidate_settings
    _check_settings_fit(wanted, settings)
    captions = load_captions(wanted.captions, wanted.num, DEFAULT_NUM_CAPTIONS)
    threads = session.threads or max(1, cpus.count_usable_cores() // max(s.world_size for s in settings))
    job, store = _build_job_record(wanted, session, threads), EvaluationFolder(Path(session.out))
    rows: dict[PictureKey, PictureRow] = {}
    panel = None
    if is_writing_process():
        store.check_same_job(job)
        rows = store.read_rows_on_disk(captions, wanted.seed)
        panel = MetricPanel.from_options(judge, wanted.model, captions)
    for task in _list_session_tasks(wanted, session, job, settings, threads):
        turns = _list_missing_turns(task, captions, settings, rows)
        if turns or env.read_torchrun_place() is not None:
            _run_session_task(task, turns)
        rows = store.read_rows_on_disk(captions, wanted.seed) if is_writing_process() else {}
    if env.read_torchrun_place() is not None:
        leave_process_group()
    if panel is None:
        return None
    return _judge_and_write(wanted, session, store, panel, captions, rows)


def build_evaluation_tables(evaluation: Mapping[str, Any]) -> list[Table | str]:
    """The means of an evaluation for a terminal: tables of numbers, and the settings as lines."""
    rows = evaluation["settings"]
    measures = [(name, about["title"], about["digits"]) for name, about in evaluation["metrics"].items()]
    if evaluation["frechet"] is not None:
        measures += [("frechet_original", "FID to original", 3)]
        measures += [("frechet_references", "FID to references", 3)] if evaluation["references"] else []
    labels = [
        f"{'original' if row['setting'] == str(ORIGINAL) else row['plan']}"
        + ("" if row["cache"] == "none" else f" | {row['cache']}")
        for row in rows
    ]
    columns = {
        "ranks": [str(row["world"]) for row in rows],
        "seconds": [f"{row['seconds']:.2f}" for row in rows],
        "latency": [f"{100 * row['latency_ratio']:.0f} %" for row in rows],
        "speed-up": [f"{row['speedup']:.2f}x" for row in rows],
        "saved, %": [f"{100 * row['blocks_saved']:.0f}" for row in rows],
    } | {title: [f"{row[name]:.{digits}f}" if name in row else "-" for row in rows] for name, title, digits in measures}
    title = f"{evaluation['model']}, {evaluation['captions']['count']} caption(s)"
    return [title, *make_numbered_tables(labels, columns)]


def list_table_remarks(evaluation: Mapping[str, Any]) -> Iterable[str]:
    """What a reader of the table must know."""
    yield f"latency: {evaluation['measured']['how']}"
    again = evaluation["measured"]["original_again_psnr"]
    if again is not None:
        same = "the same pictures" if again >= 100 else f"other pictures, at worst {again:.1f} dB away"
        yield f"the original, drawn again in later turns, made {same}"
    frechet, count = evaluation["frechet"], evaluation["captions"]["count"]
    if frechet is not None and count <= frechet["features"]:
        yield f"{count} pictures for {frechet['features']} features: such an FID only ranks settings"
    for name, why in evaluation["absent"].items():
        yield f"no {name}: {why}"


def _check_settings_fit(wanted: EvaluateOptions, settings: Sequence[EvaluationSetting]) -> None:
    """Raises `PlanError` or `ModelError` unless all settings fit the model, and torchrun's ranks."""
    source = find_model_source(wanted.model)
    place = env.read_torchrun_place()
    for setting in settings:
        if place is not None and not setting.has_original_plan and setting.world_size != place.world:
            Plan.parse(setting.plan).check_world(place.world)
    try:
        index = diffusers.DiffusionPipeline.load_config(source)
    except OSError as error:
        raise ModelError(f"model {wanted.model!r} cannot be loaded: {' '.join(str(error).split())}") from error
    known = {cls.__name__ for cls in list_model_specs()}
    if index.get("transformer", (None, None))[1] not in known:
        return  # other models are checked by `parallelize`, before they draw
    for setting in settings:
        build_dry_run_job(wanted.build_generate_options(), Plan.parse(setting.plan), setting.cache_arguments)


def _build_job_record(wanted: EvaluateOptions, session: SessionOptions, threads: int) -> dict[str, Any]:
    """The facts that all pictures of an evaluation have in common."""
    call = build_dry_run_call(wanted.build_generate_options(), defaults(wanted.model))
    del call["prompt"], call["num_images_per_prompt"]
    return {
        "model": wanted.model,
        "call": call,
        "dtype": session.dtype,
        "device": session.device,
        "threads": threads,
        "together": not session.one_at_a_time,
    }


def _list_session_tasks(
    wanted: EvaluateOptions,
    session: SessionOptions,
    job: dict[str, Any],
    settings: Sequence[EvaluationSetting],
    threads: int,
) -> list[EvaluationTask]:
    """The sessions in their order. Pictures of one process that no other session draws are drawn by the first."""
    plans = list(dict.fromkeys(setting.plan for setting in settings if not setting.has_original_plan))
    world = {plan: Plan.parse(plan).world for plan in plans}
    groups: list[tuple[int, list[str], bool, str]] = [(1, [], True, "one process")]
    if session.one_at_a_time:
        groups += [(world[plan], [plan], False, plan) for plan in plans]
    elif plans:
        worlds = sorted({*world.values()}, reverse=True)
        groups = [(n, [plan for plan in plans if world[plan] == n], True, f"{n} rank(s)") for n in worlds]
    return [
        EvaluationTask(wanted, session, job, n, tuple(of_group), original, threads, "one process" if n == 1 else title)
        for n, of_group, original, title in groups
    ]


def _list_missing_turns(
    task: EvaluationTask,
    captions: Sequence[Caption],
    settings: Sequence[EvaluationSetting],
    rows: Mapping[PictureKey, PictureRow],
) -> list[CaptionTurn]:
    """The captions of a session of which pictures are missing; all ranks use the list of rank 0."""
    first = not task.session.one_at_a_time or not task.plans
    task_settings = [s for s in settings if s.plan in task.plans or (s.has_original_plan and first)]
    if first:
        task_settings = [ORIGINAL, *task_settings]
    turns = []
    for place, caption in enumerate(captions):
        missing_settings = tuple(setting for setting in task_settings if (setting, place) not in rows)
        if missing_settings:
            turns.append(CaptionTurn(place, caption.text, task.wanted.seed + place, missing_settings))
    return turns


def _run_session_task(task: EvaluationTask, turns: list[CaptionTurn]) -> None:
    if env.read_torchrun_place() is None and task.world > 1:
        launch(draw_session, task.world, (task, turns), threads=task.threads, stall_timeout=task.session.stall_timeout)
    else:
        draw_session(task, turns)


def _judge_and_write(
    wanted: EvaluateOptions,
    session: SessionOptions,
    store: EvaluationFolder,
    panel: MetricPanel,
    captions: Sequence[Caption],
    rows: dict[PictureKey, PictureRow],
) -> dict[str, Any]:
    """Judges the pictures, writes all files, and returns the evaluation."""
    count = len(captions)
    complete_settings = list_complete_settings(rows, count)
    settings = [
        *(s for s in [ORIGINAL, *wanted.candidate_settings] if s in complete_settings),
        *(s for s in complete_settings if s not in wanted.candidate_settings),
    ]
    settings = list(dict.fromkeys(settings))
    judged: Judgement = panel.judge_settings(store, rows, settings, count)
    scored_rows = {(setting, place): rows[setting, place] for setting in settings for place in range(count)}
    store.write_picture_scores(scored_rows, captions, wanted.seed)
    figure = is_installed("matplotlib")
    absent = judged.absent | ({} if figure else {PARETO_FILE: "matplotlib is not installed"})
    again = [row["original_again_psnr"] for row in rows.values() if row["original_again_psnr"] is not None]
    evaluation = {
        "model": wanted.model,
        "job": json.loads((store.out / JOB_FILE).read_text("utf-8")),
        "captions": {
            "source": wanted.captions,
            "count": count,
            "seed": wanted.seed,
        },
        "measured": {
            "how": ONE_AT_A_TIME if session.one_at_a_time else INTERLEAVED,
            "date": f"{datetime.date.today()}",
            "original_again_psnr": min(again, default=None),
            **_describe_machine(),
        },
        "metrics": judged.metrics,
        "absent": absent,
        "frechet": judged.frechet,
        "resize": panel.side,
        "references": judged.references,
        "settings": [row | judged.distances[row["setting"]] for row in summarize_settings(rows, settings, count)],
    }
    files.write_json_file(store.out / FILE, evaluation)
    _write_contact_sheet(store, settings, captions, rows)
    if figure:
        draw_tradeoff(evaluation, store.out / PARETO_FILE)
    return evaluation


def _write_contact_sheet(
    store: EvaluationFolder,
    settings: Sequence[EvaluationSetting],
    captions: Sequence[Caption],
    rows: dict[PictureKey, PictureRow],
) -> None:
    columns = [
        (
            setting,
            [(store.picture_path(setting, k), rows[setting, k]["scores"]["psnr"]) for k in range(len(captions))][:ROWS],
        )
        for setting in settings
    ]
    sheet = draw_contact_sheet(columns, [caption.text for caption in captions][:ROWS])
    save_picture_with_texts(sheet, store.out / CONTACT_SHEET_FILE, {})


def _describe_machine() -> dict[str, Any]:
    """Machine, load and versions."""
    names = sorted({torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())})
    return {
        "machine": ", ".join(names) or f"{cpus.count_usable_cores()} core(s), {platform.machine()}",
        "load_average": read_load_average(),
        "python": platform.python_version(),
        "ditile": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }

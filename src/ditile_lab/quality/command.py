"""`ditile evaluate`: measures how plans and caches change images, and their latency.

For every caption the original pipeline (one process, no cache) and each plan with each cache make an image from the
same seed. Each image is compared with the original pipeline's image and with its caption; sets of images are compared
with the original pipeline's set and with reference images. The results are a table, `evaluation.json`, and a sheet of
images side by side (docs/evaluation.md).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import diffusers

from ditile.distributed import cpus, env
from ditile.distributed.launch import launch
from ditile.distributed.torchrun import leave_process_group
from ditile.model.call_families import FAMILIES
from ditile.plan.errors import ModelError, join_error_lines
from ditile.plan.plan import Plan
from ditile.planner.dry_run import build_dry_run_job
from ditile.runner.model_files import defaults, find_model_source
from ditile.runner.requests.console import is_writing_process, make_numbered_tables
from ditile.runner.requests.facts import build_dry_run_call
from ditile.runner.requests.pictures import hide_local_path
from ditile.runner.requests.prepare import silence_libraries
from ditile_lab.quality.captions import Caption, load_captions
from ditile_lab.quality.contact_sheet import SHEET_ROWS, draw_contact_sheet
from ditile_lab.quality.metrics import check_torchmetrics
from ditile_lab.quality.options import ORIGINAL, EvaluateOptions, EvaluationSetting, JudgeOptions, SessionOptions
from ditile_lab.quality.scores import MetricPanel
from ditile_lab.quality.session import CaptionTurn, EvaluationTask, run_evaluation_session
from ditile_lab.quality.store import (
    EvaluationFolder,
    ImageKey,
    list_complete_settings,
    save_image_with_texts,
    summarize_settings,
)
from ditile_lab.rows import Row, list_values, write_json_file
from ditile_lab.sessions import collect_machine_facts, read_load_average

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_NUM_CAPTIONS = 10
EVALUATION_FILE = "evaluation.json"
CONTACT_SHEET_FILE = "contact-sheet.png"
INTERLEAVED = (
    "each caption by the original and all settings in turn, one session for each number of ranks, in an order that "
    "rotates; seconds of the whole call (text, denoising, decoding), ratios within a turn, medians over captions"
)
ONE_AT_A_TIME = (
    "one plan after another, the original first; seconds of the whole call (text, denoising, decoding), ratios to the "
    "same caption of the original, medians over captions"
)


def run_evaluation(options: EvaluateOptions, judge: JudgeOptions, session: SessionOptions) -> Row | None:
    """Generate the missing images, judge all images, and write the files.

    Rank 0 returns the content of `evaluation.json`, other ranks None.

    Raises:
        DitileError: if a plan, a cache or an option does not fit; nothing is written in that case.
    """
    silence_libraries()
    check_torchmetrics()
    settings = options.candidate_settings
    _check_settings_fit(options, settings)
    captions = load_captions(options.captions, options.num, DEFAULT_NUM_CAPTIONS)
    # The ranks of the largest plan share the cores. All sessions use the same number of threads per rank, so that their
    # times can be compared.
    most_ranks = max(setting.world_size for setting in settings)
    threads = session.threads or max(1, cpus.count_usable_cores() // most_ranks)
    job = _build_job_record(options, session, threads)
    evaluation = Evaluation(options, session, job, captions, EvaluationFolder(Path(session.out)))
    is_writing = is_writing_process()
    rows = {}
    panel = None
    if is_writing:
        # Everything that may be refused is checked before the first image.
        evaluation.folder.check_same_job(job)
        rows = evaluation.read_rows()
        # This loads the networks that judge images, and refuses options that need a missing one.
        panel = MetricPanel.from_options(judge, options.model, captions)
    for task in _list_session_tasks(options, session, job, settings, threads):
        turns = _list_missing_turns(task, captions, settings, rows)
        # Under torchrun only rank 0 knows whether images are missing.
        if turns or env.read_torchrun_place() is not None:
            _run_session_task(task, turns)
        if is_writing:
            rows = evaluation.read_rows()
    if env.read_torchrun_place() is not None:
        leave_process_group()
    if panel is None:
        return None
    return evaluation.judge(panel, rows)


def build_evaluation_tables(evaluation: Row) -> list[Table | str]:
    """Build the means of an evaluation for a terminal: numbered tables, and a line for each setting."""
    columns: dict[str, list[str]] = {"ranks": [], "seconds": [], "latency": [], "speed-up": [], "saved, %": []}
    measures = [(name, about["title"], about["digits"]) for name, about in evaluation["metrics"].items()]
    if evaluation["frechet"] is not None:
        measures.append(("frechet_original", "FID to original", 3))
        if evaluation["references"]:
            measures.append(("frechet_references", "FID to references", 3))
    labels = []
    for row in evaluation["settings"]:
        label = row["plan"]
        if row["setting"] == str(ORIGINAL):
            label = "original"
        if row["cache"] != ORIGINAL.cache:
            label += f" | {row['cache']}"
        labels.append(label)
        columns["ranks"].append(str(row["world"]))
        columns["seconds"].append(f"{row['seconds']:.2f}")
        columns["latency"].append(f"{100 * row['latency_ratio']:.0f} %")
        columns["speed-up"].append(f"{row['speedup']:.2f}x")
        columns["saved, %"].append(f"{100 * row['blocks_saved']:.0f}")
        for name, title, digits in measures:
            text = f"{row[name]:.{digits}f}" if name in row else "-"
            columns.setdefault(title, []).append(text)
    title = f"{evaluation['model']}, {evaluation['captions']['count']} caption(s)"
    return [title, *make_numbered_tables(labels, columns)]


def list_table_remarks(evaluation: Row) -> Iterable[str]:
    """Yield remarks that explain the table to its reader."""
    yield f"latency: {evaluation['measured']['how']}"
    psnr_again = evaluation["measured"]["original_again_psnr"]
    if psnr_again is not None:
        result = f"other images, at worst {psnr_again:.1f} dB away"
        if psnr_again >= 100:
            result = "the same images"
        yield f"the original, generated again in later turns, made {result}"
    frechet = evaluation["frechet"]
    count = evaluation["captions"]["count"]
    if frechet is not None and count <= frechet["features"]:
        yield f"{count} images for {frechet['features']} features: such an FID only ranks settings"
    for name, reason in evaluation["absent"].items():
        yield f"no {name}: {reason}"


def _check_settings_fit(options: EvaluateOptions, settings: Sequence[EvaluationSetting]) -> None:
    """Raise `PlanError` or `ModelError` unless all settings fit the model and torchrun's ranks."""
    source = find_model_source(options.model, components=options.components)
    # Under torchrun no other ranks can be started, so every plan must use all of them.
    place = env.read_torchrun_place()
    for setting in settings:
        if place is not None and not setting.has_original_plan and setting.world_size != place.world:
            Plan.parse(setting.plan).check_world(place.world)
    try:
        index = diffusers.DiffusionPipeline.load_config(source)
    except OSError as error:
        raise ModelError(f"model {options.model!r} cannot be loaded: {join_error_lines(error)}") from error
    known = {cls.__name__ for cls in FAMILIES}
    # Other models are checked by `parallelize`, before they generate.
    if index.get("transformer", (None, None))[1] in known:
        for setting in settings:
            build_dry_run_job(options.build_generate_options(), Plan.parse(setting.plan), setting.cache_arguments)


def _build_job_record(options: EvaluateOptions, session: SessionOptions, threads: int) -> Row:
    """Build the record of facts that all images of an evaluation have in common."""
    call = build_dry_run_call(options.build_generate_options(), defaults(options.model))
    # The prompt and the number of images differ from caption to caption.
    del call["prompt"]
    del call["num_images_per_prompt"]
    weights = {name: hide_local_path(file) for name, file in options.components.items()}
    return {
        "model": options.model,
        "components": weights,
        "call": call,
        "dtype": session.dtype,
        "device": session.device,
        "threads": threads,
        "together": not session.one_at_a_time,
    }


def _list_session_tasks(
    options: EvaluateOptions,
    session: SessionOptions,
    job: Row,
    settings: Sequence[EvaluationSetting],
    threads: int,
) -> list[EvaluationTask]:
    """List the sessions in order: one for each number of ranks, the largest first, or one for each plan."""
    worlds = {setting.plan: setting.world_size for setting in settings if not setting.has_original_plan}
    alone = EvaluationTask(options, session, job, 1, (), True, threads, "one process")
    if not worlds:
        return [alone]
    if session.one_at_a_time:
        tasks = [alone]
        for plan, world in worlds.items():
            tasks.append(replace(alone, world=world, plans=(plan,), with_original=False, title=plan))
        return tasks
    tasks = []
    for world in sorted(set(worlds.values()), reverse=True):
        plans = tuple(plan for plan in worlds if worlds[plan] == world)
        title = "one process" if world == 1 else f"{world} rank(s)"
        tasks.append(replace(alone, world=world, plans=plans, title=title))
    return tasks


def _list_missing_turns(
    task: EvaluationTask,
    captions: Sequence[Caption],
    settings: Sequence[EvaluationSetting],
    rows: Mapping[ImageKey, Row],
) -> list[CaptionTurn]:
    """List the captions for which a session has images to make; all ranks use the list of rank 0."""
    task_settings = []
    if task.with_original:
        task_settings.append(ORIGINAL)
    for setting in settings:
        # The first session also makes the images of settings that run in one process, so later sessions find them.
        if setting.plan in task.plans or (setting.has_original_plan and task.with_original):
            task_settings.append(setting)
    turns = []
    for place, caption in enumerate(captions):
        missing_settings = tuple(setting for setting in task_settings if (setting, place) not in rows)
        if missing_settings:
            turns.append(CaptionTurn(place, caption.text, task.options.seed + place, missing_settings))
    return turns


def _run_session_task(task: EvaluationTask, turns: list[CaptionTurn]) -> None:
    if env.read_torchrun_place() is not None or task.world == 1:
        run_evaluation_session(task, turns)
        return
    launch(
        run_evaluation_session,
        task.world,
        (task, turns),
        threads=task.threads,
        stall_timeout=task.session.stall_timeout,
    )


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, in the process that writes its files.

    Attributes:
        job: the facts that all images have in common.
        folder: the folder of all files.
    """

    options: EvaluateOptions
    session: SessionOptions
    job: Row
    captions: Sequence[Caption]
    folder: EvaluationFolder

    def read_rows(self) -> dict[ImageKey, Row]:
        """Return the rows of the images that exist already."""
        return self.folder.read_rows_on_disk(self.captions, self.options.seed)

    def judge(self, panel: MetricPanel, rows: dict[ImageKey, Row]) -> Row:
        """Judge the images, write all files, and return the content of `evaluation.json`."""
        count = len(self.captions)
        complete = list_complete_settings(rows, count)
        # First the settings of this command, then complete ones that earlier commands left in the folder.
        ordered = dict.fromkeys([ORIGINAL, *self.options.candidate_settings, *complete])
        settings = [setting for setting in ordered if setting in complete]
        judged = panel.judge_settings(self.folder, rows, settings, count)
        self.folder.write_image_scores(rows, self.captions, self.options.seed)
        how = ONE_AT_A_TIME if self.session.one_at_a_time else INTERLEAVED
        evaluation = {
            "model": self.options.model,
            "job": self.job,
            "captions": {"source": self.options.captions, "count": count, "seed": self.options.seed},
            "measured": {
                "how": how,
                "date": f"{datetime.date.today()}",
                "original_again_psnr": min(list_values(rows.values(), "original_again_psnr"), default=None),
                "load_average": read_load_average(),
                "machine": collect_machine_facts(self.session.device),
            },
            "metrics": judged.metrics,
            "absent": judged.absent,
            "frechet": judged.frechet,
            "resize": panel.side,
            "references": judged.references,
            "settings": [row | judged.distances[row["setting"]] for row in summarize_settings(rows, settings, count)],
        }
        # This is written before the sheet, which is less important and may fail.
        write_json_file(self.folder.out / EVALUATION_FILE, evaluation)
        self._write_contact_sheet(settings, rows)
        return evaluation

    def _write_contact_sheet(self, settings: Sequence[EvaluationSetting], rows: Mapping[ImageKey, Row]) -> None:
        captions = [caption.text for caption in self.captions[:SHEET_ROWS]]
        columns = []
        for setting in settings:
            images = []
            for place in range(len(captions)):
                psnr = rows[setting, place]["scores"]["psnr"]
                images.append((self.folder.image_path(setting, place), psnr))
            columns.append((setting, images))
        sheet = draw_contact_sheet(columns, captions)
        save_image_with_texts(sheet, self.folder.out / CONTACT_SHEET_FILE, {})

"""The ranks' part of `ditile evaluate`: the original pipeline and every setting draw each caption, in turn.

A rank has one pipeline for each plan. Caches are enabled and disabled between pictures, outside of the timed part. The
original and caches without a plan share the whole pipeline of rank 0; the other ranks wait at a barrier meanwhile.
Before the first caption each pipeline draws a picture of a few steps, which is not counted.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import Communicators
from ditile.distributed.torchrun import join_torchrun
from ditile.distributed.transport import gather_json
from ditile.measure.bench.turns import use_cache_within
from ditile.measure.bench.worlds import allow_all_cores
from ditile.measure.evaluate.metrics import Pictures, compute_psnr
from ditile.measure.evaluate.options import ORIGINAL, EvaluateOptions, EvaluationSetting, SessionOptions
from ditile.measure.evaluate.store import EvaluationFolder, PictureRow
from ditile.model.registry import find_loop_model
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.plan.version import __version__
from ditile.runner.caching import summary
from ditile.runner.load import defaults, load
from ditile.runner.requests.arguments import build_call_arguments
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.pictures import hide_local_path, read_picture, save_picture_with_texts
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.runner import parallelize

WARMUP_STEPS = 3  # steps of the picture that is not counted


class CaptionTurn(NamedTuple):
    """A caption, and the settings that draw it."""

    place: int
    prompt: str
    seed: int
    settings: tuple[EvaluationSetting, ...]


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """The task of one session, for all its ranks.

    Attributes:
        job: what all pictures have in common, for the folder.
        world: the number of ranks.
        plans: the plans that the session needs, without that of the original.
        with_original: whether the original pipeline draws the captions too.
        threads: CPU threads of each rank.
        title: the title of the progress bar.
    """

    wanted: EvaluateOptions
    session: SessionOptions
    job: dict[str, Any]
    world: int
    plans: tuple[str, ...]
    with_original: bool
    threads: int
    title: str


def draw_session(task: EvaluationTask, turns: Sequence[CaptionTurn]) -> None:
    """Draws the captions of a session; every rank calls it, and rank 0 writes pictures and rows.

    Raises:
        DitileError: if the model, a plan or a cache does not fit.
    """
    place = env.read_torchrun_place()
    rank, local = (place.rank, place.local_rank) if place is not None else (0, 0)
    if task.world == 1 and rank > 0:
        return
    with contextlib.redirect_stdout(sys.stderr):
        silence_libraries()
        torch.set_num_threads(task.threads)
        try:
            _draw_turns(task, turns, rank, pick_device(task.session.device, local))
        except torch.cuda.OutOfMemoryError as error:
            raise ModelError("the GPU has no room for all plans at once; add --one-at-a-time") from error


def _draw_turns(task: EvaluationTask, turns: Sequence[CaptionTurn], rank: int, device: torch.device) -> None:
    groups = Communicators()
    pipelines: dict[str, EvaluationPipeline] = {
        plan: EvaluationPipeline(task, plan, device, groups) for plan in task.plans
    }
    if task.with_original and rank == 0:
        pipelines[ORIGINAL.plan] = EvaluationPipeline(task, ORIGINAL.plan, device, groups)
    everyone = dist.group.WORLD if task.world > 1 else None
    turns = [
        CaptionTurn(p, text, seed, tuple(EvaluationSetting(*s) for s in every))
        for p, text, seed, every in gather_json([list(turn) for turn in turns], everyone)[0]
    ]
    store, total = EvaluationFolder(Path(task.session.out)), sum(len(turn.settings) for turn in turns)
    for turn in turns[:1]:
        for plan in dict.fromkeys((ORIGINAL.plan, *task.plans)):
            _draw_setting(task, pipelines, EvaluationSetting(plan, ORIGINAL.cache), turn, rank, first=True)
    with show_progress_bar(task.title, total, shown=rank == 0) as advance:
        for number, turn in enumerate(turns):
            original_settings = [ORIGINAL] if task.with_original else []
            order = [*original_settings, *(setting for setting in turn.settings if setting != ORIGINAL)]
            start = number % len(order)
            pictures = {s: _draw_setting(task, pipelines, s, turn, rank) for s in order[start:] + order[:start]}
            if rank == 0:
                _write_turn_pictures(task, store, turn, {s: each for s, each in pictures.items() if each is not None})
            advance(len(turn.settings))


class TimedPicture(NamedTuple):
    """A picture `[1, H, W, 3]`, its seconds, and the share of blocks that was left out."""

    picture: Pictures
    seconds: float
    saved: float


class EvaluationPipeline:
    """A pipeline under a plan, or the original pipeline.

    Attributes:
        base: the arguments of its calls, without prompt and generator.
    """

    def __init__(self, task: EvaluationTask, plan: str, device: torch.device, groups: Communicators) -> None:
        wanted, self._is_original = task.wanted, plan == ORIGINAL.plan
        divided = None if self._is_original else Plan.parse(plan)
        pipe: Any = load(wanted.model, dtype=task.session.dtype, plan=divided)
        pipe.set_progress_bar_config(disable=True)
        self.base = build_call_arguments(pipe, wanted.build_generate_options(), defaults(wanted.model))
        self._device = device
        self._target: Any = pipe
        if divided is None:
            pipe.to(device)
            find_loop_model(pipe).register_forward_pre_hook(lambda *_: env.report_progress())
        else:
            join_torchrun(task.session.stall_timeout)
            self._target = parallelize(pipe, divided, device=device, groups=groups)

    def draw_caption(
        self, turn: CaptionTurn, configs: dict[str, Any], steps: int | None, before: Callable[[], None]
    ) -> TimedPicture | None:
        """The picture of a caption; None on ranks that do not get it.

        Args:
            configs: the keyword arguments of `enable_cache`.
            steps: the number of steps, in place of that of the job.
            before: waits for the other ranks; it is called before the clock starts.

        Raises:
            ModelError: if the cache could never leave anything out.
        """
        call = self.base | {"prompt": turn.prompt, "generator": torch.Generator("cpu").manual_seed(turn.seed)}
        call |= {"output_type": "np"} | ({} if self._is_original else {"output_on": "first"})
        if steps is not None:
            call["num_inference_steps"] = steps
        with use_cache_within(self._target, configs):
            before()
            began = self._read_device_clock()
            result = self._target(**call)
            seconds = self._read_device_clock() - began
            reports = [] if configs["cache_config"] is None else summary(self._target, logging=False)
        if result is None:
            return None
        runs = [report.blocks * report.steps for report in reports]
        saved = sum(report.saved * count for report, count in zip(reports, runs, strict=True)) / max(1, sum(runs))
        return TimedPicture((result.images * 255).round().astype(np.uint8), seconds, saved)

    def _read_device_clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _draw_setting(
    task: EvaluationTask,
    pipelines: dict[str, EvaluationPipeline],
    setting: EvaluationSetting,
    turn: CaptionTurn,
    rank: int,
    *,
    first: bool = False,
) -> TimedPicture | None:
    """Draws one picture of a turn; `first` draws a short one, before the first turn."""

    def wait_for_ranks() -> None:
        if task.world > 1:
            dist.barrier()

    pipeline = pipelines.get(setting.plan)
    if pipeline is None:
        if task.with_original or setting.plan != ORIGINAL.plan:
            wait_for_ranks()
        return None
    may_use_all_cores = setting.has_original_plan and task.world > 1 and sys.platform == "linux"
    steps = pipeline.base.get("num_inference_steps")
    with allow_all_cores() if may_use_all_cores else contextlib.nullcontext():
        return pipeline.draw_caption(
            turn, setting.cache_arguments, min(WARMUP_STEPS, steps or WARMUP_STEPS) if first else None, wait_for_ranks
        )


def _write_turn_pictures(
    task: EvaluationTask, store: EvaluationFolder, turn: CaptionTurn, pictures: dict[EvaluationSetting, TimedPicture]
) -> None:
    """Writes the pictures of a turn, then their rows."""
    store.create_folder(task.job)
    rows: list[PictureRow] = []
    original, again = pictures.get(ORIGINAL), None
    path = store.picture_path(ORIGINAL, turn.place)
    if original is not None and path.is_file() and ORIGINAL not in turn.settings:
        again = float(compute_psnr(original.picture, np.asarray(read_picture(path, "out"))[None])[0])
    for setting in turn.settings:
        timed_picture = pictures[setting]
        path = store.picture_path(setting, turn.place)
        texts = {
            "Software": f"ditile {__version__}",
            "model": hide_local_path(task.wanted.model),
            "prompt": turn.prompt,
            "seed": str(turn.seed),
            "plan": setting.plan,
            "cache": setting.cache,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_picture_with_texts(Image.fromarray(timed_picture.picture[0]), path, texts)
        except OSError as error:
            raise ModelError(f"{str(path)!r} cannot be written: {error}") from error
        rows.append(
            {
                "plan": setting.plan,
                "cache": setting.cache,
                "caption": turn.place,
                "prompt": turn.prompt,
                "seed": turn.seed,
                "file": str(path.relative_to(store.out)),
                "seconds": timed_picture.seconds,
                "original_s": None if original is None else original.seconds,
                "original_again_psnr": again,
                "blocks_saved": timed_picture.saved,
            }
        )
    store.append_picture_rows(rows)

"""The ranks' part of `ditile evaluate`: the original pipeline and every setting generate each caption, in turn.

The original and caches without a plan share the plain pipeline of rank 0; the other ranks wait meanwhile. Caches are
enabled and disabled between images, outside of the timed part. Before the first caption each pipeline generates an
image of a few steps, which is not counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import find_local_rank
from ditile.distributed.torchrun import join_torchrun
from ditile.distributed.transport import gather_json
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.plan.version import __version__
from ditile.runner.caching import summary
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.requests.arguments import build_call_arguments
from ditile.runner.requests.console import is_writing_process, show_progress_bar
from ditile.runner.requests.pictures import hide_local_path, read_picture
from ditile.runner.requests.prepare import silence_libraries
from ditile_lab.quality.metrics import ImageArrays, compute_psnr
from ditile_lab.quality.options import ORIGINAL, EvaluateOptions, EvaluationSetting, SessionOptions
from ditile_lab.quality.store import EvaluationFolder, save_image_with_texts
from ditile_lab.rows import Row
from ditile_lab.sessions import PLAIN, TurnPipelines, rotate, time_call

WARMUP_STEPS = 3
"""The number of steps of the image that is not counted."""


class CaptionTurn(NamedTuple):
    """A caption, and the settings that generate it."""

    place: int
    prompt: str
    seed: int
    settings: tuple[EvaluationSetting, ...]


class TimedImage(NamedTuple):
    """An image `[1, H, W, 3]`, its seconds, and the share of blocks that its cache skipped."""

    image: ImageArrays
    seconds: float
    saved: float


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """The task of one session, for all its ranks.

    Attributes:
        options: the compared settings.
        session: where ranks run.
        job: the facts that all images have in common, for the folder.
        plans: the plans that the session needs, without the original's.
        with_original: whether the original pipeline generates the captions too.
        threads: CPU threads of each rank.
        title: the title of the progress bar.
    """

    options: EvaluateOptions
    session: SessionOptions
    job: Row
    world: int
    plans: tuple[str, ...]
    with_original: bool
    threads: int
    title: str


def run_evaluation_session(task: EvaluationTask, turns: Sequence[CaptionTurn]) -> None:
    """Generate the captions of a session; every rank calls it, and rank 0 writes images and rows.

    Raises:
        DitileError: if the model, a plan or a cache does not fit.
    """
    # Torchrun's other ranks have no part in a session of one process.
    if task.world == 1 and not is_writing_process():
        return
    # Libraries print while they load, and the standard output should have only the table.
    with contextlib.redirect_stdout(sys.stderr):
        silence_libraries()
        torch.set_num_threads(task.threads)
        if task.world > 1:
            join_torchrun(task.session.stall_timeout)
        try:
            device = pick_device(task.session.device, find_local_rank())
            _EvaluationSession(task, device).generate_turns(turns)
        except torch.cuda.OutOfMemoryError as error:
            raise ModelError("the GPU has no room for all plans at once; add --one-at-a-time") from error


class _EvaluationSession:
    """A session on one of its ranks."""

    def __init__(self, task: EvaluationTask, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._group = dist.group.WORLD if task.world > 1 else None
        # The plain pipeline has turns with a cache, which must not affect plans.
        self._pipelines = TurnPipelines(
            self._create_pipeline, task.plans, device, with_plain=task.with_original, share_plain=False
        )
        # All pipelines are of one class, so the arguments of a call can be built with any of them.
        pipe = self._pipelines.plain
        if pipe is None:
            pipe = self._pipelines.runners[task.plans[0]].pipe
        options = task.options
        self._base_call = build_call_arguments(pipe, options.build_generate_options(), defaults(options.model))

    def _create_pipeline(self, plan: Plan | None) -> Any:
        options = self._task.options
        pipe: Any = load(options.model, dtype=self._task.session.dtype, plan=plan, components=options.components)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate_turns(self, turns: Sequence[CaptionTurn]) -> None:
        """Generate all captions; the other ranks follow rank 0, which knows the missing images."""
        turns_of_first_rank = gather_json(list(turns), self._group)[0]
        turns = []
        for place, prompt, seed, settings in turns_of_first_rank:
            turns.append(CaptionTurn(place, prompt, seed, tuple(EvaluationSetting(*setting) for setting in settings)))
        originals = [ORIGINAL] if self._task.with_original else []
        if turns:
            steps = min(WARMUP_STEPS, self._base_call.get("num_inference_steps") or WARMUP_STEPS)
            for setting in (*originals, *(EvaluationSetting(plan, ORIGINAL.cache) for plan in self._task.plans)):
                self._generate(turns[0], setting, {"num_inference_steps": steps})
        total = sum(len(turn.settings) for turn in turns)
        is_first = self._group is None or self._group.rank() == 0
        with show_progress_bar(self._task.title, total, shown=is_first) as advance:
            for number, turn in enumerate(turns):
                images = {}
                # The original is generated in every turn, because latencies are ratios within a turn.
                for setting in rotate(list(dict.fromkeys([*originals, *turn.settings])), number):
                    image = self._generate(turn, setting, {})
                    if image is not None:
                        images[setting] = image
                if is_first:
                    self._write_turn(turn, images)
                advance(len(turn.settings))

    def _generate(self, turn: CaptionTurn, setting: EvaluationSetting, overrides: CallArguments) -> TimedImage | None:
        """Generate the image of a caption under a setting; return None on ranks that do not get it.

        Raises:
            ModelError: if the cache could never skip anything.
        """
        call = self._base_call | {"prompt": turn.prompt, "output_type": "np"} | overrides
        # The generator is on the CPU, so that the noise is the same on every device.
        call["generator"] = torch.Generator("cpu").manual_seed(turn.seed)
        plan = PLAIN
        if not setting.has_original_plan:
            plan = setting.plan
            # Only rank 0 needs the image.
            call["output_on"] = "first"
        cache = setting.cache_arguments
        with self._pipelines.prepare_turn(plan, cache) as target:
            if target is None:
                return None
            result, seconds = time_call(lambda: target(**call), self._device)
            # This is read before the cache is disabled at the end of the turn.
            saved = 0.0
            if cache["cache_config"] is not None:
                saved = _compute_saved_share(target)
        if result is None:
            return None
        return TimedImage((result.images * 255).round().astype(np.uint8), seconds, saved)

    def _write_turn(self, turn: CaptionTurn, images: Mapping[EvaluationSetting, TimedImage]) -> None:
        """Write the images of a turn, then their rows, because a row means that its image exists."""
        store = EvaluationFolder(Path(self._task.session.out))
        # The folder is created here and not earlier, because a refused evaluation leaves no folder.
        store.create_folder(self._task.job)
        original = images.get(ORIGINAL)
        original_seconds = None
        psnr_again = None
        if original is not None:
            original_seconds = original.seconds
            path = store.image_path(ORIGINAL, turn.place)
            # The image of an earlier session must be the same; otherwise the latencies belong to another job.
            if path.is_file() and ORIGINAL not in turn.settings:
                earlier = np.asarray(read_picture(path, "out"))[None]
                psnr_again = float(compute_psnr(original.image, earlier)[0])
        rows = []
        for setting in turn.settings:
            timed = images[setting]
            path = store.image_path(setting, turn.place)
            self._save_image(turn, setting, timed.image, path)
            rows.append(
                {
                    "plan": setting.plan,
                    "cache": setting.cache,
                    "caption": turn.place,
                    "prompt": turn.prompt,
                    "seed": turn.seed,
                    "file": str(path.relative_to(store.out)),
                    "seconds": timed.seconds,
                    "original_s": original_seconds,
                    "original_again_psnr": psnr_again,
                    "blocks_saved": timed.saved,
                }
            )
        store.rows.append(rows)

    def _save_image(self, turn: CaptionTurn, setting: EvaluationSetting, image: ImageArrays, path: Path) -> None:
        texts = {
            "Software": f"ditile {__version__}",
            "model": hide_local_path(self._task.options.model),
            "prompt": turn.prompt,
            "seed": str(turn.seed),
            "plan": setting.plan,
            "cache": setting.cache,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_image_with_texts(Image.fromarray(image[0]), path, texts)
        except OSError as error:
            raise ModelError(f"{str(path)!r} cannot be written: {error}") from error


def _compute_saved_share(target: Any) -> float:
    """Compute the share of all blocks in the last call that the cache skipped."""
    saved = 0.0
    total = 0
    for report in summary(target, logging=False):
        blocks = report.blocks * report.steps
        saved += report.saved * blocks
        total += blocks
    return saved / max(1, total)

"""The ranks' part of `ditile evaluate`: each caption by the original pipeline and by every setting, in turn.

A rank holds one pipeline for each plan; caches are laid on and taken off between pictures, outside of what is timed.
The original and caches without a plan share the whole pipeline of rank 0, while the others wait at a barrier. Before
the first caption each pipeline draws a picture of a few steps, which is not counted.
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

import ditile
from ditile.cli import png
from ditile.cli.bench.turns import bar, cached
from ditile.cli.bench.worlds import free_to_move
from ditile.cli.evaluate.metrics import Pictures, psnr
from ditile.cli.evaluate.options import ORIGINAL, Evaluate, Session, Setting
from ditile.cli.evaluate.store import Row, Store
from ditile.cli.generate import arguments, quiet
from ditile.distributed import env
from ditile.distributed.mesh import Communicators, join_torchrun, pick_device
from ditile.distributed.transport import gather_json
from ditile.errors import ModelError
from ditile.models.registry import model_of
from ditile.plan.plan import Plan
from ditile.runner.load import defaults, load
from ditile.runner.runner import parallelize

FIRST = 3  # steps of the picture that is not counted


class Turn(NamedTuple):
    """A caption, and who is to draw it."""

    place: int
    prompt: str
    seed: int
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks of one session share.

    Attributes:
        job: what all pictures have in common, for the folder.
        world: of the session.
        plans: that it needs, without that of the original.
        with_original: whether the original draws beside them.
        threads: of each rank.
        title: of the progress bar.
    """

    wanted: Evaluate
    session: Session
    job: dict[str, Any]
    world: int
    plans: tuple[str, ...]
    with_original: bool
    threads: int
    title: str


def draw(task: Task, turns: Sequence[Turn]) -> None:
    """Runs this rank's part; rank 0 writes pictures and rows.

    Raises:
        DitileError: if the model, a plan or a cache does not fit.
    """
    place = env.torchrun()
    rank, local = (place.rank, place.local_rank) if place is not None else (0, 0)
    if task.world == 1 and rank > 0:
        return
    with contextlib.redirect_stdout(sys.stderr):
        quiet()
        torch.set_num_threads(task.threads)
        try:
            _draw(task, turns, rank, pick_device(task.session.device, local))
        except torch.cuda.OutOfMemoryError as error:
            raise ModelError("the GPU has no room for all plans at once; add --one-at-a-time") from error


def _draw(task: Task, turns: Sequence[Turn], rank: int, device: torch.device) -> None:
    groups = Communicators()
    painters: dict[str, Painter] = {plan: Painter(task, plan, device, groups) for plan in task.plans}
    if task.with_original and rank == 0:
        painters[ORIGINAL.plan] = Painter(task, ORIGINAL.plan, device, groups)
    everyone = dist.group.WORLD if task.world > 1 else None
    turns = [Turn(p, text, seed, tuple(Setting(*s) for s in every)) for p, text, seed, every in
             gather_json([list(turn) for turn in turns], everyone)[0]]  # fmt: skip
    store, total = Store(Path(task.session.out)), sum(len(turn.settings) for turn in turns)
    for turn in turns[:1]:
        for plan in dict.fromkeys((ORIGINAL.plan, *task.plans)):
            _one(task, painters, Setting(plan, ORIGINAL.cache), turn, rank, first=True)
    with bar(task.title, total, shown=rank == 0) as advance:
        for number, turn in enumerate(turns):
            beside = [ORIGINAL] if task.with_original else []
            order = [*beside, *(setting for setting in turn.settings if setting != ORIGINAL)]
            at = number % len(order)
            drawn = {s: _one(task, painters, s, turn, rank) for s in order[at:] + order[:at]}
            if rank == 0:
                _keep(task, store, turn, {s: each for s, each in drawn.items() if each is not None})
            advance(len(turn.settings))


class Drawn(NamedTuple):
    """A picture `[1, H, W, 3]`, seconds, and the share of blocks that was left out."""

    picture: Pictures
    seconds: float
    saved: float


class Painter:
    """A pipeline under a plan; that of the original has none.

    Attributes:
        base: the arguments of its calls, prompt and generator apart.
    """

    def __init__(self, task: Task, plan: str, device: torch.device, groups: Communicators) -> None:
        wanted, self._is_original = task.wanted, plan == ORIGINAL.plan
        divided = None if self._is_original else Plan.parse(plan)
        pipe: Any = load(wanted.model, dtype=task.session.dtype, plan=divided)
        pipe.set_progress_bar_config(disable=True)
        self.base = arguments(pipe, wanted.generate("a caption"), defaults(wanted.model))
        self._device = device
        self._target: Any = pipe
        if divided is None:
            pipe.to(device)
            model_of(pipe).register_forward_pre_hook(lambda *_: env.advance())
        else:
            join_torchrun(task.session.stall_timeout)
            self._target = parallelize(pipe, divided, device=device, groups=groups)

    def draw(self, turn: Turn, configs: dict[str, Any], steps: int | None, before: Callable[[], None]) -> Drawn | None:
        """The picture of a caption; None on ranks that do not get it.

        Args:
            configs: of the cache, as `enable_cache` takes them.
            steps: instead of those of the job.
            before: waits for the other ranks.

        Raises:
            ModelError: if the cache could never leave anything out.
        """
        call = self.base | {"prompt": turn.prompt, "generator": torch.Generator("cpu").manual_seed(turn.seed)}
        call |= {"output_type": "np"} | ({} if self._is_original else {"output": "first"})
        if steps is not None:
            call["num_inference_steps"] = steps
        with cached(self._target, configs):
            before()
            began = self._now()
            result = self._target(**call)
            seconds = self._now() - began
            reports = [] if configs["cache_config"] is None else ditile.summary(self._target, logging=False)
        if result is None:
            return None
        runs = [report.blocks * report.steps for report in reports]
        saved = sum(report.saved * count for report, count in zip(reports, runs, strict=True)) / max(1, sum(runs))
        return Drawn((result.images * 255).round().astype(np.uint8), seconds, saved)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _one(
    task: Task, painters: dict[str, Painter], setting: Setting, turn: Turn, rank: int, *, first: bool = False
) -> Drawn | None:
    """One picture of a turn, or before the first turn a short one."""

    def together() -> None:
        if task.world > 1:
            dist.barrier()

    painter = painters.get(setting.plan)
    if painter is None:
        if task.with_original or setting.plan != ORIGINAL.plan:
            together()
        return None
    alone = setting.is_alone and task.world > 1 and sys.platform == "linux"
    steps = painter.base.get("num_inference_steps")
    with free_to_move() if alone else contextlib.nullcontext():
        return painter.draw(turn, setting.configs, min(FIRST, steps or FIRST) if first else None, together)


def _keep(task: Task, store: Store, turn: Turn, drawn: dict[Setting, Drawn]) -> None:
    """Writes the pictures of a turn, then their rows."""
    store.begin(task.job)
    rows: list[Row] = []
    original, again = drawn.get(ORIGINAL), None
    path = store.path(ORIGINAL, turn.place)
    if original is not None and path.is_file() and ORIGINAL not in turn.settings:
        with Image.open(path) as image:
            again = float(psnr(original.picture, np.asarray(image.convert("RGB"))[None])[0])
    for setting in turn.settings:
        made = drawn[setting]
        path = store.path(setting, turn.place)
        texts = {
            "Software": f"ditile {ditile.__version__}", "model": task.wanted.model, "prompt": turn.prompt,
            "seed": str(turn.seed), "plan": setting.plan, "cache": setting.cache,
        }  # fmt: skip
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            png.save(Image.fromarray(made.picture[0]), path, texts)
        except OSError as error:
            raise ModelError(f"{str(path)!r} cannot be written: {error}") from error
        rows.append({
            "plan": setting.plan, "cache": setting.cache, "caption": turn.place, "prompt": turn.prompt,
            "seed": turn.seed, "file": str(path.relative_to(store.out)), "seconds": made.seconds,
            "original_s": None if original is None else original.seconds, "original_again_psnr": again,
            "blocks_saved": made.saved,
        })  # fmt: skip
    store.add(rows)

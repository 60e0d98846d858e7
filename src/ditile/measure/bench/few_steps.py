"""`--sweep few-steps`: what patch pipelines of a few-step model cost in quality, beside what they gain at most.

Each caption is drawn by one process, by one process with fewer steps, and under each plan; a picture is compared with
that of one process from the same noise. The gain is the bound, which is counted and not measured: the table says the
same on any machine.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table

from ditile.distributed import env, files
from ditile.distributed.launch import launch
from ditile.measure.bench.options import Comparison, Workload
from ditile.measure.evaluate.caption_check import score_pictures
from ditile.measure.evaluate.captions import BUNDLED_SOURCE, load_captions
from ditile.measure.evaluate.metrics import Pictures, compute_psnr
from ditile.model.known import list_bundled_models
from ditile.plan.errors import PlanError
from ditile.plan.plan import FEW_STEPS, Plan
from ditile.plan.schedule import Schedule
from ditile.runner.load import defaults, load
from ditile.runner.runner import parallelize

NUM_CAPTIONS = 20
RANKS = (2, 4)
PATCHES = (2, 4)
WARMUPS = (1, 2)
MODES = ("serial", "sequence")
ROWS = "rows.jsonl"


class DrawnSetting(NamedTuple):
    """What draws the captions: a plan, and a number of steps."""

    plan: Plan
    steps: int


def list_settings(steps: int, ranks: Sequence[int]) -> list[DrawnSetting]:
    """One process with all steps and with fewer, down to half of them, and each plan with as many patches as stages."""
    fewer = range(steps, max(1, steps // 2) - 1, -1)
    plans = [
        Plan(pipefusion=n, patches=m, warmup=w, warmup_mode=mode)  # type: ignore[arg-type]
        for n in ranks
        for m in PATCHES
        for w in WARMUPS
        for mode in MODES
        if m >= n and w < steps
    ]
    return [*(DrawnSetting(Plan(), each) for each in fewer), *(DrawnSetting(plan, steps) for plan in plans)]


def measure_few_steps(compared: Comparison, work: Workload) -> list[dict[str, Any]]:
    """Draws, compares, and writes a row for each setting to the folder; the first one is that of one process.

    Raises:
        DitileError: if the model is not one of few steps whose pictures can be checked, or a plan does not fit it.
    """
    if env.read_torchrun_place() is not None:
        raise PlanError("sweep few-steps starts ranks of several numbers by itself; start it without torchrun")
    if work.model not in list_bundled_models() or "num_frames" in defaults(work.model):
        raise PlanError(
            f"sweep few-steps checks pictures of bundled models, and not {work.model}; try shapes-flux-turbo"
        )
    steps = work.steps or defaults(work.model)["num_inference_steps"]
    if not 2 <= steps <= FEW_STEPS:
        raise PlanError(f"sweep few-steps is for 2 to {FEW_STEPS} steps, and there are {steps}; try shapes-flux-turbo")
    ranks = RANKS if compared.ranks is None else (compared.ranks,)
    settings = list_settings(steps, ranks)
    captions = [each.text for each in load_captions(BUNDLED_SOURCE, NUM_CAPTIONS, NUM_CAPTIONS)]
    drawn: dict[DrawnSetting, Pictures] = {}
    for world in dict.fromkeys(setting.plan.world for setting in settings):
        some = [setting for setting in settings if setting.plan.world == world]
        session = (work, some, captions)
        pictures = launch(draw_settings, world, session, threads=work.threads, stall_timeout=work.stall_timeout)[0]
        drawn |= dict(zip(some, pictures, strict=True))
    rows = [_compare_setting(setting, drawn[setting], drawn[settings[0]], captions, steps) for setting in settings]
    folder = Path(compared.out)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"model": work.model, "captions": len(captions)} | row) + "\n" for row in rows]
    files.write_atomically(folder / ROWS, "".join(lines))
    return rows


def draw_settings(work: Workload, settings: Sequence[DrawnSetting], captions: Sequence[str]) -> list[Pictures]:
    """On every rank: the pictures `[n, H, W, 3]` of each setting, which all need as many ranks; empty but on rank 0."""
    with contextlib.redirect_stdout(sys.stderr):
        pipe: Any = load(work.model, dtype=work.dtype)
        pipe.set_progress_bar_config(disable=True)
        drawn = []
        for setting in settings:
            runner = parallelize(pipe, setting.plan, device=work.device, keep_weights=True)
            drawn.append(_draw_captions(runner, work, setting.steps, captions))
            runner.restore()
            env.report_progress()
    return drawn if not dist.is_initialized() or dist.get_rank() == 0 else []


def _draw_captions(runner: Callable[..., Any], work: Workload, steps: int, captions: Sequence[str]) -> Pictures:
    size = {name: getattr(work, name) for name in ("height", "width") if getattr(work, name) is not None}
    call = defaults(work.model) | size | {"num_inference_steps": steps, "output_type": "np"}
    pictures = []
    for seed, caption in enumerate(captions):
        result = runner(caption, output_on="first", generator=torch.Generator().manual_seed(seed), **call)
        if result is not None:
            pictures.append((result.images[0] * 255).round().astype(np.uint8))
    return np.stack(pictures) if pictures else np.empty((0,), np.uint8)


def _compare_setting(
    setting: DrawnSetting, pictures: Pictures, reference: Pictures, captions: Sequence[str], steps: int
) -> dict[str, Any]:
    plan = setting.plan
    is_reference = plan == Plan() and setting.steps == steps
    decibels = None if is_reference else compute_psnr(pictures, reference)
    bound = steps / setting.steps * Schedule.from_plan(plan, setting.steps).bound_speedup()
    return {
        "plan": str(plan),
        "steps": setting.steps,
        "ranks": plan.world,
        "psnr": None if decibels is None else float(decibels.mean()),
        "psnr_lowest": None if decibels is None else float(decibels.min()),
        "all_right": score_pictures(list(pictures), captions)["all_right"],
        "bound": bound,
    }


def make_few_steps_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people: each plan with and without shared synchronous steps on one line, as their pictures agree."""
    shown = Table("ranks", "steps", "M", "W")
    for name in ("PSNR, dB", "lowest", "right, %", "at most, serial", "at most, sequence"):
        shown.add_column(name, justify="right")
    for alike in _group_by_setting(rows):
        first = alike[0]
        plan = Plan.parse(alike[0]["plan"])
        patched = plan.pipefusion > 1
        bounds = [f"{row['bound']:.2f}x" for row in alike]
        shown.add_row(
            str(first["ranks"]),
            str(first["steps"]),
            str(plan.num_patches) if patched else "",
            str(plan.warmup) if patched else "",
            *("" if row is None else f"{row:.1f}" for row in (first["psnr"], first["psnr_lowest"])),
            f"{first['all_right']:.0f}",
            *(bounds if len(bounds) == 2 else [bounds[0], ""]),
        )
    return shown


def _group_by_setting(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows that differ in how the synchronous steps run alone, serial ones first."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        plan = Plan.parse(row["plan"])
        key = f"{plan.pipefusion} {plan.patches} {plan.warmup}"
        groups.setdefault((key, row["steps"]), []).append(row)
    yield from groups.values()

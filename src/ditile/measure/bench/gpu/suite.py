"""Runs the suite: starts ranks, goes on with what is left where an item took its ranks with it, and shows the lines.

Items of one rank run in one process, and items of all ranks in as many as there are GPUs (NCCL), or in two that share
one GPU or the CPU (gloo). A rank that dies, hangs or raises costs the item that it was at: that becomes a line with the
reason, and new ranks go on with the next one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.distributed.launch import launch
from ditile.measure.bench import sweeps, turns
from ditile.measure.bench.cells import BenchCell
from ditile.measure.bench.gpu.items import SuiteItem, SuiteTask, list_all_rank_items, list_one_rank_items
from ditile.measure.bench.gpu.rank_session import LATE, run_suite_items
from ditile.measure.bench.options import Comparison, Workload
from ditile.measure.bench.subjects import create_bench_subject
from ditile.plan.errors import DitileError, PlanError, StateError
from ditile.plan.extras import is_installed
from ditile.plan.units import format_number

LINES = "gpu.jsonl"
SECONDS, QUICK_SECONDS = 15 * 60, 6 * 60
ONE_RANK_SHARE = 0.55
"""The share of the time behind which no item of one rank is begun."""
STALL_SECONDS = 120.0
LEAST_MEMORY = 38e9
"""Bytes of a rank from which it holds the largest model of random weights, what it computes, and one more for the
process."""
MODEL, SMALLER_MODEL = "random-flux blocks=57 heads=24 head_dim=128", "random-flux blocks=18 heads=24 head_dim=128"
SMALL_MODEL = "random-flux blocks=3 heads=4 head_dim=16"
STEPS, SMALL_STEPS = 8, 2
SIZES, QUICK_SIZES, SMALL_SIZES = (1024, 2048), (1024,), (128,)


def run_gpu_suite(compared: Comparison, work: Workload) -> tuple[list[dict[str, Any]], list[Table | str], list[str]]:
    """Asks this machine everything, and writes lines, a table and a figure to the folder.

    Returns:
        The lines, what a terminal shows of them, and remarks.

    Raises:
        PlanError: if it was started under torchrun, the device is none here, or there are too few GPUs.
        ModelError: if the model is not known.
    """
    if env.read_torchrun_place() is not None:
        raise PlanError("suite gpu starts ranks of several numbers by itself; start it without torchrun")
    found = pick_device(work.device, 0)
    gpus = 0 if (work.device or "cuda").startswith("cpu") else torch.cuda.device_count()
    ranks = compared.devices or max(2, gpus)
    work = fill_workload(work, gpus, ranks, small=compared.small)
    sizes = SMALL_SIZES if compared.small else QUICK_SIZES if compared.quick else SIZES
    sizes = (work.height,) if work.height else sizes
    # A model that is not known is not known on any device.
    subject = create_bench_subject(work)
    if found.type == "cpu" and not compared.small:
        raise PlanError("suite gpu found no GPU; add --small to try every part on a CPU in a minute or two")
    fits = sweeps.make_fit_check(lambda plan: subject.make_cost_job(BenchCell(str(plan), "", "", sizes[0], sizes[0])))
    folder, began = Path(compared.out), time.time()
    folder.mkdir(parents=True, exist_ok=True)
    path, all_seconds = folder / LINES, QUICK_SECONDS if compared.quick else SECONDS
    lines_before = _count_lines(path)
    _append_line(path, {"part": "machine", **collect_gpu_facts(work, gpus, ranks)})
    for number, items, share in (
        (1, list_one_rank_items(sizes, gpu=gpus > 0), ONE_RANK_SHARE),
        (ranks, list_all_rank_items(ranks, sizes[0], fits, quick=compared.quick, small=compared.small), 1.0),
    ):
        task = SuiteTask(
            items=tuple(items), work=work, out=str(path), ends_at=began + share * all_seconds, small=compared.small
        )
        run_items_on_ranks(task, number, path)
    rows = read_lines(path)[lines_before:]
    shown = make_suite_tables(rows)
    figures = [] if compared.no_figures else _draw_figure(rows, folder)
    files = [path, *figures]
    took = f"{format_number(time.time() - began)} s"
    before = f" (behind {lines_before} lines of earlier runs)" if lines_before else ""
    remarks = [f"took {took}; written: {', '.join(map(str, files))}{before}"]
    if not (compared.no_figures or is_installed("matplotlib")):
        remarks.append("no figure, as matplotlib is not installed; pip install 'ditile[plots]'")
    return rows, shown, remarks


def fill_workload(work: Workload, gpus: int, ranks: int, *, small: bool) -> Workload:
    """The call that is timed: by default that of random weights of FLUX.1-dev's sizes, or as many as fit the device."""
    model = work.model
    if model == Workload().model:
        shared = ranks if gpus < ranks else 1
        room = torch.cuda.get_device_properties(0).total_memory / shared if gpus else 0
        model = SMALL_MODEL if small else MODEL if room >= LEAST_MEMORY else SMALLER_MODEL
    steps = work.steps or (SMALL_STEPS if small else STEPS)
    dtype = work.dtype or ("bfloat16" if gpus else "float32")
    return replace(work, model=model, steps=steps, dtype=dtype, output="latent", threads=work.threads or 1)


def collect_gpu_facts(work: Workload, gpus: int, ranks: int) -> dict[str, Any]:
    """What the lines were found on: card, driver and versions; the model and the ranks."""
    facts = turns.collect_machine_facts(work.device) | {"model": work.model, "steps": work.steps, "dtype": work.dtype}
    facts |= {"ranks": ranks, "messages": "NCCL" if gpus >= ranks else "gloo", "date": time.strftime("%Y-%m-%d")}
    if gpus:
        properties = torch.cuda.get_device_properties(0)
        facts |= {"cuda": torch.version.cuda, "memory_gb": round(properties.total_memory / 1e9, 1)}
        facts["capability"] = list(torch.cuda.get_device_capability())
    if gpus and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        facts["driver"] = done.stdout.split("\n")[0].strip() or None
    return facts


def run_items_on_ranks(task: SuiteTask, ranks: int, path: Path) -> None:
    """Answers all items on so many ranks, new ones behind each item that ends them."""
    left = list(task.items)
    while left:
        before = _count_lines(path)
        if time.time() > task.ends_at:
            for item in left:
                _append_line(path, {**_describe_item(item), "ranks": ranks, "skipped": LATE})
            return

        def end_late_ranks() -> None:
            if time.time() > task.ends_at + STALL_SECONDS:
                raise StateError(LATE)

        try:
            launch(
                run_suite_items, ranks, (replace(task, items=tuple(left)),), threads=task.work.threads,
                stall_timeout=STALL_SECONDS, check=end_late_ranks,
            )  # fmt: skip
            return
        except DitileError as error:
            left = left[_count_lines(path) - before :]
            if left:
                item, *left = left
                reason = " ".join(str(error).split())
                _append_line(path, {**_describe_item(item), "ranks": ranks, "error": reason[-600:]})


def make_suite_tables(rows: Sequence[dict[str, Any]]) -> list[Table | str]:
    """The lines for people, a table for each kind of answer, behind a line of the machine."""
    machine = next(row for row in rows if row["part"] == "machine")
    card = ", ".join(dict.fromkeys(machine["gpus"])) or machine["processor"]
    names = ("ranks", "messages", "driver", "cuda", "torch", "diffusers", "ditile", "model", "steps", "dtype")
    facts = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name) is not None)
    timed = Table("part", "what", "px", "ranks")
    for name in ("seconds", "of plain", "peak GB", "relative"):
        timed.add_column(name, justify="right")
    others = Table("part", "what", "ranks", "found")
    for row in rows:
        if "seconds" in row:
            numbers = (row["seconds"], row["of_plain"], row["peak_gb"], row["relative"])
            cells = ("" if number is None else f"{number:.3g}" for number in numbers)
            timed.add_row(row["part"], row["what"], str(row["size"]), str(row["ranks"]), *cells)
        elif row["part"] != "machine":
            others.add_row(row["part"], row["what"], str(row["ranks"]), _describe_answer(row))
    return [f"{card}: {facts}", timed, others]


def _describe_answer(row: dict[str, Any]) -> str:
    for name in ("error", "skipped"):
        if name in row:
            return f"{name}: {row[name]}"
    if "ok" in row:
        return "all checks" if row["ok"] else "; ".join(row["failed"])
    if "count" in row:
        places = ", ".join(f"{place} {count}" for place, count in row["places"].items())
        return f"{row['count']} in {row['steps']} steps" + (f": {places}" if places else "")
    return "equal, bit for bit" if row["equal"] else f"{row['psnr_db']:.1f} dB" if "psnr_db" in row else "differs"


def _draw_figure(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Bars of the seconds of each timed call as a share of the plain pipeline's."""
    timed = [row for row in rows if "seconds" in row]
    if not is_installed("matplotlib") or not timed:
        return []
    from matplotlib import pyplot as plt

    from ditile.measure.bench.figures import STYLE, WIDTH
    from ditile.runner.requests.pictures import save_figure

    labels = [f"{row['what']}, {row['size']} px, {row['ranks']} rank(s)" for row in timed]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.22 * len(timed)), layout="constrained")
        axes.barh(range(len(timed)), [row["of_plain"] for row in timed], color="#4477aa")
        axes.axvline(1.0, color="#333333", lw=0.8)
        axes.set_yticks(range(len(timed)), labels)
        axes.invert_yaxis()
        axes.set_xlabel("seconds / those of one rank")
        paths = [folder / f"gpu.{ending}" for ending in ("png", "svg")]
        for path in paths:
            save_figure(figure, path, dpi=150)
        plt.close(figure)
    return paths


def _describe_item(item: SuiteItem) -> dict[str, Any]:
    return {"part": item.part, "what": item.what, "size": item.size or None}


def _append_line(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _count_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0

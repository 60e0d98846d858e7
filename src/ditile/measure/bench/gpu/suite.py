"""Runs the suite: starts ranks, starts new ones where an item took its ranks with it, and shows the lines.

Items of one rank run in one process, and items of all ranks in as many as there are GPUs (NCCL), or in two that share
one GPU or the CPU (gloo). A rank that dies, hangs or raises costs the item that it was at: that becomes a line with the
reason, and new ranks go on with the next one.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.distributed.launch import launch
from ditile.measure.bench import sweeps
from ditile.measure.bench.cells import BenchCell
from ditile.measure.bench.gpu.items import SuiteItem, SuiteTask, list_all_rank_items, list_one_rank_items
from ditile.measure.bench.gpu.rank_session import LATE, describe_item, open_suite_file, run_suite_items
from ditile.measure.bench.options import Comparison, Workload
from ditile.measure.bench.subjects import create_bench_subject
from ditile.measure.rows import Row
from ditile.measure.sessions import collect_machine_facts
from ditile.plan.errors import DitileError, PlanError, StateError
from ditile.plan.numbers import format_number
from ditile.runner.requests.console import LINE_WIDTH

LINES = "gpu.jsonl"
SECONDS = 15 * 60
QUICK_SECONDS = 6 * 60
ONE_RANK_SHARE = 0.55
"""The share of the time after which no item of one rank is begun."""
STALL_SECONDS = 120.0
SAME_ERROR = "the model that is timed failed twice with the same error"
LEAST_MEMORY = 38e9
"""Bytes of a rank that holds the largest model of random weights, its activations, and a copy of a block's output."""
MODEL = "random-flux blocks=57 heads=24 head_dim=128"
SMALLER_MODEL = "random-flux blocks=18 heads=24 head_dim=128"
SMALL_MODEL = "random-flux blocks=3 heads=4 head_dim=16"


def run_gpu_suite(compared: Comparison, work: Workload) -> tuple[list[Row], list[Table | str], list[str]]:
    """Answers all questions on this machine, and writes a line for each to the folder.

    Returns:
        The lines, the tables for a terminal, and remarks.

    Raises:
        PlanError: if it was started under torchrun, there is no such device, or there are too few GPUs.
        ModelError: if the model is not known.
    """
    if env.read_torchrun_place() is not None:
        raise PlanError("suite gpu starts ranks of several numbers by itself; start it without torchrun")
    # The time to import and to check counts too.
    began = time.time()
    device = pick_device(work.device, 0)
    gpus = 0
    if not (work.device or "cuda").startswith("cpu"):
        gpus = torch.cuda.device_count()
    ranks = compared.devices or max(2, gpus)
    work = fill_workload(work, gpus, ranks, small=compared.small)
    # A model that is not known is not known on any device, so it is refused first.
    subject = create_bench_subject(work)
    if device.type == "cpu" and not compared.small:
        raise PlanError("suite gpu found no GPU; add --small to try every part on a CPU in a minute or two")
    sizes = _choose_sizes(compared, work)
    side = sizes[0]
    fits = sweeps.make_fit_check(lambda plan: subject.make_cost_job(BenchCell(str(plan), "", side, side)))
    path = Path(compared.out, LINES)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_suite_file(path)
    lines_before = len(file.read())
    # The folder may have lines of earlier runs: each run begins with a line about the machine.
    file.append([{"part": "machine", **collect_gpu_facts(work, gpus, ranks)}])
    seconds = QUICK_SECONDS if compared.quick else SECONDS
    one_rank = SuiteTask(
        items=_select_items(list_one_rank_items(sizes, gpu=gpus > 0), compared),
        work=work,
        out=str(path),
        ends_at=began + ONE_RANK_SHARE * seconds,
        small=compared.small,
    )
    run_items_on_ranks(one_rank, 1)
    items = list_all_rank_items(
        ranks, side, fits, quick=compared.quick, small=compared.small, share_gpu=0 < gpus < ranks
    )
    all_ranks = replace(one_rank, items=_select_items(items, compared), ends_at=began + seconds)
    run_items_on_ranks(all_ranks, ranks)
    rows = file.read()[lines_before:]
    remark = f"took {format_number(time.time() - began)} s; written: {path}"
    if lines_before:
        remark += f" (after {lines_before} lines of earlier runs)"
    return rows, make_suite_tables(rows), [remark]


def _select_items(items: Iterable[SuiteItem], compared: Comparison) -> tuple[SuiteItem, ...]:
    """The items of the parts that are measured."""
    return tuple(item for item in items if item.part in compared.suite_parts)


def _choose_sizes(compared: Comparison, work: Workload) -> tuple[int, ...]:
    """Pixels of a side of the calls that are timed; all ranks use the first."""
    if work.height:
        return (work.height,)
    if compared.small:
        return (128,)
    if compared.quick:
        return (1024,)
    return (1024, 2048)


def fill_workload(work: Workload, gpus: int, ranks: int, *, small: bool) -> Workload:
    """The call that is timed: by default random weights of FLUX.1-dev's sizes, or fewer blocks if memory is short."""
    model = work.model
    if model == Workload().model:
        model = SMALLER_MODEL
        if small:
            model = SMALL_MODEL
        elif gpus:
            memory = torch.cuda.get_device_properties(0).total_memory
            if gpus < ranks:
                # All ranks share one GPU.
                memory //= ranks
            if memory >= LEAST_MEMORY:
                model = MODEL
    steps = 2 if small else 8
    dtype: Any = "bfloat16" if gpus else "float32"
    return replace(
        work,
        model=model,
        steps=work.steps or steps,
        dtype=work.dtype or dtype,
        output="latent",
        threads=work.threads or 1,
    )


def collect_gpu_facts(work: Workload, gpus: int, ranks: int) -> Row:
    """Card, driver and versions, the model and the ranks: what the lines depend on."""
    # NCCL takes one rank on each GPU.
    messages = "NCCL" if gpus >= ranks else "gloo"
    facts = collect_machine_facts(work.device) | {
        "model": work.model,
        "steps": work.steps,
        "dtype": work.dtype,
        "ranks": ranks,
        "messages": messages,
        "date": time.strftime("%Y-%m-%d"),
    }
    if gpus:
        facts["cuda"] = torch.version.cuda
        facts["memory_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
        facts["capability"] = list(torch.cuda.get_device_capability())
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            facts["driver"] = output.split("\n")[0].strip() or None
    return facts


def run_items_on_ranks(task: SuiteTask, ranks: int) -> None:
    """Measures all items on `ranks` ranks, and starts new ranks after each item that ends them."""
    file = open_suite_file(task.out)

    # An item that hangs without being idle, such as an endless loop, would never be late by itself.
    def end_late_ranks() -> None:
        if time.time() > task.ends_at + STALL_SECONDS:
            raise StateError(LATE)

    items = list(task.items)
    reasons: set[str] = set()
    while items:
        if time.time() > task.ends_at:
            file.append(describe_item(item, ranks) | {"skipped": LATE} for item in items)
            return
        # Each answered item has a line, so the count says where the ranks were.
        lines_before = len(file.read())
        try:
            launch(
                run_suite_items,
                ranks,
                (replace(task, items=tuple(items)),),
                threads=task.work.threads,
                stall_timeout=STALL_SECONDS,
                check=end_late_ranks,
            )
            return
        except DitileError as error:
            # The item after the last line is the one that ended the ranks.
            items = items[len(file.read()) - lines_before :]
            if items:
                # On one line, and its end: that is where a traceback says what happened.
                reason = " ".join(str(error).split())[-600:]
                failed = items.pop(0)
                file.append([describe_item(failed, ranks) | {"error": reason}])
                # The same error twice is the fault of the model that is timed, and starting ranks again is slow.
                if failed.size and reason in reasons:
                    skipped = [item for item in items if item.size]
                    file.append(describe_item(item, ranks) | {"skipped": SAME_ERROR} for item in skipped)
                    items = [item for item in items if not item.size]
                reasons.add(reason)


def make_suite_tables(rows: Sequence[Row]) -> list[Table | str]:
    """The lines for people: a line about the machine, then a table of timed calls and one of the other answers."""
    machine, *answers = rows
    card = ", ".join(dict.fromkeys(machine["gpus"])) or machine["processor"]
    names = ("ranks", "messages", "driver", "cuda", "torch", "diffusers", "ditile", "model", "steps", "dtype")
    facts = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name) is not None)
    timed = Table("", width=LINE_WIDTH)
    for name in ("seconds", "of plain", "peak GB", "relative"):
        timed.add_column(name, justify="right", no_wrap=True)
    others = Table("", "found", width=LINE_WIDTH)
    for heading, group in _group_by_part(answers).items():
        timed_calls = [row for row in group if "seconds" in row]
        _add_section(timed, heading, [[row["what"], *_format_timed_call(row)] for row in timed_calls])
        answered = [row for row in group if "seconds" not in row]
        _add_section(others, heading, [[row["what"], _describe_answer(row)] for row in answered])
    return [f"{card}: {facts}", timed, others]


def _group_by_part(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each part, size and number of ranks, by a heading that says them."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        words = [row["part"]]
        if row["size"]:
            words.append(f"{row['size']} px")
        ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        groups.setdefault(", ".join([*words, ranks]), []).append(row)
    return groups


def _add_section(table: Table, heading: str, rows: Sequence[Sequence[str]]) -> None:
    """Adds rows below a heading; nothing if there are none."""
    if not rows:
        return
    table.add_section()
    table.add_row(heading, style="bold")
    for row in rows:
        table.add_row(*row)


def _format_timed_call(row: Row) -> list[str]:
    texts = []
    for name in ("seconds", "of_plain", "peak_gb", "relative"):
        text = "" if row[name] is None else f"{row[name]:.3g}"
        texts.append(text)
    return texts


def _describe_answer(row: Row) -> str:
    for name in ("error", "skipped"):
        if name in row:
            return f"{name}: {row[name]}"
    if "ok" in row:
        return "; ".join(row["failed"]) or "all checks"
    if "count" in row:
        places = [f"{place} {count}" for place, count in row["places"].items()]
        return f"{row['count']} in {row['steps']} steps: {', '.join(places) or 'none'}"
    if row["equal"]:
        return "equal, bit for bit"
    if "psnr_db" in row:
        return f"{row['psnr_db']:.1f} dB"
    return "differs"

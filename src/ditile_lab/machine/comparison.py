"""`ditile bench --alone`: starts the session, and shows the slowest rank and the step of each plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from rich.table import Table

from ditile.distributed import cpus, env
from ditile.distributed.backend import pick_device
from ditile.distributed.launch import launch
from ditile.plan.errors import PlanError
from ditile.planner.profile import Profile
from ditile.runner.requests.console import Status, make_numbered_tables
from ditile_lab import sessions
from ditile_lab.bench.cells import ONE_RANK, BenchCell, parse_cells
from ditile_lab.bench.options import Comparison, Workload
from ditile_lab.bench.subjects import BenchSubject, create_bench_subject
from ditile_lab.machine.session import ROWS, AloneTask, measure_alone
from ditile_lab.rows import Row, format_columns

AFTER_WARMUP = 3
"""Steps of a short call after the synchronous ones: the first of them fill the pipeline, and may be recorded."""
BETWEEN = 5
"""Additional steps of a long call, by default."""


def measure_plans_alone(compared: Comparison, work: Workload, profile: Profile | None) -> tuple[list[Row], list[str]]:
    """Measure the ranks of plans one after the other on one device; return the rows and notes for their reader.

    Raises:
        DitileError: if a plan, the model, the size or the number of steps does not fit; nothing was measured then.
    """
    place = env.read_torchrun_place()
    if place is not None and place.world > 1:
        raise PlanError(f"--alone is for one process, and torchrun started {place.world}; start it without torchrun")
    subject = create_bench_subject(work)
    cells = _list_alone_cells(compared, work, subject)
    recorded = choose_recording(compared.recorded, pick_device(work.device, 0), cells)
    steps = choose_steps(cells, work.steps)
    threads = work.threads or cpus.count_usable_cores()
    facts = {
        "model": subject.name,
        "dtype": work.dtype,
        "device": work.device,
        "threads": threads,
        "machine": sessions.collect_machine_facts(work.device),
    }
    task = AloneTask(
        work=dataclasses.replace(work, threads=threads),
        cells=cells,
        steps=steps,
        rounds=compared.rounds,
        all_ranks=compared.all_ranks,
        recorded=recorded,
        profile=profile,
        facts=facts,
        out=compared.out,
    )
    with Status(f"one process starts and loads {work.model}"):
        results = launch(measure_alone, 1, (task,), threads=threads, stall_timeout=work.stall_timeout)
    rows = results[0]
    return rows, _list_notes(rows, profile, f"{compared.out}/{ROWS}")


def _list_alone_cells(compared: Comparison, work: Workload, subject: BenchSubject) -> list[BenchCell]:
    """List the plans, and check that each fits the model."""
    cells = []
    for cell in parse_cells(compared.plans or ""):
        if cell.cache:
            raise PlanError(
                f"{cell.display_label!r}: a cache decides by what other ranks send, and alone that is random; leave it "
                "out, or measure without --alone"
            )
        cells.append(cell._replace(height=work.height, width=work.width))
    for cell in cells:
        subject.make_cost_job(cell)
    return cells


def choose_recording(asked: bool | None, device: torch.device, cells: Sequence[BenchCell]) -> bool:
    """Return whether ranks are also measured with recorded steps: by default if there is a GPU.

    Raises:
        PlanError: if it was requested without a GPU, or for a plan whose calls cannot be recorded.
    """
    has_gpu = device.type == "cuda"
    if asked and not has_gpu:
        raise PlanError(f"recorded=True: recorded steps are CUDA graphs, and the device is {device}; leave it out")
    unrecorded = [cell.plan for cell in cells if not cell.plan_object.can_be_recorded]
    if asked and unrecorded:
        raise PlanError(f"recorded=True: calls of the plan '{unrecorded[0]}' cannot be recorded; leave one of them out")
    return has_gpu if asked is None else asked


def choose_steps(cells: Sequence[BenchCell], steps: int | None) -> tuple[int, int]:
    """Return the steps of a short and a long call, the same for all plans: the short one has steps after its warmup.

    Raises:
        PlanError: if `steps` is too small.
    """
    short = AFTER_WARMUP + max(cell.plan_object.warmup for cell in cells)
    if steps is None:
        return short, short + BETWEEN
    if steps <= short:
        raise PlanError(f"steps={steps} is too few to time a step alone after the warmup; give {short + 1} or more")
    return short, steps


def make_alone_tables(rows: Sequence[Row]) -> list[Table | str]:
    """Make the tables with the slowest rank of each plan, for 80 columns, in milliseconds of a step."""
    shown = _select_slowest_ranks(rows)
    first = shown[0]
    gpus = first["machine"]["gpus"]
    device = gpus[0] if gpus else f"CPU, {first['threads']} thread(s)"
    parts = [first["model"]]
    if first.get("height") and first.get("width"):
        parts.append(f"{first['width']} x {first['height']} px")
    parts.append(f"one {device}")
    title = f"{', '.join(parts)}: milliseconds of a step"
    labels = [_label_row(row) for row in shown]
    return [title, *make_numbered_tables(labels, format_columns(COLUMNS, shown))]


def _label_row(row: Row) -> str:
    if not row["recorded"]:
        return row["plan"] or "the plain pipeline, without ditile"
    steps = "recorded steps"
    if "as_code" in row:
        steps = f"not recorded: {row['as_code']}"
    if "problem" in row:
        steps = f"recorded steps, WRONG: {row['problem']}"
    return f"{row['plan'] or 'one rank of ditile'}, {steps}"


def _select_slowest_ranks(rows: Sequence[Row]) -> list[Row]:
    slowest: dict[tuple[str, bool], Row] = {}
    for row in rows:
        key = (row["plan"], row["recorded"])
        if key not in slowest or row["step_s"] > slowest[key]["step_s"]:
            slowest[key] = row
    return list(slowest.values())


def _list_notes(rows: Sequence[Row], profile: Profile | None, path: str) -> list[str]:
    """List notes on the meaning of the columns, and on the file of the rows."""
    notes = [
        "alone: measured, the slowest rank (from 0) by itself on this device; nothing was sent, and what others would "
        "send is a copy on the device"
    ]
    if any(row["recorded"] for row in rows):
        notes.append(
            "recorded steps: calls of the model are played as CUDA graphs, so the host does little; results were "
            "compared with those of code, bit for bit, with a callback and after a capture that was made to fail"
        )
    elif rows[0].get("device_s") is None:
        notes.append(
            "all runs as code: recorded steps (cuda_graphs) need a GPU, where each rank is measured with them too"
        )
    if rows[0].get("device_s") is None:
        notes.append("a CPU is host and device at once, so they are not apart here")
    else:
        notes.append("host: until it has started all kernels of a step; GPU: while they run; the longer limits alone")
    if profile is None:
        notes.append("no links: run `ditile calibrate`, or add --hardware NAME, such as h200-nvlink")
    else:
        notes.append(f"link: computed, not measured: what messages add over links of {profile.name}")
    notes.append("waiting: computed: gaps of the schedule; step: alone, link and waiting, which the plan should take")
    notes.append(f"written: {path}, a line for each rank")
    return notes


def _make_formatter(name: str) -> Callable[[Row], str]:
    return lambda row: _format_milliseconds(row[name]) if name in row else ""


def _format_milliseconds(seconds: float) -> str:
    """Format milliseconds with at most five characters up to ten seconds, so that a row fits a line."""
    milliseconds = 1000 * seconds
    if milliseconds < 100:
        return f"{milliseconds:.2f}"
    return f"{milliseconds:.1f}" if milliseconds < 1000 else f"{milliseconds:.0f}"


def _format_rank(row: Row) -> str:
    if row["plan"] == ONE_RANK:
        return ""
    return f"{row['rank']} of {row['world']}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "slowest": _format_rank,
    "host": _make_formatter("host_s"),
    "GPU": _make_formatter("device_s"),
    "alone": _make_formatter("step_s"),
    "link": _make_formatter("link_s"),
    "waiting": _make_formatter("waiting_s"),
    "step": _make_formatter("plan_step_s"),
    "of plain": lambda row: f"{row['times_plain']:.2f}x",
}
"""Column -> its text for a row; "" is empty."""

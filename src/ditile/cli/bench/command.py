"""`ditile bench`: measures plans side by side, and writes rows and figures. Resumes what a folder has already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from ditile.cli.bench import machine, runs, sweeps
from ditile.cli.bench.across import RANKS, measure_across
from ditile.cli.bench.cells import ONE_RANK, Cell, by_world, cells_of
from ditile.cli.bench.links import check_allowed
from ditile.cli.bench.options import Comparison, Workload
from ditile.cli.bench.predict import predicted, profile_of
from ditile.cli.bench.runs import Row
from ditile.cli.bench.session import Task, run
from ditile.cli.bench.subjects import Subject, subject_of
from ditile.cli.bench.worlds import cores
from ditile.cli.generate import quiet
from ditile.distributed import cpus, env
from ditile.distributed.launch import launch
from ditile.errors import ModelError, PlanError
from ditile.plan.cost import Job
from ditile.plan.plan import Plan
from ditile.planner.disturbance import LIMIT
from ditile.planner.profile import Profile
from ditile.runner.table import bounds

PLANS = "plans"
"""What stands for a sweep where plans were given."""
UNKNOWN = "no predictions, as this machine was not measured yet: run `ditile calibrate`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What came of it.

    Attributes:
        rows: of what was asked for, in its order; the plain pipeline's first.
        remarks: what a reader of the rows must know.
    """

    rows: list[Row]
    remarks: list[str] = field(default_factory=list)


def bench(compared: Comparison, work: Workload) -> Measured | None:
    """Measures what is not there yet, and writes rows and figures. None on torchrun's other ranks.

    Raises:
        DitileError: if something does not fit; nothing was measured or written then.
    """
    quiet()
    _check_figures(compared)
    subject, place, profile = subject_of(work), env.torchrun(), profile_of(compared)
    ranks = compared.ranks or (place.world if place is not None else max(2, torch.cuda.device_count()))
    wanted = {name: _at(compared, cells) for name, cells in _wanted(compared, work, subject, ranks).items()}
    cells = list(dict.fromkeys(cell for some in wanted.values() for cell in some))
    every = dict.fromkeys([*cells, *(cell.one_rank for cell in cells)])
    jobs = {cell: subject.job(cell) for cell in every}  # says no before anything is started
    most = _most(cells, compared)
    task = _task(compared, replace(work, threads=_threads(work, most)), subject, jobs)
    foretold = {} if profile is None else predicted(subject, jobs, profile)
    if place is None or place.rank == 0:
        done = runs.counted(runs.read(compared.out))
        todo = [(cell, compared.rounds - done.get(task.keys[cell], 0)) for cell in cells]
        task = replace(task, todo=[(cell, left) for cell, left in todo if left > 0])
    remarks = _remarks(task, _left_out(compared, work, subject, ranks, cells), profile)
    _measure(task, most)
    if place is not None and place.rank:
        return None
    return _written(compared, wanted, task, foretold, remarks)


def _remarks(task: Task, left_out: Sequence[str], profile: Profile | None) -> list[str]:
    remarks = [f"do not fit the model, and were left out: {'; '.join(left_out)}"] if left_out else []
    remarks.append(UNKNOWN if profile is None else f"predicted: seconds of the loop and memory on {profile.name}")
    if task.todo and (task.load or 0.0) > cpus.cores() / 2:
        remarks.append(
            f"this machine was busy before (load {task.load:.1f} on {cpus.cores()} cores): if others did that and "
            "went on, two ranks got more of it than one, and rounds differ; measure again when it is quiet"
        )
    return remarks


def _written(
    compared: Comparison, wanted: Mapping[str, Sequence[Cell]], task: Task, foretold: Mapping[Cell, runs.Foretold],
    remarks: list[str],
) -> Measured:  # fmt: skip
    """Rows and figures of all that was measured."""
    rows = runs.rows(runs.read(compared.out), {task.keys[cell]: one for cell, one in foretold.items()})
    files, of_key = [runs.write(compared.out, rows)], {row["key"]: row for row in rows}
    if not compared.no_figures:
        from ditile.cli.bench import figures

        files += figures.draw({k: _rows(some, task.keys, of_key) for k, some in wanted.items()}, Path(compared.out))
    shown = _rows([cell for some in wanted.values() for cell in some], task.keys, of_key)
    return Measured(rows=shown, remarks=[*remarks, *_made_again(shown), f"written: {', '.join(map(str, files))}"])


def _made_again(rows: Sequence[Row]) -> list[str]:
    """What `--remeasure` came to."""
    watched = [row for row in rows if "again" in row]
    if not watched:
        return []
    again, disturbed = (sum(row[name] for row in watched) for name in ("again", "disturbed"))
    return [
        f"{disturbed} runs ended on cores that others slowed by more than {LIMIT - 1:.0%}; "
        f"{again} more had, and were made again"
    ]


def _wanted(compared: Comparison, work: Workload, subject: Subject, ranks: int) -> dict[str, list[Cell]]:
    """The cells of each sweep, before links."""
    size = (work.height, work.width)
    if compared.plans is not None:
        return {PLANS: [cell._replace(height=size[0], width=size[1]) for cell in cells_of(compared.plans)]}
    found = {}
    for name in compared.sweeps:
        sizes = _sizes(compared, work, subject) if name == "resolution" else [size]
        fits = sweeps.fits_by(lambda plan, at=sizes[0]: subject.job(Cell(str(plan), "", "", *at)))  # type: ignore[misc]
        found[name] = sweeps.cells(name, RANKS if name == "links" else ranks, sizes, fits)
        if not found[name]:
            subject.job(Cell(str(Plan()), "", "", *sizes[0]))  # says what is wrong with the size, if that is
            raise PlanError(f"sweep {name!r}: no plan of {ranks} ranks fits {subject.name}; try other --ranks")
    return found


def _sizes(compared: Comparison, work: Workload, subject: Subject) -> list[tuple[int | None, int | None]]:
    """Squares, smallest first."""
    if compared.sizes is not None:
        return [(side, side) for side in sorted(set(compared.sizes))]
    side = work.height or subject.side()
    if side is None:
        raise ModelError(f"the size of {subject.name} is not known; give --sizes, such as 1024,2048")
    return [(k * side, k * side) for k in (1, 2, 4)]


def _at(compared: Comparison, cells: Sequence[Cell]) -> list[Cell]:
    """The cells on each link."""
    return [cell._replace(link=rate) for rate in compared.rates or [""] for cell in cells]


def _most(cells: Sequence[Cell], compared: Comparison) -> int:
    """Ranks that must be started."""
    most, place = max(by_world(cells)), env.torchrun()
    if compared.rates:
        if place is not None:
            raise PlanError("--links make hosts of their own on this machine; start ditile bench without torchrun")
        if others := [cell for cell in cells if cell.world != RANKS]:
            raise PlanError(
                f"links join two hosts of one rank each, and {others[0].label!r} needs {others[0].world} rank(s); give "
                "plans of 2"
            )
        check_allowed()
    if place is not None and most > place.world:
        raise PlanError(f"a plan needs {most} ranks and torchrun started {place.world}; start {most}, or fewer --ranks")
    return most


def _task(compared: Comparison, work: Workload, subject: Subject, jobs: Mapping[Cell, Job | None]) -> Task:
    job = {
        "model": subject.name, "prompt": work.prompt, "steps": subject.steps(), "output": work.output,
        "dtype": work.dtype, "device": work.device, "threads": work.threads, "machine": machine.facts(work.device),
    }  # fmt: skip
    known = {cell: found for cell, found in jobs.items() if found is not None and not cell.cache}
    return Task(
        work=work, todo=[], keys={cell: runs.key_of(job, cell) for cell in jobs},
        bounds={cell: math.prod(bounds(found).values()) for cell, found in known.items()},
        out=compared.out, threads=work.threads or 1, cores=cores(), load=machine.load(), remeasure=compared.remeasure,
    )  # fmt: skip


def _threads(work: Workload, most: int) -> int:
    """Of each rank: by default the cores are shared out."""
    return work.threads or max(1, cpus.cores() // most)


def _measure(task: Task, most: int) -> None:
    """On torchrun's ranks, on new ones, or on those at both ends of each link."""
    rates = dict.fromkeys(cell.link for cell, _ in task.todo)
    if env.torchrun() is not None:
        run(task)
        return
    for rate in rates:
        here = [(cell, left) for cell, left in task.todo if cell.link == rate]
        some = replace(task, todo=here, title=rate or task.title)
        if rate:
            measure_across(some, rate)
        else:
            world = max(by_world(cell for cell, _ in here))
            launch(run, world, (some,), threads=task.threads, stall_timeout=task.work.stall_timeout)


def _rows(cells: Sequence[Cell], keys: Mapping[Cell, str], of_key: Mapping[str, Row]) -> list[Row]:
    """Those of some cells, each size's one rank first."""
    every = dict.fromkeys(one for cell in cells for one in (cell.one_rank, cell))
    return [of_key[keys[cell]] for cell in every if keys[cell] in of_key]


def _left_out(compared: Comparison, work: Workload, subject: Subject, ranks: int, cells: Sequence[Cell]) -> list[str]:
    """Plans of the sweeps that do not fit the model."""
    there = {cell.plan for cell in cells} | {ONE_RANK}
    size = (work.height, work.width)
    fits = sweeps.fits_by(lambda plan: subject.job(Cell(str(plan), "", "", *size)))
    every = [plan for name in compared.sweeps for plan in sweeps.plans(name, RANKS if name == "links" else ranks, fits)]
    return [str(plan) for plan in dict.fromkeys(every) if str(plan) not in there and plan.world > 1]


def _check_figures(compared: Comparison) -> None:
    if not compared.no_figures and find_spec("matplotlib") is None:
        raise ModelError("figures need matplotlib: pip install 'ditile[plots]', or give --no-figures")

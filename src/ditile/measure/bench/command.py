"""`ditile bench`: measures plans side by side, and writes rows and figures. It resumes the runs of a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table

from ditile.distributed import cpus, env
from ditile.distributed.launch import launch
from ditile.measure.bench import runs, sweeps, turns
from ditile.measure.bench.across import RANKS, measure_across_link
from ditile.measure.bench.cells import ONE_RANK, BenchCell, group_cells_by_world, parse_cells
from ditile.measure.bench.few_steps import make_few_steps_table, measure_few_steps
from ditile.measure.bench.links import check_namespace_rights
from ditile.measure.bench.options import QUALITY_SWEEP, Comparison, Workload
from ditile.measure.bench.runs import Prediction, Row
from ditile.measure.bench.session import BenchTask, run_session
from ditile.measure.bench.subjects import BenchSubject, create_bench_subject
from ditile.measure.bench.worlds import list_allowed_cores
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.extras import require_extra
from ditile.plan.plan import Plan
from ditile.planner import hardware
from ditile.planner.calibrate import LIMIT
from ditile.planner.memory import count_rank_memory
from ditile.planner.ops import CacheSkips
from ditile.planner.profile import Profile
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.planner.search import make_pricer, predict_skipped_steps
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.table import compute_axis_bounds

PLANS = "plans"
"""The name of the sweep if plans were given."""
UNKNOWN = "no predictions, as this machine was not measured yet: run `ditile calibrate`"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """The result of a benchmark.

    Attributes:
        rows: a row for each cell, in their order; the plain pipeline's row is the first.
        remarks: what a reader of the rows must know.
        tables: of rows that are not of seconds.
    """

    rows: list[Row]
    remarks: list[str] = field(default_factory=list)
    tables: list[Table | str] = field(default_factory=list)

    def render_tables(self) -> list[Table | str]:
        """The rows for a terminal."""
        from ditile.measure.bench.tables import make_bench_tables

        return self.tables or make_bench_tables(self.rows)


def run_benchmark(compared: Comparison, work: Workload) -> BenchResult | None:
    """Measures what the folder lacks, and writes rows and figures. It returns None on torchrun's other ranks.

    Raises:
        DitileError: if a plan, a size or a cache does not fit; nothing was measured or written then.
    """
    silence_libraries()
    if compared.suite is not None:
        from ditile.measure.bench.gpu.suite import run_gpu_suite

        _, tables, remarks = run_gpu_suite(compared, work)
        return BenchResult(rows=[], remarks=remarks, tables=tables)
    if compared.sweep_names == [QUALITY_SWEEP]:
        rows = measure_few_steps(compared, work)
        return BenchResult(rows=rows, remarks=[f"written: {compared.out}"], tables=[make_few_steps_table(rows)])
    subject, place, profile = create_bench_subject(work), env.read_torchrun_place(), load_prediction_profile(compared)
    ranks = compared.ranks or (place.world if place is not None else max(2, torch.cuda.device_count()))
    wanted = {
        name: [cell._replace(link=rate) for rate in compared.link_rates or [""] for cell in cells]
        for name, cells in _list_cells_by_sweep(compared, work, subject, ranks).items()
    }
    cells = list(dict.fromkeys(cell for some in wanted.values() for cell in some))
    every = dict.fromkeys([*cells, *(cell.one_rank_baseline for cell in cells)])
    # Before ranks are started: it raises for cells that do not fit.
    jobs = {cell: subject.make_cost_job(cell) for cell in every}
    most = _count_ranks_to_start(cells, compared)
    threads = work.threads or max(1, cpus.count_usable_cores() // most)  # the cores are shared out by default
    task = _build_bench_task(compared, replace(work, threads=threads), subject, jobs)
    predictions = {} if profile is None else predict_cells(subject, jobs, profile)
    if place is None or place.rank == 0:
        done = runs.count_runs_by_key(runs.read_runs(compared.out))
        todo = [(cell, compared.rounds - done.get(task.keys[cell], 0)) for cell in cells]
        task = replace(task, todo=[(cell, left) for cell, left in todo if left > 0])
    remarks = _collect_remarks(task, _list_unfit_plans(compared, work, subject, ranks, cells), profile)
    _run_sessions(task, most)
    if place is not None and place.rank:
        return None
    return _write_results(compared, wanted, task, predictions, remarks)


def _collect_remarks(task: BenchTask, left_out: Sequence[str], profile: Profile | None) -> list[str]:
    remarks = [f"do not fit the model, and were left out: {'; '.join(left_out)}"] if left_out else []
    remarks.append(UNKNOWN if profile is None else f"predicted: seconds of the loop and memory on {profile.name}")
    cores = cpus.count_usable_cores()
    if task.todo and (task.load or 0.0) > cores / 2:
        remarks.append(
            f"this machine was busy before (load {task.load:.1f} on {cores} cores): if others did and went on, two "
            "ranks got more of it than one, and rounds differ; measure again when it is quiet"
        )
    return remarks


def _write_results(
    compared: Comparison,
    wanted: Mapping[str, Sequence[BenchCell]],
    task: BenchTask,
    predictions: Mapping[BenchCell, runs.Prediction],
    remarks: list[str],
) -> BenchResult:
    """Writes rows and figures of all runs in the folder."""
    rows = runs.summarize_runs(
        runs.read_runs(compared.out), {task.keys[cell]: one for cell, one in predictions.items()}
    )
    files, of_key = [runs.write_bench_rows(compared.out, rows)], {row["key"]: row for row in rows}
    if not compared.no_figures:
        require_extra("plots", "a figure")
        from ditile.measure.bench import figures

        files += figures.draw_sweep_figures(
            {k: _select_rows(some, task.keys, of_key) for k, some in wanted.items()}, Path(compared.out)
        )
    shown = _select_rows([cell for some in wanted.values() for cell in some], task.keys, of_key)
    return BenchResult(
        rows=shown, remarks=[*remarks, *_describe_remeasurements(shown), f"written: {', '.join(map(str, files))}"]
    )


def _describe_remeasurements(rows: Sequence[Row]) -> list[str]:
    """A remark on the runs that `--remeasure` repeated, if it watched any."""
    watched = [row for row in rows if "again" in row]
    again, disturbed = (sum(row[name] for row in watched) for name in ("again", "disturbed"))
    slower = f"{disturbed} runs ended on cores that others slowed by more than {LIMIT - 1:.0%}"
    return [f"{slower}; {again} more had, and were made again"] if watched else []


def _list_cells_by_sweep(
    compared: Comparison, work: Workload, subject: BenchSubject, ranks: int
) -> dict[str, list[BenchCell]]:
    """The cells of each sweep, without links."""
    size = (work.height, work.width)
    if compared.plans is not None:
        return {PLANS: [cell._replace(height=size[0], width=size[1]) for cell in parse_cells(compared.plans)]}
    cells_by_sweep = {}
    for name in compared.sweep_names:
        sizes = _choose_sweep_sizes(compared, work, subject) if name == "resolution" else [size]
        fits = sweeps.make_fit_check(lambda plan, at=sizes[0]: subject.make_cost_job(BenchCell(str(plan), "", "", *at)))  # type: ignore[misc]
        cells_by_sweep[name] = sweeps.list_sweep_cells(name, RANKS if name == "links" else ranks, sizes, fits)
        if not cells_by_sweep[name]:
            subject.make_cost_job(BenchCell(str(Plan()), "", "", *sizes[0]))  # raises if the size is what does not fit
            raise PlanError(f"sweep {name!r}: no plan of {ranks} ranks fits {subject.name}; try other --ranks")
    return cells_by_sweep


def _choose_sweep_sizes(
    compared: Comparison, work: Workload, subject: BenchSubject
) -> list[tuple[int | None, int | None]]:
    """(height, width) of squares, the smallest first."""
    if compared.sizes is not None:
        return [(side, side) for side in sorted(set(compared.sizes))]
    side = work.height or subject.get_native_side()
    if side is None:
        raise ModelError(f"the size of {subject.name} is not known; give --sizes, such as 1024,2048")
    return [(k * side, k * side) for k in (1, 2, 4)]


def _count_ranks_to_start(cells: Sequence[BenchCell], compared: Comparison) -> int:
    """The number of ranks that must be started. Raises `PlanError` if links or torchrun do not allow them."""
    most, place = max(group_cells_by_world(cells)), env.read_torchrun_place()
    if compared.link_rates:
        if place is not None:
            raise PlanError("--links make hosts of their own on this machine; start ditile bench without torchrun")
        if others := [cell for cell in cells if cell.num_ranks != RANKS]:
            raise PlanError(
                f"links join two hosts of one rank each, and {others[0].display_label!r} needs {others[0].num_ranks} "
                "rank(s); give plans of 2"
            )
        check_namespace_rights()
    if place is not None and most > place.world:
        raise PlanError(f"a plan needs {most} ranks and torchrun started {place.world}; start {most}, or fewer --ranks")
    return most


def _build_bench_task(
    compared: Comparison, work: Workload, subject: BenchSubject, jobs: Mapping[BenchCell, PlannedCall | None]
) -> BenchTask:
    job = {
        "model": subject.name,
        "prompt": work.prompt,
        "steps": subject.get_num_steps(),
        "output": work.output,
        "dtype": work.dtype,
        "device": work.device,
        "threads": work.threads,
        "machine": turns.collect_machine_facts(work.device),
    }
    known = {cell: cell_job for cell, cell_job in jobs.items() if cell_job is not None and not cell.cache}
    return BenchTask(
        work=work,
        todo=[],
        keys={cell: runs.make_run_key(job, cell) for cell in jobs},
        bounds={cell: math.prod(compute_axis_bounds(cell_job).values()) for cell, cell_job in known.items()},
        out=compared.out,
        threads=work.threads or 1,
        cores=list_allowed_cores(),
        load=turns.read_load_average(),
        remeasure=compared.remeasure,
    )


def _run_sessions(task: BenchTask, most: int) -> None:
    """Runs the sessions: on torchrun's ranks, on new ones, or on two hosts for each link."""
    rates = dict.fromkeys(cell.link for cell, _ in task.todo)
    if env.read_torchrun_place() is not None:
        run_session(task)
        return
    for rate in rates:
        here = [(cell, left) for cell, left in task.todo if cell.link == rate]
        some = replace(task, todo=here, title=rate or task.title)
        if rate:
            measure_across_link(some, rate)
        else:
            world = max(group_cells_by_world(cell for cell, _ in here))
            launch(run_session, world, (some,), threads=task.threads, stall_timeout=task.work.stall_timeout)


def _select_rows(cells: Sequence[BenchCell], keys: Mapping[BenchCell, str], of_key: Mapping[str, Row]) -> list[Row]:
    """The rows of some cells; that of one rank comes first for each size."""
    every = dict.fromkeys(one for cell in cells for one in (cell.one_rank_baseline, cell))
    return [of_key[keys[cell]] for cell in every if keys[cell] in of_key]


def _list_unfit_plans(
    compared: Comparison, work: Workload, subject: BenchSubject, ranks: int, cells: Sequence[BenchCell]
) -> list[str]:
    """Plans of the sweeps that do not fit the model."""
    there = {cell.plan for cell in cells} | {ONE_RANK}
    size = (work.height, work.width)
    fits = sweeps.make_fit_check(lambda plan: subject.make_cost_job(BenchCell(str(plan), "", "", *size)))
    every = [
        plan
        for name in compared.sweep_names
        for plan in sweeps.list_sweep_plans(name, RANKS if name == "links" else ranks, fits)
    ]
    return [str(plan) for plan in dict.fromkeys(every) if str(plan) not in there and plan.world > 1]


def load_prediction_profile(compared: Comparison) -> Profile | None:
    """The profile for predictions; None if no machine is named and this one was never calibrated.

    Raises:
        PlanError, ModelError: if it is not known, or a file is no profile.
    """
    if compared.hardware is None and compared.profile is None and not env.find_profile_path().exists():
        return None
    return load_machine_profile(PlanQuestion(hardware=compared.hardware, profile=compared.profile))


def predict_cells(
    subject: BenchSubject, jobs: Mapping[BenchCell, PlannedCall | None], profile: Profile
) -> dict[BenchCell, Prediction]:
    """Predicts cells. For a cache that decides by measured differences, seconds cannot be predicted."""
    return {
        cell: _predict_cell(
            subject, cell, replace(job, shape=replace(job.shape, element_size=profile.element_size)), profile
        )
        for cell, job in jobs.items()
        if job is not None
    }


def _predict_cell(subject: BenchSubject, cell: BenchCell, job: PlannedCall, profile: Profile) -> Prediction:
    # A link joins two hosts of one rank each.
    machines, host = (hardware.add_interlink(profile, cell.link), 1) if cell.link else (profile, None)
    pricer = make_pricer(subject.planner_subject, subject.make_planning_arguments(cell), machines, host)
    left = _predict_cache_skips(cell, job)
    seconds = None if left is None else pricer.price_call(job, left).latency_s
    if cell.cache or cell.plan == ONE_RANK:
        return Prediction(seconds, None)
    ranks = (
        count_rank_memory(subject.planner_subject, job, profile, rank, pricer.text_tokens)
        for rank in range(job.plan.world)
    )
    return Prediction(seconds, max(rank.denoising_peak for rank in ranks))


def _predict_cache_skips(cell: BenchCell, job: PlannedCall) -> CacheSkips | None:
    """The steps that a cell's cache leaves out; None if they depend on measured differences."""
    try:
        return predict_skipped_steps(cell.cache_configs["cache_config"], job.shape.steps)
    except PlanError:
        return None

"""`ditile bench`: measures plans side by side, and writes rows. It resumes the runs of a folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table

from ditile.distributed import cpus, env
from ditile.distributed.backend import pick_device
from ditile.distributed.launch import launch
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.planner.memory import count_rank_memory
from ditile.planner.profile import Profile
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.planner.search import make_pricer, predict_skipped_steps
from ditile.runner.requests.console import Status
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.table import compute_axis_bounds
from ditile_lab import sessions
from ditile_lab.bench import runs, sweeps
from ditile_lab.bench.cells import ONE_RANK, BenchCell, group_cells_by_world, parse_cells
from ditile_lab.bench.options import Comparison, Workload
from ditile_lab.bench.session import BenchTask, run_session
from ditile_lab.bench.subjects import BenchSubject, create_bench_subject
from ditile_lab.bench.submission import Submission
from ditile_lab.bench.tables import make_bench_tables
from ditile_lab.machine.comparison import make_alone_tables, measure_plans_alone
from ditile_lab.rows import Row

UNKNOWN = "no predictions, as this machine was not measured yet: run `ditile calibrate`"
FIGURES = "figures of these rows: python -m benchmarks.sweep_figures, in a checkout"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """The result of a benchmark.

    Attributes:
        tables: for a terminal.
        remarks: notes that a reader of the tables needs.
    """

    tables: list[Table | str]
    remarks: list[str] = field(default_factory=list)


def run_benchmark(compared: Comparison, work: Workload) -> BenchResult | None:
    """Measure the runs missing in the folder, and write rows. Returns None on torchrun's other ranks.

    Raises:
        DitileError: if a plan, a size or a cache does not fit; nothing was measured or written then.
    """
    silence_libraries()
    # This comes before ranks are started, because each of them would refuse the device.
    pick_device(work.device, 0)
    profile = load_prediction_profile(compared)
    if compared.alone:
        rows, notes = measure_plans_alone(compared, work, profile)
        return BenchResult(tables=make_alone_tables(rows), remarks=notes)
    subject = create_bench_subject(work)
    ranks = _count_sweep_ranks(compared)
    cells = _list_cells(compared, work, subject, ranks)
    # This comes before ranks are started, because it raises for cells that do not fit.
    jobs = {cell: subject.make_cost_job(cell) for cell in _add_baselines(cells)}
    most_ranks = _count_ranks_to_start(cells)
    task = _build_bench_task(compared, work, subject, jobs, most_ranks)
    predictions = {}
    if profile is not None:
        for cell, prediction in predict_cells(subject, jobs, profile).items():
            predictions[task.keys[cell]] = prediction
    # The folder may be on the machine of rank 0 only.
    place = env.read_torchrun_place()
    if place is None or place.rank == 0:
        task = replace(task, missing=_count_missing_rounds(compared, task, cells))
    remarks = _list_remarks(task, profile, most_ranks)
    unfit = _list_unfit_plans(compared, work, subject, ranks, cells)
    if unfit:
        remarks.insert(0, f"do not fit the model, and were left out: {'; '.join(unfit)}")
    _run_sessions(task, most_ranks)
    if place is not None and place.rank:
        return None
    return _write_results(compared, cells, task, predictions, remarks)


def _add_baselines(cells: Iterable[BenchCell]) -> list[BenchCell]:
    """Return the cells, each once and after the plain pipeline of its size."""
    paired: dict[BenchCell, None] = {}
    for cell in cells:
        paired |= {cell.one_rank_baseline: None, cell: None}
    return list(paired)


def _count_missing_rounds(compared: Comparison, task: BenchTask, cells: Iterable[BenchCell]) -> dict[BenchCell, int]:
    measured = runs.count_runs_by_key(runs.read_runs(compared.out))
    missing = {cell: compared.rounds - measured.get(task.keys[cell], 0) for cell in cells}
    return {cell: rounds for cell, rounds in missing.items() if rounds > 0}


def _list_remarks(task: BenchTask, profile: Profile | None, most_ranks: int) -> list[str]:
    remarks = [UNKNOWN]
    if profile is not None:
        remarks = [f"predicted: seconds of the loop and memory on {profile.name}"]
    if profile is not None and not profile.knows_ranks(most_ranks):
        remarks.append(f"not predicted: plans of more than the {len(profile.by_rank)} ranks, which are not alike")
    cores = cpus.count_usable_cores()
    if task.missing and (task.load or 0.0) > cores / 2:
        remarks.append(
            f"this machine was busy before (load {task.load:.1f} on {cores} cores): if other programs went on, two "
            "ranks got more of it than one, and rounds differ; measure again when it is quiet"
        )
    return remarks


def _write_results(
    compared: Comparison,
    cells: Iterable[BenchCell],
    task: BenchTask,
    predictions: Mapping[str, runs.Prediction],
    remarks: list[str],
) -> BenchResult:
    """Write the rows of all runs in the folder."""
    # These are all runs in the folder, including runs of earlier calls.
    rows = runs.summarize_runs(runs.read_runs(compared.out), predictions)
    files = [runs.write_bench_rows(compared.out, rows)]
    row_by_key = {row["key"]: row for row in rows}
    shown: dict[str, Row] = {}
    for cell in _add_baselines(cells):
        key = task.keys[cell]
        if key in row_by_key:
            shown[key] = row_by_key[key]
    if compared.submit is not None:
        files.append(Path(compared.submit))
        Submission.from_rows(list(shown.values())).write(files[-1])
    remarks = [*remarks, FIGURES, f"written: {', '.join(map(str, files))}"]
    return BenchResult(tables=make_bench_tables(list(shown.values())), remarks=remarks)


def _count_sweep_ranks(compared: Comparison) -> int:
    """Return the number of ranks in a sweep: the user's, torchrun's, or one for each GPU and at least two."""
    if compared.ranks is not None:
        return compared.ranks
    place = env.read_torchrun_place()
    if place is not None:
        return place.world
    return max(2, torch.cuda.device_count())


def _list_cells(compared: Comparison, work: Workload, subject: BenchSubject, ranks: int) -> list[BenchCell]:
    """Return the cells of the plans, or of all sweeps, each once."""
    if compared.plans is not None:
        cells = parse_cells(compared.plans)
        return list(dict.fromkeys(cell._replace(height=work.height, width=work.width) for cell in cells))
    cells = []
    for name in compared.sweep_names:
        sizes = [(work.height, work.width)]
        if name == "resolution":
            sizes = _choose_sweep_sizes(compared, work, subject)
        fits = _make_fit_check(subject, *sizes[0])
        sweep_cells = sweeps.list_sweep_cells(name, ranks, sizes, fits)
        if not sweep_cells:
            # It raises if the size does not fit, rather than the plans.
            subject.make_cost_job(BenchCell(str(Plan()), "", *sizes[0]))
            raise PlanError(f"sweep {name!r}: no plan of {ranks} ranks fits {subject.name}; try other --ranks")
        cells += sweep_cells
    return list(dict.fromkeys(cells))


def _make_fit_check(subject: BenchSubject, height: int | None, width: int | None) -> sweeps.Fits:
    return sweeps.make_fit_check(lambda plan: subject.make_cost_job(BenchCell(str(plan), "", height, width)))


def _choose_sweep_sizes(
    compared: Comparison, work: Workload, subject: BenchSubject
) -> list[tuple[int | None, int | None]]:
    """Return (height, width) of squares, the smallest first."""
    if compared.sizes is not None:
        return [(side, side) for side in sorted(set(compared.sizes))]
    side = work.height or subject.get_native_side()
    if side is None:
        raise ModelError(f"the size of {subject.name} is not known; give --sizes, such as 1024,2048")
    return [(factor * side, factor * side) for factor in (1, 2, 4)]


def _count_ranks_to_start(cells: Sequence[BenchCell]) -> int:
    """Return the number of ranks in the largest plan. Raises `PlanError` if torchrun started fewer."""
    most = max(cell.num_ranks for cell in cells)
    place = env.read_torchrun_place()
    if place is not None and most > place.world:
        raise PlanError(f"a plan needs {most} ranks and torchrun started {place.world}; start {most}, or fewer --ranks")
    return most


def _build_bench_task(
    compared: Comparison,
    work: Workload,
    subject: BenchSubject,
    jobs: Mapping[BenchCell, PlannedCall | None],
    most_ranks: int,
) -> BenchTask:
    # The cores are divided among the ranks of the largest plan; smaller plans get as many threads, so that seconds
    # compare.
    threads = work.threads or max(1, cpus.count_usable_cores() // most_ranks)
    job = {
        "model": subject.name,
        "prompt": work.prompt,
        "steps": subject.get_num_steps(),
        "output": work.output,
        "dtype": work.dtype,
        "device": work.device,
        "threads": threads,
        "machine": sessions.collect_machine_facts(work.device),
    }
    bounds = {}
    for cell, cell_job in jobs.items():
        if cell_job is not None and not cell.cache:
            bounds[cell] = math.prod(compute_axis_bounds(cell_job).values())
    return BenchTask(
        work=replace(work, threads=threads),
        missing={},
        keys={cell: runs.make_run_key(job, cell) for cell in jobs},
        bounds=bounds,
        out=compared.out,
        threads=threads,
        cores=cpus.list_usable_cores(),
        load=sessions.read_load_average(),
    )


def _run_sessions(task: BenchTask, most_ranks: int) -> None:
    """Run the session on torchrun's ranks, or on new ones; on none if nothing is missing."""
    if env.read_torchrun_place() is not None:
        # The session runs even if nothing is missing, because only rank 0 knows that.
        run_session(task)
    elif task.missing:
        world = max(group_cells_by_world(task.missing))
        with Status(f"{world} rank(s) start and load {task.work.model}"):
            launch(run_session, world, (task,), threads=task.threads, stall_timeout=task.work.stall_timeout)


def _list_unfit_plans(
    compared: Comparison, work: Workload, subject: BenchSubject, ranks: int, cells: Sequence[BenchCell]
) -> list[str]:
    """Return the plans of the sweeps that do not fit the model."""
    fits = _make_fit_check(subject, work.height, work.width)
    measured = {cell.plan for cell in cells}
    unfit = {}
    for name in compared.sweep_names:
        for plan in sweeps.list_sweep_plans(name, ranks, fits):
            if plan.world > 1 and str(plan) not in measured:
                unfit[str(plan)] = plan
    return list(unfit)


def load_prediction_profile(compared: Comparison) -> Profile | None:
    """Load the profile for predictions; None if no machine is named and this one was never calibrated.

    Raises:
        PlanError, ModelError: if it is unknown, or a file is not a profile.
    """
    if compared.hardware is None and compared.profile is None and not env.find_profile_path().exists():
        return None
    return load_machine_profile(PlanQuestion(hardware=compared.hardware, profile=compared.profile))


def predict_cells(
    subject: BenchSubject, jobs: Mapping[BenchCell, PlannedCall | None], profile: Profile
) -> dict[BenchCell, runs.Prediction]:
    """Predict the cells that have a job, except those with more ranks than known devices."""
    predictions = {}
    for cell, job in jobs.items():
        if job is not None and profile.knows_ranks(job.plan.world):
            predictions[cell] = predict_cell(subject, cell, job, profile)
    return predictions


def predict_cell(
    subject: BenchSubject, cell: BenchCell, job: PlannedCall, profile: Profile, ranks_per_host: int | None = None
) -> runs.Prediction:
    """Predict a cell, except the seconds of a cache that decides by measured differences.

    Args:
        ranks_per_host: given if ranks are on several hosts; the profile then has the link between these.
    """
    # A profile is made for one type of numbers, and the bytes of messages depend on it.
    job = replace(job, shape=replace(job.shape, element_size=profile.element_size))
    arguments = subject.make_planning_arguments(cell)
    pricer = make_pricer(subject.planner_subject, arguments, profile, ranks_per_host)
    seconds = None
    try:
        cache = cell.cache_configs
        forecast = cache.get("calibrator_config")
        skips = predict_skipped_steps(cache["cache_config"], job.shape.steps, forecast=forecast)
    except PlanError:
        # The steps that the cache skips depend on measured differences.
        skips = None
    if skips is not None:
        seconds = pricer.price_call(job, skips).latency_s
    # The planner does not count the memory of caches, and the plain pipeline has no plan.
    if cell.cache or cell.plan == ONE_RANK:
        return runs.Prediction(seconds, None)
    peaks = []
    for rank in range(job.plan.world):
        tokens = pricer.text_tokens
        memory = count_rank_memory(subject.planner_subject, job, profile, rank, tokens)
        peaks.append(memory.denoising_peak)
    return runs.Prediction(seconds, max(peaks))

"""The commands of the lab, which measure and study: `ditile bench`, `evaluate`, `fit` and `calibrate`.

As in the library's own commands, modules that need torch are imported within functions.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ditile.cli.main import EXAMPLE, Command, build_options, leave_torchrun, silence_libraries
from ditile.distributed import env
from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra
from ditile.plan.plan import Plan
from ditile.runner.model_files import find_model_source
from ditile.runner.requests.console import (
    Status,
    is_writing_process,
    make_console,
    print_parts,
)
from ditile.runner.requests.outputs import check_output_files
from ditile.runner.requests.preflight import check_known_model
from ditile_lab.bench.cells import parse_cells
from ditile_lab.bench.options import Comparison, Workload
from ditile_lab.machine.options import CalibrateOptions
from ditile_lab.quality.options import EvaluateOptions, FitOptions, JudgeOptions, SessionOptions


def _run_bench_command(arguments: argparse.Namespace) -> int:
    comparison = build_options(Comparison, arguments)
    work = build_options(Workload, arguments)
    if is_writing_process():
        comparison.check_output_folder(work)
    if not work.has_random_weights:
        find_model_source(work.model, components=work.components)
    plans = [Plan()]
    if comparison.plans is not None:
        plans += [cell.plan_object for cell in parse_cells(comparison.plans)]
    for plan in plans:
        check_known_model(work.to_generate_options(), plan)
    from ditile_lab.bench.command import run_benchmark

    measured = run_benchmark(comparison, work)
    leave_torchrun()
    if measured is not None:
        remarks = [f"- {remark}" for remark in measured.remarks]
        print_parts(make_console(), [*measured.tables, *remarks])
    return 0


def _run_evaluate_command(arguments: argparse.Namespace) -> int:
    require_extra("evaluate", "ditile evaluate", ["torchmetrics"])
    options = build_options(EvaluateOptions, arguments)
    judge = build_options(JudgeOptions, arguments)
    session = build_options(SessionOptions, arguments)
    if is_writing_process():
        session.check_output_folder(options, judge)
    find_model_source(options.model, components=options.components)
    for setting in options.candidate_settings:
        check_known_model(options.build_generate_options(), Plan.parse(setting.plan))
    silence_libraries()
    from ditile.runner.requests.pipelines import find_model_output

    kind = find_model_output(options.model)
    if kind != "image":
        raise ModelError(f"model {options.model!r} makes {kind}s, and images are compared here; try shapes-flux")
    from ditile_lab.quality.command import build_evaluation_tables, list_table_remarks, run_evaluation

    evaluation = run_evaluation(options, judge, session)
    if evaluation is not None:
        remarks = [f"- {remark}" for remark in list_table_remarks(evaluation)]
        print_parts(make_console(), [*build_evaluation_tables(evaluation), *remarks, f"written: {session.out}"])
    return 0


def _run_fit_command(arguments: argparse.Namespace) -> int:
    options = build_options(FitOptions, arguments)
    if options.out is not None:
        check_output_files([("out", Path(options.out))], options)
    find_model_source(options.model, components=options.components)
    check_known_model(options.to_generate_options(prompt=EXAMPLE), Plan())
    silence_libraries()
    from ditile_lab.quality.schedule_fit import build_schedule_table, fit_schedule

    schedule, path = fit_schedule(options)
    print_parts(make_console(), [build_schedule_table(schedule), f"written: {path}"])
    return 0


def _run_calibrate_command(arguments: argparse.Namespace) -> int:
    options = build_options(CalibrateOptions, arguments)
    if is_writing_process():
        path = Path(options.out) if options.out is not None else env.find_profile_path()
        if options.out is None:
            # The user's cache folder may not exist yet.
            path.parent.mkdir(parents=True, exist_ok=True)
        check_output_files([("out", path)], options)
    silence_libraries()
    from ditile_lab.machine.calibrate import calibrate_machine

    with Status("starting the ranks that measure this machine, for a minute or two"):
        written = calibrate_machine(options)
    leave_torchrun()
    if written is not None:
        print_parts(make_console(), [str(written)])
        # The path stands alone on the standard output, for scripts.
        if options.out is not None:
            hint = f"use it by --profile {shlex.quote(str(written))} of ditile plan, generate, serve, verify and bench"
            print_parts(make_console(stderr=True), [hint])
    return 0


COMMANDS = {
    "bench": Command(
        _run_bench_command,
        "measure plans and caches against one rank",
        {Comparison: "comparison", Workload: "workload"},
    ),
    "evaluate": Command(
        _run_evaluate_command,
        "measure what plans and caches do to images and time",
        {EvaluateOptions: "images", JudgeOptions: "judging", SessionOptions: "run"},
    ),
    "fit": Command(
        _run_fit_command,
        "find the steps that a model can leave out",
        {FitOptions: "captions"},
    ),
    "calibrate": Command(
        _run_calibrate_command,
        "measure this machine, so that plans can be ranked for it",
        {CalibrateOptions: "measurement"},
    ),
}

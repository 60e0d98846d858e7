"""The commands that measure and foretell: bench, evaluate, plan, calibrate. torch comes once options are checked."""

from __future__ import annotations

import argparse
import sys

from ditile.cli.bench.options import Comparison, Workload
from ditile.cli.evaluate.options import EvaluateOptions, JudgeOptions, SessionOptions
from ditile.cli.options import CalibrateOptions
from ditile.distributed import env
from ditile.distributed.console import is_writing_process, make_console, print_table_and_json
from ditile.plan.flags import collect_arguments
from ditile.planner.question import PlanQuestion
from ditile.runner.load import find_model_source


def run_bench_command(arguments: argparse.Namespace) -> int:
    """`ditile bench`."""
    compared, work = (
        Comparison(**collect_arguments(Comparison, arguments)),
        Workload(**collect_arguments(Workload, arguments)),
    )
    if is_writing_process():
        compared.check_output_folder()
    if not work.has_random_weights:
        find_model_source(work.model)
    from ditile.cli.bench import command

    measured = command.run_benchmark(compared, work)
    leave_torchrun()
    if measured is not None:
        from ditile.cli.bench.tables import make_bench_table

        shown = make_console()
        shown.print(make_bench_table(measured.rows))
        for line in measured.remarks:
            shown.print(f"- {line}", soft_wrap=True)
    return 0


def run_evaluate_command(arguments: argparse.Namespace) -> int:
    """`ditile evaluate`."""
    wanted = EvaluateOptions(**collect_arguments(EvaluateOptions, arguments))
    judge, session = (
        JudgeOptions(**collect_arguments(JudgeOptions, arguments)),
        SessionOptions(**collect_arguments(SessionOptions, arguments)),
    )
    find_model_source(wanted.model)
    from ditile.cli.generate import silence_libraries

    silence_libraries()  # before what follows imports diffusers
    from ditile.cli.evaluate import evaluate

    evaluation = evaluate.run_evaluation(wanted, judge, session)
    if evaluation is not None:
        shown = make_console()
        shown.print(evaluate.build_evaluation_table(evaluation))
        for line in evaluate.list_table_remarks(evaluation):
            shown.print(f"- {line}", soft_wrap=True)
        shown.print(f"written: {session.out}")
    return 0


def run_plan_command(arguments: argparse.Namespace) -> int:
    """`ditile plan`."""
    from ditile.cli.generate import silence_libraries

    ask = PlanQuestion(**collect_arguments(PlanQuestion, arguments))
    silence_libraries()
    from ditile.planner.answer import answer_question

    plan_answer = answer_question(ask)
    print_table_and_json(plan_answer.render_table(), plan_answer.to_json(), ask.json)
    return 0


def run_calibrate_command(arguments: argparse.Namespace) -> int:
    """`ditile calibrate`."""
    wanted = CalibrateOptions(**collect_arguments(CalibrateOptions, arguments))
    if is_writing_process():
        wanted.check_profile_path()
    from ditile.cli.generate import silence_libraries

    silence_libraries()
    from ditile.cli import calibrate

    path = calibrate.calibrate_machine(wanted)
    leave_torchrun()
    if path is not None:
        print(path)
        from ditile.planner.disturbance import BUSY
        from ditile.planner.profile import Profile

        if (share := Profile.from_json_file(path).disturbed) > BUSY:
            print(f"note: others slowed the cores in {share:.0%} of what was timed; do it again when they are gone",
                  file=sys.stderr)  # fmt: skip
    return 0


def leave_torchrun() -> None:
    """Under torchrun the ranks leave their group together."""
    if env.read_torchrun_place() is not None:
        from ditile.distributed.mesh import leave_process_group

        leave_process_group()

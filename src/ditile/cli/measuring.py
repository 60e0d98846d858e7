"""The commands that measure and foretell: bench, evaluate, plan, calibrate. torch comes once options are checked."""

from __future__ import annotations

import argparse
import sys

from ditile.cli.bench.options import Comparison, Workload
from ditile.cli.evaluate.options import Evaluate, Judge, Session
from ditile.cli.options import Calibrate
from ditile.distributed import env
from ditile.distributed.console import console, print_both, writes
from ditile.plan.flags import collect
from ditile.planner.question import Ask
from ditile.runner.load import find


def bench(arguments: argparse.Namespace) -> int:
    """`ditile bench`."""
    compared, work = Comparison(**collect(Comparison, arguments)), Workload(**collect(Workload, arguments))
    if writes():
        compared.check_out()
    if not work.is_random:
        find(work.model)
    from ditile.cli.bench import command

    measured = command.bench(compared, work)
    leave_torchrun()
    if measured is not None:
        from ditile.cli.bench.tables import table

        shown = console()
        shown.print(table(measured.rows))
        for line in measured.remarks:
            shown.print(f"- {line}", soft_wrap=True)
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """`ditile evaluate`."""
    wanted = Evaluate(**collect(Evaluate, arguments))
    judge, session = Judge(**collect(Judge, arguments)), Session(**collect(Session, arguments))
    find(wanted.model)
    from ditile.cli.generate import quiet

    quiet()  # before what follows imports diffusers
    from ditile.cli.evaluate import evaluate

    found = evaluate.evaluate(wanted, judge, session)
    if found is not None:
        shown = console()
        shown.print(evaluate.as_table(found))
        for line in evaluate.remarks(found):
            shown.print(f"- {line}", soft_wrap=True)
        shown.print(f"written: {session.out}")
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """`ditile plan`."""
    from ditile.cli.generate import quiet

    ask = Ask(**collect(Ask, arguments))
    quiet()
    from ditile.planner.answer import answer

    found = answer(ask)
    print_both(found.as_table(), found.to_json(), ask.json)
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    """`ditile calibrate`."""
    wanted = Calibrate(**collect(Calibrate, arguments))
    if writes():
        wanted.check_out()
    from ditile.cli.generate import quiet

    quiet()
    from ditile.cli import calibrate

    path = calibrate.calibrate(wanted)
    leave_torchrun()
    if path is not None:
        print(path)
        from ditile.planner.disturbance import BUSY
        from ditile.planner.profile import Profile

        if (share := Profile.read(path).disturbed) > BUSY:
            print(f"note: others slowed the cores in {share:.0%} of what was timed; do it again when they are gone",
                  file=sys.stderr)  # fmt: skip
    return 0


def leave_torchrun() -> None:
    """Under torchrun the ranks leave their group together."""
    if env.torchrun() is not None:
        from ditile.distributed.mesh import part

        part()

"""The command line. Help, the version and refused flags are answered without importing torch.

Bad input is one line on the standard error and exit code 2; a rank that failed is its traceback, one line and 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import ditile
from ditile import env
from ditile.errors import DitileError, ModelError, PlanError, RankError
from ditile.flags import add_arguments, collect, flag, normalise
from ditile.launch import launch
from ditile.load import bundled, defaults, find
from ditile.options import Generate, Run, check_image
from ditile.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from ditile.generate import Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        arguments = _parse(normalise(list(sys.argv[1:] if argv is None else argv)))
        if arguments.command == "models":
            return _models()
        return _generate(arguments)
    except RankError as error:
        print(error.traceback.rstrip(), file=sys.stderr)
        return _say(str(error), 1)
    except DitileError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt:
        return _say("interrupted", 130)


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong as a `DitileError`, without the usage lines."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(prog="ditile", description="Diffusion transformers over many devices.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"ditile {ditile.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    generate = commands.add_parser(
        "generate", help="make a picture", description="Make a picture, on several ranks if a plan says so.",
        allow_abbrev=False,
    )  # fmt: skip
    add_arguments(generate, Generate, title="picture")
    add_arguments(generate, Plan, title="plan")
    add_arguments(generate, Run, title="run")
    commands.add_parser(
        "models", help="list what can run", description="List families and bundled models.", allow_abbrev=False
    )
    return top


def _parse(argv: list[str]) -> argparse.Namespace:
    arguments, extra = parser().parse_known_args(argv)
    if not extra:
        return arguments
    name = extra[0].partition("=")[0]
    if not name.startswith("-"):
        raise PlanError(f"{extra[0]!r} is one argument too many; put a prompt of several words in quotes")
    near = difflib.get_close_matches(name, _flags(arguments.command), n=1)
    raise PlanError(f"{name} is not known; " + (f"did you mean {near[0]}?" if near else "see ditile --help"))


def _flags(command: str) -> list[str]:
    kinds = (Generate, Plan, Run) if command == "generate" else ()
    return ["--help", *(flag(field.name) for kind in kinds for field in dataclasses.fields(kind))]


def _generate(arguments: argparse.Namespace) -> int:
    plan = Plan(**collect(Plan, arguments))
    wanted, run = Generate(**collect(Generate, arguments)), Run(**collect(Run, arguments))
    find(wanted.model)
    if wanted.image is not None:
        check_image(wanted.image)
    if run.dry_run:
        return _dry_run(wanted, plan)
    run.check_outputs(wanted.num_images)
    outcome = _run(wanted, run, plan)
    if outcome is not None:
        _report(outcome, run)
    return 0


def _run(wanted: Generate, run: Run, plan: Plan) -> Outcome | None:
    """The outcome, on rank 0; None on torchrun's other ranks."""
    if env.torchrun() is None:
        if wanted.seed is None:
            wanted = dataclasses.replace(wanted, seed=secrets.randbelow(2**31))
        if plan.world > 1:
            from ditile.generate import draw

            results: list[Outcome | None] = launch(
                draw, plan.world, (wanted, run, plan), threads=run.threads, stall_timeout=run.stall_timeout
            )
            return results[0]
    from ditile.generate import draw

    return draw(wanted, run, plan)


def _dry_run(wanted: Generate, plan: Plan) -> int:
    from ditile import dry_run
    from ditile.generate import guidance_name

    base = defaults(wanted.model)
    call = base | wanted.call() | ({guidance_name(base): wanted.guidance} if wanted.guidance is not None else {})
    print(dry_run.report(wanted.model, plan, call))
    return 0


def _report(outcome: Outcome, run: Run) -> None:
    from ditile.summary import as_dict, as_table

    text = json.dumps(as_dict(outcome), indent=2)
    _console(stderr=run.json == "-").print(as_table(outcome))
    if run.json == "-":
        print(text)
    elif run.json is not None:
        try:
            Path(run.json).write_text(text + "\n", "utf-8")
        except OSError as error:
            raise ModelError(f"json={run.json!r} cannot be written: {error}") from error


def _models() -> int:
    from rich.table import Table

    from ditile.models import families

    table = Table()
    for title in ("family", "transformer", "pipelines", "rung", "why"):
        table.add_column(title, overflow="fold")
    for family in families():
        table.add_row(family.name, family.transformer, "\n".join(family.pipelines), family.rung, family.note)
    console = _console(stderr=False)
    console.print(table)
    console.print(f"bundled: {', '.join(bundled()) or 'none'}")
    return 0


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, markup=False, width=160 if piped else None)


def _say(message: str, code: int) -> int:
    print(f"ditile: {message}", file=sys.stderr)
    return code

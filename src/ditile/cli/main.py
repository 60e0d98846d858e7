"""The command line. Help, the version and refused flags are answered without importing torch.

Bad input is one line on the standard error and exit code 2; a rank that failed is its traceback, one line and 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ditile
from ditile.cli import cache_options, xdit_flags
from ditile.cli.bench.options import Comparison, Workload
from ditile.cli.cache_options import Cache
from ditile.cli.evaluate.options import Evaluate, Judge, Session
from ditile.cli.measuring import bench, calibrate, evaluate, leave_torchrun, plan
from ditile.cli.options import Calibrate, Generate, Proof, Run, check_image, check_lora
from ditile.distributed import env
from ditile.distributed.console import console, print_both, writes
from ditile.distributed.launch import launch
from ditile.errors import DitileError, ModelError, PlanError, RankError
from ditile.plan.flags import add_arguments, collect, names, normalise
from ditile.plan.plan import AUTO, Plan
from ditile.planner.budget import Budget, choose, described, stored
from ditile.planner.question import Ask
from ditile.runner.load import bundled, defaults, find

if TYPE_CHECKING:
    from ditile.cli.outcome import Outcome

KINDS: dict[str, tuple[type, ...]] = {
    "generate": (Generate, Plan, Run, Cache, Budget),
    "verify": (Plan, Proof),
    "bench": (Comparison, Workload),
    "evaluate": (Evaluate, Judge, Session),
    "plan": (Ask,),
    "calibrate": (Calibrate,),
}
"""The dataclasses whose fields are the flags of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    commands = {
        "generate": _generate, "verify": _verify, "bench": bench, "evaluate": evaluate, "plan": plan,
        "calibrate": calibrate, "models": _models,
    }  # fmt: skip
    env.hush()
    try:
        arguments = _parse(normalise(list(sys.argv[1:] if argv is None else argv)))
        return commands[arguments.command](arguments)
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
    titles: dict[type, str] = {
        Generate: "picture", Plan: "plan", Run: "run", Cache: "cache", Proof: "proof", Budget: "budget",
        Comparison: "comparison", Workload: "workload", Evaluate: "pictures", Judge: "judging", Session: "run",
        Ask: "question", Calibrate: "measurement",
    }  # fmt: skip
    for name, short, long in (
        ("generate", "make a picture", "Make a picture, on several ranks if a plan says so."),
        (
            "verify",
            "prove a plan on this machine",
            "Prove a plan on this machine: exact where it says so, and at rest.",
        ),
        (
            "bench",
            "measure plans side by side",
            "Measure plans and caches against one rank, interleaved in one session; rows, a table and figures.",
        ),
        (
            "evaluate",
            "measure what plans and caches do to pictures, and to time",
            "Draw the same captions with plans and caches and with the original pipeline; compare pictures and time.",
        ),
        ("plan", "which plan for a model and a machine", "Rank plans by predicted latency."),
        ("calibrate", "measure this machine", "Measure this machine, so that plans can be ranked for it."),
    ):
        command = commands.add_parser(name, help=short, description=long, allow_abbrev=False)
        for kind in KINDS[name]:
            add_arguments(command, kind, title=titles[kind])
        if Plan in KINDS[name]:
            xdit_flags.add_arguments(command)
        if Cache in KINDS[name]:
            cache_options.add_arguments(command)
    models = commands.add_parser(
        "models", help="list what can run", description="List families, methods and bundled models.", allow_abbrev=False
    )
    models.add_argument("--markdown", action="store_true", help="the matrix of families and methods as Markdown")
    return top


def _parse(argv: list[str]) -> argparse.Namespace:
    arguments, extra = parser().parse_known_args(argv)
    if not extra:
        return arguments
    name = extra[0].partition("=")[0]
    if not name.startswith("-"):
        quotes = "put a prompt of several words in quotes"
        what_works = quotes if arguments.command == "generate" else f"see ditile {arguments.command} --help"
        raise PlanError(f"{extra[0]!r} is one argument too many; {what_works}")
    near = difflib.get_close_matches(name, _flags(arguments.command), n=1)
    raise PlanError(f"{name} is not known; " + (f"did you mean {near[0]}?" if near else "see ditile --help"))


def _flags(command: str) -> list[str]:
    kinds = KINDS.get(command, ())
    known = cache_options.names() if Cache in kinds else []
    known += xdit_flags.names() if Plan in kinds else []
    return ["--help", *(name for kind in kinds for name in names(kind)), *known]


def _plan(arguments: argparse.Namespace, cache: Cache | None = None) -> Plan:
    own = xdit_flags.merged(arguments, _collect(Plan, arguments))
    return Plan(**(own if cache is None else cache.plan_values(own)))


def _collect(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The given flags of a set of options, and the aliases for them."""
    return cache_options.with_aliases(arguments, kind, collect(kind, arguments))


def _generate(arguments: argparse.Namespace) -> int:
    cache, budget = Cache(**collect(Cache, arguments)), Budget(**collect(Budget, arguments))
    plan = _plan(arguments, cache)
    wanted, run = Generate(**_collect(Generate, arguments)), Run(**_collect(Run, arguments))
    if run.plan is not None:
        plan = _named(run.plan, wanted, run, plan)
    if budget.is_set:
        plan, cache = _within(budget, wanted, run, plan, cache)
    run = dataclasses.replace(run, attention=cache.attention(run.attention))
    find(wanted.model, weights=not run.dry_run)
    if cache.lora is not None:
        check_lora(cache.lora)
    if wanted.image is not None:
        check_image(wanted.image)
    if run.out_dir is not None and wanted.prompts_file is None:
        raise ModelError(f"out_dir={run.out_dir!r} is for a file of prompts; use --out, or add --prompts-file FILE")
    if run.text_after == "free" and (wanted.prompts_file is not None or cache.perf):
        several = "--perf draws a picture" if cache.perf else "a file of prompts is encoded"
        raise ModelError(f"text_after='free': {several} several times, and freed encoders do so once; use offload")
    if run.dry_run:
        return _dry_run(wanted, plan, cache)
    if env.torchrun() is None and plan.world > (os.cpu_count() or 1):
        _planned("planned", wanted, plan, cache)  # before very many processes are started to say the same
    draw = _draw_lines if wanted.prompts_file is not None else _draw
    outcome = draw(wanted, run, plan, cache)
    if outcome is not None:
        _report(outcome, run)
    return 0


def _named(text: str, wanted: Generate, run: Run, given: Plan) -> Plan:
    """The plan of `--plan`; of `auto` the first of `ditile plan`, which is said.

    Raises:
        DitileError: if flags say a plan too, or this machine was not measured.
    """
    if given != Plan():
        raise PlanError(f"plan={text!r} is a whole plan, and flags say '{given}' too; leave one of them out")
    if not text.strip():
        raise PlanError(f"plan={text!r} says nothing; write name=value, such as pipefusion=2, or auto")
    if text != AUTO:
        return Plan.parse(text)
    from ditile.planner.answer import answer

    asked = {name: getattr(wanted, name) for name in ("model", "height", "width", "steps", "guidance", "num_images")}

    def fastest(hosts: int) -> str:
        place = env.torchrun()
        ask = Ask(devices=None if place is None else place.world, hosts=hosts, **asked)
        found = answer(ask, all_devices=place is not None)
        console(stderr=run.json == "-").print(found.choice(), soft_wrap=True)
        return str(found.found.prices[0].plan)

    return Plan.parse(_decided(fastest, run))


def _decided(decide: Callable[[int], Any], run: Run) -> Any:
    """What is decided by what lies on a host, for a number of hosts: under torchrun by rank 0, for all."""
    if env.torchrun() is None:
        return decide(1)
    from ditile.distributed.rank0 import decided

    return decided(decide, run.stall_timeout)


def _within(budget: Budget, wanted: Generate, run: Run, plan: Plan, cache: Cache) -> tuple[Plan, Cache]:
    """The plan and cache that a budget picks, which is said.

    Raises:
        DitileError: if there is no such evaluation, nothing in it will do, or a plan or cache was given too.
    """
    if plan != Plan() or cache.configs()["cache_config"] is not None:
        given = f"plan '{plan}'" if plan != Plan() else "cache"
        raise PlanError(f"a budget picks plan and cache, and a {given} is given too; leave one of them out")

    def picked(hosts: int) -> tuple[str, str]:
        found, place = stored(wanted.model, budget.evaluation), env.torchrun()
        rows = [row for row in found["settings"] if place is None or row["world"] == place.world]
        ranks = place.world if place is not None else budget.world or _devices()
        row = choose(rows, min_psnr=budget.min_psnr, max_latency=budget.max_latency, world=ranks)
        where = found.get("measured", {}).get("machine", "another machine")
        console(stderr=run.json == "-").print(f"picked: {described(row)}, as evaluated on {where}", soft_wrap=True)
        return row["plan"], row["cache"]

    of_plan, of_cache = _decided(picked, run)
    others = {name: getattr(cache, name) for name in cache.given}
    return Plan.parse(of_plan), Cache(**others | {"cache_line": of_cache})


def _devices() -> int:
    """GPUs, or where there are none cores."""
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def _draw(wanted: Generate, run: Run, plan: Plan, cache: Cache) -> Outcome | None:
    """The outcome of one call, on rank 0; None on torchrun's other ranks."""
    if writes():
        run.check_outputs(run.images(wanted.num_images))
    if env.torchrun() is None and wanted.seed is None:
        wanted = dataclasses.replace(wanted, seed=secrets.randbelow(2**31))
    outcome: Outcome | None = _on_ranks("draw", plan, run, (wanted, run, plan, cache))
    return outcome


def _draw_lines(wanted: Generate, run: Run, plan: Plan, cache: Cache) -> Outcome | None:
    """The same of a file of prompts. Where nothing is left to make, no model is loaded."""
    from ditile.cli import prompts

    every: list[prompts.Line] = []
    left: list[prompts.Line] = []
    if writes():
        every = prompts.lines(wanted, run)
        run.check_outputs([Path(line.path) for line in every[:1]])
        left = prompts.left(every, prompts.request(wanted, run, plan, cache, defaults(wanted.model)))
        if not left and env.torchrun() is None:
            from ditile.cli.generate import outcome_of_lines

            return outcome_of_lines(wanted, run, plan, cache, 0, [])
    outcome: Outcome | None = _on_ranks("draw_lines", plan, run, (wanted, run, plan, cache, left, len(every)))
    return outcome


def _on_ranks(name: str, plan: Plan, run: Run | Proof, args: tuple[Any, ...]) -> Any:
    """Runs one of `ditile.cli.generate` or `ditile.cli.verify` on the ranks of a plan: torchrun's or new ones."""
    if env.torchrun() is None and plan.world > 1:
        call = (name, *args)
        return launch(_on_rank, plan.world, call, threads=run.threads, stall_timeout=run.stall_timeout)[0]
    result = _on_rank(name, *args)
    leave_torchrun()
    return result


def _on_rank(name: str, *args: Any) -> Any:
    """The same on a rank, which alone imports what draws."""
    if name == "verify":
        from ditile.cli.verify import verify

        return verify(*args)
    from ditile.cli import generate

    return getattr(generate, name)(*args)


def _dry_run(wanted: Generate, plan: Plan, cache: Cache) -> int:
    print(_planned("report", wanted, plan, cache))
    leave_torchrun()
    return 0


def _planned(name: str, wanted: Generate, plan: Plan, cache: Cache) -> Any:
    """What `ditile.cli.dry_run` says of a call. Raises `PlanError` or `ModelError` if something does not fit."""
    from ditile.cli.generate import quiet

    quiet()
    from ditile.cli import dry_run

    if wanted.prompts_file is not None:
        wanted = dataclasses.replace(wanted, prompts_file=None, prompt="a prompt", num_images=plan.data)
    return getattr(dry_run, name)(wanted, plan, cache.configs())


def _verify(arguments: argparse.Namespace) -> int:
    from ditile.errors import JoinError, StateError

    plan, proof = _plan(arguments), Proof(**collect(Proof, arguments))
    find(proof.model)
    try:
        verdict = _on_ranks("verify", plan, proof, (proof, plan))
    except JoinError:
        raise
    except StateError as error:  # keys of other ages than scheduled, or another promise broken in mid-run
        return _say(f"the plan is not proven: {error}", 1)
    if writes():
        from ditile.cli.verdict import as_table

        console().print(as_table(verdict))
    return 0 if verdict.ok else 1


def _report(outcome: Outcome, run: Run) -> None:
    from ditile.cli.results import as_dict, as_table

    print_both(as_table(outcome), json.dumps(as_dict(outcome), indent=2), run.json)


def _models(arguments: argparse.Namespace) -> int:
    from ditile.cli.generate import quiet

    quiet()
    from ditile.cli import models as matrix

    if arguments.markdown:
        print(matrix.as_markdown())
        return 0
    shown = console()
    for table in matrix.as_tables():
        shown.print(table)
    shown.print(f"bundled: {', '.join(bundled()) or 'none'}")
    return 0


def _say(message: str, code: int) -> int:
    print(f"ditile: {message}", file=sys.stderr)
    return code

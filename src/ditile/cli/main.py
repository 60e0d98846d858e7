"""The command line. Help, the version and refused flags are answered without importing torch.

Bad input is one line on the standard error and exit code 2; a rank that failed is its traceback, one line and 1.

The commands that measure and foretell: bench, evaluate, plan, calibrate. torch comes once options are checked.
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
from ditile.cli import flag_aliases
from ditile.cli.bench.options import Comparison, Workload
from ditile.cli.cache_options import CacheOptions
from ditile.cli.evaluate.options import EvaluateOptions, JudgeOptions, SessionOptions
from ditile.cli.options import (
    CalibrateOptions,
    GenerateOptions,
    RunOptions,
    VerifyOptions,
    check_image_file,
    check_lora_source,
)
from ditile.distributed import env
from ditile.distributed.console import is_writing_process, make_console, print_table_and_json
from ditile.distributed.launch import launch
from ditile.errors import DitileError, ModelError, PlanError, RankError
from ditile.plan.flags import add_arguments, collect_arguments, format_flag, list_flags, normalise_flags
from ditile.plan.plan import AUTO, Plan
from ditile.planner.budget import Budget, choose, describe_setting, load_evaluation
from ditile.planner.question import PlanQuestion
from ditile.runner.load import find_model_source, list_bundled_models, read_generation_options

if TYPE_CHECKING:
    from ditile.cli.outcome import Outcome


OPTION_CLASSES: dict[str, tuple[type, ...]] = {
    "generate": (GenerateOptions, Plan, RunOptions, CacheOptions, Budget),
    "verify": (Plan, VerifyOptions),
    "bench": (Comparison, Workload),
    "evaluate": (EvaluateOptions, JudgeOptions, SessionOptions),
    "plan": (PlanQuestion,),
    "calibrate": (CalibrateOptions,),
}
"""The dataclasses whose fields are the flags of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    commands = {
        "generate": _run_generate_command,
        "verify": _run_verify_command,
        "bench": run_bench_command,
        "evaluate": run_evaluate_command,
        "plan": run_plan_command,
        "calibrate": run_calibrate_command,
        "models": _run_models_command,
    }
    env.silence_library_imports()
    try:
        arguments = _parse_arguments(normalise_flags(list(sys.argv[1:] if argv is None else argv)))
        return commands[arguments.command](arguments)
    except RankError as error:
        print(error.traceback.rstrip(), file=sys.stderr)
        return _print_error(str(error), 1)
    except DitileError as error:
        return _print_error(str(error), 2)
    except KeyboardInterrupt:
        return _print_error("interrupted", 130)


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong as a `DitileError`, without the usage lines."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(prog="ditile", description="Diffusion transformers over many devices.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"ditile {ditile.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    titles: dict[type, str] = {
        GenerateOptions: "picture",
        Plan: "plan",
        RunOptions: "run",
        CacheOptions: "cache",
        VerifyOptions: "proof",
        Budget: "budget",
        Comparison: "comparison",
        Workload: "workload",
        EvaluateOptions: "pictures",
        JudgeOptions: "judging",
        SessionOptions: "run",
        PlanQuestion: "question",
        CalibrateOptions: "measurement",
    }
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
        for kind in OPTION_CLASSES[name]:
            add_arguments(command, kind, title=titles[kind])
        if Plan in OPTION_CLASSES[name]:
            flag_aliases.add_alias_arguments(command, flag_aliases.XDIT_ALIASES, title="plan, with the flags of xDiT")
        if CacheOptions in OPTION_CLASSES[name]:
            title = "picture, plan and run, with the flags of cache-dit"
            flag_aliases.add_alias_arguments(command, flag_aliases.CACHE_DIT_ALIASES, title=title)
    models = commands.add_parser(
        "models", help="list what can run", description="List families, methods and bundled models.", allow_abbrev=False
    )
    models.add_argument("--markdown", action="store_true", help="the matrix of families and methods as Markdown")
    return top


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    arguments, extra = build_parser().parse_known_args(argv)
    if not extra:
        return arguments
    name = extra[0].partition("=")[0]
    if not name.startswith("-"):
        quotes = "put a prompt of several words in quotes"
        what_works = quotes if arguments.command == "generate" else f"see ditile {arguments.command} --help"
        raise PlanError(f"{extra[0]!r} is one argument too many; {what_works}")
    close_matches = difflib.get_close_matches(name, _list_known_flags(arguments.command), n=1)
    raise PlanError(
        f"{name} is not known; " + (f"did you mean {close_matches[0]}?" if close_matches else "see ditile --help")
    )


def _list_known_flags(command: str) -> list[str]:
    kinds = OPTION_CLASSES.get(command, ())
    aliases: tuple[flag_aliases.FlagAlias, ...] = flag_aliases.CACHE_DIT_ALIASES if CacheOptions in kinds else ()
    aliases += flag_aliases.XDIT_ALIASES if Plan in kinds else ()
    names = [format_flag(alias.name) for alias in aliases]
    return ["--help", *(name for kind in kinds for name in list_flags(kind)), *names]


def _build_plan(arguments: argparse.Namespace, cache: CacheOptions | None = None) -> Plan:
    plan_values = _collect_options(Plan, arguments)
    return Plan(**(plan_values if cache is None else cache.collect_plan_values(plan_values)))


def _collect_options(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The given flags of a set of options, and the aliases for them."""
    return flag_aliases.merge_alias_values(arguments, kind, collect_arguments(kind, arguments))


def _run_generate_command(arguments: argparse.Namespace) -> int:
    cache, budget = (
        CacheOptions(**collect_arguments(CacheOptions, arguments)),
        Budget(**collect_arguments(Budget, arguments)),
    )
    plan = _build_plan(arguments, cache)
    wanted, run = (
        GenerateOptions(**_collect_options(GenerateOptions, arguments)),
        RunOptions(**_collect_options(RunOptions, arguments)),
    )
    if run.plan is not None:
        plan = _resolve_plan_option(run.plan, wanted, run, plan)
    if budget.has_bound:
        plan, cache = _choose_within_budget(budget, wanted, run, plan, cache)
    run = dataclasses.replace(run, attention=cache.choose_attention_backend(run.attention))
    find_model_source(wanted.model, weights=not run.dry_run)
    if cache.lora is not None:
        check_lora_source(cache.lora)
    if wanted.image is not None:
        check_image_file(wanted.image)
    if run.out_dir is not None and wanted.prompts_file is None:
        raise ModelError(f"out_dir={run.out_dir!r} is for a file of prompts; use --out, or add --prompts-file FILE")
    if run.text_after == "free" and (wanted.prompts_file is not None or cache.perf):
        several = "--perf draws a picture" if cache.perf else "a file of prompts is encoded"
        raise ModelError(f"text_after='free': {several} several times, and freed encoders do so once; use offload")
    if run.dry_run:
        return _print_dry_run(wanted, plan, cache)
    if env.read_torchrun_place() is None and plan.world > (os.cpu_count() or 1):
        _call_dry_run(
            "build_dry_run_job", wanted, plan, cache
        )  # before very many processes are started to say the same
    draw = _generate_prompts_file if wanted.prompts_file is not None else _generate_pictures
    outcome = draw(wanted, run, plan, cache)
    if outcome is not None:
        _print_outcome(outcome, run)
    return 0


def _resolve_plan_option(text: str, wanted: GenerateOptions, run: RunOptions, given: Plan) -> Plan:
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
    from ditile.planner.answer import answer_question

    request_options = {
        name: getattr(wanted, name) for name in ("model", "height", "width", "steps", "guidance", "num_images")
    }

    def find_fastest_plan(hosts: int) -> str:
        place = env.read_torchrun_place()
        ask = PlanQuestion(devices=None if place is None else place.world, hosts=hosts, **request_options)
        plan_answer = answer_question(ask, all_devices=place is not None)
        make_console(stderr=run.json == "-").print(plan_answer.describe_choice(), soft_wrap=True)
        return str(plan_answer.result.prices[0].plan)

    return Plan.parse(_decide_on_first_rank(find_fastest_plan, run))


def _decide_on_first_rank(decide: Callable[[int], Any], run: RunOptions) -> Any:
    """What is decided by what lies on a host, for a number of hosts: under torchrun by rank 0, for all."""
    if env.read_torchrun_place() is None:
        return decide(1)
    from ditile.distributed.rank0 import decide_on_first_rank

    return decide_on_first_rank(decide, run.stall_timeout)


def _choose_within_budget(
    budget: Budget, wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Plan, CacheOptions]:
    """The plan and cache that a budget picks, which is said.

    Raises:
        DitileError: if there is no such evaluation, nothing in it will do, or a plan or cache was given too.
    """
    if plan != Plan() or cache.build_cache_arguments()["cache_config"] is not None:
        given = f"plan '{plan}'" if plan != Plan() else "cache"
        raise PlanError(f"a budget picks plan and cache, and a {given} is given too; leave one of them out")

    def choose_setting(hosts: int) -> tuple[str, str]:
        evaluation, place = load_evaluation(wanted.model, budget.evaluation), env.read_torchrun_place()
        rows = [row for row in evaluation["settings"] if place is None or row["world"] == place.world]
        ranks = place.world if place is not None else budget.world or _count_devices()
        row = choose(rows, min_psnr=budget.min_psnr, max_latency=budget.max_latency, world=ranks)
        where = evaluation.get("measured", {}).get("machine", "another machine")
        make_console(stderr=run.json == "-").print(
            f"picked: {describe_setting(row)}, as evaluated on {where}", soft_wrap=True
        )
        return row["plan"], row["cache"]

    plan_text, cache_text = _decide_on_first_rank(choose_setting, run)
    others = {name: getattr(cache, name) for name in cache.given}
    return Plan.parse(plan_text), CacheOptions(**others | {"cache_line": cache_text})


def _count_devices() -> int:
    """GPUs, or where there are none cores."""
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def _generate_pictures(wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> Outcome | None:
    """The outcome of one call, on rank 0; None on torchrun's other ranks."""
    if is_writing_process():
        run.check_output_paths(run.list_image_paths(wanted.num_images))
    if env.read_torchrun_place() is None and wanted.seed is None:
        wanted = dataclasses.replace(wanted, seed=secrets.randbelow(2**31))
    outcome: Outcome | None = _run_on_ranks("draw_pictures", plan, run, (wanted, run, plan, cache))
    return outcome


def _generate_prompts_file(wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> Outcome | None:
    """The same of a file of prompts. Where nothing is left to make, no model is loaded."""
    from ditile.cli import prompts

    all_lines: list[prompts.PromptLine] = []
    missing_lines: list[prompts.PromptLine] = []
    if is_writing_process():
        all_lines = prompts.list_prompt_lines(wanted, run)
        run.check_output_paths([Path(line.path) for line in all_lines[:1]])
        missing_lines = prompts.select_missing_lines(
            all_lines, prompts.describe_request(wanted, run, plan, cache, read_generation_options(wanted.model))
        )
        if not missing_lines and env.read_torchrun_place() is None:
            from ditile.cli.generate import build_lines_outcome

            return build_lines_outcome(wanted, run, plan, cache, 0, [])
    outcome: Outcome | None = _run_on_ranks(
        "draw_prompt_lines", plan, run, (wanted, run, plan, cache, missing_lines, len(all_lines))
    )
    return outcome


def _run_on_ranks(name: str, plan: Plan, run: RunOptions | VerifyOptions, args: tuple[Any, ...]) -> Any:
    """Runs one of `ditile.cli.generate` or `ditile.cli.verify` on the ranks of a plan: torchrun's or new ones."""
    if env.read_torchrun_place() is None and plan.world > 1:
        call = (name, *args)
        return launch(_call_on_rank, plan.world, call, threads=run.threads, stall_timeout=run.stall_timeout)[0]
    result = _call_on_rank(name, *args)
    leave_torchrun()
    return result


def _call_on_rank(name: str, *args: Any) -> Any:
    """The same on a rank, which alone imports what draws."""
    if name == "verify":
        from ditile.cli.verify import verify_plan

        return verify_plan(*args)
    from ditile.cli import generate

    return getattr(generate, name)(*args)


def _print_dry_run(wanted: GenerateOptions, plan: Plan, cache: CacheOptions) -> int:
    print(_call_dry_run("describe_dry_run", wanted, plan, cache))
    leave_torchrun()
    return 0


def _call_dry_run(name: str, wanted: GenerateOptions, plan: Plan, cache: CacheOptions) -> Any:
    """What `ditile.cli.dry_run` says of a call. Raises `PlanError` or `ModelError` if something does not fit."""
    from ditile.cli.generate import silence_libraries

    silence_libraries()
    from ditile.cli import dry_run

    if wanted.prompts_file is not None:
        wanted = dataclasses.replace(wanted, prompts_file=None, prompt="a prompt", num_images=plan.data)
    return getattr(dry_run, name)(wanted, plan, cache.build_cache_arguments())


def _run_verify_command(arguments: argparse.Namespace) -> int:
    from ditile.cli.verify import build_verdict_table
    from ditile.errors import JoinError, StateError

    plan, proof = _build_plan(arguments), VerifyOptions(**collect_arguments(VerifyOptions, arguments))
    find_model_source(proof.model)
    try:
        verdict = _run_on_ranks("verify", plan, proof, (proof, plan))
    except JoinError:
        raise
    except StateError as error:  # keys of other ages than scheduled, or another promise broken in mid-run
        return _print_error(f"the plan is not proven: {error}", 1)
    if is_writing_process():
        make_console().print(build_verdict_table(verdict))
    return 0 if verdict.is_proven else 1


def _print_outcome(outcome: Outcome, run: RunOptions) -> None:
    from ditile.cli.outcome import build_outcome_table, summarize_outcome

    print_table_and_json(build_outcome_table(outcome), json.dumps(summarize_outcome(outcome), indent=2), run.json)


def _run_models_command(arguments: argparse.Namespace) -> int:
    from ditile.cli.generate import silence_libraries

    silence_libraries()
    from ditile.cli import models as matrix

    if arguments.markdown:
        print(matrix.format_matrix_markdown())
        return 0
    shown = make_console()
    for table in matrix.build_matrix_tables():
        shown.print(table)
    shown.print(f"bundled: {', '.join(list_bundled_models()) or 'none'}")
    return 0


def _print_error(message: str, code: int) -> int:
    print(f"ditile: {message}", file=sys.stderr)
    return code


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
        from ditile.planner.calibrate import BUSY
        from ditile.planner.profile import Profile

        if (share := Profile.from_json_file(path).disturbed) > BUSY:
            print(
                f"note: others slowed the cores in {share:.0%} of what was timed; do it again when they are gone",
                file=sys.stderr,
            )
    return 0


def leave_torchrun() -> None:
    """Under torchrun the ranks leave their group together."""
    if env.read_torchrun_place() is not None:
        from ditile.distributed.mesh import leave_process_group

        leave_process_group()

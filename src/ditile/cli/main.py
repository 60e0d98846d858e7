"""The command line: parses flags, checks options, and starts ranks where a plan needs them.

For bad input the command prints one line on the standard error and exits with 2. If a rank failed it prints the rank's
traceback and one line, and exits with 1. Help, the version and refused flags do not import torch, which takes seconds:
modules that need torch are imported within functions, and a process that only starts ranks never imports it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ditile
from ditile.cli import flag_aliases
from ditile.distributed import env
from ditile.distributed.heartbeat import RankFailure, describe_error, is_out_of_memory
from ditile.distributed.launch import launch
from ditile.distributed.torchrun_watch import START_SECONDS, begin_watch, needs_watch, report_failure, start_watcher
from ditile.measure.bench.cells import parse_cells
from ditile.measure.bench.options import Comparison, Workload
from ditile.measure.evaluate.options import EvaluateOptions, JudgeOptions, SessionOptions
from ditile.model.known import find_known_model
from ditile.plan.checks import find_nearest, suggest_nearest
from ditile.plan.errors import DitileError, JoinError, ModelError, PlanError, RankError, StateError
from ditile.plan.extras import require_extra
from ditile.plan.flags import FlagParser, add_arguments, collect_arguments, format_flag, list_flags, normalize_flags
from ditile.plan.plan import AUTO, FEW_STEPS, Plan
from ditile.planner.budget import Budget
from ditile.planner.choose import choose_within_budget, resolve_plan_option
from ditile.planner.question import PlanQuestion
from ditile.runner.model_files import check_weight_source, defaults, find_model_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.command_options import (
    CalibrateOptions,
    ModelsOptions,
    RunOptions,
    VerifyOptions,
    check_output_files,
)
from ditile.runner.requests.console import (
    LINE_WIDTH,
    Status,
    is_writing_process,
    make_console,
    print_parts,
    print_tables_and_json,
)
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.options import ServeOptions

if TYPE_CHECKING:
    from ditile.cli.outcome import Outcome
    from ditile.measure.verify import PlanVerdict

Options = TypeVar("Options")
MAX_LINE = 480
"""Characters of an error."""

EXAMPLE = "a large red circle on the left on a gray background"
"""A prompt that the bundled models know."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    env.silence_library_imports()
    env.prefer_passive_waiting()
    try:
        if needs_watch():
            start_watcher()
        words = normalize_flags(list(sys.argv[1:] if argv is None else argv))
        if not words:
            build_parser().print_help()
            return 0
        arguments = _parse_arguments(words)
        return COMMANDS[arguments.command].run(arguments)
    except RankError as error:
        print(error.traceback.rstrip(), file=sys.stderr)
        return _print_error(str(error), 1)
    except DitileError as error:
        return 2 if report_failure(describe_error(error), 2) else _print_error(str(error), 2)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        line = ": ".join(filter(None, ("out of memory", str(error))))
        failure = RankFailure(time.monotonic(), type(error).__name__, line)
        return 1 if report_failure(failure, 1) else _print_error(line, 1)
    except KeyboardInterrupt:
        failure = RankFailure(time.monotonic(), "interrupted", "interrupted")
        return 130 if report_failure(failure, 130) else _print_error("interrupted", 130)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = FlagParser(prog="ditile", description="Diffusion transformers over many devices.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"ditile {ditile.__version__}")
    parsers = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=FlagParser)
    for name, command in COMMANDS.items():
        parser = parsers.add_parser(
            name,
            help=command.help,
            description=command.description,
            essential=command.essential,
            allow_abbrev=False,
        )
        for kind, title in command.options.items():
            add_arguments(parser, kind, title=title, left_out=command.left_out)
        flag_aliases.add_alias_arguments(parser, list(command.options))
    return top


def _check_words(argv: list[str]) -> None:
    """Raises `PlanError` for a word that is not UTF-8, or that argparse would read as a list."""
    for word in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise PlanError(f"{ascii(word)} is not UTF-8; set the terminal, or the locale, to UTF-8")
        if word.startswith("--") and word.endswith("=--"):
            raise PlanError(f"{word}: -- is no value; give another")


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    _check_words(argv)
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        hint = suggest_nearest(argv[0], COMMANDS, "", cutoff=0.5)
        raise PlanError(f"{argv[0]!r} is no command; {hint and hint + ' '}there are {', '.join(COMMANDS)}")
    arguments, extra = build_parser().parse_known_args(argv)
    if not extra and arguments.command is not None:
        return arguments
    name = (extra or argv)[0].partition("=")[0]
    if not name.startswith("-"):
        quotes = "put a prompt of several words in quotes"
        what_works = quotes if arguments.command == "generate" else f"see ditile {arguments.command} --help"
        raise PlanError(f"{extra[0]!r} is one argument too many; {what_works}")
    command = f"ditile {arguments.command}" if arguments.command else "ditile"
    # Without the dashes, which all flags have, and which would make any short word like another.
    flags = {flag.lstrip("-"): flag for flag in _list_known_flags(arguments.command)}
    near = find_nearest(name.lstrip("-"), flags)
    hint = f"see {command} --help-all" if near is None else f"did you mean {flags[near]}?"
    raise PlanError(f"{name} is not known; {hint}")


def _list_known_flags(command: str | None) -> list[str]:
    if command is None:
        return ["--help", "--help-all", "--version"]
    kinds = COMMANDS[command].options
    aliases: tuple[flag_aliases.FlagAlias, ...] = flag_aliases.CACHE_DIT_ALIASES if CacheOptions in kinds else ()
    aliases += flag_aliases.XDIT_ALIASES if Plan in kinds else ()
    names = [format_flag(alias.name) for alias in aliases]
    return ["--help", "--help-all", *(name for kind in kinds for name in list_flags(kind)), *names]


def _build_plan(arguments: argparse.Namespace, cache: CacheOptions | None = None) -> Plan:
    plan_values = _collect_values(Plan, arguments)
    return Plan(**(plan_values if cache is None else cache.collect_plan_values(plan_values)))


def _build_options(kind: type[Options], arguments: argparse.Namespace) -> Options:
    return kind(**_collect_values(kind, arguments))


def _collect_values(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of a set of options that were given, by flags and by aliases."""
    return flag_aliases.merge_alias_values(arguments, kind, collect_arguments(kind, arguments))


def _run_generate_command(arguments: argparse.Namespace) -> int:
    cache, budget = _build_options(CacheOptions, arguments), _build_options(Budget, arguments)
    plan = _build_plan(arguments, cache)
    wanted, run = _build_options(GenerateOptions, arguments), _build_options(RunOptions, arguments)
    if run.plan is not None:
        plan = resolve_plan_option(run.plan, wanted, run, plan)
    else:
        plan = _share_short_warmup(plan, arguments, wanted.model)
    if budget.has_bound:
        plan, cache = choose_within_budget(budget, wanted, run, plan, cache)
    run = dataclasses.replace(run, attention=cache.choose_attention_backend(run.attention))
    _check_generate_options(wanted, run, cache)
    _check_known_model(wanted, [plan])
    run = _name_output(wanted, run)
    if run.dry_run:
        return _print_dry_run(wanted, run, plan, cache)
    # Before many processes are started, each of which would raise the same error.
    if env.read_torchrun_place() is None and plan.world > (os.cpu_count() or 1):
        _silence_libraries()
        from ditile.planner.dry_run import build_dry_run_job

        build_dry_run_job(_pick_one_line(wanted, plan), plan, cache.build_cache_arguments())
    draw = _generate_prompts_file if wanted.prompts_file is not None else _generate_pictures
    outcome = draw(wanted, run, plan, cache, budget)
    if outcome is not None:
        from ditile.cli.outcome import list_outcome_lines, summarize_outcome

        print_tables_and_json(list_outcome_lines(outcome), json.dumps(summarize_outcome(outcome), indent=2), run.json)
        _print_note_on_prompts(wanted)
    return 0


def _share_short_warmup(plan: Plan, arguments: argparse.Namespace, model: str) -> Plan:
    """The plan with warmup_mode=auto for a model of few steps: a server does not know those of a request."""
    if _collect_values(Plan, arguments).keys() & {"warmup", "warmup_mode"}:
        return plan
    can_share = min(plan.pipefusion, plan.num_patches) > 1 and plan.token_ranks * plan.tensor == 1
    short = can_share and defaults(model).get("num_inference_steps", FEW_STEPS + 1) <= FEW_STEPS
    return dataclasses.replace(plan, warmup_mode=AUTO) if short else plan


def _name_output(wanted: GenerateOptions, run: RunOptions) -> RunOptions:
    """The options with the file to write, of a picture or a video, as the model draws one or the other.

    Raises:
        ModelError: if the file that is given is of the other kind, or cannot be encoded here.
    """
    known = find_known_model(wanted.model)
    if known is None or known.hub_id is not None:  # the class is asked, which needs diffusers
        _silence_libraries()
    from ditile.runner.requests.pipelines import check_model_packages, draws_videos

    video = draws_videos(wanted.model)
    if not run.dry_run:
        check_model_packages(wanted.model)
    run = run.name_output(wanted, video=video)
    if video and not run.dry_run and is_writing_process():
        from ditile.runner.requests.videos import check_encoder

        check_encoder(Path(run.out or ""), wanted.fps)
    if not video and wanted.fps is not None:
        raise ModelError(f"fps={wanted.fps:g}: {wanted.model} draws pictures, which have no rate; leave it out")
    return run


def _check_known_model(wanted: GenerateOptions, plans: Sequence[Plan]) -> None:
    """Raises `ModelError` or `PlanError` for what a model that is known by name cannot do: before torch is imported."""
    if (known := find_known_model(wanted.model)) is not None:
        for plan in plans:
            known.check_call(plan, defaults(wanted.model) | wanted.to_call_arguments())


def _print_note_on_prompts(wanted: GenerateOptions) -> None:
    """Says so if a prompt names nothing that the model can draw."""
    known = find_known_model(wanted.model)
    if known is None or not known.words:
        return
    from ditile.runner.requests.prompts import read_prompts

    prompts = [wanted.prompt] if wanted.prompts_file is None else read_prompts(wanted.prompts_file)
    if foreign := [prompt for prompt in prompts if prompt is not None and not known.knows_word_of(prompt)]:
        print(
            f"note: {known.name} is small and knows {', '.join(known.words)} alone, and {foreign[0]!r} names none; "
            f"try {known.example!r}",
            file=sys.stderr,
        )


def _check_generate_options(wanted: GenerateOptions, run: RunOptions, cache: CacheOptions) -> None:
    """Raises `LoadError` or `ModelError` for files that cannot be read, and options that contradict each other."""
    # A class may start from a picture alone; of the others the call is refused.
    if wanted.prompt is None and wanted.prompts_file is None and not wanted.conditions and not run.dry_run:
        raise ModelError("there is nothing to draw; give a PROMPT, or --prompts-file FILE")
    if run.dry_run and run.json is not None:
        raise ModelError(f"json={run.json!r} is for what a run measured, and dry_run=True runs nothing; leave one out")
    find_model_source(wanted.model, weights=not run.dry_run)
    if cache.lora is not None:
        check_weight_source(cache.lora, "lora")
    if wanted.controlnet is not None:
        check_weight_source(wanted.controlnet, "controlnet")
    if wanted.conditions:
        from ditile.runner.requests.conditions import read_condition_files

        read_condition_files(wanted)
    if run.out_dir is not None and wanted.prompts_file is None:
        raise ModelError(f"out_dir={run.out_dir!r} is for a file of prompts; use --out, or add --prompts-file FILE")
    if run.text_after == "free" and (wanted.prompts_file is not None or cache.perf or run.warm):
        several = (
            "a file of prompts is encoded" if wanted.prompts_file is not None else "--perf or --warm draws a picture"
        )
        raise ModelError(f"text_after='free': {several} several times, and freed encoders do so once; use offload")


def _generate_pictures(
    wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions, budget: Budget
) -> Outcome | None:
    """The outcome of one call, on rank 0; None on torchrun's other ranks."""
    from ditile.runner.requests.pipelines import draws_videos

    if env.read_torchrun_place() is None and wanted.seed is None:
        wanted = dataclasses.replace(wanted, seed=secrets.randbelow(2**31))
    if is_writing_process():
        # The ranks of torchrun agree on a seed later: the names differ then, and the folder does not.
        paths = run.list_image_paths(wanted.num_images, wanted.seed or 0, wanted.model)
        run.check_output_paths(paths, wanted, cache, budget, video=draws_videos(wanted.model))
    outcome: Outcome | None = _run_on_ranks(_draw_pictures, plan, run, (wanted, run, plan, cache))
    return outcome


def _generate_prompts_file(
    wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions, budget: Budget
) -> Outcome | None:
    """The outcome of a file of prompts, on rank 0. If no picture is missing, no model is loaded."""
    from ditile.runner.requests import prompts
    from ditile.runner.requests.pipelines import draws_videos

    all_lines: list[prompts.PromptLine] = []
    missing_lines: list[prompts.PromptLine] = []
    if is_writing_process():
        all_lines = prompts.list_prompt_lines(wanted, run)
        video = draws_videos(wanted.model)
        run.check_output_paths([Path(line.path) for line in all_lines], wanted, cache, budget, video=video)
        request = prompts.describe_request(wanted, run, plan, cache, defaults(wanted.model))
        missing_lines = prompts.select_missing_lines(all_lines, request, has_posters=video)
        if not missing_lines and env.read_torchrun_place() is None:
            from ditile.cli.generate import build_outcome

            images = [line.path for line in all_lines]
            return build_outcome(wanted, plan, cache, [], seed=wanted.seed or 0, images=images, skipped=len(images))
    outcome: Outcome | None = _run_on_ranks(
        _draw_prompt_lines, plan, run, (wanted, run, plan, cache, missing_lines, len(all_lines))
    )
    return outcome


def _run_on_ranks(fn: Callable[..., Any], plan: Plan, run: RunOptions | VerifyOptions, args: tuple[Any, ...]) -> Any:
    """Runs a function on the ranks of a plan, torchrun's or new ones, and returns the first rank's result."""
    env.check_torchrun_world(plan)
    if env.read_torchrun_place() is None and plan.world > 1:
        with Status(f"starting {plan.world} ranks") as status:
            # A rank reports first that it has started.
            return launch(
                fn,
                plan.world,
                args,
                threads=run.threads,
                stall_timeout=run.stall_timeout,
                progress=lambda rank, reports: status.end(),
            )[0]
    begin_watch(run.stall_timeout, START_SECONDS)
    result = fn(*args)
    _leave_torchrun()
    return result


def _draw_pictures(*args: Any) -> Outcome | None:
    from ditile.cli.generate import draw_pictures

    return draw_pictures(*args)


def _draw_prompt_lines(*args: Any) -> Outcome | None:
    from ditile.cli.generate import draw_prompt_lines

    return draw_prompt_lines(*args)


def _verify_plan(*args: Any) -> PlanVerdict:
    from ditile.measure.verify import verify_plan

    return verify_plan(*args)


def _print_dry_run(wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> int:
    _silence_libraries()
    from ditile.planner.dry_run import describe_dry_run

    print(describe_dry_run(_pick_one_line(wanted, plan), plan, cache.build_cache_arguments(), run))
    _leave_torchrun()
    return 0


def _pick_one_line(wanted: GenerateOptions, plan: Plan) -> GenerateOptions:
    """The options of one call. A dry run needs no prompt of the user's: in place of a file they have one."""
    if wanted.prompts_file is not None:
        return dataclasses.replace(wanted, prompts_file=None, prompt=EXAMPLE, num_images=plan.data)
    return dataclasses.replace(wanted, prompt=wanted.prompt or EXAMPLE)


def _run_verify_command(arguments: argparse.Namespace) -> int:
    plan, proof = _build_plan(arguments), _build_options(VerifyOptions, arguments)
    if proof.plan is not None:
        plan = resolve_plan_option(proof.plan, proof.to_generate_options(), RunOptions(), plan)
    if plan == Plan():
        raise PlanError("there is nothing to prove: no plan is given, and one rank is exact; try --pipefusion 2")
    find_model_source(proof.model)
    _check_known_model(proof.to_generate_options(), [plan])
    try:
        verdict: PlanVerdict = _run_on_ranks(_verify_plan, plan, proof, (proof, plan))
    except JoinError:
        raise
    except StateError as error:  # such as a key of another age than scheduled, which is found during a call
        return _print_error(f"the plan is not proven: {error}", 1)
    if is_writing_process():
        print_parts(make_console(), verdict.render_tables())
    return 0 if verdict.is_proven else 1


def _run_serve_command(arguments: argparse.Namespace) -> int:
    from ditile.cli.serve import serve_model

    options, cache = _build_options(ServeOptions, arguments), _build_options(CacheOptions, arguments)
    wanted, plan = GenerateOptions(model=options.model), _build_plan(arguments, cache)
    if options.plan is not None:
        plan = resolve_plan_option(options.plan, wanted, RunOptions(), plan)
    else:
        plan = _share_short_warmup(plan, arguments, wanted.model)
    _check_known_model(wanted, [plan])
    return serve_model(options, plan, cache)


def _run_models_command(arguments: argparse.Namespace) -> int:
    from ditile.cli.models import (
        build_matrix_tables,
        build_tables_of_name,
        format_matrix_markdown,
        read_families,
        read_matrix,
    )

    options = _build_options(ModelsOptions, arguments)
    if options.markdown and options.name is not None:
        raise ModelError(f"name={options.name!r} is for the tables; leave it out, or leave out --markdown")
    if options.markdown:
        print(format_matrix_markdown(read_matrix(), read_families()))
        return 0
    matrix = read_matrix()
    tables = build_matrix_tables(matrix) if options.name is None else build_tables_of_name(matrix, options.name)
    for table in tables:
        make_console(piped_width=LINE_WIDTH).print(table)
    return 0


def _run_bench_command(arguments: argparse.Namespace) -> int:
    compared, work = _build_options(Comparison, arguments), _build_options(Workload, arguments)
    if is_writing_process():
        compared.check_output_folder(work)
    if not work.has_random_weights:
        find_model_source(work.model)
    cells = parse_cells(compared.plans) if compared.plans is not None else []
    _check_known_model(work.to_generate_options(), [Plan(), *(cell.plan_object for cell in cells)])
    from ditile.measure.bench.command import run_benchmark

    measured = run_benchmark(compared, work)
    _leave_torchrun()
    if measured is not None:
        remarks = [f"- {remark}" for remark in measured.remarks]
        print_parts(make_console(), [*measured.tables, *remarks])
    return 0


def _run_evaluate_command(arguments: argparse.Namespace) -> int:
    require_extra("evaluate", "ditile evaluate", ["torchmetrics"])
    wanted, judge = _build_options(EvaluateOptions, arguments), _build_options(JudgeOptions, arguments)
    session = _build_options(SessionOptions, arguments)
    if is_writing_process():
        session.check_output_folder(wanted, judge)
    find_model_source(wanted.model)
    _check_known_model(wanted.build_generate_options(), [Plan.parse(one.plan) for one in wanted.candidate_settings])
    _silence_libraries()
    from ditile.runner.requests.pipelines import draws_videos

    if draws_videos(wanted.model):
        raise ModelError(f"model {wanted.model!r} draws videos, and pictures are compared here; try shapes-flux")
    from ditile.measure.evaluate.command import build_evaluation_tables, list_table_remarks, run_evaluation

    evaluation = run_evaluation(wanted, judge, session)
    if evaluation is not None:
        remarks = [f"- {remark}" for remark in list_table_remarks(evaluation)]
        print_parts(make_console(), [*build_evaluation_tables(evaluation), *remarks, f"written: {session.out}"])
    return 0


def _run_plan_command(arguments: argparse.Namespace) -> int:
    question = _build_options(PlanQuestion, arguments)
    if question.json not in (None, "-"):
        check_output_files([("json", Path(question.json))], question)
    question.check_without_torch()
    _silence_libraries()
    from ditile.planner.choose import answer_question

    plan_answer = answer_question(question)
    print_tables_and_json(plan_answer.render_tables(), plan_answer.to_json(), question.json)
    return 0


def _run_calibrate_command(arguments: argparse.Namespace) -> int:
    wanted = _build_options(CalibrateOptions, arguments)
    if is_writing_process():
        wanted.check_profile_path()
    _silence_libraries()
    from ditile.cli.calibrate import calibrate_machine

    with Status("starting the ranks that measure this machine, for a minute or two"):
        path = calibrate_machine(wanted)
    _leave_torchrun()
    if path is not None:
        print(path)
        from ditile.planner.calibrate import BUSY
        from ditile.planner.profile import Profile

        if (share := Profile.from_json_file(path).disturbed) > BUSY:
            remark = f"others slowed the cores in {share:.0%} of what was timed; do it again when they are gone"
            print(f"note: {remark}", file=sys.stderr)
    return 0


def _silence_libraries() -> None:
    """Silences libraries; it must come before diffusers is imported, which would warn."""
    from ditile.runner.requests.prepare import silence_libraries

    silence_libraries()


def _leave_torchrun() -> None:
    """Destroys the process group under torchrun; every rank calls this at the end of a command."""
    if env.read_torchrun_place() is not None:
        from ditile.distributed.torchrun import leave_process_group

        leave_process_group()


def _print_error(message: str, code: int) -> int:
    """Prints one line. Of a long one the middle is left out, which quotes what somebody gave."""
    line = " ".join(message.split())
    line = line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} .. {line[4 - MAX_LINE // 2 :]}"
    # All ranks of a host read the same command line; one of them says what is wrong with it.
    if env.is_first_on_host():
        print(f"ditile: {line}", file=sys.stderr)
    return code


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command of `ditile`.

    Attributes:
        run: runs the command and returns the exit code.
        options: the dataclasses whose fields are its flags -> the title of the group in `--help`.
        left_out: fields of them that are no flags of this command.
        essential: fields whose flags `--help` shows; empty for all.
    """

    run: Callable[[argparse.Namespace], int]
    help: str
    description: str
    options: dict[type, str]
    left_out: tuple[str, ...] = ()
    essential: tuple[str, ...] = ()


ESSENTIAL_PLAN = ("pipefusion", "ulysses", "cfg", "data")
ESSENTIAL_CACHE = ("cache", "quantize", "lora")
COMMANDS = {
    "generate": Command(_run_generate_command, "make a picture or a video",
        "Make a picture or a video, on several ranks if a plan says so.",
        {GenerateOptions: "picture", Plan: "plan", RunOptions: "run", CacheOptions: "cache", Budget: "budget"},
        essential=("prompt", "model", "steps", "height", "width", "guidance", "negative_prompt", "seed", "num_images",
            "image", "prompts_file", *ESSENTIAL_PLAN, "plan", "out", "dry_run", *ESSENTIAL_CACHE)),
    "serve": Command(_run_serve_command, "serve pictures or videos over HTTP",
        "Serve a model over HTTP, in the words of the OpenAI API, from ranks that live on between requests.",
        {ServeOptions: "server", Plan: "plan", CacheOptions: "cache"}, left_out=("perf", "track_memory"),
        essential=("model", "plan", "host", "port", "api_key", "replicas", "lora_dir", "max_batch", *ESSENTIAL_PLAN,
            *ESSENTIAL_CACHE)),
    "verify": Command(_run_verify_command, "prove a plan on this machine",
        "Check a plan on this machine: exactness, message sizes, memory.",
        {Plan: "plan", VerifyOptions: "proof"}),
    "bench": Command(_run_bench_command, "measure plans side by side",
        "Measure plans and caches against one rank, interleaved in one session; rows, a table and figures.",
        {Comparison: "comparison", Workload: "workload"}),
    "evaluate": Command(_run_evaluate_command, "measure what plans and caches do to pictures, and to time",
        "Draw the same captions with plans and caches and with the original pipeline; compare pictures and time.",
        {EvaluateOptions: "pictures", JudgeOptions: "judging", SessionOptions: "run"}),
    "plan": Command(_run_plan_command, "which plan for a model and a machine", "Rank plans by predicted latency.",
        {PlanQuestion: "question"}),
    "calibrate": Command(_run_calibrate_command, "measure this machine",
        "Measure this machine, so that plans can be ranked for it.", {CalibrateOptions: "measurement"}),
    "models": Command(_run_models_command, "list what can run", "List families, methods and bundled models.",
        {ModelsOptions: "table"}),
}  # fmt: skip

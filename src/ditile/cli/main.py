"""The command line: parses flags, checks options, and starts ranks where a plan needs them.

For bad input the command prints one line on the standard error and exits with 2. If a rank failed it prints the rank's
traceback and one line, and exits with 1. Help, the version and refused flags do not import torch, which takes seconds:
modules that need torch are imported within functions, and a process that only starts ranks never imports it.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ditile
from ditile.cache.config import FittedScheduleConfig
from ditile.distributed import env, files
from ditile.distributed.heartbeat import OUT_OF_MEMORY, RankFailure, describe_error, describe_system_error
from ditile.distributed.launch import launch
from ditile.distributed.start_watcher import begin_watch, needs_watch, report_failure, start_watcher
from ditile.model.known import find_known_model
from ditile.plan.errors import (
    DitileError,
    JoinError,
    ModelError,
    PlanError,
    RankError,
    StateError,
    escape_controls,
    find_nearest,
    read_message,
    suggest_nearest,
)
from ditile.plan.extras import import_lab, require_extra
from ditile.plan.flag_parser import (
    FlagParser,
    add_arguments,
    collect_arguments,
    list_flags,
    normalize_flags,
)
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import AUTO, FEW_STEPS, Plan
from ditile.planner.choose import choose_within_bounds, resolve_plan_option
from ditile.planner.promise import Bounds, take_reference_steps
from ditile.planner.question import PlanQuestion
from ditile.runner.model_files import (
    check_model_file,
    check_weight_source,
    defaults,
    find_index_file,
    find_model_source,
)
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.console import (
    LINE_WIDTH,
    Status,
    is_writing_process,
    make_console,
    print_parts,
    print_tables_and_json,
)
from ditile.runner.requests.options import (
    DecodeOptions,
    DeviceOptions,
    GenerateOptions,
    ModelsOptions,
    VerifyOptions,
)
from ditile.runner.requests.outputs import RunOptions, check_output_files
from ditile.runner.requests.pipelines import OutputKind
from ditile.runner.requests.preflight import check_known_model, check_options
from ditile.serve.options import ServeOptions

Options = TypeVar("Options")
MAX_LINE = 480
"""The most characters of an error's line."""

EXAMPLE = "a large red circle on the left on a gray background"
"""A prompt that the bundled models know."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if argv is not None:
        return _run_and_report(argv)
    # Without an argument list this process is the program, so it may replace its own streams.
    files.open_closed_streams()
    files.guard_standard_stream("stderr", 2)
    output = files.guard_standard_stream("stdout", 1)
    try:
        code = _run_and_report(sys.argv[1:])
    except SystemExit as ended:  # of --help, or by a signal
        code = int(ended.code or 0)
    sys.stdout.flush()
    # A reader that has gone, such as `head`, needs no error message.
    if output.error is not None and output.error.errno != errno.EPIPE:
        code = code or _print_error(f"the standard output is not whole: {output.error.strerror}", 1)
    return code


def _run_and_report(argv: Sequence[str]) -> int:
    """Run one command, print a line if it fails, and return the exit code."""
    # Both calls set variables that libraries read when they are imported.
    env.silence_library_imports()
    env.prefer_passive_waiting()
    try:
        try:
            os.getcwd()
        except OSError as error:
            # The folder was deleted, and all relative names depend on it.
            raise StateError(f"the working folder cannot be used: {error.strerror}; change to another") from None
        # The watch must start before a command that may hang: it ends ranks of torchrun whose peers have failed.
        if needs_watch():
            start_watcher()
        words = normalize_flags(list(argv))
        if not words:
            build_parser().print_help()
            return 0
        arguments = _parse_arguments(words)
        return list_commands()[arguments.command].run(arguments)
    except RankError as error:
        # Where memory ran out is chance, so the traceback would tell nothing more than the line.
        if not error.message.startswith(OUT_OF_MEMORY):
            print(escape_controls(error.traceback.rstrip()), file=sys.stderr)
        return _print_error(str(error), 1)
    except DitileError as error:
        return _end_with_error(describe_error(error), read_message(error), 2)
    except (MemoryError, RuntimeError, OSError, ImportError, SystemError) as error:
        line = describe_system_error(error)
        if not line:
            raise
        return _end_with_error(RankFailure(time.monotonic(), type(error).__name__, line), line, 1)
    except KeyboardInterrupt:
        # 128 + 2 is a shell's exit code for SIGINT.
        return _end_with_error(RankFailure(time.monotonic(), "interrupted", "interrupted"), "interrupted", 130)


def _end_with_error(failure: RankFailure, message: str, code: int) -> int:
    """Report a failed command, and return its exit code.

    If a watch runs over torchrun's ranks, the watch prints the message.
    """
    if not report_failure(failure, code):
        _print_error(message, code)
    return code


class _PrintVersions(argparse.Action):
    """Prints the versions of ditile and of the libraries under it, and looks them up only when the flag is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = ("torch", "diffusers", "transformers")
        installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
        print(f"ditile {ditile.__version__} (Python {platform.python_version()}, {installed})")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = FlagParser(prog="ditile", description="Diffusion transformers over many devices.", allow_abbrev=False)
    top.add_argument("--version", action=_PrintVersions, nargs=0)
    parsers = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=FlagParser)
    for name, command in list_commands().items():
        parser = parsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            essential=command.essential,
            allow_abbrev=False,
        )
        for cls, title in command.options.items():
            add_arguments(parser, cls, title=title, left_out=command.left_out)
    return top


def _parse_arguments(words: list[str]) -> argparse.Namespace:
    for word in words:
        # Python keeps undecodable bytes as halves of surrogate pairs.
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise PlanError(f"{ascii(word)} is not UTF-8; set the terminal, or the locale, to UTF-8")
    commands = list_commands()
    if not words[0].startswith("-") and words[0] not in commands:
        hint = suggest_nearest(words[0], commands, "", cutoff=0.5)
        raise PlanError(f"{words[0]!r} is not a command; {hint} there are {', '.join(commands)}".replace("  ", " "))
    arguments, unknown = build_parser().parse_known_args(words)
    if not unknown and arguments.command is not None:
        return arguments
    raise PlanError(_explain_unknown_word((unknown or words)[0], arguments.command))


def _explain_unknown_word(word: str, command: str | None) -> str:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"{word!r} is one argument too many; put a prompt of several words in quotes"
    program = "ditile"
    flags = ["--help", "--help-all", "--version"]
    if command is not None:
        program = f"ditile {command}"
        row = list_commands()[command]
        for cls in row.options:
            flags += list_flags(cls, left_out=row.left_out)
    # Compared without the dashes, which would make any two short flags similar.
    by_name = {flag.lstrip("-"): flag for flag in flags}
    nearest = find_nearest(name.lstrip("-"), by_name)
    if nearest is not None:
        return f"{name} is not known; did you mean {by_name[nearest]}?"
    return f"{name} is not known; see {program} --help-all"


def build_options(cls: type[Options], arguments: argparse.Namespace) -> Options:
    """Build the options of a class from the flags and aliases that were given."""
    options: Any = cls(**collect_arguments(cls, arguments))
    model = getattr(options, "model", None)
    # A file given as the model is the transformer of a published one.
    if model is not None and hasattr(options, "transformer") and os.path.isfile(model):
        check_model_file(Path(model))
        silence_libraries()
        from ditile.runner.load import split_model_file

        base, weight_files = split_model_file(model, options.components)
        options = dataclasses.replace(options, model=base, transformer=weight_files["transformer"])
    return options  # type: ignore[no-any-return]


def _take_reference_steps(request: GenerateOptions, bounds: Bounds, cache: CacheOptions) -> GenerateOptions:
    """Return the request with the number of steps to which the schedule of its model was fitted."""
    if bounds.seconds is not None:
        # A bound in seconds may leave time for all steps of the model, so its own number of steps stays.
        return request
    if bounds.is_given:
        return take_reference_steps(request, None, cache.schedule)
    config = cache.build_cache_arguments()["cache_config"]
    if not isinstance(config, FittedScheduleConfig) or config.steps is None:
        return request
    # Weights with LoRAs or quantization have no fitted schedule: computed steps are spread over the model's own steps.
    if config.schedule is not None or not (cache.lora or cache.quantize):
        return take_reference_steps(request, config.steps, config.schedule)
    return request


def _run_generate_command(arguments: argparse.Namespace) -> int:
    cache = build_options(CacheOptions, arguments)
    bounds = build_options(Bounds, arguments)
    plan = Plan(**cache.collect_plan_values(collect_arguments(Plan, arguments)))
    request = build_options(GenerateOptions, arguments)
    run = build_options(RunOptions, arguments)
    plan, chosen = resolve_plan_option(run.plan, request, run, plan)
    if run.plan is None:
        plan = _share_short_warmup(plan, arguments, request.model)
    request = _take_reference_steps(request, bounds, cache)
    promised: JsonObject = {}
    if bounds.is_given:
        promise, cache = choose_within_bounds(bounds, request, run, plan, cache)
        plan = promise.plan
        promised = promise.to_json_dict()
        chosen.append(f"promised: {promise}")
    run = dataclasses.replace(run, attention=cache.choose_attention_backend(run.attention))
    check_options(request, run, plan, cache)
    run, kind = _name_output(request, run)
    _print_choice(chosen, to_stderr=run.json == "-")
    if run.dry_run:
        return _print_dry_run(request, run, plan, cache)
    if env.read_torchrun_place() is None and plan.world > (os.cpu_count() or 1):
        # Checked before many processes start, since each would raise the same error.
        silence_libraries()
        from ditile.planner.dry_run import build_dry_run_job

        build_dry_run_job(_pick_one_line(request, plan), plan, cache.build_cache_arguments())
    outcome = _generate_images(request, run, plan, cache, promised, kind)
    if outcome is not None:
        from ditile.cli.outcome import list_outcome_lines

        print_tables_and_json(list_outcome_lines(outcome), json.dumps(outcome, indent=2), run.json)
        _print_note_on_prompts(request)
    return 0


def _print_choice(lines: list[str], *, to_stderr: bool = False) -> None:
    """Print what was chosen for the user. This comes after all checks that may refuse the choice."""
    if is_writing_process():
        print_parts(make_console(stderr=to_stderr), lines)


def _share_short_warmup(plan: Plan, arguments: argparse.Namespace, model: str) -> Plan:
    """Return the plan, with warmup_mode=auto if the model's default steps are few, as a server knows no other steps."""
    if collect_arguments(Plan, arguments).keys() & {"warmup", "warmup_mode"}:
        return plan
    can_share = min(plan.pipefusion, plan.num_patches) > 1 and plan.token_ranks * plan.tensor == 1
    if can_share and defaults(model).get("num_inference_steps", FEW_STEPS + 1) <= FEW_STEPS:
        return dataclasses.replace(plan, warmup_mode=AUTO)
    return plan


def _name_output(request: GenerateOptions, run: RunOptions) -> tuple[RunOptions, OutputKind]:
    """Return the options with the output file, and what the model makes.

    Raises `ModelError` if the given file is of another kind, or cannot be encoded here.
    """
    known = find_known_model(request.model)
    if known is None or known.hub_id is not None:
        # The answer depends on the class of the model, and finding that imports diffusers.
        silence_libraries()
    from ditile.runner.requests.pipelines import find_model_output

    kind = find_model_output(request.model, check_packages=not run.dry_run)
    run = run.name_output(request, kind)
    if kind != "image" and not run.dry_run and is_writing_process():
        from ditile.runner.requests.videos import check_encoder

        check_encoder(Path(run.out or ""), request.fps)
    if kind != "video" and request.fps is not None:
        raise ModelError(f"fps={request.fps:g}: {request.model} makes {kind}s, which have no rate; leave it out")
    return run, kind


def _print_note_on_prompts(request: GenerateOptions) -> None:
    """Print a note if a prompt names nothing that the model knows."""
    known = find_known_model(request.model)
    if known is None:
        return
    from ditile.runner.requests.prompts import read_prompts

    prompts = [request.prompt or known.example]
    if request.prompts_file is not None:
        prompts = read_prompts(request.prompts_file)
    for prompt in prompts:
        note = known.explain_unknown_prompt(prompt)
        if note is not None:
            print(f"note: {note}", file=sys.stderr)
            return


def _generate_images(
    request: GenerateOptions,
    run: RunOptions,
    plan: Plan,
    cache: CacheOptions,
    promise: JsonObject,
    kind: OutputKind,
) -> JsonObject | None:
    """Generate the images, and return the summary on rank 0. If all images of a prompt file exist, load no model."""
    from ditile.runner.requests import prompts

    lines: list[prompts.PromptLine] = []
    missing: list[prompts.PromptLine] = []
    if is_writing_process():
        lines = prompts.list_prompt_lines(request, run)
        run.check_output_paths([Path(line.path) for line in lines], request, cache, video=kind == "video")
        missing = lines
        if request.prompts_file is not None:
            description = prompts.describe_request(request, run, plan, cache, defaults(request.model))
            missing = prompts.select_missing_lines(lines, description, kind=kind)
        # The ranks of torchrun wait for each other, so only a single process may return early.
        if not missing and env.read_torchrun_place() is None:
            from ditile.cli.outcome import summarize_outcome

            return summarize_outcome(request, plan, cache, lines, skipped=len(lines), kind=kind)
    arguments = (request, run, plan, cache, lines, missing, promise, kind)
    outcome: JsonObject | None = _run_on_ranks("ditile.cli.generate.generate_images", plan, run, arguments)
    return outcome


def _run_on_ranks(name: str, plan: Plan, run: DeviceOptions, args: tuple[Any, ...]) -> Any:
    """Run a function on the ranks of a plan, torchrun's or new ones, and return the first rank's result."""
    env.check_torchrun_world(plan)
    if env.read_torchrun_place() is None and plan.world > 1:
        with Status(f"starting {plan.world} ranks") as status:
            results = launch(
                _call_by_name,
                plan.world,
                (name, *args),
                threads=run.threads,
                stall_timeout=run.stall_timeout,
                # The first report of a rank says that it has started.
                progress=lambda rank, reports: status.end(),
            )
            return results[0]
    begin_watch(run.stall_timeout)
    with Status("loading torch and diffusers"):
        import ditile.runner.runner  # noqa: F401
    result = _call_by_name(name, *args)
    leave_torchrun()
    return result


def _call_by_name(name: str, *args: Any) -> Any:
    """Call a function by its name: modules of ranks import torch, which the command's own process must not."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)(*args)


def _print_dry_run(request: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions) -> int:
    silence_libraries()
    from ditile.planner.dry_run import describe_dry_run

    text = describe_dry_run(_pick_one_line(request, plan), plan, cache.build_cache_arguments(), run)
    print_parts(make_console(), [text])
    leave_torchrun()
    return 0


def _pick_one_line(request: GenerateOptions, plan: Plan) -> GenerateOptions:
    """Return the options of one call. In a dry run, an example replaces a missing prompt or a file of prompts."""
    if request.prompts_file is not None:
        return dataclasses.replace(request, prompts_file=None, prompt=EXAMPLE, num_images=plan.data)
    return dataclasses.replace(request, prompt=request.prompt or EXAMPLE)


def _run_verify_command(arguments: argparse.Namespace) -> int:
    plan = build_options(Plan, arguments)
    options = build_options(VerifyOptions, arguments)
    request = options.to_generate_options()
    plan, chosen = resolve_plan_option(options.plan, request, RunOptions(profile=options.profile), plan)
    if plan == Plan() and not options.recorded:
        raise PlanError("there is nothing to prove: no plan is given, and one rank is exact; try --pipefusion 2")
    find_model_source(options.model, components=options.components)
    check_known_model(request, plan)
    _print_choice(chosen)
    try:
        if options.recorded:
            from ditile.cli.verify import verify_recorded_steps

            verdict = verify_recorded_steps(options, plan, _run_on_ranks)
        else:
            verdict = _run_on_ranks("ditile.cli.verify.verify_plan", plan, options, (options, plan))
    except JoinError:
        raise
    except StateError as error:
        # For instance a call found a key of another age than scheduled.
        return _print_error(f"the plan is not proven: {error}", 1)
    if is_writing_process():
        from ditile.cli.verdict import build_verdict_table

        make_console(piped_width=LINE_WIDTH).print(build_verdict_table(verdict))
    return 0 if verdict.is_proven else 1


def _run_decode_command(arguments: argparse.Namespace) -> int:
    options = build_options(DecodeOptions, arguments)
    check_model_file(options.file, "file")
    from ditile.cli.decode import check_decode

    # Any axis within an image will do; nothing but the VAE is divided.
    plan = Plan(ulysses=options.ranks, vae="rows")
    facts, paths = check_decode(options)
    summary = _run_on_ranks("ditile.cli.decode.decode_latents", plan, options, (options, plan, facts, paths))
    print_parts(make_console(), summary)
    return 0


def _run_serve_command(arguments: argparse.Namespace) -> int:
    options = build_options(ServeOptions, arguments)
    cache = build_options(CacheOptions, arguments)
    options = dataclasses.replace(options, attention=cache.choose_attention_backend(options.attention))
    plan = Plan(**cache.collect_plan_values(collect_arguments(Plan, arguments)))
    request = GenerateOptions(model=options.model, transformer=options.transformer, component=options.component)
    run = RunOptions(cuda_graphs=options.cuda_graphs, profile=options.profile)
    plan, chosen = resolve_plan_option(options.plan, request, run, plan, options.max_replicas)
    if options.forward is not None:
        from ditile.serve.forward.server import run_forward_server

        # Calls of only a transformer have no steps and no size.
        _print_choice(chosen)
        return run_forward_server(options, plan, cache)
    if options.plan is None:
        plan = _share_short_warmup(plan, arguments, options.model)
    check_known_model(request, plan)
    require_extra("serve", "the server")
    find_model_source(options.model, components=options.components)
    for choice in cache.loras.values():
        check_weight_source(choice.source, "lora")
    if options.text_after == "free":
        raise ModelError("text_after='free': every request has a prompt to encode; use offload or keep")
    _print_choice(chosen)
    from ditile.serve.server import run_server

    return run_server(options, plan, cache)


def _run_models_command(arguments: argparse.Namespace) -> int:
    from ditile.cli.models import show_models

    options = build_options(ModelsOptions, arguments)
    if options.name and find_index_file(Path(os.path.expanduser(options.name))):
        return _print_dry_run(GenerateOptions(model=options.name), RunOptions(), Plan(), CacheOptions())
    show_models(options, make_console(piped_width=LINE_WIDTH))
    return 0


def _run_plan_command(arguments: argparse.Namespace) -> int:
    question = build_options(PlanQuestion, arguments)
    if question.json not in (None, "-"):
        check_output_files([("json", Path(question.json))], question)
    question.check_without_torch()
    silence_libraries()
    from ditile.planner.choose import answer_question

    plan_answer = answer_question(question)
    print_tables_and_json(plan_answer.render_tables(), plan_answer.to_json(), question.json)
    return 0


def silence_libraries() -> None:
    """Silence libraries. This must come before the import of diffusers, which would warn."""
    from ditile.runner.requests import prepare

    prepare.silence_libraries()


def leave_torchrun() -> None:
    """Destroy the process group under torchrun. Every rank calls this at the end of a command."""
    if env.read_torchrun_place() is not None:
        from ditile.distributed.torchrun import leave_process_group

        leave_process_group()


def _print_error(message: str, code: int) -> int:
    """Print an error as one line. Long messages are cut in the middle, where they quote user input."""
    line = escape_controls(" ".join(message.split()))
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE // 2]} .. {line[4 - MAX_LINE // 2 :]}"
    # All ranks of a host read the same command line, so only one prints the error.
    if env.is_first_on_host():
        print(f"ditile: {line}", file=sys.stderr)
    return code


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command of `ditile`.

    Attributes:
        run: runs the command and returns the exit code.
        options: the dataclasses whose fields are its flags -> the title of the group in `--help`.
        left_out: fields of them that are not flags of this command.
        essential: fields whose flags `--help` shows; empty for all.
    """

    run: Callable[[argparse.Namespace], int]
    help: str
    options: dict[type, str]
    left_out: tuple[str, ...] = ()
    essential: tuple[str, ...] = ()


ESSENTIAL_PLAN = ("pipefusion", "ulysses", "cfg")
COMMANDS = {
    "generate": Command(
        _run_generate_command,
        "make an image, a video or a sound",
        {GenerateOptions: "image", Plan: "plan", RunOptions: "run", CacheOptions: "cache", Bounds: "bounds"},
        # The short help has at most 30 lines.
        essential=(
            *("prompt", "model", "steps", "height", "width", "guidance", "seed", "num_images", "image"),
            *("prompts_file", *ESSENTIAL_PLAN, "plan", "out", "dry_run", "cache"),
        ),
    ),
    "decode": Command(
        _run_decode_command,
        "decode the latents that generate kept in a file",
        {DecodeOptions: "decode"},
        left_out=("transformer",),
    ),
    "serve": Command(
        _run_serve_command,
        "serve images or videos over HTTP, in the words of the OpenAI API",
        {ServeOptions: "server", Plan: "plan", CacheOptions: "cache"},
        left_out=("perf", "track_memory"),
        essential=(
            *("model", "plan", "host", "port", "api_key", "replicas", "lora_dir", "max_batch"),
            *(*ESSENTIAL_PLAN, "data", "cache", "quantize", "lora"),
        ),
    ),
    "verify": Command(
        _run_verify_command,
        "prove a plan on this machine: exactness, message sizes, memory",
        {Plan: "plan", VerifyOptions: "proof"},
    ),
    "plan": Command(
        _run_plan_command,
        "rank plans for a model and a machine by predicted latency",
        {PlanQuestion: "question"},
    ),
    "models": Command(
        _run_models_command,
        "list families, methods and bundled models",
        {ModelsOptions: "table"},
    ),
}


@functools.cache
def list_commands() -> dict[str, Command]:
    """Return the commands of the library and of the lab by their names."""
    # Import the lab's commands late, because they import this module.
    return {**COMMANDS, **import_lab("commands").COMMANDS}

"""Chooses a plan: the one that is given, the one predicted to be the fastest, or one of an evaluation in a budget.

`ditile plan` and `ditile.plan_for` ask `answer_question`; `ditile generate` asks `resolve_plan_option` for `--plan` and
`choose_within_budget` for `--min-psnr` and `--max-latency`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ditile.cache.config_text import parse_cache_line
from ditile.distributed import env
from ditile.plan.errors import PlanError
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.plan.plan import AUTO, Plan
from ditile.planner import hardware
from ditile.planner.budget import Budget, choose, describe_setting, load_evaluation
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.runner.model_files import find_model_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.console import is_writing_process, make_console
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions

# Nothing here imports torch before there is something to ask: the command line imports this for every command.
if TYPE_CHECKING:
    from ditile.planner.answer import PlanAnswer
    from ditile.planner.search import SearchRequest
    from ditile.planner.subject import PlanSubject

DTYPES_BY_SIZE = {2: "bfloat16", 4: "float32"}
"""Bytes of a number -> the type for which a machine's profile is."""
REQUEST_FIELDS = (
    "model",
    "height",
    "width",
    "frames",
    "steps",
    "num_images",
    "image",
    "guidance",
    "true_cfg",
    "negative_prompt",
)
"""What a question takes over from a request."""


def answer_question(question: PlanQuestion, *, all_devices: bool = False) -> PlanAnswer:
    """The answer to a question.

    Args:
        question: the question.
        all_devices: search only plans that use every device, as when the ranks were started already.

    Raises:
        PlanError: if no plan fits, or the plan to be priced does not.
        ModelError, LoadError: if the model cannot be planned for.
    """
    from ditile.planner.answer import PlanAnswer
    from ditile.planner.memory import count_host_memory, count_rank_memory
    from ditile.planner.search import PlanSearch, predict_skipped_steps, search_plans
    from ditile.planner.subject import PlanSubject

    profile = load_machine_profile(question)
    source = find_model_source(question.model, weights=False)
    conditions = ["image"] if question.image else []
    subject = PlanSubject.from_configs(question.model, source, conditions)
    call = question.fill_call_arguments() | subject.bind_pictures(question.read_pictures())
    plan = question.priced_plan
    devices = question.devices
    if devices is None:
        devices = profile.devices if plan is None else plan.world
    # Every host has as many ranks as the others.
    if devices % question.hosts:
        raise PlanError(f"devices={devices} cannot be split evenly over hosts={question.hosts}; give --devices")
    if question.cuda_graphs is True and not profile.runs_ahead:
        raise PlanError(f"cuda_graphs=True needs a GPU, and {profile.name} is a CPU; leave it out")
    request = _make_search_request(question, devices, all_devices=all_devices)
    shape = subject.make_call_shape(call, profile.element_size)
    cache = None if question.cache is None else parse_cache_line(question.cache)["cache_config"]
    skips = predict_skipped_steps(cache, shape.steps, question.hit_rate)
    if plan is None:
        result = search_plans(subject, call, profile, request, skips)
        used_devices = devices
    else:
        result = PlanSearch(subject, call, profile, request, skips).price_plan(plan)
        used_devices = plan.world
    tokens = subject.count_text_tokens(call)
    memories = []
    hosts = []
    for price in result.prices:
        job = subject.make_plan_job(price.plan, shape)
        ranks = range(price.plan.world)
        memories.append(tuple(count_rank_memory(subject, job, profile, rank, tokens) for rank in ranks))
        hosts.append(count_host_memory(subject, job, devices // question.hosts))
    return PlanAnswer(
        model=question.model,
        hardware=profile.name,
        devices=used_devices,
        result=result,
        call=_describe_call(subject, call, profile.element_size) | {"pictures": len(question.image or ())},
        uncounted=subject.uncounted,
        memories=tuple(memories),
        hosts=tuple(hosts),
        host_memory_bytes=request.host_memory_bytes or profile.host_memory_bytes,
        models=subject.models,
    )


def _make_search_request(question: PlanQuestion, devices: int, *, all_devices: bool) -> SearchRequest:
    from ditile.planner.search import SearchRequest

    return SearchRequest(
        devices=devices,
        hosts=question.hosts,
        memory_bytes=_parse_memory(question.memory, "memory"),
        host_memory_bytes=_parse_memory(question.host_memory, "host_memory"),
        max_latency_s=question.max_latency,
        warmup=question.warmup,
        all_devices=all_devices,
        records=question.cuda_graphs is not False,
    )


def _parse_memory(text: str | None, name: str) -> int | None:
    return None if text is None else hardware.parse_byte_amount(text, name)


def _describe_call(subject: PlanSubject, call: CallArguments, element_size: int) -> JsonObject:
    """See `PlanAnswer.call`."""
    shape = subject.make_call_shape(call, element_size)
    filled = subject.fill_arguments(call)
    scale = "true_cfg_scale" if "true_cfg_scale" in call else "guidance_scale"
    return {
        "height": shape.height,
        "width": shape.width,
        "frames": int(filled.get("num_frames", 1)),
        "steps": shape.steps,
        "images": shape.images,
        "dtype": DTYPES_BY_SIZE[element_size],
        "guidance": filled.get(scale),
        "references": shape.references,
    }


def plan_for(
    model: str = "shapes-pixart", *, min_psnr: float | None = None, evaluation: str | None = None, **asked: Any
) -> Plan:
    """The plan that is predicted to be the fastest for a model, on this machine as `ditile calibrate` measured it.

    The first rank prints it as one line on standard error.

    Args:
        model: a published model, a bundled one, a folder or a hub id.
        min_psnr: in dB. With it nothing is predicted: the plan is the fastest one without a cache that `ditile
            evaluate` measured with at least this PSNR; `devices` and `max_latency` are its upper bounds.
        evaluation: the folder of that evaluation; the one that comes with the model by default.
        asked: `height`, `width`, `steps`, `guidance`, `num_images`, `hardware`, `devices`, `memory` and the others of
            `ditile plan`.

    Raises:
        PlanError: if the machine was not measured and none is named, no plan fits it or the quality, or a word of the
            question is not known.
        ModelError, LoadError: if the model cannot be planned for, or was not evaluated.
    """
    if min_psnr is not None:
        if others := sorted(set(asked) - {"devices", "max_latency"}):
            raise PlanError(f"min_psnr={min_psnr:g} asks an evaluation, which has no {others[0]}; leave it out")
        measured = load_evaluation(model, evaluation)
        rows = [row for row in measured["settings"] if row["cache"] == "none"]
        row = choose(rows, min_psnr=min_psnr, max_latency=asked.get("max_latency"), world=asked.get("devices"))
        _print_on_first_rank(_describe_picked_setting(row, measured))
        return Plan.parse(row["plan"])
    known_words = [field.name for field in fields(PlanQuestion)]
    unknown = sorted(set(asked) - set(known_words))
    # A dataclass would say only that there is an unexpected keyword.
    if unknown:
        raise PlanError(f"{unknown[0]}= is nothing that a plan is asked for by; there are {', '.join(known_words)}")
    plan_answer = answer_question(PlanQuestion(model=model, **asked))
    _print_on_first_rank(plan_answer.describe_choice())
    return plan_answer.result.prices[0].plan


def _print_on_first_rank(line: str) -> None:
    import torch.distributed as group

    is_first_rank = not (group.is_available() and group.is_initialized() and group.get_rank() > 0)
    if is_first_rank and is_writing_process():
        make_console(stderr=True).print(line, soft_wrap=True)


def resolve_plan_option(text: str, options: GenerateOptions, run: RunOptions, plan_of_flags: Plan) -> Plan:
    """The plan of `--plan`; for `auto` the first plan of `ditile plan`, which is printed.

    Raises:
        DitileError: if flags say a plan too, or this machine was not measured.
    """
    if plan_of_flags != Plan():
        raise PlanError(f"plan={text!r} is a whole plan, and flags say '{plan_of_flags}' too; leave one of them out")
    if not text.strip():
        raise PlanError(f"plan={text!r} says nothing; write name=value, such as pipefusion=2, or auto")
    if text != AUTO and "=" not in text:
        raise PlanError(f"plan={text!r} is no plan; write name=value, such as pipefusion=2, or auto for the fastest")
    if text != AUTO:
        return Plan.parse(text)

    def find_fastest_plan(hosts: int) -> str:
        place = env.read_torchrun_place()
        # Under torchrun the ranks are there already, and a plan must use all of them.
        devices = None if place is None else place.world
        request = {name: getattr(options, name) for name in REQUEST_FIELDS}
        question = PlanQuestion(devices=devices, hosts=hosts, **request)
        plan_answer = answer_question(question, all_devices=place is not None)
        make_console(stderr=run.json == "-").print(plan_answer.describe_choice(), soft_wrap=True)
        return str(plan_answer.result.prices[0].plan)

    return Plan.parse(_decide_on_first_rank(find_fastest_plan, run))


def choose_within_budget(
    budget: Budget, options: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Plan, CacheOptions]:
    """The plan and cache that a budget chooses, which are printed.

    Raises:
        DitileError: if there is no evaluation, no setting is within the budget, or a plan or cache is given too.
    """
    if plan != Plan():
        raise PlanError(f"a budget picks plan and cache, and a plan '{plan}' is given too; leave one of them out")
    if cache.build_cache_arguments()["cache_config"] is not None:
        raise PlanError("a budget picks plan and cache, and a cache is given too; leave one of them out")

    def choose_setting(hosts: int) -> tuple[str, str]:
        evaluation = load_evaluation(options.model, budget.evaluation)
        rows = evaluation["settings"]
        place = env.read_torchrun_place()
        ranks = budget.world
        if place is not None:
            # The ranks were started already, and a plan must use all of them.
            ranks = place.world
            rows = [row for row in rows if row["world"] == ranks]
        row = choose(rows, min_psnr=budget.min_psnr, max_latency=budget.max_latency, world=ranks or _count_devices())
        line = _describe_picked_setting(row, evaluation)
        make_console(stderr=run.json == "-").print(line, soft_wrap=True)
        return row["plan"], row["cache"]

    plan_text, cache_text = _decide_on_first_rank(choose_setting, run)
    others = {name: getattr(cache, name) for name in cache.given}
    return Plan.parse(plan_text), CacheOptions(**others | {"cache_line": cache_text})


def _describe_picked_setting(row: JsonObject, evaluation: JsonObject) -> str:
    where = evaluation.get("measured", {}).get("machine", "another machine")
    return f"picked: {describe_setting(row)}, as evaluated on {where}"


def _decide_on_first_rank(decide: Callable[[int], Any], run: RunOptions) -> Any:
    """The result of `decide` (number of hosts), which reads files: under torchrun rank 0 decides for all ranks."""
    if env.read_torchrun_place() is None:
        return decide(1)
    from ditile.distributed.torchrun import decide_on_first_rank

    return decide_on_first_rank(decide, run.stall_timeout)


def _count_devices() -> int:
    """The number of GPUs, or of cores if there is no GPU."""
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1

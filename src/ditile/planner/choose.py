"""Chooses a plan: the given one, the one predicted to be the fastest, or one within bounds.

`ditile plan` and `ditile.plan_for` ask `answer_question`; `ditile generate` asks `resolve_plan_option` for `--plan` and
`choose_within_bounds` for `--seconds` and `--min-psnr`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from ditile.cache.config_text import NO_CACHE, parse_cache_line
from ditile.cache.fitted.identity import SIZE_ARGUMENTS
from ditile.distributed import env
from ditile.plan.errors import PlanError
from ditile.plan.option_classes import CallArguments, JsonObject, Seconds, checked
from ditile.plan.plan import AUTO, Plan
from ditile.planner import hardware
from ditile.planner.promise import (
    Bounds,
    Decibels,
    Promise,
    choose_promise,
    find_schedule,
)
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.runner.model_files import find_model_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.console import is_writing_process, make_console
from ditile.runner.requests.facts import count_request_steps
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions

# Torch is imported only once a question is asked, because the command line imports this module for every command.
if TYPE_CHECKING:
    from ditile.planner.answer import PlanAnswer
    from ditile.planner.search import PlanSearch

DTYPES_BY_SIZE = {2: "bfloat16", 4: "float32"}
"""Bytes of a number -> the type in which a machine's profile was measured."""


def answer_question(question: PlanQuestion, *, all_devices: bool = False) -> PlanAnswer:
    """Answer a question.

    Args:
        all_devices: search only plans on every device, such as when the ranks are started already.

    Raises:
        PlanError: if no plan fits, or the plan to be priced does not.
        ModelError, LoadError: if the model cannot be planned for.
    """
    from ditile.planner.answer import PlanAnswer
    from ditile.planner.memory import count_host_memory, count_rank_memory

    search = _prepare_search(question, all_devices=all_devices)
    subject = search.subject
    profile = search.profile
    request = search.request
    plan = question.priced_plan
    used_devices = request.devices
    if plan is None:
        result = search.find_fastest_plans()
    else:
        result = search.price_plan(plan)
        # The plan that is priced may leave devices idle.
        used_devices = plan.world
    tokens = subject.count_text_tokens(search.call)
    memories = []
    hosts = []
    for price in result.prices:
        job = subject.make_plan_job(price.plan, search.shape)
        by_rank = []
        for rank in range(price.plan.world):
            by_rank.append(count_rank_memory(subject, job, profile, rank, tokens, records=price.is_recorded))
        memories.append(tuple(by_rank))

        hosts.append(count_host_memory(subject, job, request.ranks_of_host))
    return PlanAnswer(
        model=question.model,
        hardware=profile.name,
        devices=used_devices,
        result=result,
        call=_describe_call(search, question),
        uncounted=subject.uncounted,
        memories=tuple(memories),
        hosts=tuple(hosts),
        is_unlike=bool(profile.by_rank),
        host_memory_bytes=search.host_bytes,
        models=subject.models,
    )


def _prepare_search(question: PlanQuestion, *, all_devices: bool, exact: bool = False) -> PlanSearch:
    """Prepare the search for a question. Raises the errors of `answer_question`."""
    from ditile.planner.search import PlanSearch, SearchRequest, predict_skipped_steps
    from ditile.planner.subject import PlanSubject

    profile = load_machine_profile(question)
    source = find_model_source(question.model, weights=False, components=question.components)
    conditions = ["image"] if question.image else []
    subject = PlanSubject.from_configs(question.model, source, conditions, components=question.components)
    call = question.fill_call_arguments() | subject.bind_pictures(question.read_pictures())
    plan = question.priced_plan
    devices = question.devices
    if devices is None:
        devices = profile.devices if plan is None else plan.world
        # A datasheet describes a card and not how many there are, so each host counts as having one.
        if plan is None and question.hardware in hardware.read_datasheets():
            devices = question.hosts
    # All hosts have the same number of ranks.
    if devices % question.hosts:
        raise PlanError(f"devices={devices} cannot be split evenly over hosts={question.hosts}; give --devices")
    if question.cuda_graphs and not profile.runs_ahead:
        raise PlanError(f"cuda_graphs=True needs a GPU, and {profile.name} is a CPU; leave it out")
    request = SearchRequest(
        devices=devices,
        hosts=question.hosts,
        memory_bytes=_parse_memory(question.memory, "memory"),
        host_memory_bytes=_parse_memory(question.host_memory, "host_memory"),
        max_latency_s=question.max_latency,
        warmup=question.warmup,
        all_devices=all_devices,
        exact=exact,
        wire_dtype=question.wire_dtype,
        records=question.cuda_graphs and not subject.unpacks_weights,
    )
    steps = subject.make_call_shape(call, profile.element_size).steps
    cache = parse_cache_line(question.cache or NO_CACHE)
    skips = predict_skipped_steps(cache["cache_config"], steps, question.hit_rate, cache.get("calibrator_config"))
    return PlanSearch(subject, call, profile, request, skips)


def _parse_memory(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    return hardware.parse_byte_amount(text, name)


def _describe_call(search: PlanSearch, question: PlanQuestion) -> CallArguments:
    """Describe the call for `PlanAnswer.call`."""
    shape = search.shape
    filled = search.subject.fill_arguments(search.call)
    scale = "guidance_scale"
    if "true_cfg_scale" in search.call:
        scale = "true_cfg_scale"
    return {
        "height": shape.height,
        "width": shape.width,
        "frames": int(filled.get("num_frames", 1)),
        "steps": shape.steps,
        "images": shape.images,
        "dtype": DTYPES_BY_SIZE[shape.element_size],
        "guidance": filled.get(scale),
        "references": shape.references,
        "pictures": len(question.image or ()),
    }


@overload
def plan_for(model: str = ..., *, seconds: None = ..., min_psnr: None = ..., **asked: Any) -> Plan: ...


@overload
def plan_for(
    model: str = ...,
    *,
    seconds: Seconds | None = ...,
    min_psnr: Decibels | None = ...,
    schedule: str | None = ...,
    **asked: Any,
) -> Promise: ...


@checked(PlanError)
def plan_for(
    model: str = "shapes-pixart",
    *,
    seconds: Seconds | None = None,
    min_psnr: Decibels | None = None,
    schedule: str | None = None,
    **asked: Any,
) -> Plan | Promise:
    """Return the fastest plan predicted for a model on this machine, by the measurements of `ditile calibrate`.

    With a bound it returns a `Promise` instead, which has a `plan`, and a `cache_config` if some steps are forecast:

        promise = ditile.plan_for("shapes-flux", min_psnr=45)
        runner = ditile.parallelize(pipe, promise.plan)
        if promise.skips_steps:
            ditile.enable_cache(runner, promise.cache_config)

    The first rank prints the choice as one line on standard error.

    Args:
        model: a published model, a bundled one, a folder or a hub id.
        seconds: the most that a call may take.
        min_psnr: the least mean PSNR to the image of all steps, in dB, as a fitted schedule promises it.
        schedule: the file of that schedule; by default the one that comes with the model.
        asked: `height`, `width`, `steps`, `guidance`, `num_images`, `hardware`, `devices`, `memory` and further options
            of `ditile plan`.

    Raises:
        PlanError: if the machine was not measured and none is named, no plan fits it or keeps the bounds, or a field of
            the question is not known.
        ModelError, LoadError: if the model cannot be planned for, or a file is not a schedule.
    """
    known_words = [field.name for field in fields(PlanQuestion)]
    unknown = sorted(set(asked) - set(known_words))
    # A dataclass would say only that there is an unexpected keyword.
    if unknown:
        raise PlanError(f"{unknown[0]}= is not a field of a question; there are {', '.join(known_words)}")
    question = PlanQuestion(model=model, **asked)
    bounds = Bounds(seconds=seconds, min_psnr=min_psnr)
    if bounds.is_given:
        promise = _choose_promise_of_question(question, bounds, schedule)
        _print_on_first_rank(f"promised: {promise}")
        return promise
    if schedule is not None:
        raise PlanError(f"schedule={schedule!r} is for a bound; give seconds or min_psnr")
    plan_answer = answer_question(question)
    _print_on_first_rank(plan_answer.describe_choice())
    return plan_answer.result.prices[0].plan


def _choose_promise_of_question(
    question: PlanQuestion,
    bounds: Bounds,
    schedule_path: str | None,
    *,
    strength: float | None = None,
    all_devices: bool = False,
) -> Promise:
    """Return the promise for a question. Its plan is the priced one, or the best of a search.

    With no bound on seconds and no measured machine there is no search: the plan is the priced one or that of one rank.
    """
    call = question.fill_call_arguments()
    size = {name: call[name] for name in SIZE_ARGUMENTS if call.get(name) is not None}
    is_measured = question.profile is not None or question.hardware is not None or env.find_profile_path().exists()
    search = None
    if bounds.seconds is None and not is_measured:
        num_steps = count_request_steps(question.make_request())
    else:
        search = _prepare_search(question, all_devices=all_devices, exact=bounds.min_psnr is not None)
        num_steps = search.shape.steps
    # With a strength a call begins at a later step, as in the pipelines of diffusers.
    if strength is not None:
        num_steps = min(int(num_steps * strength), num_steps)
    schedule, path = find_schedule(question.model, num_steps, schedule_path, size)
    plans = [question.priced_plan or Plan()]
    predict = None
    if search is not None:
        predict = search.predict_call_seconds
        if question.priced_plan is None:
            plans = [price.plan for price in search.find_fastest_plans().prices]
    return choose_promise(bounds, question.model, num_steps, plans, schedule=schedule, path=path, predict=predict)


def _print_on_first_rank(line: str) -> None:
    import torch.distributed as group

    is_first_rank = not (group.is_available() and group.is_initialized() and group.get_rank() > 0)
    if is_first_rank and is_writing_process():
        make_console(stderr=True).print(line, soft_wrap=True)


def resolve_plan_option(
    text: str | None, options: GenerateOptions, run: RunOptions, plan_of_flags: Plan, replicas: int = 1
) -> tuple[Plan, list[str]]:
    """Return the plan of `--plan`, and lines to print once it is accepted.

    `auto` is the first plan of `ditile plan`; a type of messages may follow the word, as in "auto wire_dtype=int8".
    Without a text, the plan is that of the flags.

    Raises:
        DitileError: if flags say a plan too, this machine was not measured, or replicas have unlike devices.
    """
    if text is None:
        return plan_of_flags, []
    if plan_of_flags != Plan():
        raise PlanError(f"plan={text!r} is a whole plan, and flags say '{plan_of_flags}' too; leave one of them out")
    words = text.split()
    if not words:
        raise PlanError(f"plan={text!r} says nothing; write name=value, such as pipefusion=2, or auto")
    if words[0] != AUTO:
        return Plan.parse(text), []
    wire_dtype = None
    if len(words) > 1:
        name, _, wire_dtype = words[1].partition("=")
        if len(words) > 2 or name.replace("-", "_") != "wire_dtype":
            raise PlanError(f"plan={text!r}: auto chooses all but the type of messages, as in 'auto wire_dtype=int8'")

    def find_fastest_plan(hosts: int) -> list[str]:
        question = _make_question(options, hosts, run.cuda_graphs, run.profile, wire_dtype=wire_dtype)
        plan_answer = answer_question(question, all_devices=question.devices is not None)
        plan = plan_answer.result.prices[0].plan
        check_devices_of_replicas(plan, replicas, run.profile)
        return [str(plan), plan_answer.describe_choice()]

    plan_text, line = _decide_on_first_rank(find_fastest_plan, run)
    return Plan.parse(plan_text), [line]


def _make_question(
    options: GenerateOptions,
    hosts: int,
    cuda_graphs: bool,
    profile: str | None,
    price: str | None = None,
    wire_dtype: str | None = None,
) -> PlanQuestion:
    """Make the question that asks for a request's plan, or for the price of a given one."""
    place = env.read_torchrun_place()
    # Under torchrun the ranks are there already, and a plan must use all of them.
    devices = None if place is None else place.world
    names = [field.name for field in fields(PlanQuestion) if hasattr(options, field.name)]
    request = {name: getattr(options, name) for name in names}
    bounds: dict[str, Any] = {"devices": devices, "price": price, "wire_dtype": wire_dtype}
    return PlanQuestion(hosts=hosts, cuda_graphs=cuda_graphs, profile=profile, **bounds, **request)


def check_devices_of_replicas(plan: Plan, replicas: int, profile_path: str | None) -> None:
    """Check the devices of a plan's replicas. Raises `PlanError` if a later one has other devices than the first."""
    if replicas == 1:
        return
    profile = load_machine_profile(PlanQuestion(profile=profile_path))
    if not profile.by_rank:
        return
    profile.check_rank_count(replicas * plan.world)
    for rank in range(plan.world, replicas * plan.world):
        first = rank % plan.world
        if profile.ranks[rank].is_unlike(profile.ranks[first]):
            raise PlanError(
                f"replicas={replicas}: '{plan}' is for the devices of the first replica, and that of rank {rank} is "
                f"not like that of rank {first}; use replicas=1, or give a plan with equal shares in place of auto"
            )


def choose_within_bounds(
    bounds: Bounds, options: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Promise, CacheOptions]:
    """Return the promise within the bounds of a request, and the cache of its computed steps.

    A plan given by flags is kept; without one the fastest plan is searched, if this machine was measured.

    Raises:
        DitileError: if a cache is given too, there is no schedule, or nothing keeps the bounds.
    """
    schedule_path = cache.schedule
    others = {name: getattr(cache, name) for name in cache.given - {"schedule"}}
    if CacheOptions(**others).build_cache_arguments()["cache_config"] is not None:
        raise PlanError("a bound chooses the steps that compute, and a cache is given too; leave one of them out")

    if bounds.seconds is not None and cache.quantize:
        raise PlanError("--seconds does not know what quantized weights take; leave --seconds or --quantize out")

    def choose(hosts: int) -> JsonObject:
        given_plan = None if plan == Plan() else plan
        # A first image records its steps and plays few of them; only a warm run plays most.
        cuda_graphs = run.cuda_graphs and run.warm
        promise = choose_promise_of_request(
            bounds, options, given_plan, schedule_path, hosts=hosts, cuda_graphs=cuda_graphs, profile=run.profile
        )
        return promise.to_json_dict()

    promise = Promise.from_json_dict(_decide_on_first_rank(choose, run), options.model, schedule_path)
    if promise.skips_steps:
        others |= {"cache_line": f"steps={promise.num_computed}", "schedule": promise.schedule}
    return promise, CacheOptions(**others)


def choose_promise_of_request(
    bounds: Bounds,
    options: GenerateOptions,
    plan: Plan | None,
    schedule_path: str | None,
    *,
    cuda_graphs: bool,
    hosts: int = 1,
    profile: str | None = None,
) -> Promise:
    """Return the promise within the bounds of a request.

    Args:
        plan: the plan; None searches for the fastest, if this machine was measured.
        schedule_path: the file of the schedule; by default the one that comes with the model.
        cuda_graphs: whether the image's steps are played from CUDA graphs.
        hosts: the number of hosts that a search is for.
        profile: the file of the machine; by default this one's.

    Raises:
        DitileError: if there is no schedule, or nothing keeps the bounds.
    """
    price = None if plan is None else str(plan)
    question = _make_question(options, hosts, cuda_graphs, profile, price)
    return _choose_promise_of_question(
        question, bounds, schedule_path, strength=options.strength, all_devices=question.devices is not None
    )


def _decide_on_first_rank(decide: Callable[[int], Any], run: RunOptions) -> Any:
    """Return the result of `decide`, called with the number of hosts. Under torchrun only rank 0 calls it."""
    if env.read_torchrun_place() is None:
        return decide(1)
    from ditile.distributed.torchrun import decide_on_first_rank

    return decide_on_first_rank(decide, run.stall_timeout)

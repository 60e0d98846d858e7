"""A dry run: shows the table of a plan and the first steps of its schedule, from configs only, without weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ditile.cache.build import explain_idle_steps
from ditile.cache.cached import build_transformer_cache
from ditile.cache.calls.scheduled import check_num_computed
from ditile.cache.config import CallCacheConfig, FittedScheduleConfig
from ditile.model.block_lists import find_block_lists
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import ModelError
from ditile.plan.numbers import format_bytes
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, OpKind, PatchSchedule
from ditile.plan.simulate import simulate_schedule
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import choose_dtype_name, defaults, find_model_source
from ditile.runner.requests.facts import build_dry_run_call, collect_call_facts
from ditile.runner.requests.options import EngineOptions, GenerateOptions
from ditile.runner.requests.pictures import read_picture
from ditile.runner.requests.pipeline_choice import choose_requested_class
from ditile.runner.requests.pipelines import find_output_kind, name_pipeline
from ditile.runner.table import describe_plan

STEPS_SHOWN = 2
_PATCH_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def describe_dry_run(options: GenerateOptions, plan: Plan, configs: CallArguments, engine: EngineOptions) -> str:
    """Format the table and the schedule of a model's call under a plan.

    Args:
        options: the request; the defaults of the model and its pipeline complete it. For a hub id only configs are
            fetched.
        configs: the keyword arguments for `enable_cache`.
        engine: the options with the dtype.

    Raises:
        LoadError, ModelError, PlanError: if the model is missing, is not known, does not take one of the options, or
            does not fit the plan or the cache.
    """
    subject, call = _read_planned_call(options)
    # A dry run is about GPUs, even on a machine without any.
    source = find_model_source(options.model, weights=False)
    dtype = choose_dtype_name(source, engine.dtype, on_gpu=True)
    element_size = getattr(torch, dtype).itemsize
    job = build_subject_job(subject, plan, call, configs, element_size)
    table = describe_plan(options.model, job, ["any"] * plan.world)
    # To keep the chart narrow, it has one step more for a warmup of one step, and only the first steps of a longer one.
    num_shown = STEPS_SHOWN
    if plan.warmup < STEPS_SHOWN:
        num_shown += plan.warmup
    chart = _render_gantt_chart(job.step_schedule, min(num_shown, job.shape.steps), job.count_calls_in_step(1))
    heading = ""
    # The conditions of a request may choose another class than that of the model.
    chosen = choose_requested_class(options)[0] if options.conditions else None
    if chosen is not None:
        heading = f"pipeline: {name_pipeline(chosen)}\n"
    for name, file in options.components.items():
        heading += f"{name}: {file}, {format_bytes(Path(file).stat().st_size)}\n"
    return f"{heading}{table}\ndtype: {dtype}\n\n{chart}"


def build_dry_run_job(options: GenerateOptions, plan: Plan, configs: CallArguments) -> PlannedCall:
    """Plan the call that `describe_dry_run` shows, with the same errors and, except `engine`, the same arguments."""
    subject, call = _read_planned_call(options)
    return build_subject_job(subject, plan, call, configs)


def _read_planned_call(options: GenerateOptions) -> tuple[PlanSubject, CallArguments]:
    """Return the model of a request without its weights, and the arguments of the call."""
    source = find_model_source(options.model, weights=False, components=options.components)
    base = defaults(options.model)
    has_controlnet = options.controlnet is not None
    subject = PlanSubject.from_configs(
        options.model,
        source,
        [*options.conditions],
        has_controlnet=has_controlnet,
        components=options.components,
    )
    # Called for its check: it refuses a class whose output cannot be written.
    find_output_kind(subject.pipeline)
    # Called for its check: it refuses options that the class does not take.
    pipeline = choose_requested_class(options)[0] or subject.pipeline
    collect_call_facts(pipeline).merge_arguments(options, base)
    pictures = [read_picture(path, "image") for path in options.image or ()]
    return subject, build_dry_run_call(options, base) | subject.bind_pictures(pictures)


def _render_gantt_chart(schedule: PatchSchedule, steps: int, calls: int) -> str:
    """Render the first `steps` steps as text, with unit costs: a line for each stage, a column for each unit of
    time."""
    num_chunks = len(schedule.split_micro_batches(MicroStep(0, None))) * max(schedule.warmup_group_size, 1)
    # A column is the longest unit of time that divides the time of every op.
    column_time = 1 / (schedule.stages * math.lcm(schedule.patches, num_chunks) * calls)
    spans = []
    for span in simulate_schedule(schedule, calls=calls):
        if span.op.kind is OpKind.COMPUTE and span.op.step < steps:
            spans.append(span)
    width = max(round(span.end / column_time) for span in spans)
    rows = [["."] * width for _ in range(schedule.stages)]
    for span in spans:
        patch = span.op.patch
        mark = "=" if patch is None else _PATCH_MARKS[patch % len(_PATCH_MARKS)]
        for column in range(round(span.start / column_time), round(span.end / column_time)):
            rows[span.stage][column] = mark
    lines = [f"stage {stage:<2} |{''.join(row)}|" for stage, row in enumerate(rows)]
    legend = "= a whole synchronous step, 0-9.. a patch of an asynchronous one, . idle"
    return "\n".join([f"steps 0 to {steps - 1} ({legend}):", *lines])


def build_subject_job(
    subject: PlanSubject, plan: Plan, call: CallArguments, configs: CallArguments, element_size: int = 4
) -> PlannedCall:
    """Plan a call of a model with values of `element_size` bytes.

    Raises:
        ModelError, PlanError: if the model is not known, or does not fit the plan or the cache.
    """
    job = subject.make_plan_job(plan, subject.make_call_shape(call, element_size))
    config = configs["cache_config"]
    if config is None:
        return job
    if isinstance(config, FittedScheduleConfig):
        check_num_computed(job.shape.steps, config.count_computed(job.shape.steps))
    if isinstance(config, CallCacheConfig):
        return job
    # A cache that could never skip anything is refused.
    lists = find_block_lists(subject.transformer)
    for context in build_transformer_cache(subject.transformer, lists, config).contexts:
        reason = context.idle or explain_idle_steps(context.config, job.shape.steps)
        if reason:
            raise ModelError(reason)
    return job

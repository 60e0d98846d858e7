"""A dry run: the runner's table and the first steps of the schedule, from configs alone. No weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ditile.cache.build import cached_transformer
from ditile.cli.generate import planned_call, taken
from ditile.cli.image_to_image import class_from_image
from ditile.cli.options import Generate
from ditile.cli.pipelines import check_pictures
from ditile.errors import ModelError
from ditile.models.block_lists import block_lists
from ditile.plan.cost import Job
from ditile.plan.gantt import as_text
from ditile.plan.plan import Plan
from ditile.planner.subject import Subject
from ditile.runner.load import defaults, find
from ditile.runner.table import describe

STEPS_SHOWN = 2


def report(wanted: Generate, plan: Plan, configs: Mapping[str, Any]) -> str:
    """What a call of a model under a plan would look like.

    Args:
        wanted: the picture. Of a hub id only configs are fetched; the model's and its pipeline's own options fill gaps.
        plan: the plan.
        configs: the keyword arguments of `enable_cache`.

    Raises:
        LoadError, ModelError, PlanError: if the model is not there, has no spec, has no use for something that was
            asked for, or does not fit the plan or the cache.
    """
    job = planned(wanted, plan, configs)
    table = describe(wanted.model, job, ["as found"] * plan.world)
    shown = min(plan.least_warmup + STEPS_SHOWN, job.shape.steps) if plan.least_warmup < 2 else STEPS_SHOWN
    return f"{table}\n\n{as_text(job.schedule, shown, job.calls(1))}"


def planned(wanted: Generate, plan: Plan, configs: Mapping[str, Any]) -> Job:
    """The call as numbers, if everything fits; arguments and errors as `report`."""
    subject, base = Subject.of(wanted.model, find(wanted.model, weights=False)), defaults(wanted.model)
    check_pictures(subject.pipeline)
    taken(subject.pipeline if wanted.image is None else class_from_image(subject.pipeline), wanted, base)
    return job_of(subject, plan, planned_call(wanted, base), configs)


def job_of(subject: Subject, plan: Plan, call: Mapping[str, Any], configs: Mapping[str, Any]) -> Job:
    """The same of a model that is at hand.

    Raises:
        ModelError, PlanError: if it has no spec, or does not fit the plan or the cache.
    """
    job = subject.job(plan, subject.shape(call))
    _check_cache(subject.transformer, configs, job.shape.steps)
    return job


def _check_cache(transformer: nn.Module, configs: Mapping[str, Any], steps: int) -> None:
    """Raises `ModelError` for a cache that can never leave anything out."""
    if (config := configs["cache_config"]) is None:
        return
    for context in cached_transformer(transformer, block_lists(transformer), config).contexts:
        if reason := context.idle or context.idle_in(steps):
            raise ModelError(reason)

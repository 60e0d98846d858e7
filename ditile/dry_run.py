"""A dry run: the runner's table and the first steps of the schedule, from configs alone. No weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from ditile.blocks.costs import divide
from ditile.blocks.gantt import as_text
from ditile.cost import Job
from ditile.errors import LoadError, ModelError
from ditile.load import find
from ditile.models import spec_of
from ditile.models.block_lists import block_lists
from ditile.plan import Plan
from ditile.seats import Seats
from ditile.shape import Shape, filled_call
from ditile.steps.build import cached_transformer
from ditile.steps.step_mask import resolve
from ditile.table import describe

STEPS_SHOWN = 2


def report(model: str, plan: Plan, call: Mapping[str, Any], configs: Mapping[str, Any]) -> str:
    """What a call of a model under a plan would look like.

    Args:
        model: a bundled model, a folder or a hub id (of which only configs are fetched).
        plan: the plan.
        call: the call's arguments; the pipeline's own defaults fill the gaps.
        configs: the keyword arguments of `enable_cache`.

    Raises:
        LoadError, ModelError, PlanError: if the model is not there, has no spec, or does not fit the plan or the cache.
    """
    job = planned(model, plan, call, configs)
    table = describe(model, job, ["as found"] * plan.world)
    shown = min(plan.least_warmup + STEPS_SHOWN, job.shape.steps) if plan.least_warmup < 2 else STEPS_SHOWN
    return f"{table}\n\n{as_text(job.schedule, shown, job.calls(1))}"


def planned(model: str, plan: Plan, call: Mapping[str, Any], configs: Mapping[str, Any]) -> Job:
    """The call as numbers, if everything fits; arguments and errors as `report`."""
    pipeline, transformer, vae_scale = _skeleton(find(model))
    return job_of(pipeline, transformer, vae_scale, plan, call, configs)


def job_of(
    pipeline: type, transformer: nn.Module, vae_scale: int, plan: Plan, call: Mapping[str, Any],
    configs: Mapping[str, Any],
) -> Job:  # fmt: skip
    """The same of a pipeline's class and its transformer, which may be on the meta device.

    Raises:
        ModelError, PlanError: if it has no spec, or does not fit the plan or the cache.
    """
    spec = spec_of(transformer)
    seats = Seats(transformer, spec)
    config: Any = transformer.config
    filled, unit = filled_call(pipeline, config, vae_scale, call), vae_scale * spec.latent_per_token(config)
    for name in ("height", "width"):
        if filled[name] % unit:
            raise ModelError(
                f"{name}={filled[name]} is not a multiple of {unit}, a token of this model; try {name}="
                f"{max(unit, round(filled[name] / unit) * unit)}"
            )
    shape = Shape.of(spec, config, vae_scale, 4, filled)
    plan.check(shape.facts(type(transformer).__name__, len(seats.chain)))
    stages = divide(seats, plan)
    _check_cache(transformer, configs, shape.steps)
    return Job(plan=plan, spec=spec, shape=shape, weights=seats.weights(), stages=stages)


def _check_cache(transformer: nn.Module, configs: Mapping[str, Any], steps: int) -> None:
    """Raises `ModelError` for a cache that can never leave anything out."""
    if (config := configs["cache_config"]) is None:
        return
    resolve(config.steps_computation_mask, steps)
    for context in cached_transformer(transformer, block_lists(transformer), config).contexts:
        if context.idle is not None:
            raise ModelError(context.idle)


def _skeleton(source: Path | str) -> tuple[type, nn.Module, int]:
    """The pipeline's class, its transformer without weights, and pixels per latent pixel."""
    try:
        index = diffusers.DiffusionPipeline.load_config(source)
        pipeline = getattr(diffusers, index["_class_name"])
        name = index.get("transformer", (None, None))[1]
        if name is None:
            raise ModelError(f"{index['_class_name']} has no transformer, so it cannot be cut into stages")
        cls = getattr(diffusers, name)
        config = cls.load_config(source, subfolder="transformer")
        vae = diffusers.AutoencoderKL.load_config(source, subfolder="vae")
    except (OSError, KeyError, AttributeError) as error:
        raise LoadError(f"the configs of {str(source)!r} cannot be read: {' '.join(str(error).split())}") from error
    with torch.device("meta"):
        transformer: nn.Module = cls.from_config(config)
    return pipeline, transformer, 2 ** (len(vae["block_out_channels"]) - 1)

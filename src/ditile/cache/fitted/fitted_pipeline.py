"""What a schedule has to fit: the model of a pipeline with its weights, its latents, its scheduler and sigmas."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ditile.cache.calls.policy import ModelCall
from ditile.cache.calls.scheduled import ScheduledSteps, check_num_computed, spread_steps
from ditile.cache.config import FittedScheduleConfig
from ditile.cache.fitted.schedule import (
    Schedule,
    are_equal_sigmas,
    find_shipped_schedules,
    make_fit_command,
)
from ditile.plan.errors import ModelError

HASHED_NUMBERS = 2**16
"""Of each weight so many numbers are read at most: the first ones tell models apart."""


class FittedPolicies:
    """Makes the policy of each generation of a pipeline.

    Args:
        pipe: the pipeline, or a model that has none.
        models: that it calls in its loop.
        config: the settings.

    Raises:
        LoadError: if the file of the schedule cannot be read.
        ModelError: if it is not of these models.
    """

    def __init__(self, pipe: Any, models: Sequence[nn.Module], config: FittedScheduleConfig) -> None:
        self._pipe = pipe
        self._model_class = type(models[0]).__name__
        weights_hash = hash_weights(models)
        if config.schedule is None:
            self._schedules = list(find_shipped_schedules(self._model_class, weights_hash))
            return
        schedule = config.schedule
        if not isinstance(schedule, Schedule):
            schedule = Schedule.read(schedule)
        self._schedules = [schedule]
        if schedule.model_class != self._model_class:
            raise ModelError(
                f"the schedule is of {schedule.model}, a {schedule.model_class}, and the pipeline calls a "
                f"{self._model_class}; make one with ditile fit --model NAME"
            )
        if schedule.weights_hash != weights_hash:
            raise ModelError(
                f"the schedule of {schedule.model} was fitted to other weights than this {self._model_class} has; "
                f"run ditile fit again with these"
            )

    @property
    def content(self) -> str:
        """Equal for ranks whose files say the same."""
        digest = hashlib.sha256()
        for schedule in self._schedules:
            digest.update(schedule.model_dump_json().encode())
        return digest.hexdigest()[:16]

    def check_guidance(self, call: Mapping[str, Any]) -> None:
        """Raises `ModelError` if a call of the pipeline is guided otherwise than those of every schedule."""
        parameters = inspect.signature(type(self._pipe).__call__).parameters
        for schedule in self._schedules:
            wrong = ""
            for name, fitted in schedule.guidance.items():
                default = parameters[name].default if name in parameters else None
                value = call.get(name, default)
                if value is not None and value != fitted:
                    wrong = f"{name}={fitted:g}, and the call has {value:g}"
            if not wrong:
                return
        if self._schedules:
            raise ModelError(
                f"the schedule of {schedule.model} is for {wrong}; guide it as it was fitted, or run ditile fit again "
                "with --guidance or --true-cfg"
            )

    def __call__(self, config: FittedScheduleConfig, num_steps: int) -> ScheduledSteps:
        """The policy of a generation of `num_steps` steps.

        Raises:
            ModelError: if there is a schedule of the model, and it is of other steps, or of another scheduler.
        """
        num_computed = config.count_computed(num_steps)
        check_num_computed(num_steps, num_computed)
        if num_computed == num_steps:
            return ScheduledSteps(range(num_steps), {})
        if not self._schedules:
            return spread_steps(num_steps, num_computed)
        schedule = self._select_schedule(num_steps)
        budget = schedule.select_budget(num_computed)

        def check_latents(call: ModelCall) -> None:
            shape = describe_latents(call.latents)
            if shape != schedule.latents:
                raise ModelError(
                    f"the schedule of {schedule.model} is for latents of shape {list(schedule.latents)}, and these "
                    f"have {list(shape)}; generate in the size of the schedule, or run ditile fit --model "
                    f"{schedule.model} --steps {num_steps} --height N --width N"
                )

        return ScheduledSteps(budget.computed, budget.weights, check_latents)

    def _select_schedule(self, num_steps: int) -> Schedule:
        """The schedule of these steps with the scheduler that the pipeline has now."""
        schedules: list[Schedule] = []
        for schedule in self._schedules:
            if schedule.num_steps == num_steps:
                schedules.append(schedule)
        if not schedules:
            known = self._schedules[0]
            counts = " and ".join(str(schedule.num_steps) for schedule in self._schedules)
            raise ModelError(
                f"there is a schedule for {counts} steps of {known.model}, and the call has {num_steps}; run "
                f"{make_fit_command(known.model, num_steps)}"
            )
        scheduler = getattr(self._pipe, "scheduler", None)
        if scheduler is None:
            return schedules[0]
        name = type(scheduler).__name__
        sigmas = read_sigmas(scheduler, num_steps)
        for schedule in schedules:
            if schedule.scheduler == name and are_equal_sigmas(schedule.sigmas, sigmas):
                return schedule
        known = schedules[0]
        if known.scheduler != name:
            raise ModelError(
                f"the schedule of {known.model} is for the {known.scheduler}, and the pipeline has a {name}; set the "
                f"other, or run {make_fit_command(known.model, num_steps)}"
            )
        raise ModelError(
            f"the schedule of {known.model} is for other sigmas than the {num_steps} steps of this call have, as of "
            f"another size or shift; call it as it was fitted, or run {make_fit_command(known.model, num_steps)}"
        )


def read_sigmas(scheduler: Any, num_steps: int) -> list[float]:
    """The noise levels at which a generation of so many steps calls the model; timesteps where there are none."""
    sigmas = getattr(scheduler, "sigmas", None)
    if isinstance(sigmas, Tensor) and len(sigmas) > num_steps:
        # The last one is what remains after the last step.
        return [float(sigma) for sigma in sigmas.tolist()[-num_steps - 1 : -1]]
    # A runner's timesteps drive its loop when they are iterated, so they are read as numbers.
    return [float(time) for time in scheduler.timesteps.tolist()[-num_steps:]]


def describe_latents(latents: Any) -> tuple[int, ...]:
    """The shape of one image's latents, as a model takes them: a batch of rows, or a list of them."""
    if isinstance(latents, Tensor):
        return tuple(latents.shape[1:])
    first = latents[0]
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def hash_weights(models: Sequence[nn.Module]) -> str:
    """Tells models with other weights apart, whatever their dtype and device, and also where blocks are elsewhere.

    It counts the parameters outside of lists of blocks, which every rank has.
    """
    digest = hashlib.sha256()
    for model in models:
        for name, parameter in sorted(model.named_parameters()):
            if any(part.isdigit() for part in name.split(".")):
                continue
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            weight = parameter.detach()
            # Quantized and offloaded weights do not tell their numbers: they are others than those of a fit.
            if type(weight) is not Tensor or weight.is_meta or not weight.is_floating_point():
                continue
            # Weights that were rounded to bfloat16 are the same ones.
            rounded = weight.reshape(-1)[:HASHED_NUMBERS].to(torch.bfloat16)
            digest.update(rounded.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]

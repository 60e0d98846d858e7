"""Selects the fitted schedule for a call of a pipeline, and makes the policy of its generation."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ditile.cache.calls.policy import ModelCall
from ditile.cache.calls.scheduled import ScheduledSteps, check_num_computed, spread_steps
from ditile.cache.config import FittedScheduleConfig
from ditile.cache.fitted.identity import (
    ListShares,
    describe_call,
    describe_latents,
    describe_models,
    describe_scheduler,
    find_difference,
)
from ditile.cache.fitted.schedule import Schedule, make_fit_command, read_shipped_schedules
from ditile.plan.errors import ModelError

LOG = logging.getLogger("ditile")


@functools.cache
def _log_once(line: str) -> None:
    """Log a line, unless this process has done so before."""
    LOG.warning(line)


class FittedPolicies:
    """Makes the policy of each generation of a pipeline.

    Args:
        pipe: the pipeline; the model itself, if it has none.
        models: the transformers that the pipeline's loop calls.
        list_later_shares: lists the modules of a model whose leading weights are on another rank.

    Raises:
        LoadError: if the file of the schedule cannot be read.
        ModelError: if the schedule was not fitted to these models.
    """

    def __init__(
        self, pipe: Any, models: Sequence[nn.Module], config: FittedScheduleConfig, list_later_shares: ListShares
    ) -> None:
        self._pipe = pipe
        self._list_later_shares = list_later_shares
        self._models = models
        self._is_shipped = config.schedule is None
        # The user's schedule, or the shipped ones for this class of model; `_schedules` has those for these weights.
        self._candidates: list[Schedule] = []
        if config.schedule is None:
            for schedule in read_shipped_schedules().values():
                if schedule.identity.model_class == type(models[0]).__name__:
                    self._candidates.append(schedule)
        elif isinstance(config.schedule, Schedule):
            self._candidates.append(config.schedule)
        else:
            self._candidates.append(Schedule.read(config.schedule))
        self._schedules: list[Schedule] = list(self._candidates)
        self._strength: float | None = None
        self._steps: int | None = None
        # On several ranks nothing is raised here, because only some may differ: they compare `content` in each call.
        if not torch.distributed.is_initialized():
            self._schedules = self._match_weights()

    @property
    def source(self) -> str:
        """Return `of_` and the model whose schedule is used; `spread` if there is no schedule."""
        if not self._schedules:
            return "spread"
        return f"of_{self._schedules[0].model}"

    @property
    def content(self) -> str:
        """Return a text for comparing ranks: a digest of the schedules, and whether they fit these weights."""
        digest = hashlib.sha256()
        present = describe_models(self._models, self._list_later_shares)
        words: list[str] = []
        for schedule in self._candidates:
            digest.update(schedule.model_dump_json().encode())
            word = "these"
            if find_difference(schedule.identity, present, self._models):
                word = "other"
            words.append(f"of {word} weights")
        return " ".join([digest.hexdigest()[:16], *words])

    def check_call(self, call: Mapping[str, Any]) -> None:
        """Raise `ModelError` if the call fits no schedule, or the present weights do not fit the user's schedule."""
        # LoRAs and quantization may have come since the cache was enabled, or since the last call.
        self._schedules = self._match_weights()
        self._strength = call.get("strength")
        self._steps = call.get("num_inference_steps")
        if self._schedules:
            present = describe_call(self._pipe, self._models[0], call)
            self._schedules = self._select_equal(self._schedules, present)

    def __call__(self, config: FittedScheduleConfig, num_steps: int) -> ScheduledSteps:
        """Return the policy of a generation of `num_steps` steps.

        Raises:
            ModelError: if `config` computes too many or too few steps, or no schedule has these steps and scheduler.
        """
        if isinstance(self._pipe, nn.Module):
            # `check_call` has not run, because no pipeline calls the model.
            self._schedules = self._match_weights()
        num_computed = config.count_computed(num_steps)
        check_num_computed(num_steps, num_computed)
        if num_computed == num_steps:
            return ScheduledSteps(range(num_steps), {})
        if not self._schedules:
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                # `load` names a bundled model by its folder.
                model = str(getattr(self._pipe, "name_or_path", "") or "MODEL")
                _log_once(
                    f"no schedule was fitted to this model, so its {num_computed} computed steps are spread evenly; "
                    f"{make_fit_command(model, self._steps or num_steps)} makes one"
                )
            return spread_steps(num_steps, num_computed)
        schedule = self._select_schedule(num_steps)
        budget = schedule.select_budget(num_computed)

        def check_latents(call: ModelCall) -> None:
            self._select_equal([schedule], {"latents": describe_latents(call.latents)})

        return ScheduledSteps(budget.computed, budget.weights, check_latents)

    def _match_weights(self) -> list[Schedule]:
        """Return the schedules that were fitted to these weights.

        Raises:
            ModelError: if the user's schedule was not fitted to them. Shipped schedules are left out instead.
        """
        if not self._candidates:
            return []
        try:
            return self._select_equal(self._candidates, describe_models(self._models, self._list_later_shares))
        except ModelError:
            if not self._is_shipped:
                raise
            return []

    def _select_equal(self, schedules: Sequence[Schedule], present: Mapping[str, Any]) -> list[Schedule]:
        """Return the schedules that match the known facts of a generation. Raises `ModelError` if none does."""
        equal: list[Schedule] = []
        differences: list[str] = []
        for schedule in schedules:
            difference = find_difference(schedule.identity, present, self._models)
            differences.append(difference)
            if not difference:
                equal.append(schedule)
        if equal:
            return equal
        known = schedules[0]
        # If the weights differ, the loaded model may be another one than the schedule names.
        model = "MODEL" if "weights" in present else known.model
        refusal = f"the schedule of {known.model} {differences[0]}"
        if "scheduler" in present and self._strength is None:
            # Fitting again would not help, because `ditile fit` takes the model's own scheduler.
            raise ModelError(refusal)
        raise ModelError(f"{refusal}, or run {make_fit_command(model, self._steps or known.num_steps)}")

    def _select_schedule(self, num_steps: int) -> Schedule:
        """Return the schedule for this number of steps and the pipeline's present scheduler."""
        schedules: list[Schedule] = []
        for schedule in self._schedules:
            if schedule.num_steps == num_steps:
                schedules.append(schedule)
        if not schedules:
            known = self._schedules[0]
            counts = " and ".join(str(schedule.num_steps) for schedule in self._schedules)
            raise ModelError(
                f"there is a schedule for {counts} steps of {known.model}, and the call has {num_steps}; run "
                f"{make_fit_command(known.model, self._steps or num_steps)}"
            )
        scheduler = getattr(self._pipe, "scheduler", None)
        if scheduler is None:
            return schedules[0]
        return self._select_equal(schedules, describe_scheduler(scheduler, num_steps))[0]

"""A promise: bounds on the time or the loss of an image, and the plan and the computed steps that keep them.

`ditile generate --seconds 4` computes the most steps within 4 s under the fastest plan, by the planner's seconds.
`--min-psnr 45` computes the fewest steps with at least 45 dB promised by a fitted schedule (`ditile fit`). The PSNR of
a schedule compares images of its calibration captions with the same images of all steps, on average. Without `--steps`
those steps are the finer run's that the model's schedule was fitted to, if it was fitted to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from ditile.cache.config import FittedScheduleConfig
from ditile.cache.fitted.identity import find_difference
from ditile.cache.fitted.schedule import Schedule, make_fit_command, read_shipped_schedules
from ditile.plan.errors import PlanError
from ditile.plan.numbers import format_number
from ditile.plan.option_classes import JsonObject, Seconds, define_option, options
from ditile.plan.plan import Plan
from ditile.runner.requests.facts import count_request_steps
from ditile.runner.requests.options import GenerateOptions

MARGIN_DB = 1.0
"""About how far the mean over other captions was below that over the calibration captions, at most."""

FIT_IMAGES = 30
"""A fit generates about as many images: some captions with all steps, and again with fewer."""

Decibels = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PredictSeconds = Callable[[Plan, int], float]
"""(plan, computed steps) -> seconds of the whole call."""


@options()
class Bounds:
    """Bounds on the time or the loss of an image, by which plan and computed steps are chosen."""

    seconds: Seconds | None = define_option(
        None, "compute as many steps as fit in this time, under the fastest plan", example=4
    )
    min_psnr: Decibels | None = define_option(
        None,
        "compute the fewest steps with this PSNR, on average, to the image of all --steps; without --steps to that of "
        "the finer run a schedule was fitted to",
        metavar="DB",
        example=45,
    )

    @property
    def is_given(self) -> bool:
        """Return whether there is a bound."""
        return self.seconds is not None or self.min_psnr is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """A plan and its computed steps, with their expected time and loss.

    Attributes:
        num_computed: how many steps compute; the others are forecast.
        seconds: the prediction for the whole call; None if this machine was not measured.
        mean_db, worst_db: PSNR to the image of all steps, over the calibration captions; None where all steps compute,
            or it was not measured.
        schedule: the file of the schedule, if there is one; not used where all steps compute.
    """

    plan: Plan
    num_computed: int
    num_steps: int
    seconds: float | None = None
    mean_db: float | None = None
    worst_db: float | None = None
    schedule: str | None = None

    @property
    def skips_steps(self) -> bool:
        """Return whether some steps are forecast."""
        return self.num_computed < self.num_steps

    @property
    def cache_config(self) -> FittedScheduleConfig | None:
        """Return the cache of the promise, for `ditile.enable_cache`; None if all steps compute."""
        if not self.skips_steps:
            return None
        return FittedScheduleConfig(steps=self.num_computed, schedule=self.schedule)

    def __str__(self) -> str:
        parts = [f"'{self.plan}' computes {self.num_computed} of {self.num_steps} steps"]
        if self.seconds is not None:
            parts.append(f"{format_number(self.seconds)} s predicted")
        if self.mean_db is not None:
            # A mean does not promise anything for each image.
            parts.append(f"{self.mean_db:.1f} dB on average (the worst of the calibration {self.worst_db:.1f})")
        return ", ".join(parts)

    def to_json_dict(self) -> JsonObject:
        """Convert the promise to JSON types for programs."""
        return {
            "plan": str(self.plan),
            "computed_steps": self.num_computed,
            "steps": self.num_steps,
            "seconds": self.seconds,
            "mean_psnr": self.mean_db,
            "worst_psnr": self.worst_db,
        }

    @classmethod
    def from_json_dict(cls, values: JsonObject, model: str, schedule: str | None) -> Promise:
        """Build the promise of another rank, with the schedule's path on this host, as paths may differ."""
        _, path = find_schedule(model, values["steps"], schedule)
        return cls(
            plan=Plan.parse(values["plan"]),
            num_computed=values["computed_steps"],
            num_steps=values["steps"],
            seconds=values["seconds"],
            mean_db=values["mean_psnr"],
            worst_db=values["worst_psnr"],
            schedule=path,
        )


def find_schedule(
    model: str, num_steps: int, path: str | None, size: Mapping[str, int] | None = None
) -> tuple[Schedule | None, str | None]:
    """Return the schedule in a file, or ditile's own for a call, and its file; None for both if there is none.

    Args:
        path: the file; None looks for one that comes with ditile.
        size: the size of the call, in the form of `Identity.size`; None if another rank has compared it.

    Raises:
        LoadError, ModelError: if the file is not a schedule.
        PlanError: if it is of another number of steps, or of another size.
    """
    present = {"size": size or {}}
    if path is None:
        for shipped, schedule in read_shipped_schedules().items():
            is_same_call = (schedule.model, schedule.num_steps) == (model, num_steps)
            if is_same_call and not find_difference(schedule.identity, present):
                # The call reads the schedule by this path, which refuses a model of that name with other weights.
                return schedule, shipped
        return None, None
    schedule = Schedule.read(path)
    if schedule.num_steps != num_steps:
        raise PlanError(
            f"schedule={path!r} has {schedule.num_steps} steps, and the call {num_steps}; run "
            f"{make_fit_command(model, num_steps)}"
        )
    difference = find_difference(schedule.identity, present)
    if difference:
        raise PlanError(f"schedule={path!r} {difference}, or run {make_fit_command(model, num_steps)}")
    return schedule, path


def take_reference_steps(options: GenerateOptions, num_computed: int | None, path: str | None) -> GenerateOptions:
    """Return a request with the steps of the finer run that its model's schedule was fitted to, if it gives none.

    With few computed steps, that schedule is closer to what the model means than one that was fitted to the model's own
    steps.

    Args:
        num_computed: the computed steps; None where a bound chooses them.
        path: the file of the schedule; None looks among those that come with ditile.
    """
    if options.steps is not None or options.strength is not None:
        return options
    # Schedules that come with ditile are for calls that begin with noise.
    if path is None and options.image:
        return options
    if path is None:
        schedules = [schedule for schedule in read_shipped_schedules().values() if schedule.model == options.model]
    else:
        schedules = [Schedule.read(path)]
    for schedule in schedules:
        if schedule.own is None:
            continue
        is_fewer = num_computed is None or num_computed < schedule.own.steps
        if is_fewer and count_request_steps(options) == schedule.own.steps:
            return replace(options, steps=schedule.num_steps)
    return options


def choose_promise(
    bounds: Bounds,
    model: str,
    num_steps: int,
    plans: Sequence[Plan],
    *,
    schedule: Schedule | None,
    path: str | None = None,
    predict: PredictSeconds | None = None,
) -> Promise:
    """Choose the promise within the bounds.

    Args:
        bounds: the bounds, at least one of them.
        plans: the plans to choose from, at least one.
        schedule, path: the schedule of the model and its file, if there is one.
        predict: predicts seconds; None if this machine was not measured.

    Raises:
        PlanError: if nothing keeps the bounds, or they include a PSNR and a plan attends to stale keys.
    """
    for plan in plans:
        if bounds.min_psnr is not None and plan.attends_to_stale_keys:
            raise PlanError(
                f"min_psnr={bounds.min_psnr:g}: a schedule knows what skipped steps lose, and not what stale keys of "
                f"'{plan}' lose; use a plan of ulysses, ring, tensor or cfg"
            )
    candidates = _list_candidates(bounds, num_steps, schedule)
    if schedule is None and (bounds.seconds is None or predict is None):
        raise PlanError(f"{_name_bounds(bounds)} needs a fitted schedule: {_explain_fit(model, num_steps)}")
    if bounds.seconds is None:
        candidates = candidates[-1:]
    # The most computed steps first: they are closest to the image of all steps.
    for num_computed, mean_db, worst_db in candidates:
        plan = plans[0]
        seconds = None
        if predict is not None:
            seconds_by_plan = {plan: predict(plan, num_computed) for plan in plans}
            plan = min(plans, key=seconds_by_plan.__getitem__)
            seconds = seconds_by_plan[plan]
        promise = Promise(
            plan=plan,
            num_computed=num_computed,
            num_steps=num_steps,
            seconds=seconds,
            mean_db=mean_db,
            worst_db=worst_db,
            schedule=path,
        )
        if bounds.seconds is None or (seconds is not None and seconds <= bounds.seconds):
            return promise
    advice = "use more devices or a smaller image"
    if schedule is None:
        advice = _explain_fit(model, num_steps)
    raise PlanError(f"{_name_bounds(bounds)} cannot be kept: the fastest that could be is {promise}; {advice}")


def _list_candidates(
    bounds: Bounds, num_steps: int, schedule: Schedule | None
) -> list[tuple[int, float | None, float | None]]:
    """List numbers of computed steps within the bound on PSNR, the largest first, each with its mean and worst PSNR."""
    candidates: list[tuple[int, float | None, float | None]] = [(num_steps, None, None)]
    # Budgets come with the fewest computed steps first.
    budgets = () if schedule is None else schedule.budgets
    for budget in reversed(budgets):
        is_close = budget.mean_db is not None and budget.mean_db >= (bounds.min_psnr or 0.0) + MARGIN_DB
        if budget.size < num_steps and (bounds.min_psnr is None or is_close):
            candidates.append((budget.size, budget.mean_db, budget.worst_db))
    return candidates


def _name_bounds(bounds: Bounds) -> str:
    names = []
    if bounds.seconds is not None:
        names.append(f"seconds={bounds.seconds:g}")
    if bounds.min_psnr is not None:
        names.append(f"min_psnr={bounds.min_psnr:g}")
    return " and ".join(names)


def _explain_fit(model: str, num_steps: int) -> str:
    """Explain the command to make a schedule, and the time it takes."""
    return (
        f"there is none of {model} for {num_steps} steps; run {make_fit_command(model, num_steps)}, which takes as "
        f"long as about {FIT_IMAGES} images, and add --schedule FILE"
    )

"""A fitted schedule: which steps compute for every budget, and the weights of each forecast, as one small JSON file.

    {"kind": "ditile schedule", "model": "shapes-flux", "identity": {"sigmas": [1.0, 0.95, ..], ..},
     "budgets": [{"computed": [0, 1, 2, 4, ..], "weights": {"3": [1.5, -0.5], ..}, "predicted_db": 41.3, ..}, ..]}

A schedule holds for one model with its weights, one kind of call, and one scheduler, and is refused for any other.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ditile.cache.fitted.identity import MAX_STEPS, Identity, Name, Number
from ditile.distributed import files
from ditile.model.known import ASSETS
from ditile.plan.errors import LoadError, ModelError, escape_controls, join_error_lines
from ditile.plan.option_classes import check_value, checked

FOLDER = ASSETS / "schedules"
"""The schedules that come with the package."""

FEWEST_FORECAST_STEPS = 8
"""With fewer steps an output differs so much from the last one that a line is worse than repeating the last output."""

Step = Annotated[int, Field(ge=0, lt=MAX_STEPS)]


class StepBudget(BaseModel):
    """The steps that compute, and the weights that forecast the other steps.

    Attributes:
        computed: the steps that compute, in order.
        weights: for each other step, the weights of the newest and the second newest computed output.
        predicted_db: the expected error of the final latents, in dB below their mean square.
        mean_db, worst_db: the measured PSNR of the calibration captions' images against images for which all steps
            computed; None if it was not measured.
        own_mean_db, own_worst_db: their PSNR against images of the pipeline's own number of steps; None if the schedule
            was fitted to that number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    computed: tuple[Step, ...]
    weights: Mapping[Step, tuple[Number, Number]]
    predicted_db: Number
    mean_db: Number | None = None
    worst_db: Number | None = None
    own_mean_db: Number | None = None
    own_worst_db: Number | None = None

    @property
    def size(self) -> int:
        """Return the number of steps that compute."""
        return len(self.computed)


class OwnSteps(BaseModel):
    """The pipeline's own number of steps, and the PSNR of its images against those of the finer run.

    The schedule may compute fewer steps than that, and still come closer to the finer run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[int, Field(ge=2, le=MAX_STEPS)]
    mean_db: Number
    worst_db: Number


class Schedule(BaseModel):
    """A fitted schedule of one model, as `ditile fit` writes it.

        schedule = ditile.Schedule.read("shapes-flux-20.json")
        schedule.select_budget(10).mean_db

    Attributes:
        model: the name under which the model was loaded.
        identity: the weights, the call and the scheduler for which it holds.
        captions: how many captions it was fitted to.
        own: what the pipeline's own number of steps gives, where the schedule was fitted to a finer run.
        budgets: from the one with the fewest computed steps to the one with the most.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["ditile schedule"] = "ditile schedule"
    model: Name
    identity: Identity
    captions: Annotated[int, Field(ge=1)]
    own: OwnSteps | None = None
    budgets: Annotated[tuple[StepBudget, ...], Field(min_length=1)]

    def __init__(self, **fields: Any) -> None:
        """Raise `ModelError` if these are not the fields of a schedule. It names the first wrong one and says why."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            # The keys of a file may be any text, so they are escaped.
            place = escape_controls(".".join(map(str, first["loc"][:3]))).replace("\n", r"\n")
            raise ModelError(f"{place or 'it'}: {first['msg']}") from error

    @model_validator(mode="after")
    def _check_budgets(self) -> Schedule:
        steps = set(range(self.num_steps))
        sizes = [budget.size for budget in self.budgets]
        if sizes != sorted(set(sizes)):
            raise ValueError("the budgets are not in order")
        for budget in self.budgets:
            computed = set(budget.computed)
            if list(budget.computed) != sorted(computed) or 0 not in computed or not computed <= steps:
                raise ValueError(f"{list(budget.computed)} are not steps of {self.num_steps} that could compute")
            if set(budget.weights) != steps - computed:
                raise ValueError(f"the budget of {budget.size} steps has no weights for some step, or too many")
        return self

    @property
    def num_steps(self) -> int:
        """Return the number of steps of a generation."""
        return len(self.identity.sigmas)

    @classmethod
    @checked()
    def read(cls, path: str | Path) -> Schedule:
        """Read a file.

        Raises:
            LoadError: if it cannot be read.
            ModelError: if it is not a schedule; the message says what is wrong.
        """
        try:
            text = files.read_text(path)
        except (OSError, ValueError) as error:
            raise LoadError(f"the schedule {str(path)!r} cannot be read: {files.describe_error(error)}") from error
        try:
            content = files.parse_json(text)
        except ValueError as error:
            raise ModelError(f"the schedule {str(path)!r} is not JSON: {join_error_lines(error, 200)}") from error
        try:
            check_value(Mapping[str, Any], content, "it")
            return cls(**content)
        except ModelError as error:
            raise ModelError(f"the schedule {str(path)!r} is not one of `ditile fit`: {error}") from error

    @checked()
    def write(self, path: str | Path) -> None:
        """Write the file, which gets its name only once it is complete."""
        files.write_atomically(Path(path), self.model_dump_json() + "\n")

    @checked()
    def select_budget(self, num_computed: int) -> StepBudget:
        """Return the budget with `num_computed` computed steps.

        Raises `ModelError` if there is none. The message lists the budgets.
        """
        for budget in self.budgets:
            if budget.size == num_computed:
                return budget
        sizes = [str(budget.size) for budget in self.budgets]
        raise ModelError(
            f"steps={num_computed}: the schedule of {self.model} computes {', '.join(sizes)} or all of "
            f"{self.num_steps} steps; give one of these"
        )


@functools.lru_cache
def read_shipped_schedules() -> Mapping[str, Schedule]:
    """Read the schedules that come with the package. Their keys are the paths of their files."""
    return {str(path): Schedule.read(path) for path in sorted(FOLDER.glob("*.json"))}


def make_fit_command(model: str, num_steps: int) -> str:
    """Return the command that fits a schedule to a call with `num_inference_steps=num_steps`."""
    command = f"ditile fit --model {shlex.quote(model)} --steps {num_steps}"
    if num_steps >= FEWEST_FORECAST_STEPS:
        # By default the command fits to a finer run, of more steps than this call has.
        command += f" --reference-steps {num_steps}"
    return f"`{command}` with the options of this call"

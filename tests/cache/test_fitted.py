"""Fitted schedules: dynamic programming against every choice of steps, weights, and files that are refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ditile import Schedule
from ditile.plan.errors import LoadError, ModelError
from ditile_lab.quality.fit import StepFit, compute_gram_matrix, list_forced_steps

STEPS = 9


def make_predictions(seed: int = 0) -> list[torch.Tensor]:
    """Predictions that turn smoothly, as those of a model do, with a little noise."""
    random = torch.Generator().manual_seed(seed)
    start, turn, bend = torch.randn(3, 200, generator=random)
    times = torch.linspace(0, 1, STEPS)
    return [start + turn * t + bend * t**3 + 0.05 * torch.randn(200, generator=random) for t in times]


@pytest.mark.parametrize("reuses", [False, True])
def test_dynamic_programming_equals_every_choice(reuses: bool) -> None:
    """For each budget no other choice of steps has a lower error, and every budget computes the forced steps."""
    gains = np.linspace(0.3, 0.05, STEPS).tolist()
    forced = list_forced_steps(STEPS, [5], 3)
    fit = StepFit(compute_gram_matrix(make_predictions()), gains, forced, reuses=reuses)
    budgets = fit.fit_all_budgets()
    assert [len(budget.computed) for budget in budgets] == list(range(len(forced), STEPS))
    for budget in budgets:
        free = sorted(set(range(STEPS)) - forced)
        errors = []
        for more in itertools.combinations(free, len(budget.computed) - len(forced)):
            errors.append(fit.measure_error(sorted({*forced, *more})))
        assert fit.measure_error(budget.computed) == pytest.approx(min(errors), rel=1e-9)
        assert budget.predicted_db == pytest.approx(-10 * math.log10(min(errors)), abs=0.01)
        assert forced <= set(budget.computed)


def test_the_error_is_that_of_the_forecasts() -> None:
    """With one gap the expected error is the mean square of what the forecasts miss, weighted by the gains."""
    predictions = make_predictions()
    gains = np.linspace(0.3, 0.05, STEPS).tolist()
    fit = StepFit(compute_gram_matrix(predictions), gains, range(3))
    computed = [0, 1, 2, 3, 6, 7, 8]
    missed = torch.zeros(200, dtype=torch.float64)
    for step in (4, 5):
        first, second = fit.fit_weights(2, 3, step)
        missed += gains[step] * (first * predictions[3] + second * predictions[2] - predictions[step]).double()
    assert fit.measure_error(computed) == pytest.approx(float((missed**2).mean()), rel=1e-5)


def test_forecasts_take_back_what_earlier_gaps_have_moved() -> None:
    """The errors of all gaps together are smaller then; the first gap has nothing to take back."""
    predictions = make_predictions()
    gains = np.linspace(0.3, 0.05, STEPS).tolist()
    squares: list[float] = []
    budgets = []
    for corrects_drift in (False, True):
        fit = StepFit(compute_gram_matrix(predictions), gains, range(3), corrects_drift=corrects_drift)
        budget = fit.fit_all_budgets()[2]
        missed = torch.zeros(200, dtype=torch.float64)
        for step, (first, second) in budget.weights.items():
            before, newest = [number for number in budget.computed if number < step][-2:]
            forecast = first * predictions[newest] + second * predictions[before]
            missed += gains[step] * (forecast - predictions[step]).double()
        squares.append(float((missed**2).mean()))
        budgets.append(budget)
    assert budgets[0].computed == budgets[1].computed
    assert budgets[1].predicted_db == pytest.approx(-10 * math.log10(squares[1]), abs=0.01)
    assert squares[1] < 0.9 * squares[0]
    first_skipped = min(budgets[0].weights)
    assert budgets[0].weights[first_skipped] == budgets[1].weights[first_skipped]


def make_identity(**changes: Any) -> dict[str, Any]:
    content = {
        "model_class": "FluxTransformer2DModel",
        "weights": [{"x_embedder.weight": [0.5, -0.25]}],
        "guidance": {"guidance_scale": 3.5},
        "size": {"height": 128, "width": 128},
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "solver": {"stochastic_sampling": False},
        "sigmas": [1.0, 0.75, 0.5, 0.25],
        "latents": [16, 64],
    }
    return content | changes


def make_schedule(**changes: Any) -> dict[str, Any]:
    content = {
        "kind": "ditile schedule",
        "model": "tiny",
        "identity": make_identity(),
        "captions": 8,
        "budgets": [{"computed": [0, 1, 2], "weights": {"3": [1.0, 0.0]}, "predicted_db": 30.0}],
    }
    return content | changes


HOSTILE = {
    "no JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "another kind": json.dumps(make_schedule(kind="profile")),
    "a field more": json.dumps(make_schedule(code="x")),
    "NaN": json.dumps(make_schedule(identity=make_identity(sigmas=[1.0, float("nan"), 0.5, 0.25]))),
    "a name that moves the cursor": json.dumps(make_schedule(model="a\x1b[2J")),
    "a name of two lines": json.dumps(make_schedule(identity=make_identity(guidance={"a\nb": 1.0}))),
    "no weights": json.dumps(make_schedule(identity=make_identity(weights=[]))),
    "no budget": json.dumps(make_schedule(budgets=[])),
    "weights of a step that computes": json.dumps(
        make_schedule(budgets=[{"computed": [0, 1, 2], "weights": {"2": [1, 0], "3": [1, 0]}, "predicted_db": 1.0}])
    ),
    "a step that is not there": json.dumps(
        make_schedule(budgets=[{"computed": [0, 1, 9], "weights": {}, "predicted_db": 1.0}])
    ),
    "one weight": json.dumps(
        make_schedule(budgets=[{"computed": [0, 1, 2], "weights": {"3": [1.0]}, "predicted_db": 1.0}])
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(HOSTILE[name])
    with pytest.raises(ModelError) as refusal:
        Schedule.read(path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500
    with pytest.raises(LoadError, match="cannot be read"):
        Schedule.read(tmp_path / "none.json")

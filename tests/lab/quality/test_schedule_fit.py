"""`ditile fit` on a bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ditile
from ditile.cache.fitted.identity import describe_models, find_difference
from ditile.cache.fitted.schedule import FOLDER, read_shipped_schedules
from ditile.cli.main import main
from ditile.plan.errors import ModelError
from ditile.planner.promise import take_reference_steps
from ditile.runner.requests.options import GenerateOptions
from ditile_lab.quality.captions import load_captions
from ditile_lab.quality.fit import EXACT_DB, StepFit, add_switches, fit_budgets
from ditile_lab.quality.schedule_fit import compute_decibels


def test_a_fitted_file_serves_the_call_it_was_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "turbo.json"
    assert main(["fit", "--model", "shapes-flux-turbo", "--num-captions", "2", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "written:" in printed and max(map(len, printed.splitlines()[:-1])) <= 80
    schedule = ditile.Schedule.read(path)
    assert [budget.size for budget in schedule.budgets] == [2, 3]
    budget = schedule.select_budget(3)
    # With few steps, outputs are used again as they are.
    assert set(budget.weights.values()) == {(1.0, 0.0)}
    assert budget.worst_db is not None and budget.mean_db is not None
    assert 25 < budget.worst_db <= budget.mean_db < EXACT_DB
    pipe = ditile.load("shapes-flux-turbo")
    call = ditile.defaults("shapes-flux-turbo") | {"prompt": "a large red circle on a gray background"}
    ditile.enable_cache(pipe, ditile.FittedScheduleConfig(steps=3, schedule=str(path)))
    pipe(**call)
    [report] = ditile.summary(pipe, logging=False)
    assert report.cached_steps == sorted(budget.weights)
    with pytest.raises(ModelError, match=r"run `ditile fit --model shapes-flux-turbo --steps 6"):
        pipe(**call | {"num_inference_steps": 6})


def test_a_schedule_of_a_finer_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "finer.json")
    words = ["--steps", "4", "--reference-steps", "9", "--num-captions", "1", "--out", path]
    assert main(["fit", "--model", "shapes-flux-turbo", *words]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[:-1])) <= 80
    schedule = ditile.Schedule.read(path)
    assert schedule.num_steps == 9 and schedule.own is not None and schedule.own.steps == 4
    assert [budget.size for budget in schedule.budgets] == [3]
    budget = schedule.select_budget(3)
    assert budget.mean_db is not None and budget.own_mean_db is not None
    # A request that says no steps takes those of the finer run, and one for which that is no less work does not.
    request = GenerateOptions(model="shapes-flux-turbo", prompt="a circle")
    assert take_reference_steps(request, 3, path).steps == 9
    assert take_reference_steps(request, 4, path).steps is None
    assert take_reference_steps(replace(request, steps=4), 3, path).steps == 4
    # The files that come with ditile are for calls that begin with noise.
    request = GenerateOptions(model="shapes-flux", prompt="a circle")
    assert take_reference_steps(request, 8, None).steps == 48
    assert take_reference_steps(replace(request, image=("a.png",)), 8, None).steps is None
    assert main(["fit", "--model", "shapes-flux-turbo", "--steps", "4", "--reference-steps", "3", "--out", path]) == 2


@pytest.mark.parametrize(
    "words", [["--num-captions", "9999"], ["--model", "no-such-model"]], ids=lambda words: words[0]
)
def test_bad_input_writes_nothing(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.json"
    assert main(["fit", "--model", "shapes-flux-turbo", "--out", str(path), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_switch_of_models_is_never_forecast_across() -> None:
    """After a switch two steps compute, so that a forecast never mixes outputs of two models."""
    random = np.random.default_rng(0)
    vectors = np.cumsum(random.normal(size=(12, 40)), axis=0)
    gram = vectors @ vectors.T
    for steps in fit_budgets(gram, [0.1] * 12, [6]):
        assert {0, 1, 2, 6, 7} <= set(steps.computed)
        for step in steps.weights:
            newest, before = [number for number in reversed(steps.computed) if number < step][:2]
            assert (before >= 6) == (step >= 6)
            weights = StepFit(gram, [0.1] * 12, add_switches(range(3), [6], 12)).fit_weights(before, newest, step)
            assert steps.weights[step] == pytest.approx(weights, abs=1e-5)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_schedules_belong_to_bundled_models(path: Path) -> None:
    """Each is small, is found by the weights of its model, and was measured."""
    assert path.stat().st_size < 32_000
    schedule = ditile.Schedule.read(path)
    pipe = ditile.load(schedule.model)
    present = describe_models([pipe.transformer])
    found: list[ditile.Schedule] = []
    for shipped in read_shipped_schedules().values():
        if not find_difference(shipped.identity, present, [pipe.transformer]):
            found.append(shipped)
    assert schedule in found and {shipped.model for shipped in found} == {schedule.model}
    assert path.stem == f"{schedule.model}-{schedule.num_steps}"
    measured = [budget.mean_db for budget in schedule.budgets if budget.mean_db is not None]
    assert measured == sorted(measured) and len(measured) >= 2


def test_half_of_the_steps_is_near_on_a_caption_that_was_not_fitted_to() -> None:
    pipe = ditile.load("shapes-flux")
    pipe.set_progress_bar_config(disable=True)
    call = ditile.defaults("shapes-flux") | {"prompt": load_captions("bundled", 1, 1)[0].text}

    def draw() -> np.ndarray[Any, Any]:
        image = pipe(**call, generator=torch.Generator().manual_seed(0)).images[0]
        return np.asarray(image)[None]

    plain = draw()
    ditile.enable_cache(pipe, ditile.FittedScheduleConfig())
    assert compute_decibels(draw(), plain) > 44
    [report] = ditile.summary(pipe, logging=False)
    assert len(report.cached_steps) == 10

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
from peft import LoraConfig

import ditile
from ditile import FittedScheduleConfig, Schedule
from ditile.cache.cached import find_model_cache
from ditile.cache.config_text import load_cache_config, parse_cache_line
from ditile.cache.fitted.identity import Identity, describe_call, describe_models, describe_scheduler, find_difference
from ditile.cache.fitted.schedule import StepBudget
from ditile.model.hooks.placeholders import restore_contents, turn_into_placeholder
from ditile.plan.errors import LoadError, ModelError
from ditile.runner import caching
from ditile_lab.quality.fit import StepFit, add_switches, compute_gram_matrix
from tests import tiny

STEPS = 9


def make_predictions(seed: int = 0) -> list[torch.Tensor]:
    """Predictions that turn smoothly, as those of a model do, with a little noise."""
    random = torch.Generator().manual_seed(seed)
    start, turn, bend = torch.randn(3, 200, generator=random)
    times = torch.linspace(0, 1, STEPS)
    return [start + turn * t + bend * t**3 + 0.05 * torch.randn(200, generator=random) for t in times]


def measure_error(fit: StepFit, steps: list[int]) -> float:
    """The expected mean square error of the final latents for some computed steps."""
    gaps = zip([-1, *steps], steps, [*steps[1:], STEPS], strict=False)
    return sum(fit._measure_gap(*gap) for gap in gaps)


@pytest.mark.parametrize("reuses", [False, True])
def test_dynamic_programming_equals_every_choice(reuses: bool) -> None:
    """For each budget no other choice of steps has a lower error, and every budget computes the forced steps."""
    gains = np.linspace(0.3, 0.05, STEPS).tolist()
    forced = add_switches(range(3), [5], STEPS)
    fit = StepFit(compute_gram_matrix(make_predictions()), gains, forced, reuses=reuses)
    budgets = fit.fit_all_budgets()
    assert [len(budget.computed) for budget in budgets] == list(range(len(forced), STEPS))
    for budget in budgets:
        free = sorted(set(range(STEPS)) - forced)
        errors = []
        for more in itertools.combinations(free, len(budget.computed) - len(forced)):
            errors.append(measure_error(fit, sorted({*forced, *more})))
        assert measure_error(fit, [*budget.computed]) == pytest.approx(min(errors), rel=1e-9)
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
    assert measure_error(fit, computed) == pytest.approx(float((missed**2).mean()), rel=1e-5)


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
    "deep": "[" * 100_000,
    "a field more": json.dumps(make_schedule(code="x")),
    "NaN": json.dumps(make_schedule(identity=make_identity(sigmas=[1.0, float("nan"), 0.5, 0.25]))),
    "a name that moves the cursor": json.dumps(make_schedule(model="a\x1b[2J")),
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


FITTED_STEPS = 10


def fit_schedule(pipe: Any, call: dict[str, Any] | None = None, **changes: Any) -> Schedule:
    """A schedule of a tiny FLUX, in which 4 of 10 steps compute and the others take the last output.

    Changes are of its identity.
    """
    call = tiny.arguments("flux", num_inference_steps=FITTED_STEPS) | (call or {})
    pipe(**call)
    computed = (0, 1, 2, 6)
    weights = {step: (1.0, 0.0) for step in range(FITTED_STEPS) if step not in computed}
    models = [pipe.transformer]
    fields = (
        describe_models(models)
        | describe_call(pipe, models[0], call)
        | describe_scheduler(pipe.scheduler, FITTED_STEPS)
    )
    return Schedule(
        model="tiny-flux",
        identity=Identity(**fields | {"latents": (48, 16)} | changes),
        captions=1,
        budgets=(StepBudget(computed=computed, weights=weights, predicted_db=20.0),),
    )


def change_identity(schedule: Schedule, **changes: Any) -> Schedule:
    return schedule.model_copy(update={"identity": schedule.identity.model_copy(update=changes)})


def draw(pipe: Any, **changes: Any) -> Any:
    call = tiny.arguments("flux", num_inference_steps=FITTED_STEPS) | changes
    return pipe(**call | {"generator": torch.Generator().manual_seed(0)}).images


def test_lines_and_files_stand_for_one_config(tmp_path: Path) -> None:
    config = FittedScheduleConfig(steps=10, schedule="a.json")
    assert parse_cache_line("steps=10 schedule=a.json") == {"cache_config": config}
    assert load_cache_config({"cache_config": {"cache_type": "schedule", "steps": 10, "schedule": "a.json"}}) == (
        config,
        None,
    )
    assert str(FittedScheduleConfig(steps=10)) == "FittedSchedule_10"
    # Half of the steps, however many there are.
    assert parse_cache_line("steps") == {"cache_config": FittedScheduleConfig()}
    for line in ("steps=10 F=1", "taylor=1 steps=10", "steps=0", "steps=ten"):
        with pytest.raises(ModelError):
            parse_cache_line(line)


def test_a_schedule_computes_its_steps_and_is_refused_elsewhere(tmp_path: Path) -> None:
    """A failure means that a schedule is applied to a generation that it was not fitted to."""
    pipe = tiny.flux()
    schedule = fit_schedule(pipe)
    plain = draw(pipe)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=schedule))
    image = draw(pipe)
    assert not torch.equal(image, plain)
    [report] = caching.summary(pipe, logging=False)
    assert report.cached_steps == [3, 4, 5, 7, 8, 9]
    with pytest.raises(ModelError, match=r"there is a schedule for 10 steps of tiny-flux, and the call has 12; run"):
        draw(pipe, num_inference_steps=12)
    with pytest.raises(ModelError, match="height=32, and the call has 64"):
        draw(pipe, height=64)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=change_identity(schedule, latents=(64, 16))))
    with pytest.raises(ModelError, match="latents="):
        draw(pipe)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=schedule))
    # After a refusal the pipeline and its cache are as before.
    assert torch.equal(draw(pipe), image)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=5, schedule=schedule))
    with pytest.raises(ModelError, match="computes 4 or all of 10 steps"):
        draw(pipe)
    # Ranks compare the content, not the name of a file.
    texts: list[str] = []
    for name in ("one", "two"):
        budget = schedule.budgets[0].model_copy(update={"predicted_db": 20.0 + (name == "two")})
        schedule.model_copy(update={"budgets": (budget,)}).write(tmp_path / "schedule.json")
        caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=str(tmp_path / "schedule.json")))
        cache = find_model_cache(pipe.transformer)
        assert cache is not None
        texts.append(cache.contexts[0].settings)
    assert texts[0] != texts[1]
    wrong = {"weights": ({"x_embedder.weight": (9.0,)},), "model_class": "WanTransformer3DModel"}
    for name, value in wrong.items():
        with pytest.raises(ModelError, match="ditile fit"):
            caching.enable_cache(pipe, FittedScheduleConfig(schedule=fit_schedule(tiny.flux(), **{name: value})))
    sigmas = tuple(0.9 * sigma for sigma in schedule.identity.sigmas)
    solver = {"stochastic_sampling": True}
    for name, other in {"scheduler": "DDIMScheduler", "sigmas": sigmas, "solver": solver}.items():
        caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=change_identity(schedule, **{name: other})))
        with pytest.raises(ModelError, match="the schedule of tiny-flux is for"):
            draw(pipe)
    caching.disable_cache(pipe)
    assert torch.equal(draw(pipe), plain)


def test_other_guidance_is_refused() -> None:
    """A failure means that forecasts of one strength of guidance are used for another."""
    pipe = tiny.flux(guidance=True)
    schedule = fit_schedule(pipe, {"guidance_scale": 5.0})
    # The pipeline's default is another strength, also where the call does not name it.
    caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=schedule))
    for target in (pipe, ditile.parallelize(pipe, ditile.Plan(), keep_weights=True)):
        for call in ({"guidance_scale": 3.5}, {}):
            with pytest.raises(ModelError, match=r"guidance_scale=5, and the call has 3\.5"):
                draw(target, **call)
        assert torch.equal(draw(target, guidance_scale=5.0), draw(target, guidance_scale=5.0))
        guided = {"guidance_scale": 5.0, "true_cfg_scale": 3.0}
        with pytest.raises(ModelError, match="true_cfg_scale=1, and the call has 3"):
            draw(target, **guided, negative_prompt="a square")
        # Without a negative prompt nothing is guided.
        draw(target, **guided)
    target.restore()


def test_other_weights_are_refused_whenever_they_come() -> None:
    """A failure means that a fine-tune, a LoRA or a quantized model is forecast with the weights of another model."""
    pipe = tiny.flux()
    schedule = fit_schedule(pipe)
    config = FittedScheduleConfig(steps=4, schedule=schedule)
    caching.enable_cache(pipe, config)
    image = draw(pipe)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False), "style")
    for _ in range(2):
        with pytest.raises(ModelError, match="style at 4; disable the LoRA"):
            draw(pipe)
        with pytest.raises(ModelError, match="style at 4; disable the LoRA"):
            caching.enable_cache(pipe, config)
    pipe.transformer.disable_adapters()
    assert torch.equal(draw(pipe), image)
    pipe.transformer.delete_adapters("style")
    # As a LoRA that was fused, or a fine-tune, of one block.
    weight = pipe.transformer.single_transformer_blocks[1].attn.to_k.weight
    with torch.no_grad():
        weight *= 1.05
    with pytest.raises(ModelError, match=r"other weights than single_transformer_blocks\.1\.attn\.to_k\.weight"):
        draw(pipe)
    with torch.no_grad():
        weight /= 1.05
    draw(pipe)
    pipe.transformer.x_embedder.to("meta")
    with pytest.raises(ModelError, match="quantized or offloaded"):
        caching.enable_cache(pipe, config)


def test_a_stage_compares_the_blocks_that_it_has() -> None:
    """A failure means that a rank refuses a model whose other blocks are on other ranks, or accepts a shorter one."""
    pipe = tiny.flux()
    schedule = fit_schedule(pipe)
    model = pipe.transformer
    contents = turn_into_placeholder(model.transformer_blocks[1])
    assert find_difference(schedule.identity, describe_models([model]), [model]) == ""
    restore_contents(model.transformer_blocks[1], contents)
    del model.single_transformer_blocks[2]
    assert "which this one has not" in find_difference(schedule.identity, describe_models([model]), [model])

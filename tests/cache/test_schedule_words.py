"""How a schedule is named: in a cache line, in a config file, by a flag, and in Python; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ditile
from ditile import FittedScheduleConfig, Schedule
from ditile.cache.cached import find_model_cache
from ditile.cache.config_text import load_cache_config, parse_cache_line
from ditile.cache.fitted.fitted_pipeline import hash_weights, read_sigmas
from ditile.cache.fitted.schedule import StepBudget
from ditile.plan.errors import ModelError, PlanError
from ditile.planner.search import predict_skipped_steps
from ditile.runner import caching
from ditile.runner.requests.cache_options import CacheOptions
from tests import tiny

STEPS = 10


def make_schedule(pipe: Any, **changes: Any) -> Schedule:
    """A schedule of a tiny FLUX, in which 4 of 10 steps compute and the others take the last output."""
    pipe(**tiny.arguments("flux", num_inference_steps=STEPS))
    computed = (0, 1, 2, 6)
    weights = {step: (1.0, 0.0) for step in range(STEPS) if step not in computed}
    values: dict[str, Any] = {
        "model": "tiny-flux",
        "model_class": "FluxTransformer2DModel",
        "weights_hash": hash_weights([pipe.transformer]),
        "scheduler": type(pipe.scheduler).__name__,
        "sigmas": tuple(read_sigmas(pipe.scheduler, STEPS)),
        "latents": (48, 16),
        "guidance": {},
        "captions": 1,
        "budgets": (StepBudget(computed=computed, weights=weights, predicted_db=20.0),),
    }
    return Schedule(**values | changes)


def draw(pipe: Any, **changes: Any) -> Any:
    call = tiny.arguments("flux", num_inference_steps=STEPS) | changes
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


def test_the_flag_wins_and_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    with pytest.raises(ditile.LoadError, match="cannot be read"):
        CacheOptions(schedule=str(path))
    make_schedule(tiny.flux()).write(path)
    config = CacheOptions(schedule=str(path), cache_line="steps=4").build_cache_arguments()["cache_config"]
    assert config == FittedScheduleConfig(schedule=str(path), steps=4)
    with pytest.raises(ModelError, match="another cache is given too"):
        CacheOptions(schedule=str(path), cache=True)
    with pytest.raises(ModelError, match="another cache is given too"):
        CacheOptions(schedule=str(path), cache_line="F=1 R=0.1")


def test_a_schedule_computes_its_steps_and_is_refused_elsewhere(tmp_path: Path) -> None:
    """A failure means that a schedule is applied to a generation that it was not fitted to."""
    pipe = tiny.flux()
    schedule = make_schedule(pipe)
    plain = draw(pipe)
    caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=schedule))
    image = draw(pipe)
    assert not torch.equal(image, plain)
    [report] = caching.summary(pipe, logging=False)
    assert report.cached_steps == [3, 4, 5, 7, 8, 9]
    with pytest.raises(ModelError, match=r"there is a schedule for 10 steps of tiny-flux, and the call has 12; run"):
        draw(pipe, num_inference_steps=12)
    with pytest.raises(ModelError, match="latents of shape"):
        draw(pipe, height=64)
    guided = schedule.model_copy(update={"guidance": {"guidance_scale": 5.0}})
    caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=guided))
    for target in (pipe, ditile.parallelize(pipe, ditile.Plan(), keep_weights=True)):
        with pytest.raises(ModelError, match=r"guidance_scale=5, and the call has 3\.5"):
            draw(target, guidance_scale=3.5)
        assert torch.equal(draw(target, guidance_scale=5.0), draw(target, guidance_scale=5.0))
    target.restore()
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
    wrong = {"weights_hash": "0", "model_class": "WanTransformer3DModel"}
    for name, value in wrong.items():
        with pytest.raises(ModelError, match="ditile fit"):
            caching.enable_cache(pipe, FittedScheduleConfig(schedule=make_schedule(tiny.flux(), **{name: value})))
    for name, other in {"scheduler": "DDIMScheduler", "sigmas": tuple(0.9 * x for x in schedule.sigmas)}.items():
        caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=schedule.model_copy(update={name: other})))
        with pytest.raises(ModelError, match="ditile fit"):
            draw(pipe)
    caching.disable_cache(pipe)
    assert torch.equal(draw(pipe), plain)


def test_planning_counts_the_steps_that_compute() -> None:
    assert len(predict_skipped_steps(FittedScheduleConfig(steps=8), 20).steps) == 12
    assert len(predict_skipped_steps(FittedScheduleConfig(), 20).steps) == 10
    with pytest.raises((ModelError, PlanError), match="more than the 20"):
        predict_skipped_steps(FittedScheduleConfig(steps=21), 20)

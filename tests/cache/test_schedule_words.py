"""How a schedule is named: in a cache line, in a config file, by a flag, and in Python; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from ditile.plan.errors import ModelError
from ditile.runner import caching
from tests import tiny

STEPS = 10


def make_schedule(pipe: Any, call: dict[str, Any] | None = None, **changes: Any) -> Schedule:
    """A schedule of a tiny FLUX, in which 4 of 10 steps compute and the others take the last output.

    Changes are of its identity.
    """
    call = tiny.arguments("flux", num_inference_steps=STEPS) | (call or {})
    pipe(**call)
    computed = (0, 1, 2, 6)
    weights = {step: (1.0, 0.0) for step in range(STEPS) if step not in computed}
    models = [pipe.transformer]
    fields = describe_models(models) | describe_call(pipe, models[0], call) | describe_scheduler(pipe.scheduler, STEPS)
    return Schedule(
        model="tiny-flux",
        identity=Identity(**fields | {"latents": (48, 16)} | changes),
        captions=1,
        budgets=(StepBudget(computed=computed, weights=weights, predicted_db=20.0),),
    )


def change_identity(schedule: Schedule, **changes: Any) -> Schedule:
    return schedule.model_copy(update={"identity": schedule.identity.model_copy(update=changes)})


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
            caching.enable_cache(pipe, FittedScheduleConfig(schedule=make_schedule(tiny.flux(), **{name: value})))
    sigmas = tuple(0.9 * sigma for sigma in schedule.identity.sigmas)
    solver = {"stochastic_sampling": True}
    for name, other in {"scheduler": "DDIMScheduler", "sigmas": sigmas, "solver": solver}.items():
        caching.enable_cache(pipe, FittedScheduleConfig(steps=4, schedule=change_identity(schedule, **{name: other})))
        with pytest.raises(ModelError, match="ditile fit"):
            draw(pipe)
    caching.disable_cache(pipe)
    assert torch.equal(draw(pipe), plain)


def test_other_guidance_is_refused() -> None:
    """A failure means that forecasts of one strength of guidance are used for another."""
    pipe = tiny.flux(guidance=True)
    schedule = make_schedule(pipe, {"guidance_scale": 5.0})
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
    schedule = make_schedule(pipe)
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
    schedule = make_schedule(pipe)
    model = pipe.transformer
    contents = turn_into_placeholder(model.transformer_blocks[1])
    assert find_difference(schedule.identity, describe_models([model]), [model]) == ""
    restore_contents(model.transformer_blocks[1], contents)
    del model.single_transformer_blocks[2]
    assert "which this one has not" in find_difference(schedule.identity, describe_models([model]), [model])

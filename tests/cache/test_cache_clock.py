"""Pipelines that step unusually, and transformers without one: what a step and a branch are there, and what is told."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
)
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

import ditile
from ditile import BlockAdapter, TaylorSeerCalibratorConfig
from ditile.cache.cached import IdleCacheWarning, find_model_cache
from ditile.cache.step_mask import build_preset_mask
from ditile.plan.errors import ModelError, StateError
from ditile.runner import caching
from tests.cache.pictures import draw_plain_and_cached, settings_for, skipped
from tests.families import EVERY, FAMILIES, TEXT, noise
from tests.parallel.sequence.planned import Denoising, denoising, draw, wan_pipeline
from tests.runner.cases import MAKE, call_of, different, same
from tests.tiny import quiet
from tests.zoo import ZOO

STEPS, SPARE = 6, 2
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw_cached = SETTINGS


def test_a_pipeline_that_steps_copies_of_its_scheduler() -> None:
    """Diffusion forcing steps a copy for each frame, the scheduler never; its calls have names. A failure means that
    every call is taken for one more branch of guidance, so that nothing is left out."""
    entry = ZOO["skyreels-v2-diffusion-forcing"]
    pipe = entry.make()

    def frames(steps: int = STEPS) -> Any:
        return pipe(**entry.call() | {"num_inference_steps": steps, "overlap_history": 17}).frames

    plain, _ = draw_plain_and_cached(pipe, SETTINGS, frames)
    assert skipped(pipe) == [REST] * 2, "two branches"
    frames(20)
    assert skipped(pipe) == [list(range(SPARE, 20))] * 2 and find_model_cache(pipe.transformer).memory_bytes == 0
    ditile.disable_cache(pipe)
    assert "cache_context" not in vars(pipe.transformer)
    same(frames(), plain)


class Looks(Denoising):  # type: ignore[misc]
    """Shows its transformer something before the timesteps are set, as pipelines do with images that they are given."""

    def __call__(self, latents: Any, inputs: dict[str, Any], num_inference_steps: int = STEPS) -> Any:
        self.transformer(hidden_states=latents, timestep=torch.zeros(len(latents)), return_dict=False, **inputs)
        return super().__call__(latents, inputs, num_inference_steps)


def test_a_call_before_the_timesteps_is_no_step() -> None:
    """A failure means that it begins a picture of the scheduler's last or thousand timesteps, which no mask fits."""
    made, call = denoising("ltx", 3, 5, 7)
    pipe = quiet(Looks(made.transformer, made.scheduler))
    plain = pipe(**call).images
    ditile.enable_cache(pipe, EXACT)
    same(pipe(**call).images, plain)
    mask = [1, 1, 0, 1, 0, 1]
    ditile.enable_cache(pipe, CACHE.reset(steps_computation_mask=mask, steps_computation_policy="static"))
    for _ in range(2):
        pipe(**call)
        assert {tuple(each) for each in skipped(pipe)} == {(2, 4)}


class Preset(Denoising):  # type: ignore[misc]
    """Goes over the timesteps that its scheduler has."""

    @torch.no_grad()
    def __call__(self, latents: Any, inputs: dict[str, Any]) -> Any:
        for t in self.scheduler.timesteps:
            out = self.transformer(hidden_states=latents, timestep=t.expand(2) / 1000, return_dict=False, **inputs)[0]
            latents = self.scheduler.step(out, t, latents, return_dict=False)[0]
        return latents


def test_timesteps_that_were_set_before_the_call() -> None:
    """A failure means that nothing is left out, in silence, where a pipeline does not set them itself."""
    model = FAMILIES["WanTransformer3DModel"].make()
    pipe = quiet(Preset(model, DDIMScheduler(clip_sample=False)))
    pipe.scheduler.set_timesteps(STEPS)
    ditile.enable_cache(pipe, CACHE)
    with pytest.raises(StateError, match="outside the pipeline's loop"):
        pipe(noise(2, 4, 2, 8, 8), {"encoder_hidden_states": noise(2, TEXT, 16, seed=1)})


class Own(DiffusionPipeline):  # type: ignore[misc]
    """A loop without a scheduler; it may be left in mid picture."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)

    @torch.no_grad()
    def __call__(self, latents: Any, text: Any, num_inference_steps: int = STEPS, leave: int = -1) -> Any:
        for k in range(num_inference_steps):
            if k == leave:
                raise KeyError(leave)
            with self.transformer.cache_context("cond"):
                out = self.transformer(latents, torch.tensor([900 - 100 * k]), text, return_dict=False)[0]
            latents = latents - 0.1 * out
        return latents


def test_a_pipeline_without_a_scheduler() -> None:
    """A failure means that it cannot be cached, or that a picture which is left in the middle goes on in the next."""
    model, text = wan_pipeline()[0].transformer, draw(1, 9, 16, seed=1)
    latents = draw(1, 4, 1, 6, 10, seed=3)
    pipe = Own(model)
    plain, _ = draw_plain_and_cached(pipe, SETTINGS, lambda: pipe(latents, text))
    with pytest.raises(KeyError):
        pipe(latents, text, leave=3)
    assert find_model_cache(model).memory_bytes == 0
    different(pipe(latents, text), plain)
    assert skipped(pipe) == [REST]
    pipe(latents, text, 9)
    assert skipped(pipe) == [list(range(SPARE, 9))]
    ditile.disable_cache(pipe)
    assert type(pipe) is Own
    same(pipe(latents, text), plain)


@pytest.mark.parametrize("guided", [range(STEPS), range(2, 4), range(3)], ids=["all", "some", "first"])
def test_a_transformer_alone_whose_calls_have_names(guided: range) -> None:
    """diffusers' pipelines name their calls. A failure means that a branch of guidance is taken for a step: other steps
    than with the pipeline's cache are left out, and each branch is given what the other one added."""
    pipe, _ = denoising("ltx", 3, 5, 7)
    model, call = pipe.transformer, denoising("ltx", 3, 5, 7)[1]

    class Guided(Denoising):  # type: ignore[misc]
        @torch.no_grad()
        def __call__(self, latents: Any, inputs: dict[str, Any]) -> Any:
            self.scheduler.set_timesteps(STEPS)
            for k, t in enumerate(self.scheduler.timesteps):
                outs = []
                for name in ("cond", "uncond") if k in guided else ("cond",):
                    sample = latents if name == "cond" else -latents
                    with self.transformer.cache_context(name):
                        time = t.expand(len(latents)) / 1000
                        outs.append(self.transformer(sample, timestep=time, return_dict=False, **inputs)[0])
                latents = self.scheduler.step(sum(outs), t, latents, return_dict=False)[0]
            return latents

    pipe = quiet(Guided(model, FlowMatchEulerDiscreteScheduler()))
    inputs = call["latents"], call["inputs"]
    ditile.enable_cache(pipe, CACHE)
    wanted, steps = pipe(*inputs), {tuple(branch) for branch in skipped(pipe)}
    assert tuple(REST) in steps
    ditile.disable_cache(pipe)
    ditile.enable_cache(model, CACHE)
    for _ in range(2):
        ditile.refresh_context(model, num_inference_steps=STEPS, verbose=True)
        same(pipe(*inputs), wanted)
        assert {tuple(branch) for branch in skipped(model)} == steps
    ditile.enable_cache(model, CACHE.reset(num_inference_steps=STEPS))
    for _ in range(2):
        same(pipe(*inputs), wanted)


def test_guidance_by_two_calls_without_a_pipeline() -> None:
    """Nothing counts steps there, so the user says it, at once or later. A failure means that the two branches are
    successive steps, each judged by the other's probe and given the other's residual."""
    model = wan_pipeline()[0].transformer
    texts = draw(1, 9, 16, seed=1), draw(1, 9, 16, seed=2)

    def loop() -> torch.Tensor:
        latents = draw(1, 4, 1, 6, 10, seed=3)
        with torch.no_grad():
            for k in range(STEPS):
                time = torch.tensor([900 - 100 * k])
                one, other = (model(latents, time, text, return_dict=False)[0] for text in texts)
                latents = latents - 0.1 * (other + 3 * (one - other))
        return latents

    plain, config = loop(), CACHE.reset(num_inference_steps=STEPS)
    ditile.enable_cache(BlockAdapter(transformer=model, has_separate_cfg=True), config)
    wanted = loop()
    different(wanted, plain)
    assert skipped(model) == [REST] * 2
    ditile.enable_cache(model, config.reset(enable_separate_cfg=True))
    same(loop(), wanted)
    ditile.enable_cache(model, config)
    different(loop(), wanted)
    ditile.refresh_context(model, enable_separate_cfg=True)
    same(loop(), wanted)
    with pytest.raises(ModelError, match="a list of transformers and no pipe"):
        ditile.enable_cache(BlockAdapter(transformer=[model, model]), config)


def test_modes_of_a_model_remember_apart() -> None:
    """Qwen-Image 2.1 runs prefix and picture through its blocks in one mode, and the picture alone in the next, called
    with tensors of the same shapes. A failure means that what was remembered in one mode is continued in the other."""
    name = "QwenImage21Transformer2DModel"
    model, text, side = EVERY[name].make(), 6, 4
    widths = model.config.in_channels, model.config.context_in_dim
    mask = torch.cat([torch.zeros(1, text, dtype=torch.bool), torch.ones(1, side * side // 4, dtype=torch.bool)], 1)

    def loop() -> torch.Tensor:
        memory, latents = QwenImage21KVCache(len(model.transformer_blocks)), draw(1, side * side, widths[0])
        with torch.no_grad():
            for k in range(STEPS):
                out = model(
                    hidden_states=latents, timestep=torch.tensor([1 - k / STEPS]), img_mask=mask,
                    encoder_hidden_states=draw(1, text, widths[1], seed=1), img_shapes=[[(1, side, side)]],
                    encoder_hidden_states_mask=torch.ones(1, text, dtype=torch.bool), kv_cache=memory,
                    kv_cache_mode="cached" if k else "extract", return_dict=False,
                )[0]  # fmt: skip
                latents = latents - 0.1 * out[:, -side * side :]
        return latents

    plain = loop()
    config = CACHE.reset(num_inference_steps=STEPS, max_warmup_steps=1)
    ditile.enable_cache(model, config.reset(residual_diff_threshold=1e-12))
    same(loop(), plain)
    ditile.enable_cache(model, config, TaylorSeerCalibratorConfig())
    different(loop(), plain)
    assert skipped(model) == [[], list(range(2, STEPS))], "the first step of each mode computes"


def test_masks_are_of_the_generation_whichever_transformer_it_calls() -> None:
    """And what was saved is a share of the steps in which a transformer ran. A failure means that the second one of Wan
    2.2 leaves out the last step, or that its savings are understated."""
    pipe, call = wan_pipeline()
    call["num_inference_steps"] = 20
    mask = build_preset_mask("fast", 20)
    ditile.enable_cache(pipe, CACHE.reset(steps_computation_mask="fast", steps_computation_policy="static"))
    pipe(**call, generator=torch.Generator().manual_seed(0))
    first, second = caching.summary(pipe, logging=False)
    assert first.steps + second.steps == 20 and min(first.steps, second.steps) > 4
    for report, start in ((first, 0), (second, first.steps)):
        wanted = [k for k in range(report.steps) if not mask[start + k] and k]
        assert report.cached_steps == wanted
        assert report.saved == pytest.approx(len(wanted) / report.steps * report.middle / report.blocks)


OF = {
    "pixart sigma": {
        "DDIMScheduler": 6,  # has neither step_index nor begin_index
        "DDPMScheduler": 6,
        "PNDMScheduler": 15,
        "HeunDiscreteScheduler": 11,
        "EulerAncestralDiscreteScheduler": 6,
        "UniPCMultistepScheduler": 6,
        "LCMScheduler": 6,
    },
    "sd3": {"FlowMatchEulerDiscreteScheduler": 6, "FlowMatchHeunDiscreteScheduler": 11},
}
"""The transformer steps of six steps."""


@pytest.mark.parametrize("name", OF)
def test_schedulers_that_are_set_later(name: str) -> None:
    """With `from_config`, one after the other, on a pipeline that has a cache. A failure means that the cache watches a
    scheduler that nobody steps, counts its steps wrong, or leaves something on it."""
    pipe = MAKE[name]()
    ditile.enable_cache(pipe, CACHE)
    for kind, steps in OF[name].items():
        before = pipe.scheduler
        pipe.scheduler = getattr(diffusers, kind).from_config(before.config)
        assert type(pipe.scheduler).__name__ == kind
        got = draw_cached(pipe, name)
        assert skipped(pipe) == [list(range(SPARE, steps))], kind
        assert find_model_cache(pipe.transformer).memory_bytes == 0
        assert not {"step", "set_timesteps"} & vars(before).keys(), f"{type(before).__name__} is not used any more"
        same(draw_cached(pipe, name), got, f"{kind}, the second call")
        ditile.disable_cache(pipe)
        assert not {"step", "set_timesteps"} & vars(pipe.scheduler).keys()
        plain = draw_cached(pipe, name)
        different(plain, got, kind)
        ditile.enable_cache(pipe, EXACT)
        same(draw_cached(pipe, name), plain, kind)
        ditile.enable_cache(pipe, CACHE)


def test_image_to_image() -> None:
    """`strength` takes the last steps of the schedule: they are counted from the first one that is taken, and masks are
    made for as many. A failure means that memory is kept after the call, or a mask belongs to other steps."""
    parts = MAKE["flux"]().components
    names = FluxImg2ImgPipeline.__init__.__annotations__
    pipe = quiet(FluxImg2ImgPipeline(**{key: part for key, part in parts.items() if key in names}))
    call = call_of("flux", num_inference_steps=12, strength=0.8, image=torch.rand(1, 3, 32, 24), height=32, width=24)
    call["generator"] = None

    def picture() -> Any:
        torch.manual_seed(3)
        return pipe(**call).images

    plain = picture()
    ditile.enable_cache(pipe, EXACT)
    same(picture(), plain)
    [report] = caching.summary(pipe, logging=False)
    assert report.steps == 10 and len(report.differences) == 10 - SPARE
    ditile.enable_cache(pipe, CACHE)
    different(picture(), plain)
    assert skipped(pipe) == [list(range(SPARE, 10))]
    mask = CACHE.reset(steps_computation_mask="ultra", steps_computation_policy="static")
    ditile.enable_cache(pipe, mask)
    picture()
    assert skipped(pipe) == [[step for step, computes in enumerate(build_preset_mask("ultra", 10)) if not computes]]


def test_a_scheduler_that_takes_its_sample_elsewhere() -> None:
    """Regression: the third argument of CogVideoX's scheduler is the time, and no sample with a row for each image."""
    entry = ZOO["cogvideox"]
    pipe = entry.make()
    pipe.scheduler = CogVideoXDPMScheduler()

    def frames() -> Any:
        return pipe(**entry.two_images() | {"num_inference_steps": STEPS}).frames

    draw_plain_and_cached(pipe, SETTINGS, frames)
    assert skipped(pipe) == [REST] * 2, "an image each"


def test_another_pipeline_with_the_same_model_draws_as_ever() -> None:
    """Its scheduler is not the one that is watched. A failure means that a picture is taken for one endless step, that
    something is kept of it, or that the pipeline with the cache is disturbed by it."""
    pipe = MAKE["sd3"]()
    ditile.enable_cache(pipe, CACHE)
    cached = draw_cached(pipe, "sd3")
    ditile.disable_cache(pipe)
    parts = {**pipe.components, "scheduler": FlowMatchEulerDiscreteScheduler()}
    other = quiet(type(pipe)(**{key: part for key, part in parts.items() if part is not None}))
    wanted = draw_cached(other, "sd3")
    ditile.enable_cache(pipe, CACHE)
    with pytest.warns(IdleCacheWarning, match="outside of the pipeline that was cached"):
        same(draw_cached(other, "sd3"), wanted)
    # The timesteps of the cached one are set, and the other one runs.
    pipe.scheduler.set_timesteps(STEPS)
    same(draw_cached(other, "sd3"), wanted)
    assert find_model_cache(pipe.transformer).memory_bytes == 0
    same(draw_cached(pipe, "sd3"), cached)
    assert skipped(pipe) == [REST]

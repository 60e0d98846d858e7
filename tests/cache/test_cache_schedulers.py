"""Where a cached pipeline is, is read off its scheduler: any of them, whatever is done to it, any number of steps."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    StableDiffusion3Img2ImgPipeline,
)

import ditile
from ditile.cache.cached import find_model_cache
from ditile.cache.clock import find_schedulers
from ditile.cache.step_mask import build_preset_mask
from ditile.runner import caching
from tests.cache.pictures import draw_plain_and_cached, settings_for, skipped
from tests.families import FAMILIES, TEXT, noise
from tests.parallel.sequence.planned import Denoising
from tests.runner.cases import MAKE, call_of, different, same
from tests.tiny import quiet

STEPS, SPARE = 6, 2
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw = SETTINGS
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
        got = draw(pipe, name)
        assert skipped(pipe) == [list(range(SPARE, steps))], kind
        assert find_model_cache(pipe.transformer).memory_bytes == 0
        assert not {"step", "set_timesteps"} & vars(before).keys(), f"{type(before).__name__} is not used any more"
        same(draw(pipe, name), got, f"{kind}, the second call")
        ditile.disable_cache(pipe)
        assert not {"step", "set_timesteps"} & vars(pipe.scheduler).keys()
        plain = draw(pipe, name)
        different(plain, got, kind)
        ditile.enable_cache(pipe, EXACT)
        same(draw(pipe, name), plain, kind)
        ditile.enable_cache(pipe, CACHE)


IMG2IMG = {"flux": FluxImg2ImgPipeline, "sd3": StableDiffusion3Img2ImgPipeline}


@pytest.mark.parametrize("name", IMG2IMG)
def test_image_to_image(name: str) -> None:
    """`strength` takes the last steps of the schedule: they are counted from the first one that is taken, and masks are
    made for as many. A failure means that memory is kept after the call, or a mask belongs to other steps."""
    pipe = MAKE[name]()
    cls = IMG2IMG[name]
    pipe = quiet(cls(**{key: part for key, part in pipe.components.items() if key in cls.__init__.__annotations__}))
    call = call_of(name, num_inference_steps=12, strength=0.8, image=torch.rand(1, 3, 32, 24), height=32, width=24)
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
    assert skipped(pipe) == [list(range(SPARE, 10))] and find_model_cache(pipe.transformer).memory_bytes == 0
    mask = CACHE.reset(steps_computation_mask="ultra", steps_computation_policy="static")
    ditile.enable_cache(pipe, mask)
    picture()
    assert skipped(pipe) == [[step for step, computes in enumerate(build_preset_mask("ultra", 10)) if not computes]]


class Late(Denoising):  # type: ignore[misc]
    """Takes the last steps of its schedule without a word to its scheduler, as pipelines do with those that know no
    begin_index."""

    @torch.no_grad()
    def __call__(self, latents: Any, inputs: dict[str, Any], skip: int = 2) -> Any:
        self.scheduler.set_timesteps(STEPS)
        for t in self.scheduler.timesteps[skip:]:
            out = self.transformer(hidden_states=latents, timestep=t.expand(2) / 1000, return_dict=False, **inputs)[0]
            latents = self.scheduler.step(out, t, latents, return_dict=False)[0]
        return latents


class Optional(Late):  # type: ignore[misc]
    """Makes its scheduler itself where it is given none, so that diffusers does not count it as a component."""

    def __init__(self, transformer: Any, scheduler: Any = None) -> None:
        super().__init__(transformer, scheduler or DDIMScheduler(clip_sample=False))


def test_a_scheduler_that_the_pipeline_makes() -> None:
    """Regression: without it calls were counted as steps, and two calls of a step were two steps."""
    pipe = Optional(FAMILIES["WanTransformer3DModel"].make())
    assert "scheduler" not in pipe.components and find_schedulers(pipe) == {"scheduler": pipe.scheduler}


def test_a_scheduler_that_takes_its_sample_elsewhere() -> None:
    """Regression: the third argument of CogVideoX's scheduler is the time, and no sample with a row for each image."""
    model = FAMILIES["CogVideoXTransformer3DModel"].make()
    scheduler = CogVideoXDPMScheduler()
    pipe = quiet(CogVideoXPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=model, scheduler=scheduler))
    call = {
        "prompt_embeds": noise(2, TEXT, 16, seed=1), "negative_prompt_embeds": noise(2, TEXT, 16, seed=2),
        "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": STEPS,
        "output_type": "latent",
    }  # fmt: skip

    def frames() -> Any:
        return pipe(**call, generator=torch.Generator().manual_seed(0)).frames

    draw_plain_and_cached(pipe, SETTINGS, frames)
    assert skipped(pipe) == [REST] * 2, "an image each"


def test_another_pipeline_with_the_same_model_draws_as_ever() -> None:
    """Its scheduler is not the one that is watched. A failure means that a picture is taken for one endless step, that
    something is kept of it, or that the pipeline with the cache is disturbed by it."""
    pipe = MAKE["sd3"]()
    ditile.enable_cache(pipe, CACHE)
    cached = draw(pipe, "sd3")
    ditile.disable_cache(pipe)
    parts = {**pipe.components, "scheduler": FlowMatchEulerDiscreteScheduler()}
    other = quiet(type(pipe)(**{key: part for key, part in parts.items() if part is not None}))
    wanted = draw(other, "sd3")
    ditile.enable_cache(pipe, CACHE)
    long = None
    for _ in range(2):
        for _ in range(7):
            same(draw(other, "sd3"), wanted)
            assert find_model_cache(pipe.transformer).memory_bytes == 0
        got = draw(other, "sd3", num_inference_steps=40)
        same(got, got if long is None else long)
        same(draw(pipe, "sd3"), cached)
        assert skipped(pipe) == [REST]
        long = got
    # The timesteps of the cached one are set, and the other one runs.
    pipe.scheduler.set_timesteps(STEPS)
    same(draw(other, "sd3", num_inference_steps=40), long)
    assert find_model_cache(pipe.transformer).memory_bytes == 0
    ditile.enable_cache(other, CACHE)
    different(draw(other, "sd3"), wanted)
    ditile.disable_cache(pipe)
    same(draw(other, "sd3"), wanted)

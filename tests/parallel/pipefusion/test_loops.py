"""Pipelines whose loops are not quite as others': under every plan they may have they draw what they draw alone.

They read the scheduler's place, unpack what it returns, iterate their progress bar, or leave the loop early. fp64 and
1e-10 as in test_batch: fewer rows make matrices of other shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxInpaintPipeline,
    FluxPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    PixArtSigmaPipeline,
    SD3Transformer2DModel,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor
from transformers import CLIPTextModelWithProjection

from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from tests import tiny
from tests.families import FAMILIES, noise
from tests.parallel.batch.test_batch import close
from tests.pool import Pool, on_ranks
from tests.runner.cases import different, divided, same

Made = tuple[Any, dict[str, Any]]
TWO = ["a red circle", "a ring"]
SIZE = {"height": 32, "width": 32}


def painted(pipe: Any, **call: Any) -> Made:
    """The left half anew; between steps the right half is the picture under noise of the next step's level."""
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.float64)
    mask[..., :16] = 1
    image = torch.linspace(0, 1, 3 * 32 * 32, dtype=torch.float64).view(1, 3, 32, 32)
    return pipe, {"prompt": TWO, "image": image, "mask_image": mask, "strength": 0.7, "output_type": "latent"} | call


def unet_inpaint() -> Made:
    pipe = tiny.stable_diffusion(StableDiffusionInpaintPipeline)
    pipe.scheduler = EulerDiscreteScheduler(beta_end=0.004)
    return painted(pipe, **SIZE)


def flux_inpaint() -> Made:
    pipe = FluxInpaintPipeline(**tiny.flux().components)
    return painted(pipe, max_sequence_length=12, **SIZE)


def sd3_inpaint() -> Made:
    parts = tiny.sd3().components
    config = {k: v for k, v in parts["transformer"].config.items() if not k.startswith("_")}
    parts["transformer"] = tiny.randomise(SD3Transformer2DModel(**config | {"in_channels": 16, "out_channels": 16}))
    pipe = StableDiffusion3InpaintPipeline(**parts | {"vae": tiny.vae(16)})
    return painted(pipe, max_sequence_length=12, guidance_scale=3.0, **SIZE)


def bar_that_is_iterated() -> Made:
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    pipe = DiTPipeline(tiny.randomise(transformer, gain=1.0), tiny.vae(), DDIMScheduler(beta_end=0.004))
    return pipe, {"class_labels": [1, 2], "guidance_scale": 1.0, "output_type": "np"}


def latents_for_each_branch() -> Made:
    pipe, call = bar_that_is_iterated()
    return pipe, call | {"class_labels": [1, 2, 3], "guidance_scale": 3.0}


def results_unpacked() -> Made:
    pipe = tiny.stable_diffusion(LatentConsistencyModelPipeline)
    config = {k: v for k, v in pipe.unet.config.items() if not k.startswith("_")}
    torch.manual_seed(0)
    pipe.unet = tiny.randomise(UNet2DConditionModel(**config | {"time_cond_proj_dim": 8}), gain=1.0)
    pipe.scheduler = LCMScheduler(beta_end=0.004)
    return pipe, {"prompt": TWO, "output_type": "latent", **SIZE}


def left_early() -> Made:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        cross_attention_dim=2 * tiny.WIDTH, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=tiny.WIDTH + 6 * 8,
    )  # fmt: skip
    pipe = StableDiffusionXLPipeline(
        vae=tiny.vae(), text_encoder=tiny.clip(), text_encoder_2=tiny.clip(CLIPTextModelWithProjection),
        tokenizer=tiny.tokenizer(), tokenizer_2=tiny.tokenizer(), unet=tiny.randomise(unet, gain=1.0),
        scheduler=EulerDiscreteScheduler(beta_end=0.004), add_watermarker=False,
    )  # fmt: skip
    return pipe, {"prompt": TWO, "denoising_end": 0.6, "output_type": "latent", **SIZE}


LOOPS: dict[Callable[[], Made], list[dict[str, Any]]] = {
    unet_inpaint: [{}, {"data": 2}, {"cfg": 2}],
    bar_that_is_iterated: [{}, {"data": 2}],
    latents_for_each_branch: [{}, {"data": 2}, {"cfg": 2}],
    results_unpacked: [{}, {"data": 2}],
    left_early: [{}, {"data": 2}, {"cfg": 2}],
}


def as_alone(make: Callable[[], Made], plans: list[dict[str, Any]]) -> None:
    pipe, call = make()
    tiny.quiet(pipe).to(torch.float64)

    def picture(pipe: Any) -> Any:
        return pipe(**call, num_inference_steps=6, generator=torch.Generator().manual_seed(7), return_dict=False)[0]

    wanted, alone = picture(pipe), dist.get_world_size() == 1
    for plan in plans:
        if (Plan(**plan).world == 1) == alone:
            with divided(pipe, **plan) as runner:
                got = picture(runner)
                same(got, wanted, plan) if alone else close(got, wanted, f"{plan} rank {dist.get_rank()}")


@pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)
def test_a_loop_of_its_own(pool: Pool, make: Callable[[], Made]) -> None:
    """A failure means that a pipeline sees that its scheduler is another one's work."""
    for ranks in (1, 2):
        pool.run(as_alone, ranks, make, LOOPS[make])


class Unpacking(PixArtSigmaPipeline):  # type: ignore[misc]
    """Takes more than latents from its scheduler."""

    def prepare_extra_step_kwargs(self, *args: Any) -> Any:
        step = self.scheduler.step

        def unpacked(*args: Any, **kwargs: Any) -> Any:
            latents, original = step(*args, **kwargs)
            return (latents + 0 * original.mean(),)

        self.scheduler.step = unpacked
        return super().prepare_extra_step_kwargs(*args)


@on_ranks(1)
def test_what_a_scheduler_made_of_a_patch_is_refused() -> None:
    """A failure means that a pipeline goes on with a patch and takes it for the whole."""
    pipe = tiny.quiet(Unpacking(**tiny.pixart().components | {"scheduler": DDIMScheduler(beta_end=0.004)}))
    says = "takes more than latents from its scheduler.*use a plan without pipefusion and patches"
    with divided(pipe, patches=2) as runner, pytest.raises(StateError, match=says):
        runner(**tiny.arguments("pixart"))


class Indexed(DiffusionPipeline):  # type: ignore[misc]
    """Reads the level of noise by the number of its iteration, as many pipelines do."""

    vae_scale_factor = 8

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], seen: list[int], num_inference_steps: int = 4, bar: bool = False) -> Any:
        latents = inputs["hidden_states"]
        self.scheduler.set_timesteps(num_inference_steps)
        timesteps = self.scheduler.timesteps
        for i, t in enumerate(self.progress_bar(timesteps) if bar else timesteps):
            seen.append(i)
            scale = 1 + self.scheduler.sigmas[i] - self.scheduler.sigmas[i + 1]
            call = inputs | {"hidden_states": latents, "timestep": t.expand(len(latents)) / 1000}
            out = self.transformer(**call, return_dict=False)[0] * scale
            latents = self.scheduler.step(out, t, latents, return_dict=False)[0]
        assert [k for k, _ in enumerate("ab", 1)] == [1, 2]
        return latents


@on_ranks(1)
def test_an_iteration_has_the_number_of_its_step() -> None:
    """A failure means that a micro-step's number is taken for a step's, or a module keeps what was put under it."""
    family = FAMILIES["FluxTransformer2DModel"]
    pipe = tiny.quiet(Indexed(family.make(), FlowMatchEulerDiscreteScheduler()))
    inputs, seen = family.inputs(), []
    wanted = pipe(inputs, seen)
    assert seen == [0, 1, 2, 3]
    for warmup, iterations in ((4, seen), (1, [0, 1, 1, 2, 2, 3, 3])):
        for bar in (False, True):
            with divided(pipe, patches=2, warmup=warmup) as runner:
                got = runner(inputs, counted := [], bar=bar)
            assert counted == [0, 1, 2, 3] + [0] * 4 + iterations, (
                "behind a rehearsal of each step of a loop of the user's"
            )
            if warmup == 4:
                same(got, wanted, bar)
            assert torch.isfinite(got).all()
    assert "enumerate" not in vars(sys.modules[__name__])


class OwnSteps(PixArtSigmaPipeline):  # type: ignore[misc]
    """Its loop draws noise for each timestep, and predicts and steps by itself, or leaves that for later."""

    def __call__(self, generator: torch.Generator, *, predicts: bool, num_inference_steps: int = 4) -> Any:
        self.scheduler.set_timesteps(num_inference_steps)
        latents, noises = noise(1, 4, 8, 8, seed=1), []
        text = noise(1, 5, tiny.WIDTH, seed=2)
        for _, t in enumerate(self.scheduler.timesteps):
            noises.append(torch.randn(1, 4, 8, 8, generator=generator))
            if predicts:
                mask, sizes = torch.ones(1, 5), {"resolution": None, "aspect_ratio": None}
                output = self.transformer(
                    latents, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=t[None],
                    added_cond_kwargs=sizes, return_dict=False,
                )  # fmt: skip
                latents = latents - 0.1 * output[0].chunk(2, dim=1)[0]
        return torch.cat([latents, *noises])


@pytest.mark.parametrize("warmup", [1, 9])
@pytest.mark.parametrize("steps", [1, 4])
def test_loops_that_step_no_scheduler(warmup: int, steps: int) -> None:
    """One that calls no model draws the noises that it draws alone, each once; one that calls a model and steps by
    itself is refused. A failure means a repeated noise, or a picture of one step whose blocks were passed by."""
    pipe = tiny.quiet(OwnSteps(**tiny.pixart().components))

    def draw(pipe: Any, *, predicts: bool) -> Any:
        return pipe(torch.Generator().manual_seed(3), predicts=predicts, num_inference_steps=steps)

    wanted = draw(pipe, predicts=False)
    with divided(pipe, patches=2, warmup=warmup) as runner:
        same(draw(runner, predicts=False), wanted)
        with pytest.raises(StateError, match="went on without stepping its scheduler"):
            draw(runner, predicts=True)


STEPS, PATCHES = 4, 3


class MadeArguments(FluxPipeline):
    """Its model has twice the channels of its latents, and `kind` says what is in the others."""

    kind = "squares"

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], num_inference_steps: int = STEPS) -> Tensor:
        latents = inputs["hidden_states"]
        self.scheduler.set_timesteps(num_inference_steps)
        predicted = torch.zeros_like(latents)
        for t in self.scheduler.timesteps:
            more, call = latents, dict(inputs)
            if self.kind == "squares":
                more = latents * latents
            elif self.kind == "means":
                more = latents.mean(1, keepdim=True).expand_as(latents)
            elif self.kind == "guided":
                call["pooled_projections"] = inputs["pooled_projections"] + latents.mean()
            elif self.kind == "conditioned on itself":
                more = predicted
            call |= {"hidden_states": torch.cat([latents, more], -1), "timestep": t.expand(len(latents)) / 1000}
            predicted = self.transformer(**call, return_dict=False)[0]
            latents = self.scheduler.step(predicted, t, latents, return_dict=False)[0]
        return latents


def make(kind: str) -> tuple[Any, dict[str, Any]]:
    family = FAMILIES["FluxTransformer2DModel"]
    channels = family.inputs()["hidden_states"].shape[-1]
    changes = {"in_channels": 2 * channels, "out_channels": channels}
    transformer = tiny.randomise(family._replace(config=family.config | changes).make(), gain=1.0)
    parts = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = tiny.quiet(MadeArguments(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **parts))
    pipe.kind = kind
    return pipe, family.inputs()


def paint_made(kind: str, stages: int, is_refused: bool) -> Tensor | None:
    """On a rank: twice without anything stale, and the stale picture, or that it is refused."""
    pipe, inputs = make(kind)
    want = pipe(inputs)
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=STEPS) as runner:
        for _ in range(2):
            same(runner(inputs), want, (kind, stages))
        if is_refused:
            with pytest.raises(StateError, match="from latents of other patches"):
                runner(inputs, STEPS + 2)  # the last ones are stale
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=1) as runner:
        if is_refused:
            for _ in range(2):
                with pytest.raises(StateError, match=rf"from latents of other patches.*use warmup={STEPS}"):
                    runner(inputs)
            return None
        first = runner(inputs)
        same(runner(inputs), first)
        different(first, want)
        return first


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["squares", "means", "guided"])
def test_what_is_made_of_latents(pool: Pool, kind: str) -> None:
    """What is made of a patch's own is the same on any stages; what is made of all is exact where every step is
    synchronous, also on a stage between, and refused else. A failure means a picture that is silently another one."""
    is_refused = kind != "squares"
    drawn = [each for ranks in (1, 2, 3) for each in pool.run(paint_made, ranks, kind, ranks, is_refused)]
    if not is_refused:
        same(drawn, drawn[:1] * len(drawn))


@pytest.mark.nightly
@on_ranks(2)
def test_what_is_made_of_the_last_prediction() -> None:
    """Other stages than the last have none. A failure means a picture that is silently another one."""
    stages = 2
    pipe, inputs = make("conditioned on itself")
    for warmup in (1, STEPS):
        with (
            divided(pipe, pipefusion=stages, patches=PATCHES, warmup=warmup) as runner,
            pytest.raises(StateError, match="hidden_states for its model from what the model predicted last"),
        ):
            runner(inputs)

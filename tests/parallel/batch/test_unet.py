"""Models of which nothing is known: U-Nets, and a user's own pipeline. They get data and cfg, and no more.

fp64 and 1e-10 as in test_batch: matrices have other shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, StableDiffusionPAGPipeline
from torch import Tensor

from benchmarks.method_matrix import list_families
from ditile.plan.errors import DitileError, ModelError, PlanError, StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from ditile.runner.table import DERIVED_COLUMNS
from tests import tiny
from tests.families import FAMILIES, noise
from tests.parallel.batch.test_batch import close
from tests.pool import Pool, on_ranks
from tests.runner.cases import divided, same


def call_of(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"prompt": ["a red circle", "a ring"], "num_images_per_prompt": 2, "output_type": "latent"}
    call |= {"height": 16, "width": 24, "num_inference_steps": 3, "generator": torch.Generator().manual_seed(7)}
    return call | changes


CALLS: list[dict[str, Any]] = [{}, {"guidance_rescale": 0.7}, {"output_type": "pt"}]


def as_plain(plan: dict[str, Any]) -> None:
    pipe = tiny.stable_diffusion().to(torch.float64)
    for changes in CALLS:
        wanted = pipe(**call_of(**changes)).images
        with divided(pipe, **plan) as runner:
            close(runner(**call_of(**changes)).images, wanted, f"{plan} {changes} rank {dist.get_rank()}")
            sent = runner.report.sent if runner.report else {}
            assert [kind in sent for kind in ("cfg", "data")] == ["cfg" in plan, "data" in plan]
            assert "UNet2DConditionModel" in str(runner)
            assert all(title in str(runner) for title in DERIVED_COLUMNS)
            assert "runner.reports()" in str(runner) and "?" not in str(runner)
            assert repr(runner).startswith("<Runner of StableDiffusionPipeline: ") and "\n" not in repr(runner)


@pytest.mark.parametrize("plan", [{"cfg": 2}, {"data": 2}, {"cfg": 2, "data": 2}])
def test_stable_diffusion(pool: Pool, plan: dict[str, Any]) -> None:
    """A failure means that the lowest rung of the ladder depends on something that only transformers have."""
    pool.run(as_plain, Plan(**plan).world, plan)


class Own(DiffusionPipeline):  # type: ignore[misc]
    """A user's pipeline, which asks for each branch by a call of its own."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, prompt: Any, way: str, generator: Any = None) -> Any:
        """`way`: both branches in each step; the second late; the first computed with, written elsewhere, or read
        early, or read so in later steps; one; more latents, odd; NaN."""
        latents = torch.randn(({"more": 4, "odd": 3}.get(way, 2), 4, 8, 8), generator=generator, dtype=torch.float64)
        latents = latents * torch.nan if way == "sick" else latents
        text = torch.linspace(-1, 1, 2 * 5 * tiny.WIDTH, dtype=torch.float64).view(2, 1, 5, tiny.WIDTH)
        self.scheduler.set_timesteps(4)
        for i, t in enumerate(self.scheduler.timesteps):
            words = [one.expand(len(latents), -1, -1) for one in text]
            wanted = self.unet(latents, t, encoder_hidden_states=words[0]).sample
            used = (wanted.clone() * 3.0).mul_(1.0) if way == "early" else None
            if way == "written":
                latents.new_zeros(latents.shape)[:] = wanted
            if way == "read" or (way == "read later" and i):
                used = wanted * float(wanted.sign().prod() * 0 + 3)
            if way != "one" and (way != "late" or i >= 2):
                unwanted = self.unet(latents, t, words[1], return_dict=False)[0]
                wanted = unwanted + (used if used is not None else 3.0 * wanted) - 3.0 * unwanted
            latents = self.scheduler.step(wanted, t, latents).prev_sample
        return latents


REFUSED: dict[str, tuple[type[DitileError], str]] = {
    "late": (ModelError, "UNet2DConditionModel was called once, with one row for each image; raise guidance_scale"),
    "one": (ModelError, "was called once"),
    "written": (ModelError, "the pipeline writes it into another tensor by __setitem__ before the next one.*use cfg=1"),
    "read": (ModelError, "the pipeline asks for numbers of it by __float__ before the next one.*use cfg=1"),
    "read later": (StateError, "used one prediction before it asked for the next.*use cfg=1"),
    "odd": (ModelError, r"has 3 row\(s\) for 2 image\(s\).*data=1 and cfg=1"),
}


def own() -> Own:
    return Own(tiny.stable_diffusion().unet.to(torch.float64), DDIMScheduler())


@on_ranks(2)
def test_calls_in_turn() -> None:
    """A failure means that a half's prediction does not arrive where the pipeline holds it."""
    pipe = own()
    plain = {
        way: pipe(["a", "b"], way, torch.Generator().manual_seed(1)) for way in ("both", "late", "early", "one", "more")
    }
    with divided(pipe, cfg=2) as runner:
        for way in ("early", "both"):
            same(runner(["a", "b"], way, torch.Generator().manual_seed(1)), plain[way], f"{way}: the calls, shared out")
        assert runner.report is not None
        assert runner.report.sent["cfg"] == 3 * 2 * 4 * 8 * 8 * 8, "the first step is whole on both"
        close(runner(["a", "b"], "more", torch.Generator().manual_seed(1)), plain["more"], "two copies under cfg")
        with pytest.raises(ModelError, match="since step 1 of 4"):
            runner(["a", "b"], "sick", torch.Generator().manual_seed(1))
    for way in plain:
        with divided(pipe, data=2) as runner:
            got = runner(["a", "b"], way, torch.Generator().manual_seed(1))
            close(got, plain[way], f"{way} under data")


class Fewer(Own):
    """Leaves guidance in mid-run, for good or for two steps, or asks for more of it."""

    @torch.no_grad()
    def __call__(self, prompt: Any, way: str, generator: Any = None) -> Any:
        latents: Tensor = torch.zeros(2, 4, 8, 8, dtype=torch.float64)
        text = torch.zeros(2, 5, tiny.WIDTH, dtype=torch.float64)
        numbers = {"fewer": [2, 2, 1, 1], "more": [2, 2, 3, 3], "between": [2, 1, 1, 2, 2]}[way]
        self.scheduler.set_timesteps(len(numbers))
        for calls, t in zip(numbers, self.scheduler.timesteps, strict=True):
            results = [self.unet(latents, t, text + call).sample for call in range(calls)]
            latents = self.scheduler.step(sum(results), t, latents).prev_sample
        return latents


@on_ranks(2)
def test_the_number_of_calls_may_change() -> None:
    """A failure means that a half waits for a call that is not made, or does not compute one more."""
    for way in ("fewer", "more", "between"):
        pipe = Fewer(**own().components)
        wanted = pipe(["a", "b"], way)
        for plan in ({"cfg": 2}, {"data": 2}):
            with divided(pipe, **plan) as runner:
                close(runner(["a", "b"], way), wanted, f"{way} calls under {plan}")


@on_ranks(2)
def test_what_cannot_be_shared_out_is_refused() -> None:
    """A failure means a hang, or a picture of holes."""
    for way in REFUSED:
        error, says = REFUSED[way]
        with divided(own(), cfg=2) as runner, pytest.raises(error, match=says):
            runner(["a", "b"], way, torch.Generator().manual_seed(1))


def no_more() -> None:
    pipe = tiny.stable_diffusion()
    for plan in (Plan(pipefusion=2), Plan(ulysses=2), Plan(tensor=2)):
        with pytest.raises(ModelError, match="UNet2DConditionModel is not in the table.*data and cfg work without one"):
            parallelize(pipe, plan)
    with pytest.raises(PlanError, match="StableDiffusionPAGPipeline tells branches of guidance apart.*use data"):
        parallelize(tiny.stable_diffusion(StableDiffusionPAGPipeline), Plan(cfg=2))
    pipe.prior_scheduler, pipe.scheduler = pipe.scheduler, None
    with pytest.raises(ModelError, match="has no part `scheduler` that it steps in its loop, but prior_scheduler, so"):
        parallelize(pipe, Plan(data=2))
    pipe.unet = None
    with pytest.raises(ModelError, match="has no transformer and no unet"):
        parallelize(pipe, Plan(data=2))


def test_no_more_than_data_and_cfg(pool: Pool) -> None:
    """A failure means that a model is cut of which nothing is known."""
    pool.run(no_more, 2)
    assert list_families()[-1].rung == "data, cfg"


class Denoising(DiffusionPipeline):  # type: ignore[misc]
    """The loop of a pipeline without its encoders. Branches of guidance share a call, if it has more than one."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], num_waveforms_per_prompt: int, num_inference_steps: int = 2) -> Tensor:
        images, (name, batch) = num_waveforms_per_prompt, next(iter(inputs.items()))
        latents = batch[:images]
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            call = inputs | {name: latents.repeat(len(batch) // images, *[1] * (latents.ndim - 1))}
            out = self.transformer(**call | {"timestep": t.expand(len(batch))}).sample
            out = 3 * out[:images] - 2 * out[-images:] if len(batch) > images else out
            latents = self.scheduler.step(out, t, latents, return_dict=False)[0]
        return latents  # type: ignore[no-any-return]


def positions() -> tuple[Any, dict[str, Any]]:
    """Two frames and two words."""
    family = FAMILIES["Kandinsky5Transformer3DModel"]
    words = {"encoder_hidden_states": noise(2, 2, 16, seed=1), "text_rope_pos": torch.arange(2)}
    return family.make(), family.inputs() | words


@on_ranks(2)
def test_what_is_as_long_as_the_batch_is_not_the_batch() -> None:
    """A failure means that a table of positions is cut to a replica's rows: the video is wrong, or the model raises."""
    for plan, images in (({"data": 2}, 2), ({"cfg": 2}, 1)):
        model, inputs = positions()
        pipe = tiny.quiet(Denoising(model, FlowMatchEulerDiscreteScheduler()))
        wanted = pipe(inputs, images)
        with divided(pipe, **plan) as runner:
            close(runner(inputs, images), wanted, f"{plan} rank {dist.get_rank()}", tolerance=1e-4)

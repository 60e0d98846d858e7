"""Which arguments of a transformer have rows, under data and cfg, where other things are as long as the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from tests import tiny
from tests.families import FAMILIES, noise
from tests.more_families import RUN
from tests.parallel.batch.test_batch import close
from tests.pool import Pool
from tests.runner.cases import divided


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


def tables() -> tuple[Any, dict[str, Any]]:
    """Rotary tables of two frames, which are looked up by index."""
    family = next(family for family in RUN if family.name == "AllegroTransformer3DModel")
    frames = torch.arange(2.0)[:, None].expand(2, 4)
    sides = ((torch.ones(4, 4), torch.zeros(4, 4)),) * 2
    grid = torch.cartesian_prod(*map(torch.arange, (2, 4, 4))).T[:, None]
    return family.make(), family.inputs() | {"image_rotary_emb": (((frames.cos(), frames.sin()), *sides), tuple(grid))}


def views() -> tuple[Any, dict[str, Any]]:
    """Two branches of two images: a replica's rows lie apart, and the forward takes views of its arguments."""
    family = FAMILIES["HunyuanDiT2DModel"]
    torch.manual_seed(0)
    model = family.kind(**family.config | {"use_style_cond_and_image_meta_size": True, "learn_sigma": False})
    rows = {name: noise(4, *value.shape[1:], seed=k) for k, (name, value) in enumerate(family.inputs().items())}
    rows |= {"text_embedding_mask": torch.ones(4, 4), "text_embedding_mask_t5": torch.ones(4, 4)}
    rows |= {"image_meta_size": torch.arange(24.0).view(4, 6), "style": torch.zeros(4, dtype=torch.int64)}
    return tiny.randomise(model, gain=1.0), rows


MAKE = {"positions": positions, "tables": tables, "views": views}


def denoising(name: str, plan: dict[str, Any], images: int) -> None:
    model, inputs = MAKE[name]()
    pipe = tiny.quiet(Denoising(model, FlowMatchEulerDiscreteScheduler()))
    wanted = pipe(inputs, images)
    with divided(pipe, **plan) as runner:
        close(runner(inputs, images), wanted, f"{name} {plan} rank {dist.get_rank()}", 1e-4)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_as_long_as_the_batch_is_not_the_batch(pool: Pool, name: str) -> None:
    """A failure means that a table of positions is cut to a replica's rows: the video is wrong, or the model raises."""
    for plan, images in (({"data": 2}, 2), ({"cfg": 2}, 2 if name == "views" else 1)):
        pool.run(denoising, 2, name, plan, images)

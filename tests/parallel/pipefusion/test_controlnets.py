"""Models beside the transformer, such as a ControlNet, which read the latents on every stage, and IP-adapters.

Nothing stale: bit for bit the pipeline. Stale keys: bit for bit the same on one, two and three ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import ZImageControlNetInpaintPipeline
from torch import nn

from tests import tiny
from tests.parallel.pipefusion.test_blends import PATCHES, STEPS, draw, make_entry, paint
from tests.pool import Pool
from tests.runner.cases import divided
from tests.zoo.conditions import filled, z_image_controlnet


def z_image_controlnet_inpaint() -> tuple[Any, dict[str, Any]]:
    """Its ControlNet is shown the picture, the mask, and the picture without what is drawn anew."""
    pipe, call = make_entry("z-image-controlnet")
    pipe = ZImageControlNetInpaintPipeline(**pipe.components | {"controlnet": z_image_controlnet(channels=9)})
    return pipe, call | filled(28, 44)


NAMES = (
    "flux-controlnet", "flux-controlnet-inpaint", "qwen-image-controlnet", "qwen-image-controlnet-inpaint",
    "stable-diffusion-3-controlnet", "z-image-controlnet", "wan-vace", "flux-ip-adapter",
    "stable-diffusion-3-ip-adapter",
)  # fmt: skip
MAKES = {name: partial(make_entry, name) for name in NAMES} | {"z-image-controlnet-inpaint": z_image_controlnet_inpaint}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_models_that_read_the_latents_on_every_stage(pool: Pool, make: Callable[[], Any]) -> None:
    """A failure means that a stage between the first and the last computes with latents of the first step."""
    drawn = [pair for ranks in (1, 2, 3) for pair in pool.run(paint, ranks, make, ranks)]
    for stale, want in drawn:
        assert torch.equal(stale, drawn[0][0])
        assert not torch.equal(stale, want), "stale keys change something"


def count_calls(stages: int) -> tuple[int, float]:
    """How often a ControlNet runs, and how much it changes the stale picture."""
    pipe, call = make_entry("flux-controlnet")
    calls: list[nn.Module] = []
    embedder = tiny.quiet(pipe).controlnet.controlnet_x_embedder
    embedder.register_forward_hook(lambda module, *_: calls.append(module))
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=1) as runner:
        got = draw(runner, call)
        counted = len(calls)
        without = draw(runner, call | {"controlnet_conditioning_scale": 0.0})
    return counted, float((got - without).abs().max())


def test_a_controlnet_runs_once_in_a_step(pool: Pool) -> None:
    """And once in the rehearsal. A failure means that it is computed for each patch."""
    for counted, change in pool.run(count_calls, 1, 1):
        assert counted == STEPS + 1 and change > 0

"""Models beside the transformer, such as a ControlNet, which read the latents on every stage, and IP-adapters.

Nothing stale: bit for bit the pipeline. Stale keys: bit for bit the same on one, two and three ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxControlNetInpaintPipeline
from torch import nn

from tests import tiny
from tests.parallel.pipefusion.test_blends import PATCHES, STEPS, draw, paint
from tests.pool import Pool
from tests.runner.cases import divided
from tests.zoo import ZOO
from tests.zoo.entry import picture

Made = tuple[Any, dict[str, Any]]


def flux_controlnet() -> Made:
    return ZOO["flux-controlnet"].make(), ZOO["flux-controlnet"].call()


def flux_controlnet_inpaint() -> Made:
    pipe, call = flux_controlnet()
    images = {"image": picture(12, 20), "mask_image": picture(12, 20, 1), "strength": 0.9}
    components = {
        name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")
    }
    return FluxControlNetInpaintPipeline(**components), call | images


def qwen_controlnet() -> Made:
    return ZOO["qwen-image-controlnet"].make(), ZOO["qwen-image-controlnet"].call()


def sd3_controlnet() -> Made:
    return ZOO["stable-diffusion-3-controlnet"].make(), ZOO["stable-diffusion-3-controlnet"].call()


def z_image_controlnet() -> Made:
    return ZOO["z-image-controlnet"].make(), ZOO["z-image-controlnet"].call()


def flux_ip_adapter() -> Made:
    return ZOO["flux-ip-adapter"].make(), ZOO["flux-ip-adapter"].call()


def wan_vace() -> Made:
    return ZOO["wan-vace"].make(), ZOO["wan-vace"].call()


MAKES = [
    flux_controlnet,
    flux_controlnet_inpaint,
    qwen_controlnet,
    sd3_controlnet,
    z_image_controlnet,
    wan_vace,
    flux_ip_adapter,
]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_models_that_read_the_latents_on_every_stage(pool: Pool, make: Callable[[], Any]) -> None:
    """A failure means that a stage between the first and the last computes with latents of the first step."""
    drawn = [pair for ranks in (1, 2, 3) for pair in pool.run(paint, ranks, make, ranks)]
    for stale, want in drawn:
        assert torch.equal(stale, drawn[0][0])
        assert not torch.equal(stale, want), "stale keys change something"


def count_calls(stages: int) -> tuple[int, float]:
    """How often a ControlNet runs, and how much it changes the stale picture."""
    pipe, call = flux_controlnet()
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

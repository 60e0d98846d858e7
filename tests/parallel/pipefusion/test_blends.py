"""Pipelines that do more than call a transformer, on one, two and three ranks.

In-painting blends what is kept of a picture into the latents between steps, at the noise of the next. Models beside the
transformer, such as a ControlNet, read the latents on every stage; IP-adapters have keys of their own.
Nothing stale: bit for bit the pipeline. Stale keys: bit for bit the same on one, two and three ranks, and a picture
whose kept part is that of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxInpaintPipeline, ZImageControlNetInpaintPipeline
from torch import Tensor, nn

from ditile.plan.errors import StateError
from ditile.runner.load import load
from tests import tiny
from tests.parallel.pipefusion.test_loops import flux_inpaint, sd3_inpaint
from tests.pool import Pool, on_ranks
from tests.runner.cases import divided, same
from tests.zoo import ZOO
from tests.zoo.conditions import filled, z_image_controlnet

STEPS, PATCHES = 5, 3


def make_entry(name: str) -> tuple[Any, dict[str, Any]]:
    """The pipeline of an entry of the collection, and a call of it that starts from a noised picture."""
    call = ZOO[name].call()
    return ZOO[name].make(), call | ({"strength": 0.8} if "strength" in call else {})


def draw(pipe: Any, call: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)  # an autoencoder of control pictures may draw, too
    changes = {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(7), "return_dict": False}
    result = pipe(**call | changes)[0]
    return torch.stack(result) if isinstance(result, list) else result


def paint(make: Callable[[], Any], stages: int) -> tuple[Tensor, Tensor]:
    """The stale picture, and a plain one, which is that of nothing stale."""
    pipe, call = make()
    want, degrees = draw(tiny.quiet(pipe), call), {"pipefusion": stages, "patches": PATCHES}
    for plan in (degrees, {"pipefusion": stages}) if stages > 1 else (degrees,):
        with divided(pipe, **plan, warmup=STEPS) as runner:
            same(draw(runner, call), want, (plan, dist.get_rank()))
    with divided(pipe, **degrees, warmup=1) as runner:
        return draw(runner, call), want


def z_image_controlnet_inpaint() -> tuple[Any, dict[str, Any]]:
    """Its ControlNet is shown the picture, the mask, and the picture without what is drawn anew."""
    pipe, call = make_entry("z-image-controlnet")
    pipe = ZImageControlNetInpaintPipeline(**pipe.components | {"controlnet": z_image_controlnet(channels=9)})
    return pipe, call | filled(28, 44)


MAKES = {
    "flux-inpaint": flux_inpaint,
    "sd3-inpaint": sd3_inpaint,
    "z-image-controlnet-inpaint": z_image_controlnet_inpaint,
    # Those that start from their own pictures draw the same under the rows of the zoo.
    "flux-controlnet-inpaint": partial(make_entry, "flux-controlnet-inpaint"),
    "stable-diffusion-3-ip-adapter": partial(make_entry, "stable-diffusion-3-ip-adapter"),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_one_two_and_three_ranks_draw_the_same(pool: Pool, make: Callable[[], Any]) -> None:
    """A failure: a patch is blended with the noise of another step, or a stage computes with other latents."""
    drawn = [pair for ranks in (1, 2, 3) for pair in pool.run(paint, ranks, make, ranks)]
    for stale, want in drawn:
        same(stale, drawn[0][0])
        assert not torch.equal(stale, want), "stale keys change something"


class Doubled(FluxInpaintPipeline):  # type: ignore[misc]
    """Its kept part is another one whenever it is blended."""

    @property
    def interrupt(self) -> bool:
        self.blends = getattr(self, "blends", 0) + 1
        stock = type(self.scheduler).scale_noise
        self.scheduler.scale_noise = lambda *args: stock(self.scheduler, *args) * self.blends
        return False


@on_ranks(1)
def test_a_blend_that_cannot_be_made_again_is_refused() -> None:
    """A failure means that patches are blended otherwise than the pipeline does it, in silence."""
    pipe, call = flux_inpaint()
    with divided(tiny.quiet(Doubled(**pipe.components)), patches=3) as runner, pytest.raises(StateError) as refusal:
        draw(runner, call)
    assert "makes different latents of the same ones" in str(refusal.value)


def test_what_is_kept_of_a_picture() -> None:
    """With weights that make pictures. A failure means that a stale picture has seams, or noise where it is kept."""
    pipe = load("shapes-flux")
    picture = torch.linspace(0, 1, 3 * 64 * 64).view(1, 3, 64, 64)
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., 32:, :] = 1
    call = {
        "prompt": "a large red circle", "image": picture, "mask_image": mask, "strength": 1.0, "height": 64,
        "width": 64, "output_type": "latent",
    }  # fmt: skip
    pipe = tiny.quiet(FluxInpaintPipeline(**pipe.components))
    want = draw(pipe, call)
    with divided(pipe, patches=2, warmup=2) as runner:
        got = draw(runner, call)
    kept = len(want[0]) // 2
    same(got[:, :kept], want[:, :kept])
    error, power = (got - want)[:, kept:].square().mean(), want[:, kept:].square().mean()
    assert 0 < error < 0.05 * power, float(error / power)


@on_ranks(1)
def test_a_controlnet_runs_once_in_a_step() -> None:
    """And once in the rehearsal. A failure means that it is computed for each patch."""
    pipe, call = make_entry("flux-controlnet")
    calls: list[nn.Module] = []
    embedder = tiny.quiet(pipe).controlnet.controlnet_x_embedder
    embedder.register_forward_hook(lambda module, *_: calls.append(module))
    with divided(pipe, patches=PATCHES, warmup=1) as runner:
        got = draw(runner, call)
        counted = len(calls)
        without = draw(runner, call | {"controlnet_conditioning_scale": 0.0})
    change = float((got - without).abs().max())
    assert counted == STEPS + 1 and change > 0

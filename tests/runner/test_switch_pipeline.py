"""One divided model and several classes of pipelines: each as if it had been divided by itself, and the first again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline, FluxPipeline
from PIL import Image

from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import on_ranks
from tests.runner.cases import MAKE, call_of, different, divided, run, same

PICTURE = Image.radial_gradient("L").resize((24, 32)).convert("RGB")
MASK = Image.linear_gradient("L").resize((24, 32)).point(lambda value: 255 * (value > 128))
STEPS = 5


def call_with_picture(name: str = "flux", **more: Any) -> dict[str, Any]:
    return call_of(name, image=PICTURE, strength=0.8, num_inference_steps=STEPS, **more)


def convert(kind: type, pipe: Any) -> Any:
    """As diffusers does it."""
    return tiny.quiet(kind.from_pipe(pipe))  # type: ignore[attr-defined]


PLANS: list[dict[str, Any]] = [
    {"pipefusion": 2, "warmup": 1},
    {"pipefusion": 2, "warmup": STEPS},
    {"ulysses": 2},
    {"tensor": 2},
    {"data": 2},
    {"cfg": 2},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@on_ranks(2)
def test_other_classes_on_the_same_model(plan: dict[str, Any]) -> None:
    """A failure means that a server draws other pictures than a runner of the class, or spoils the first class."""
    kinds = [FluxInpaintPipeline, FluxImg2ImgPipeline]
    name = "flux true cfg" if "cfg" in plan else "flux"
    calls = {
        FluxImg2ImgPipeline: lambda: call_with_picture(name),
        FluxInpaintPipeline: lambda: call_with_picture(name, mask_image=MASK),
    }
    wanted = []
    for kind in kinds:
        with divided(convert(kind, MAKE["flux"]()), **plan) as runner:
            wanted.append(runner(**calls[kind]())[0])
    with divided(MAKE["flux"](), **plan) as runner:
        pipe = runner.pipe
        first = run(runner, name)
        for kind, picture in zip(kinds, wanted, strict=True):
            sibling = runner.switch_pipeline(kind)
            assert type(sibling) is kind and sibling is runner.pipe and sibling.transformer is pipe.transformer
            same(runner(**calls[kind]())[0], picture, f"{kind.__name__} under {plan}")
            different(picture, first)
            assert runner.switch_pipeline(FluxPipeline) is pipe
            same(run(runner, name), first, f"the first class again, under {plan}")
        assert runner.switch_pipeline(kinds[0]) is not sibling
        same(runner(**calls[kinds[0]]())[0], wanted[0], "a second time")


def test_modules_stay_as_they_are() -> None:
    """diffusers would convert them. A failure means that half of the memory, or the picture, is another."""
    pipe = MAKE["flux"]().to(torch.bfloat16)
    pipe.vae.to(torch.float32)
    runner = parallelize(pipe, Plan(), device="cpu", keep_weights=True)
    sibling = runner.switch_pipeline(FluxImg2ImgPipeline)
    assert sibling.transformer.dtype == torch.bfloat16 and sibling.vae.dtype == torch.float32
    assert sibling.components == {**pipe.components, **sibling.components}
    runner.restore()
    with pytest.raises(StateError, match="was restored"):
        runner.switch_pipeline(FluxPipeline)

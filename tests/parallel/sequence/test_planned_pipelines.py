"""Pipelines beyond text-to-image, models of users, and several users of one process or one runner.

Bitwise throughout: at the limit where nothing is stale against the plain pipeline, else against one rank.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FluxImg2ImgPipeline,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Img2ImgPipeline,
)
from PIL import Image
from torch import nn

from ditile.model.registry import FLUX, PIXART
from ditile.plan.errors import StateError
from tests import tiny
from tests.pool import Pool, share
from tests.runner.cases import MAKE, different, divided, run, same

STEPS = 4
EXACT = {"patches": 3, "warmup": STEPS}
STALE = {"patches": 3, "warmup": 1}
FROM_IMAGE = {"flux": FluxImg2ImgPipeline, "flux true cfg": FluxImg2ImgPipeline, "sd3": StableDiffusion3Img2ImgPipeline}


def picture() -> Image.Image:
    """A picture to begin with."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 24, 3), np.uint8))


def from_image(name: str, pipe: Any = None) -> Any:
    return tiny.quiet(FROM_IMAGE[name].from_pipe(pipe or MAKE[name]()))


def strengths() -> list[dict[str, Any]]:
    """0.3 of 4 steps is one, 0.8 of 10 are eight: the loop begins in the middle of the scheduler's steps."""
    sigmas = {"sigmas": [1.0, 0.8, 0.5, 0.3, 0.1], "num_inference_steps": 5}
    calls: list[dict[str, Any]] = [{"strength": 0.3}, {"strength": 0.8}, {"strength": 0.8, "num_inference_steps": 10}]
    return [{"image": picture()} | call for call in (*calls, sigmas | {"strength": 0.8})]


def begun_with_a_picture(name: str, ranks: int) -> list[Any]:
    pipe = from_image(name)
    calls = strengths()
    wanted = share(f"{name} from an image", lambda: [run(pipe, name, **call) for call in calls])
    with divided(pipe, pipefusion=ranks, patches=3, warmup=10) as runner:
        for call, want in zip(calls, wanted, strict=True):
            same(run(runner, name, **call), want, f"{name}, {call}")
    with divided(pipe, pipefusion=ranks, **STALE) as runner:
        return [run(runner, name, **call) for call in calls]


@pytest.mark.parametrize("name", FROM_IMAGE)
def test_image_to_image(pool: Pool, name: str) -> None:
    """A failure means that a loop which begins at step k warms up at the wrong steps, or reads keys of another age."""
    wanted = pool.run(begun_with_a_picture, 1, name, 1)[0]
    different(wanted[1], wanted[0], "strength")
    for ranks in (2, 3):
        for results in pool.run(begun_with_a_picture, ranks, name, ranks):
            same(results, wanted, f"{name}, stale keys, {ranks} ranks")


# Models of users


class OwnFlux(FluxTransformer2DModel):  # type: ignore[misc]
    """Adds a layer of its own around the stock forward."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(hidden_states, *args, **kwargs)
        return (out[0] * 0.9, *out[1:])


class OwnPixArt(PixArtTransformer2DModel):  # type: ignore[misc]
    """Has one block more than its config says, and a forward of another signature."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.transformer_blocks.append(copy.deepcopy(self.transformer_blocks[0]))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states=hidden_states, **kwargs)


class OwnSD3(SD3Transformer2DModel):  # type: ignore[misc]
    """Inherits its table: it is registered nowhere."""


OWN: dict[str, tuple[type[nn.Module], Any]] = {
    "flux": (OwnFlux, FLUX),
    "pixart sigma": (OwnPixArt, PIXART),
    "sd3.5 medium": (OwnSD3, None),
}


def backends() -> None:
    from diffusers.models import attention_dispatch as stock

    name, asked = "flux", []
    registry = stock._AttentionBackendRegistry
    active = registry.get_active_backend()[0]
    for backend, of_others in (("native", "_native_math"), ("_native_math", "native")):
        pipe = MAKE[name]()
        member = stock.AttentionBackendName(backend)
        attend = registry._backends[member]

        def noted(*args: Any, attend: Any = attend, member: Any = member, **kwargs: Any) -> Any:
            asked.append(member)
            return attend(*args, **kwargs)

        registry._backends[member] = noted
        try:
            asked.clear()
            pipe.transformer.set_attention_backend(backend)
            registry.set_active_backend(stock.AttentionBackendName(of_others))  # as another pipeline would
            wanted, calls = run(pipe, name), len(asked)
            asked.clear()
            with divided(pipe, pipefusion=2, **EXACT) as runner:
                same(run(runner, name), wanted, backend)
            assert 0 < len(asked) < calls and set(asked) == {member}, f"{backend}: {set(asked)}"
            asked.clear()
            run(pipe, name)
            assert len(asked) == calls, f"{backend} is not set any more"
            assert registry.get_active_backend()[0].value == of_others
        finally:
            registry._backends[member] = attend
            registry.set_active_backend(active)


# Several users


def second_thread(ranks: int) -> None:
    pipe = MAKE["flux"]()
    wanted = run(pipe, "flux")
    errors: list[BaseException] = []

    def call_too() -> None:
        try:
            run(runner, "flux")
        except StateError as error:
            errors.append(error)

    def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        thread = threading.Thread(target=call_too)
        thread.start()
        thread.join()
        return {}

    with divided(pipe, pipefusion=ranks, **EXACT) as runner:
        call = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": []}
        same(run(runner, "flux", **call), wanted, "the call that was under way")
        assert len(errors) == STEPS and all("one at a time" in str(error) for error in errors), errors
        same(run(runner, "flux"), wanted, "the call after it")


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_call_at_a_time(pool: Pool, ranks: int) -> None:
    """A failure means that two threads of a server spoil each other's pictures."""
    pool.run(second_thread, ranks, ranks)

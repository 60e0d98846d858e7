"""Pipelines beyond text-to-image, models of users, and several users of one process or one runner.

Bitwise throughout: at the limit where nothing is stale against the plain pipeline, else against one rank.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from diffusers import FluxImg2ImgPipeline, StableDiffusion3Img2ImgPipeline
from PIL import Image

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

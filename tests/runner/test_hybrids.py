"""Several axes at once. An exact axis added to a stale schedule changes nothing: the tables below, on every rank.

Each row is drawn as it stands, against its stale axes alone (all exact ones set to 1). What has no synchronous step is
also drawn with all steps warmed up, against the plain pipeline; the other rows have such steps among theirs, which
test_limits holds for the stale axes alone. In float64, so that what is left is rounding in the schedulers, which is
1e-7, and not what rounding grows into in a network without training (1e-6 to 2e-5 in float32; see test_tokens). Ranks
of one image agree on every bit. To add a hybrid, add a row: the world is the product of its degrees.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, StableDiffusion3Img2ImgPipeline
from PIL import Image
from torch import Tensor

from ditile.plan.plan import Plan
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, make_double, run
from tests.runner.loras import edits, folders_of

TOLERANCE = 1e-6
FROM_IMAGE = {"flux": FluxImg2ImgPipeline, "flux true cfg": FluxImg2ImgPipeline, "sd3": StableDiffusion3Img2ImgPipeline}
STALE_AXES = ("pipefusion", "distrifusion")
ALL = 99
"""More steps than any call here has."""


class Hybrid(NamedTuple):
    """A pipeline of `MAKE`, a plan, and words that say what else there is."""

    name: str
    plan: str
    also: str = ""


HOW: dict[str, dict[str, Any]] = {
    "": {},  # three steps, 8 rows of 6 tokens
    "large": {"height": 40, "width": 56, "max_sequence_length": 7},  # 10 rows of 14 tokens: nothing divides
    "two images": {"num_images_per_prompt": 2},
    "image": {"strength": 0.6, "num_inference_steps": 6},  # the loop begins at the fourth step of seven
    "callback": {"callback_on_step_end_tensor_inputs": ["latents"]},
    "lora": {},
    "decoded": {"output_type": "pt"},
}

HYBRIDS = [
    # a stage alone, its patches shared out: any number of ranks
    Hybrid("flux", "patches=3 ulysses=2", "large"),
    Hybrid("pixart sigma", "patches=2 ring=3 warmup=0", "large"),
    # stages with one other axis
    Hybrid("flux", "pipefusion=2 patches=7 ulysses=2 async_ulysses=true", "large"),
    Hybrid("flux", "pipefusion=2 patches=3 ring=2", "callback"),
    Hybrid("flux", "pipefusion=2 patches=3 gather=2", "callback"),
    Hybrid("flux embedded guidance", "pipefusion=2 patches=1 ulysses=2", "two images"),
    Hybrid("sd3.5 medium", "pipefusion=2 patches=3 ulysses=3 warmup=0", "large"),
    Hybrid("pixart sigma", "pipefusion=2 patches=4 ring=2 warmup=0", "lora"),
    Hybrid("pixart alpha", "pipefusion=2 patches=3 ring=2 stage_blocks=3,1"),
    # stages with both
    Hybrid("sd3.5 medium", "pipefusion=2 patches=3 ulysses=2 ring=2 async_ulysses=true", "large"),
    # shares of the weights too
    Hybrid("flux", "pipefusion=2 patches=3 tensor=2"),
    Hybrid("flux true cfg", "distrifusion=2 ulysses=2 tensor=2", "large"),
    Hybrid("pixart sigma", "distrifusion=2 tensor=2 split_scheme=sequence", "large"),
    Hybrid("sd3.5 medium", "pipefusion=2 patches=3 tensor=2 split_scheme=sequence", "large"),
    # rows decoded by every rank of the image
    Hybrid("sd3.5 medium", "distrifusion=2 tensor=2 vae=rows", "decoded"),
    Hybrid("pixart sigma", "pipefusion=2 patches=3 ring=2 tensor=2 vae=rows", "decoded"),
    # branches of guidance, and images
    Hybrid("flux true cfg", "cfg=2 pipefusion=2 patches=3 ring=2", "callback"),
    Hybrid("sd3", "cfg=2 distrifusion=2", "image"),
    Hybrid("pixart sigma", "data=2 gather=2", "two images"),
    Hybrid("flux", "data=2 pipefusion=2 patches=3", "two images"),
    Hybrid("sd3.5 medium", "data=2 cfg=2 tensor=2 vae=rows", "decoded"),  # one replica has no image
    # text encoders on the first rank, or shared out
    Hybrid("sd3.5 medium", "distrifusion=2 tensor=2 text=split"),
    # sixteen ranks
    Hybrid("sd3.5 medium", "data=2 cfg=2 pipefusion=2 patches=3 ulysses=2", "two images"),
    # patches of rows, shared out
    Hybrid("flux", "distrifusion=2 ulysses=2", "image"),
]


def alone(plan: Plan) -> Plan:
    """The stale axes of a plan, which say what the picture is."""
    stale = {axis: getattr(plan, axis) for axis in STALE_AXES}
    return Plan(patches=plan.patches, warmup=plan.warmup, stage_blocks=plan.stage_blocks, **stale)


def draw(name: str, also: str, plan: Plan | None, loras: dict[str, Path]) -> list[Tensor]:
    """On a rank: the latents in the end, and those that a callback saw."""
    pipe = MAKE[name]()
    call, seen = {"num_inference_steps": 3} | HOW[also], list[Tensor]()
    if also == "image":
        pipe = tiny.quiet(FROM_IMAGE[name].from_pipe(pipe))
        call["image"] = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 24, 3), np.uint8))
    if also == "lora":
        edits(name)["loaded"](pipe, loras[name])
    if also == "callback":
        call["callback_on_step_end"] = lambda pipe, step, t, tensors: seen.append(tensors["latents"].clone()) or {}
    make_double(pipe)
    with nullcontext(pipe) if plan is None else divided(pipe, **plan.to_dict()) as runner:
        return [run(runner, name, **call), *seen]


Draw = Callable[[Hybrid, Plan | None], list[list[Tensor]]]


@pytest.fixture(scope="module")
def draw_once(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Draw:
    """What every rank gets of a row under a plan (None: the plain pipeline), drawn when it is first asked for."""
    loras = folders_of({row.name for row in HYBRIDS if row.also == "lora"}, tmp_path_factory)

    @functools.cache
    def draw_all(name: str, also: str, plan: Plan | None) -> list[list[Tensor]]:
        return pool.run(draw, plan.world if plan else 1, name, also, plan, loras, timeout=600.0)

    return lambda row, plan: draw_all(row.name, row.also, plan)


def close(of_ranks: list[list[Tensor]], wanted: list[Tensor], what: Any) -> None:
    """Raises unless every rank has the same, and that is `wanted` up to rounding."""
    for rank, actual in enumerate(of_ranks):
        assert len(actual) == len(wanted), f"{what}, rank {rank}"
        for one, first, want in zip(actual, of_ranks[0], wanted, strict=True):
            assert torch.equal(one, first), f"{what}: ranks 0 and {rank} have other pictures"
            assert distance(one, want) < TOLERANCE, f"{what}, rank {rank}: {distance(one, want):.2g}"


def distance(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape and torch.isfinite(wanted).all()
    return float((got - wanted).abs().max() / wanted.abs().max())


def names(row: Hybrid) -> str:
    return f"{row.name}-{row.plan}-{row.also}".replace(" ", "_")


@pytest.mark.nightly
@pytest.mark.parametrize("row", HYBRIDS, ids=names)
def test_exact_axes_change_nothing(draw_once: Draw, row: Hybrid) -> None:
    """A failure with one plan means that two strategies tread on each other: keys of a patch kept elsewhere than those
    of the whole step, text shared out with the wrong ranks, an exchange that waits for another's. With all plans of an
    axis: the axis. The stale picture is far from the plain one, so that keys of the wrong step are seen.
    """
    plan = Plan.parse(row.plan)
    stale = draw_once(row, alone(plan))[0]
    close(draw_once(row, plan), stale, row)
    if plan.num_patches * plan.distrifusion > 1:
        assert distance(stale[0], draw_once(row, None)[0][0]) > 100 * TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("row", [row for row in HYBRIDS if Plan.parse(row.plan).warmup == 0], ids=names)
def test_warmed_up_to_the_end_is_the_plain_pipeline(draw_once: Draw, row: Hybrid) -> None:
    """A failure means that the exact parts of a hybrid are not."""
    warm = dataclasses.replace(Plan.parse(row.plan), warmup=ALL)
    close(draw_once(row, warm), draw_once(row, None)[0], row)

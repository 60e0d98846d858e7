"""Pictures of a plan whose ranks decode rows: equal to those of the plain pipeline, from text and from a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from diffusers import FluxImg2ImgPipeline
from PIL import Image

from ditile.parallel.vae.halo import Halo, RowWindow, Strip
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import divided

PLANS: list[dict[str, Any]] = [
    {"pipefusion": 2, "warmup": 99, "vae": "rows"},
    {"ulysses": 2, "vae": "rows", "rank_weights": (99.0, 1.0)},  # the second rank has one row
    {"tensor": 2, "vae": "rows"},
    {"ulysses": 2, "vae": "rows", "vae_block_size": 3},
]


def pictures(family: str, output: str) -> list[Any]:
    """The plain pipeline's, and those of each plan on this rank."""
    pipe = tiny.FAMILIES[family]()
    call = {"height": 40, "width": 24, "output_type": "np", "num_images_per_prompt": 2}
    results = [pipe(**tiny.arguments(family, **call)).images]
    for plan in PLANS:
        with divided(pipe, **plan) as runner:
            result = runner(**tiny.arguments(family, **call), output=output)
            results.append(None if result is None else result.images)
    return results


@pytest.mark.parametrize("family", ["flux", "pixart", "sd3"])
def test_rows_of_the_picture(pool: Pool, family: str) -> None:
    """Odd latent rows, two images. A failure means that the decode of a plan is not that of the pipeline."""
    for plain, *results in pool.run(pictures, 2, family, "all"):
        for plan, got in zip(PLANS, results, strict=True):
            assert np.abs(got - plain).max() < 1e-5, plan


def test_on_the_first_rank(pool: Pool) -> None:
    """Every rank decodes its rows, and rank 0 alone has the picture."""
    first, second = pool.run(pictures, 2, "pixart", "first")
    assert all(np.abs(got - first[0]).max() < 1e-5 for got in first[1:])
    assert second[1:] == [None] * len(PLANS)


def block_sizes(plan: dict[str, Any]) -> set[int]:
    """Of the convolutions of one decode."""
    pipe, results, pass_through = tiny.flux(), set(), Strip.begin_operation

    def noted(strip: Strip, window: RowWindow) -> Halo:
        results.add(strip.block_size)
        return pass_through(strip, window)

    with pytest.MonkeyPatch.context() as patch, divided(pipe, **plan) as runner:
        patch.setattr(Strip, "begin_operation", noted)
        runner(**tiny.arguments("flux", height=40, width=24, output_type="np"))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_blocks_of_a_plan_reach_the_convolutions(pool: Pool, ranks: int) -> None:
    """A failure means that a plan says so and nothing is done in blocks; one rank alone has them, too."""
    plan = {"ulysses": ranks, "vae": "rows", "vae_block_size": 3}
    assert pool.run(block_sizes, ranks, plan) == [{3}] * ranks


def from_picture() -> list[Any]:
    pipe = FluxImg2ImgPipeline(**tiny.flux().components)
    pipe.set_progress_bar_config(disable=True)
    image = Image.fromarray((np.arange(40 * 24 * 3).reshape(40, 24, 3) % 251).astype(np.uint8))
    call = {"height": 40, "width": 24, "image": image, "strength": 0.6, "output_type": "np"}
    results = [pipe(**tiny.arguments("flux", **call)).images]
    with divided(pipe, pipefusion=2, warmup=99, vae="rows") as runner:
        results.append(runner(**tiny.arguments("flux", **call)).images)
    return results


def test_image_to_image(pool: Pool) -> None:
    """The encoder is divided as well."""
    for plain, got in pool.run(from_picture, 2):
        assert np.abs(got - plain).max() < 1e-5

"""Shares of unlike size, as devices of unlike speed get them, make the same image as equal ones.

In float64, so that what is left is rounding. Bytes and kept keys of such plans are in `plan/test_cost`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, make_double, run
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

CALL = {"height": 40, "width": 56, "max_sequence_length": 7, "num_inference_steps": 3}
"""10 rows of 14 tokens and text of 7, over four heads."""
EXACT = {
    "ring=2": "2,1",
    "ulysses=2": "3,1",
    "ulysses=2 async_ulysses=true": "1,2.5",
    "distrifusion=2 warmup=9": "2,1",
    "ring=3": "1,2,4",
    "ulysses=3": "2,1,1",
    "distrifusion=3 warmup=9": "1,1,3",
    "ring=2 ulysses=2": "3,2,2,1",
    "distrifusion=2 ulysses=2 warmup=9": "4,1,1,4",
}
"""Plan -> the weights of its ranks."""
OF_TENSOR = [
    *("flux", "qwen-image", "pixart-sigma", "stable-diffusion-3", "flux-2", "chroma", "ernie-image"),
    *("glm-image", "aura-flow", "cogview-4", "cogvideox", "prx", "bria", "stable-audio", "dit", "flux-3"),
]
"""Entries whose heads and features have four equal parts."""
STALE = {"pipefusion=2 ring=2 patches=3": "3,1", "pipefusion=2 ulysses=2 patches=3": "1,2"}
"""Patches are the same, however ranks split each of them."""
NAMES = ("flux", "pixart sigma", "sd3.5 medium")
"""Each plan, and text beside the tokens and a second attention where they are split."""


def make_images(name: str, plans: list[str]) -> list[tuple[Tensor, int]]:
    """On a rank: the latents under each plan, and the image tokens that the rank computes."""
    results = []
    pipe = MAKE[name]()
    make_double(pipe)
    for plan in plans:
        runner = parallelize(pipe, Plan.parse(plan), keep_weights=True)
        images: Any = run(runner, name, **CALL)
        job = runner.job()
        assert job is not None
        shard = job.shard_tokens(None)[job.plan_rank(runner.mesh.rank).token_place]
        results.append((images, shard.image_tokens))
        runner.restore()
    return results


@pytest.mark.parametrize(("name", "plan"), list(itertools.product(NAMES, [*EXACT, *STALE])))
def test_shares_change_no_image(pool: Pool, name: str, plan: str) -> None:
    """A failure means that a rank with more tokens or heads computes others than its neighbours expect."""
    weights = (EXACT | STALE)[plan]
    results = pool.run(make_images, Plan.parse(plan).world, name, [plan, f"{plan} token_weights={weights}"])
    for (equal, _), (unlike, _) in results:
        distance = float((unlike - equal).abs().max() / equal.abs().max())
        assert torch.isfinite(equal).all() and distance < 1e-6, f"{distance:.2g}"
    numbers = [float(number) for number in weights.split(",")]
    # Ranks that split the tokens follow each other in a stage.
    of_stage = [tokens for _, (_, tokens) in results[: len(numbers)]]
    for tokens, number in zip(of_stage, numbers, strict=True):
        assert tokens == pytest.approx(sum(of_stage) * number / sum(numbers), abs=14), "not what the weights say"
    assert len(set(of_stage)) > 1


def make_zoo_image(name: str, plans: list[Plan]) -> tuple[list[Tensor], int]:
    """On a rank: what an entry draws alone and under each plan, and the weights under the last one."""
    pipe = ZOO[name].make()
    images = [list_tensors(pipe(**ZOO[name].call()))[0]]
    for plan in plans:
        with divided(pipe, **plan.to_dict()) as runner:
            images.append(list_tensors(runner(**ZOO[name].call()))[0])
            weights = sum(parameter.numel() for parameter in pipe.transformer.parameters())
    return images, weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_TENSOR)
def test_heads_and_features_of_unlike_shares_are_those_of_the_whole(pool: Pool, name: str) -> None:
    """A failure means that a rank sums features of another's heads, or has half of them whatever the weights say."""
    plans = [Plan(tensor=2, tensor_weights=(3, 1))]
    (images, large), (others, small) = pool.run(make_zoo_image, 2, name, plans)
    assert torch.equal(images[1], others[1]) and large > 1.3 * small
    for image in images[1:]:
        assert float((image - images[0]).abs().max() / images[0].abs().max()) < 1e-5


def test_shares_of_tensor_within_other_axes(pool: Pool) -> None:
    """Stages whose ranks have three and one of four heads, which Ulysses splits again."""
    plans = [Plan.parse("pipefusion=2 patches=2 warmup=9 ulysses=2 tensor=2 tensor_weights=3,1 vae=rows text=split")]
    for images, _ in pool.run(make_zoo_image, 8, "flux", plans):
        assert float((images[1] - images[0]).abs().max() / images[0].abs().max()) < 1e-5


@pytest.mark.parametrize("ranks", [2, 3])
def test_patches_of_distrifusion_follow_the_weights(pool: Pool, ranks: int) -> None:
    """Its patches are the shares, so that stale keys are of other tokens. A failure means that weights do nothing."""
    weights = ",".join(map(str, range(1, ranks + 1)))
    plan = f"distrifusion={ranks} warmup=1"
    for (equal, _), (unlike, _) in pool.run(make_images, ranks, "flux", [plan, f"{plan} token_weights={weights}"]):
        assert not torch.equal(equal, unlike) and torch.isfinite(unlike).all()

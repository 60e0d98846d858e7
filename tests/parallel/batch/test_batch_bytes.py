"""Bytes and messages of cfg and data: counted, and equal to a formula worked out here by hand.

b images, S steps, W of them synchronous, M patches, P numbers in an image's prediction, fp32, n halves or replicas. A
half sends S b P to each other one if branches share a call, and (S - 1) b P if they are calls: the first step is whole
on all. It takes W + (S - W) M gathers, or one step's less. A replica sends its own latents once, after the last step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests import tiny
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run

SIZE = {"height": 40, "width": 56}
TOKENS, LATENTS, STEPS, FLOAT, IMAGES = 10 * 14, 10 * 14 * 16, 4, 4, 3


class Job(NamedTuple):
    """A family's prediction of one image, text in its sequence, and whether branches are calls of their own."""

    prediction: int
    text: int
    by_calls: bool


JOBS = {
    "flux true cfg": Job(LATENTS, 12, by_calls=True),
    "pixart sigma": Job(2 * LATENTS, 0, by_calls=False),  # with a variance, which travels too
    "sd3.5 medium": Job(LATENTS, 16 + 12, by_calls=False),
}


def counted(name: str, plans: list[dict[str, Any]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    pipe, results = MAKE[name](), []
    for plan in plans:
        with divided(pipe, **plan) as runner:
            run(runner, name, num_images_per_prompt=IMAGES, **SIZE)
            assert runner.report is not None
            calls = {kind: count for kind, count in runner.mesh.traffic.calls.items() if kind != "control"}
            results.append(({kind: size for kind, size in runner.report.sent.items() if kind != "control"}, calls))
    return results


@pytest.mark.parametrize("name", JOBS)
def test_halves_send_their_own_predictions(pool: Pool, name: str) -> None:
    """A failure means that text, whole images or stages without a prediction take part in the exchange."""
    job, patches, warmup = JOBS[name], 3, 1
    steps = STEPS - job.by_calls
    size, latents = steps * IMAGES * job.prediction * FLOAT, IMAGES * LATENTS * FLOAT
    for results in pool.run(counted, 2, name, [{"cfg": 2}]):
        assert results == [({"cfg": size}, {"cfg": steps})]
    rows = STEPS + job.by_calls  # of each image: one branch, but for the first step of two calls
    activations = rows * IMAGES * (TOKENS + job.text) * tiny.WIDTH * FLOAT
    plan = {"cfg": 2, "pipefusion": 2, "patches": patches, "warmup": warmup}
    for rank, results in enumerate(pool.run(counted, 4, name, [plan])):
        if rank % 2 == 0:
            assert results == [({"activations": activations}, {"activations": rows * patches})]
            continue
        messages = {"cfg": (warmup - job.by_calls) + (STEPS - warmup) * patches, "result": 1}
        messages["latents"] = (STEPS - 1) * patches
        assert results == [({"cfg": size, "latents": (STEPS - 1) * latents, "result": latents}, messages)]


@pytest.mark.parametrize("name", JOBS)
def test_replicas_send_their_own_latents(pool: Pool, name: str) -> None:
    """A failure means that replicas exchange more than what they made, or stages send rows of other replicas."""
    for ranks in (2, 3):
        for rank, results in enumerate(pool.run(counted, ranks, name, [{"data": ranks}])):
            own = (IMAGES - rank + ranks - 1) // ranks
            assert results == [({"data": (ranks - 1) * own * LATENTS * FLOAT}, {"data": 1})]
    plan = {"data": 2, "pipefusion": 2, "patches": 3}
    for rank, results in enumerate(pool.run(counted, 4, name, [plan])):
        own = 2 - rank // 2
        if rank % 2 == 0:
            activations = 2 * STEPS * own * (TOKENS + JOBS[name].text) * tiny.WIDTH * FLOAT
            assert [sent for sent, _ in results] == [{"activations": activations}]
            continue
        latents = own * LATENTS * FLOAT
        sent = {"latents": (STEPS - 1) * latents, "data": latents, "result": IMAGES * LATENTS * FLOAT}
        assert [sent for sent, _ in results] == [sent]

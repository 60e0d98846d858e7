"""The formulas of `ditile.plan.cost` are what is counted, by kind and on every rank, and what the table says.

Uneven on purpose: 10 token rows over 3 patches, 4 heads over 3 ranks, text of 7. Where shares are even, bytes and
messages are those of closed formulas too: the paper's table (arXiv 2405.14430), and sums worked out by hand.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ditile.plan import cost
from ditile.plan.plan import Plan
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run

CALL = {"height": 40, "width": 56, "max_sequence_length": 7, "num_images_per_prompt": 3, "num_inference_steps": 3}
STEPS = 3
TOKENS = 10 * 14
PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"pipefusion": 2}, {"tensor": 2}, {"tensor": 2, "split_scheme": "sequence"},
        {"data": 2, "patches": 3}, {"cfg": 2}, {"cfg": 2, "patches": 3},
        {"pipefusion": 2, "warmup_mode": "sequence"},
        {"pipefusion": 2, "warmup_mode": "pipelined"}, {"distrifusion": 2, "warmup": 0},
        {"ulysses": 2, "async_ulysses": True}, {"ring": 2, "patches": 3, "warmup": 2},
        {"ring": 2, "token_weights": (2, 1)}, {"gather": 2}, {"gather": 2, "patches": 3},
        {"gather": 2, "token_weights": (2, 1)}, {"ulysses": 2, "token_weights": (1, 3)},
        {"distrifusion": 2, "warmup": 1, "token_weights": (3, 1)}, {"pipefusion": 2, "stage_weights": (3, 1)},
        {"tensor": 2, "tensor_weights": (3, 1)},
    ],
    3: [
        {"pipefusion": 3, "patches": 4, "warmup": 2}, {"ulysses": 3, "patches": 3},
        {"pipefusion": 3, "patches": 4, "warmup": 2, "warmup_mode": "sequence"},
        {"pipefusion": 3, "warmup": 4, "warmup_mode": "sequence"},
        {"ring": 3}, {"gather": 3}, {"distrifusion": 3, "warmup": 2},
        {"ring": 3, "patches": 2, "token_weights": (1, 2, 4)}, {"ulysses": 3, "token_weights": (2, 1, 1)},
    ],
    4: [
        {"pipefusion": 2, "tensor": 2, "patches": 3}, {"ulysses": 2, "tensor": 2},
        {"pipefusion": 2, "tensor": 2, "patches": 3, "split_scheme": "sequence"},
        {"data": 4}, {"cfg": 2, "pipefusion": 2, "patches": 3}, {"data": 2, "ulysses": 2}, {"cfg": 2, "ring": 2},
        {"cfg": 2, "pipefusion": 2, "patches": 3, "warmup_mode": "sequence"},
        {"data": 2, "pipefusion": 2, "warmup": 2, "warmup_mode": "sequence"},
        {"ulysses": 2, "ring": 2}, {"ulysses": 2, "gather": 2}, {"pipefusion": 2, "patches": 3, "gather": 2},
        {"cfg": 2, "gather": 2}, {"distrifusion": 2, "ulysses": 2}, {"pipefusion": 2, "patches": 1, "ring": 2},
        {"pipefusion": 2, "patches": 3, "ulysses": 2}, {"pipefusion": 2, "patches": 3, "ring": 2, "warmup": 2},
        {"pipefusion": 2, "patches": 3, "ulysses": 2, "stage_weights": (2, 1), "token_weights": (3, 1)},
        {"distrifusion": 2, "ulysses": 2, "token_weights": (4, 2, 2, 1)},
        {"pipefusion": 2, "patches": 3, "tensor": 2, "tensor_weights": (1, 3)},
        {"ulysses": 2, "tensor": 2, "token_weights": (2, 1), "tensor_weights": (3, 1)},
    ],
}  # fmt: skip
"""By number of ranks."""


def counted(name: str, plans: list[dict[str, Any]]) -> list[tuple[dict[str, int], dict[str, int], int, int]]:
    """On a rank: bytes sent by kind, counted and by formula; bytes of stored keys, counted and by formula."""
    pipe, results = MAKE[name](), []
    for plan in plans:
        with divided(pipe, **plan) as runner:
            run(runner, name, **CALL)
            assert runner.report is not None
            job, rank = runner.job(), runner.mesh.rank
            assert job is not None
            sent = {kind: size for kind, size in runner.report.sent.items() if size and kind != "control"}
            formulas = cost.count_traffic_bytes(job, rank), job.plan_rank(rank).count_kept_key_bytes()
            results.append((sent, formulas[0], runner.report.key_bytes, formulas[1]))
    return results


FAMILIES = ("flux true cfg", "pixart sigma", "sd3.5 medium")


@pytest.mark.parametrize(("name", "ranks"), list(itertools.product(FAMILIES, PLANS)))
def test_counted_is_the_formula(pool: Pool, name: str, ranks: int) -> None:
    """A failure means that a strategy sends or keeps more than it should, or that tables promise something else."""
    for rank, of_plans in enumerate(pool.run(counted, ranks, name, PLANS[ranks])):
        for plan, (sent, formula, stored, stored_formula) in zip(PLANS[ranks], of_plans, strict=True):
            assert sent == formula, f"{name}, rank {rank}, {plan}"
            assert stored == stored_formula, f"{name}, rank {rank}, {plan}"


IMAGES, LAYERS = 2, 4
ROWS = 2 * IMAGES
"""Of a transformer call of PixArt: both branches of guidance of each image."""
LATENTS = IMAGES * TOKENS * 16
SYNCHRONOUS = STEPS * ROWS * LAYERS
HIDDEN = TOKENS * tiny.WIDTH
CLOSED: dict[str, tuple[str, int, int]] = {
    "ulysses=2": ("ulysses", SYNCHRONOUS * HIDDEN, STEPS * LAYERS * 2),
    "ulysses=2 async_ulysses=true": ("ulysses", SYNCHRONOUS * HIDDEN, STEPS * LAYERS * 4),
    "ulysses=4": ("ulysses", SYNCHRONOUS * HIDDEN * 3 // 4, STEPS * LAYERS * 2),
    "ring=2": ("ring", SYNCHRONOUS * HIDDEN, STEPS * LAYERS),
    "ring=4": ("ring", SYNCHRONOUS * HIDDEN * 3 // 2, STEPS * LAYERS * 3),
    "gather=2": ("gather", SYNCHRONOUS * HIDDEN, STEPS * LAYERS),
    "gather=4": ("gather", SYNCHRONOUS * HIDDEN * 3 // 2, STEPS * LAYERS),
    "distrifusion=2 warmup=4": ("distrifusion", SYNCHRONOUS * HIDDEN, STEPS * LAYERS),
    # Three sums in each block: an all-reduce sends as much as a reduce-scatter and a gather. One gather more brings the
    # tokens together after the last block.
    "tensor=2": ("tensor", SYNCHRONOUS * HIDDEN * 3, STEPS * LAYERS * 3),
    "tensor=2 split_scheme=sequence": (
        "tensor",
        SYNCHRONOUS * HIDDEN * 3 + STEPS * ROWS * HIDDEN // 2,
        STEPS * (LAYERS * 6 + 1),
    ),
    "pipefusion=2 patches=3": ("activations", STEPS * ROWS * HIDDEN, STEPS * 3),
    # A prediction has a variance, which travels too.
    "cfg=2": ("cfg", STEPS * LATENTS * 2, STEPS),
    # The latents of its own image, after the last step.
    "data=2": ("data", LATENTS // 2, 1),
}
"""Plan -> a kind of traffic, its numbers in a call on the first rank, and its messages."""


def count_kind(plan: str, kind: str) -> tuple[int, int]:
    """On a rank: bytes and messages of a kind."""
    with divided(MAKE["pixart sigma"](), **Plan.parse(plan).to_dict()) as runner:
        run(runner, "pixart sigma", **CALL | {"num_images_per_prompt": IMAGES})
        traffic = runner.mesh.traffic
        return traffic.bytes.get(kind, 0), traffic.calls.get(kind, 0)


@pytest.mark.parametrize("plan", CLOSED)
def test_even_shares_send_what_the_closed_formula_says(pool: Pool, plan: str) -> None:
    """A failure means that padding, dummies or keys travel twice, or that something is agreed by messages."""
    kind, numbers, messages = CLOSED[plan]
    sent = pool.run(count_kind, Plan.parse(plan).world, plan, kind)[0]
    assert sent == (numbers * torch.float32.itemsize, messages)

"""Bytes and messages that each rank sends in a generation: counted, and equal to a formula worked out here by hand.

p image tokens, t text tokens that travel with patch 0, S steps, c transformer calls per step, b rows of a call, C
channels, fp32. Stage k < N - 1 sends S c b (p + t) C in S c M messages, whatever the warmup. The last stage returns
(S - 1) times the latents in (S - 1) M messages, and gives them to all once at the end.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

from tests import tiny
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run

SIZE = {"height": 40, "width": 56}
TOKENS, LATENTS, STEPS, FLOAT = 10 * 14, 10 * 14 * 16, 4, 4  # 4 x 4 pixels are a token, and 16 numbers of latents


class Job(NamedTuple):
    """What a family makes of a call with one image."""

    text: int
    rows: int
    calls: int


JOBS = {
    "flux": Job(text=12, rows=1, calls=1),
    "flux true cfg": Job(text=12, rows=1, calls=2),
    "pixart sigma": Job(text=0, rows=2, calls=1),  # cross attention: the text does not travel
    "sd3.5 medium": Job(text=16 + 12, rows=2, calls=1),  # CLIP's 16 and T5's 12
}
PLANS = [{"patches": m, "warmup": w} for m, w in ((1, 0), (3, 0), (3, 1), (3, STEPS), (7, 1))]


def expected(job: Job, rank: int, ranks: int, patches: int, images: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes and messages by kind, headers (kind "control") apart."""
    if rank < ranks - 1:
        size = STEPS * job.calls * job.rows * images * (TOKENS + job.text) * tiny.WIDTH * FLOAT
        return {"activations": size}, {"activations": STEPS * job.calls * patches}
    size = LATENTS * images * FLOAT
    return {"latents": (STEPS - 1) * size, "result": size}, {"latents": (STEPS - 1) * patches, "result": 1}


def counted(name: str, ranks: int, images: int) -> list[tuple[dict[str, int], dict[str, int], list[Any]]]:
    pipe, actual = MAKE[name](), []
    for plan in PLANS:
        with divided(pipe, pipefusion=ranks, **plan) as runner:
            run(runner, name, num_images_per_prompt=images, **SIZE)
            assert runner.report is not None
            actual.append((runner.report.sent, dict(runner.mesh.traffic.calls), runner.reports()))
    return actual


@pytest.mark.parametrize(
    ("name", "images", "ranks"),
    [*((name, 1, 2) for name in JOBS), ("sd3.5 medium", 2, 2), ("flux true cfg", 1, 4), ("sd3.5 medium", 1, 4)],
)
def test_counted_is_the_formula(pool: Pool, name: str, images: int, ranks: int) -> None:
    """A failure means that text, padding or a whole image travels again, or shapes are agreed by messages."""
    for rank, of_plans in enumerate(pool.run(counted, ranks, name, ranks, images)):
        for plan, (sent, messages, reports) in zip(PLANS, of_plans, strict=True):
            where = f"{name}, rank {rank} of {ranks}, {plan}"
            wanted, wanted_messages = expected(JOBS[name], rank, ranks, plan["patches"], images)
            assert {kind: n for kind, n in sent.items() if kind != "control"} == wanted, where
            assert {kind: n for kind, n in messages.items() if kind != "control"} == wanted_messages, where
            assert reports[rank]["sent"] == sent and len(reports) == ranks, where


def headers(ranks: int, steps: int) -> int:
    with divided(MAKE["flux"](), pipefusion=ranks, patches=3) as runner:
        run(runner, "flux", num_inference_steps=steps)
        assert runner.report is not None
        return runner.report.sent["control"]


def test_headers_are_eight_bytes_a_step(pool: Pool) -> None:
    """A failure means that more than the vote on stopping is agreed in every step."""
    short, long = (pool.run(headers, 3, 3, steps) for steps in (2, 7))
    assert [b - a for a, b in zip(short, long, strict=True)] == [5 * 8] * 3
    states = torch.Generator().get_state().numel() + torch.get_rng_state().numel()
    # Of two steps, and whether the latents are numbers, at the end; the first rank's states before, the last's after.
    assert [count - 3 * 8 for count in short] == [states, 0, states]


def table(ranks: int) -> tuple[str, list[dict[str, int]]]:
    with divided(MAKE["flux true cfg"](), pipefusion=ranks, patches=3) as runner:
        run(runner, "flux true cfg", **SIZE)
        return str(runner), [report["sent"] for report in runner.reports()]


def test_the_table_says_what_is_sent(pool: Pool) -> None:
    """A failure means that the runner's table promises other traffic than the run has."""
    text, sent = pool.run(table, 3, 3)[0]
    # A rank has several lines, of which the first begins with its number.
    rows = [row for row in re.split(r"\n(?= \d+ )", text)[1:] if " MB" in row or " KB" in row]
    for row, of_rank in zip(rows, sent, strict=True):
        size = of_rank.get("activations", 0) / STEPS + of_rank.get("latents", 0) / (STEPS - 1)
        assert f"{size / 1000:.1f} KB" in row, (row, size)


def alone(name: str) -> dict[str, int]:
    with divided(MAKE[name](), patches=3) as runner:
        run(runner, name, **SIZE)
        assert runner.report is not None
        return runner.report.sent


@pytest.mark.parametrize("name", JOBS)
def test_one_rank_sends_nothing(pool: Pool, name: str) -> None:
    """A failure means that a world of one talks to itself."""
    assert pool.run(alone, 1, name) == [{}]

"""What ranks send besides tokens, and that a rank alone sends nothing; `plan/test_cost` counts what is sent."""

from __future__ import annotations

import pytest
import torch

from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run


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


def alone(name: str) -> dict[str, int]:
    with divided(MAKE[name](), patches=3) as runner:
        run(runner, name)
        assert runner.report is not None
        return runner.report.sent


@pytest.mark.parametrize("name", ["flux true cfg", "pixart sigma"])
def test_one_rank_sends_nothing(pool: Pool, name: str) -> None:
    """A failure means that a world of one talks to itself."""
    assert pool.run(alone, 1, name) == [{}]

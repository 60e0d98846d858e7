"""The table of docs/traffic.md: what `bench.traffic` counts on each rank is what the formula beside it says."""

from __future__ import annotations

import pytest

from benchmarks.traffic import METHODS, TrafficCount, TrafficJob, count_all, make_traffic_table
from tests.pool import Pool

JOB = TrafficJob(blocks=4, heads=4, head_dim=8, size=128)  # 8 rows of 8 tokens: all shares are even, up to four ranks


@pytest.mark.parametrize("n", [2, 4])
def test_counted_is_the_formula(pool: Pool, n: int) -> None:
    """The last stage sends latents instead of activations. A failure means that the docs promise too little."""
    methods = [method for method in METHODS if n >= method.least]
    counted = pool.run(count_all, n, JOB, n, timeout=300.0)
    for rank, of_methods in enumerate(counted):
        for method, sent in zip(methods, of_methods, strict=True):
            plan = method.plan(n)
            last = plan.pipefusion > 1 and rank >= n - n // plan.pipefusion
            gone = method.factors(n)[0] * JOB.num_image_tokens * JOB.channels * 8 if last else 0
            assert sent.bytes == method.bytes_by_formula(JOB, n) - gone, f"{method.name}, rank {rank}"
    lines = make_traffic_table(JOB, {n: counted})
    assert len(lines) == 2 + len(methods)
    assert all(line.split(" | ")[4] == line.split(" | ")[5] for line in lines[2:])


def test_the_table_names_the_rank_that_sends_most() -> None:
    """A failure means that the table hides a rank that sends more."""
    sent = [[TrafficCount(1000 * rank, 2, 500 - rank) for _ in METHODS] for rank in range(4)]
    line = make_traffic_table(JOB, {4: sent})[2]
    assert line.endswith("| 3.0 | 2 | 0.5 |")

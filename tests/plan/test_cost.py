"""The formulas of `ditile.plan.cost` are what is counted, by kind and on every rank, and what the table says.

Uneven on purpose: 10 token rows over 3 patches, 4 heads over 3 ranks, text of 7.
"""

from __future__ import annotations

from typing import Any

import pytest

from ditile.plan import cost
from ditile.plan.numbers import format_bytes
from ditile.plan.plan import Plan
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run

CALL = {"height": 40, "width": 56, "max_sequence_length": 7, "num_images_per_prompt": 3}
STEPS = 4
PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"pipefusion": 2}, {"tensor": 2}, {"tensor": 2, "split_scheme": "sequence"},
        {"data": 2, "patches": 3}, {"cfg": 2}, {"cfg": 2, "patches": 3},
        {"pipefusion": 2, "warmup_mode": "sequence"}, {"pipefusion": 2, "warmup_mode": "separate", "warmup": 2},
        {"pipefusion": 2, "warmup_mode": "pipelined"},
    ],
    3: [
        {"pipefusion": 3, "patches": 4, "warmup": 2}, {"ulysses": 3, "patches": 3},
        {"pipefusion": 3, "patches": 4, "warmup": 2, "warmup_mode": "sequence"},
        {"pipefusion": 3, "warmup": 4, "warmup_mode": "sequence"},
        {"pipefusion": 3, "warmup": 2, "warmup_mode": "separate", "warmup_ranks": 2},
    ],
    4: [
        {"pipefusion": 2, "tensor": 2, "patches": 3}, {"ulysses": 2, "tensor": 2},
        {"pipefusion": 2, "tensor": 2, "patches": 3, "split_scheme": "sequence"},
        {"data": 4}, {"cfg": 2, "pipefusion": 2, "patches": 3}, {"data": 2, "ulysses": 2}, {"cfg": 2, "ring": 2},
        {"cfg": 2, "pipefusion": 2, "patches": 3, "warmup_mode": "sequence"},
        {"data": 2, "pipefusion": 2, "warmup": 2, "warmup_mode": "sequence"},
    ],
}  # fmt: skip
"""By number of ranks. Plans of tokens alone are those of test_token_bytes."""


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
            formulas = cost.count_traffic_bytes(job, rank), cost.count_key_store_bytes(job, rank)
            results.append((sent, formulas[0], runner.report.key_bytes, formulas[1]))
    return results


@pytest.mark.parametrize("name", ["flux true cfg", "pixart sigma", "sd3.5 medium"])
@pytest.mark.parametrize("ranks", PLANS)
def test_counted_is_the_formula(pool: Pool, name: str, ranks: int) -> None:
    """A failure means that a strategy sends or keeps more than it should, or that tables promise something else."""
    for rank, of_plans in enumerate(pool.run(counted, ranks, name, PLANS[ranks])):
        for plan, (sent, formula, stored, stored_formula) in zip(PLANS[ranks], of_plans, strict=True):
            assert sent == formula, f"{name}, rank {rank}, {plan}"
            assert stored == stored_formula, f"{name}, rank {rank}, {plan}"


def shown(name: str, plan: dict[str, Any]) -> tuple[str, list[dict[str, int]]]:
    with divided(MAKE[name](), **plan) as runner:
        run(runner, name, **CALL)
        of_ranks = range(Plan(**plan).world)
        job = runner.job()
        assert job is not None
        return str(runner), [cost.count_traffic_in_step(job, rank, STEPS - 2) for rank in of_ranks]


def test_the_table_has_a_row_for_every_rank_and_kind(pool: Pool) -> None:
    """A failure means that `print(runner)` leaves out a rank, its place, or a kind of traffic."""
    plan = {"pipefusion": 2, "ulysses": 2, "patches": 3}
    for text, sent in pool.run(shown, 4, "flux", plan):
        for word in ("place", "stage 0", "stage 1", "ulysses 0", "ulysses 1", "cpu", "speed-up over one rank: at most"):
            assert word in text, word
        assert max(map(len, text.splitlines()[4:-2])) <= 88, "it fits a narrow terminal"
        for of_rank in sent:
            assert set(of_rank) == {"ulysses", "activations"} or set(of_rank) == {"ulysses", "prediction", "latents"}
            for kind, size in of_rank.items():
                assert kind in text and format_bytes(size) in text

"""The pool that other tests stand on: every rank answers, every failure is shown, the next case is clean."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import CaseError, Pool


def summed(number: float) -> tuple[int, float, int, str]:
    total = torch.tensor([number])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads(), os.environ["WORLD_SIZE"]


def fail(how: str) -> None:
    if dist.get_rank() != 0:
        if how == "die":
            os._exit(3)
        raise ValueError(f"from {dist.get_rank()}")
    if how == "wait":
        time.sleep(1000)
    raise KeyError("from 0")


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def test_cases_of_different_sizes(pool: Pool) -> None:
    for ranks in (2, 1, 3, 2):
        assert pool.run(summed, ranks, 1.5) == [(rank, 1.5 * ranks, 1, str(ranks)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("raise", ["KeyError: 'from 0'", "ValueError: from 1"]),
        ("die", ["Traceback", "exit code 3"]),
        ("wait", ["in fail", "ValueError: from 1"]),
    ],
)
def test_every_rank_that_fails_is_shown(pool: Pool, how: str, texts: list[str]) -> None:
    with pytest.raises(CaseError) as caught:
        pool.run(fail, 2, how)
    for rank, text in enumerate(texts):
        assert text in caught.value.tracebacks[rank]
        assert caught.value.tracebacks[rank] in str(caught.value)
    assert pool.run(summed, 2, 1.0)[1][1] == 2.0


def test_a_rank_that_hangs_is_named(pool: Pool) -> None:
    with pytest.raises(CaseError, match="hang hung") as caught:
        pool.run(hang, 2, timeout=3)
    assert "test_pool.py" in caught.value.tracebacks[1] and "in hang" in caught.value.tracebacks[1]
    assert "in barrier" in caught.value.tracebacks[0]

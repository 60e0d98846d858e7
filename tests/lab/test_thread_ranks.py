"""Ranks in threads exchange tensors like ranks of a group; a proof neither hangs nor passes if one of them fails."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from ditile_lab.study.thread_ranks import ThreadRank, run_thread_ranks


def test_all_ranks_get_the_tensors_of_all_in_rank_order() -> None:
    shapes = [(1, 2), (3, 2), (2, 2)]

    def run(rank: ThreadRank) -> tuple[list[Tensor], Tensor]:
        x = torch.full(shapes[rank.index], float(rank.index))
        parts = rank.start_gather(x, shapes).wait_for_tensors()
        return parts, rank.sum_over_ranks(torch.tensor([rank.index + 0.25]))

    for parts, total in run_thread_ranks(3, run):
        assert [tuple(part.shape) for part in parts] == shapes
        assert [float(part.mean()) for part in parts] == [0.0, 1.0, 2.0]
        assert float(total) == 3.75


def test_a_sender_may_write_into_what_it_has_sent() -> None:
    """A failure means that a receiver reads what the sender computed later."""

    def run(rank: ThreadRank) -> float:
        x = torch.zeros(1)
        if rank.index == 0:
            rank.start_exchange([(1, x)], [], x)
            x.add_(1)
            return 0.0
        time.sleep(0.05)
        (received,) = rank.start_exchange([], [(0, (1,))], x).wait_for_tensors()
        return float(received)

    assert run_thread_ranks(2, run) == [0.0, 0.0]


@pytest.mark.parametrize("wrong_shape", [False, True])
def test_an_error_of_one_rank_ends_all(wrong_shape: bool) -> None:
    """A failure means that a proof waits a minute for each rank, or names an error that another rank has caused."""

    def run(rank: ThreadRank) -> None:
        if rank.index == 2 and not wrong_shape:
            raise ValueError("of rank 2")
        rank.start_gather(torch.zeros(1 + rank.index // 2), [(1,)] * 3).wait_for_tensors()

    began = time.monotonic()
    with pytest.raises((RuntimeError, ValueError), match="arrives where" if wrong_shape else "of rank 2"):
        run_thread_ranks(3, run)
    assert time.monotonic() - began < 20

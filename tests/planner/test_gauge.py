"""Measurements that are made again where others kept the cores busy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ditile.planner import disturbance
from ditile.planner.disturbance import LIMIT, DisturbanceGuard, SlowdownGauge, compute_disturbed_share
from tests.pool import Pool

SLOW = 2 * LIMIT
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance, "PAUSE", 0.0)


def measured(slower: list[float], times: int, pauses: int) -> tuple[list[int], DisturbanceGuard, Iterator[float]]:
    """What measurements gave, which are counted, on a machine that is so much slower each time that it is asked."""
    left, count = iter(slower), iter(range(100))
    again = DisturbanceGuard(lambda: next(left), times, pauses)
    return [again.measure_undisturbed(lambda: next(count))], again, left


@pytest.mark.parametrize(
    ("slower", "found", "made"),
    [
        ([1.0], 0, 0),
        ([SLOW, 1.0, 1.0], 1, 1),  # after the first; it was over; after the second
        ([SLOW, SLOW, SLOW, 1.0, LIMIT], 1, 1),  # two pauses
        ([SLOW, *[SLOW] * 10], 0, 0),  # they stay longer than may be waited
        ([SLOW, 1.0, SLOW, 1.0, 1.0], 2, 2),
        ([SLOW, 1.0, SLOW, 1.0, SLOW], 2, 2),  # the last that may be
    ],
)
def test_what_was_disturbed_is_measured_again(slower: list[float], found: int, made: int) -> None:
    values, again, left = measured(slower, 2, 9)
    assert compute_disturbed_share(again) == (1.0 if slower[-1] > LIMIT else 0.0) and again.seconds > 0
    assert (values, again.num_repeats, again.last) == ([found], made, slower[-1]) and not list(left)


def test_what_may_be_waited_is_for_all_that_is_measured() -> None:
    """A failure means that a calibration on a busy machine takes as much longer as there are measurements."""
    left, count = iter([SLOW, SLOW, SLOW, 1.0, 1.0, SLOW, SLOW, SLOW]), iter(range(100))
    again = DisturbanceGuard(lambda: next(left), 9, 3)
    assert [again.measure_undisturbed(lambda: next(count)) for _ in range(2)] == [1, 2] and again.num_repeats == 1
    assert not list(left), "two pauses for the first, one for the second"


def test_nobody_asks_where_nothing_may_be_made_again() -> None:
    assert measured([], 0, 9)[0] == [0]


def test_slower_is_against_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = SlowdownGauge(None, CPU)
    for seconds, wanted in ((2.0, 1.0), (3.0, 1.5), (1.0, 1.0), (3.0, 3.0)):
        monkeypatch.setattr(slower, "_time_products", lambda seconds=seconds: [9 * seconds, seconds, 0.0])
        assert slower() == wanted
    assert slower.best_s == 1.0


def test_gpus_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = SlowdownGauge(None, torch.device("cuda"))
    monkeypatch.setattr(slower, "_time_products", lambda: pytest.fail("a product was timed"))
    assert slower() == 1.0


def _heard() -> tuple[float, float, bool]:
    """On a rank: the last of them is slow, and the first beyond the cores would be slower still."""
    asked = list[int]()
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disturbance.cpus, "list_own_cores", lambda: [rank % 2])
        slower = SlowdownGauge(dist.group.WORLD, CPU)
        patch.setattr(slower, "_time_products", lambda: asked.append(rank) or [1.0])
        first = slower()
        patch.setattr(slower, "_time_products", lambda: [1.0 + rank])
        return first, slower(), bool(asked)


def test_ranks_agree_on_the_slowest_and_only_as_many_compute_as_there_are_cores(pool: Pool) -> None:
    """A failure means that ranks part ways, one measuring again and the other not, and the run hangs."""
    assert pool.run(_heard, 3) == [(1.0, 2.0, True), (1.0, 2.0, True), (1.0, 2.0, False)]

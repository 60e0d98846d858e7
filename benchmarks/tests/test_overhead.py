"""What `python -m benchmarks.overhead --runner` makes of the seconds that it takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import overhead
from ditile_lab.bench.random_models import RandomModel


def test_the_overhead_is_the_median_of_ratios_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 10 and 11, 20 and 21, 40 and 41 seconds. A failure means that one way is slower because it goes last."""
    taken: Iterator[float] = iter([10, 11, 21, 20, 40, 41])
    clock = [0.0]
    began: list[bool] = []

    def thread_time() -> float:
        began.append(True)
        if len(began) > 2 and len(began) % 2 == 0:  # behind the call
            clock[0] += next(taken)
        return clock[0]

    monkeypatch.setattr(overhead.time, "thread_time", thread_time)
    actual = overhead.runner_overhead(RandomModel.parse_model_name("random-pixart blocks=1 heads=1"), 64, 1, 3)
    assert actual == {"plain_s": 20, "runner_s": 21, "rounds": 3, "overhead": pytest.approx(0.05)}

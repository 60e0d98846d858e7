"""Measurements made again where others kept the cores busy.

What shares a physical core with a rank slows it by a third for seconds at a time; no median of a few rounds is free of
that. A product of matrices, timed apart from what is measured, says when: it alone decides what counts, so that no
method is favoured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ditile.distributed import cpus
from ditile.distributed.transport import gather_json

LIMIT = 1.1
"""From so many times its shortest on, a product says that somebody else is there; alone it is within 1.05."""
BUSY = 0.1
"""Share of the seconds from which on what was measured is no measure of this machine."""
PAUSE = 0.1
SIDE, TIMES = 512, 7
_Result = TypeVar("_Result")


class SlowdownGauge:
    """How much slower the cores of some ranks are now than at their best so far.

    Args:
        group: the ranks, all of which are asked at once; None for this process alone. Those for which there is no core
            left compute nothing.
        device: what they compute on. Only CPUs are watched: a GPU is seldom shared, and slows down when it is warm.

    Attributes:
        watches: whether it does.
        best_s: the shortest that a product took on this rank, the median of some in a row; infinite before the first.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self.best_s = group, math.inf
        self.watches = device.type == "cpu"
        if self.watches:
            rank = 0 if group is None else dist.get_rank(group)
            cores = set[int]().union(*gather_json(cpus.list_usable_cores(), group))
            self._computes = rank < max(1, len(cores) // torch.get_num_threads())

    def __call__(self) -> float:
        """How many times as long as at its shortest a product takes now, on the slowest; the same on all ranks."""
        if not self.watches:
            return 1.0
        own = 1.0
        if self._computes:
            took = statistics.median(self._time_products())
            self.best_s = min(self.best_s, took)
            own = took / self.best_s
        return float(max(gather_json(own, self._group)))

    def _time_products(self) -> list[float]:
        x = torch.full((SIDE, SIDE), 0.5)
        timings = []
        for _ in range(TIMES):
            began = time.perf_counter()
            x @ x
            timings.append(time.perf_counter() - began)
        return timings


class DisturbanceGuard:
    """Measures again what was disturbed, within bounds.

    Args:
        slower: how many times as long as at its best the machine takes now; the same on all ranks.
        times: how often in all something may be measured again.
        pauses: and how many tenths of a second in all may be waited for the others to leave.

    Attributes:
        made: how often something was measured again.
        last: how much slower the machine was after the last measurement.
        seconds, disturbed_s: of all measurements that count, and of those after which the machine was slower.
    """

    def __init__(self, slower: Callable[[], float], times: int, pauses: int) -> None:
        self._slower, self._times, self._pauses = slower, times, pauses
        self.num_repeats, self.last = 0, 1.0
        self.seconds = self.disturbed_s = 0.0

    def measure_undisturbed(self, measure: Callable[[], _Result]) -> _Result:
        """What a measurement gives, after which the machine is as fast as at its best; or else the last that may be."""
        if self._times == 0:
            return measure()
        result, seconds = self._measure_once(measure)
        while self.last > LIMIT and self.num_repeats < self._times and self._wait_until_quiet():
            self.num_repeats += 1
            result, seconds = self._measure_once(measure)
        self.seconds += seconds
        self.disturbed_s += seconds if self.last > LIMIT else 0.0
        return result

    def _measure_once(self, measure: Callable[[], _Result]) -> tuple[_Result, float]:
        began = time.perf_counter()
        result = measure()
        seconds = time.perf_counter() - began
        self.last = self._slower()
        return result, seconds

    def _wait_until_quiet(self) -> bool:
        """Waits for it, while it may."""
        while self._slower() > LIMIT:
            if self._pauses == 0:
                return False
            self._pauses -= 1
            time.sleep(PAUSE)
        return True


def compute_disturbed_share(*every: DisturbanceGuard) -> float:
    """The share of the seconds of what counts after which the machine was slower than at its best."""
    return sum(again.disturbed_s for again in every) / max(sum(again.seconds for again in every), 1e-9)

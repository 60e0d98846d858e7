"""Whether the host or the GPU limits the calls of a model: how far the GPU is behind when the host has started a call.

The host starts kernels ahead of the GPU. Where the GPU is the limit, it falls behind by the difference with each call,
until its queue is full and the host waits in the driver, so that the host's seconds alone would say nothing. Where the
host is the limit, the GPU has done each kernel before the next one is there, and a call ends on both at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ditile.distributed.trace import record_cuda_event

LIMITING_LAG = 0.2
"""Share of its seconds for a call that the GPU is behind at the end of it where the GPU is the limit.

In a call that begins with an idle GPU that is host time below 0.8 of GPU time. In later ones the GPU is behind by what
fits the driver's queue: 1,024 kernels, which are a third of an eager call of FLUX.1 (57 blocks of some fifty kernels)
and more than a call of a patch. Less than a fifth comes about by the last kernels alone."""
CALLS_IN_A_ROW = 2
"""Calls of a form that the host must limit, as garbage collection or the loading of a kernel slows a single one."""
MAX_UNREAD = 64
"""Calls whose events are kept; more are under way only where the GPU is far behind."""


class DeviceEvents(Protocol):
    """Events that a device passes when it has done all work so far."""

    def record_event(self) -> Any:
        """An event of now."""

    def read_seconds(self, event: Any) -> float | None:
        """When the device passed an event, in seconds from some fixed time; None if it has not. Does not wait."""

    def read_host_seconds(self) -> float:
        """The time of the host, in seconds from some fixed time."""


class CudaEvents:
    """Events in the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Events measure times from each other alone.
        self._origin: torch.cuda.Event | None = None

    def record_event(self) -> torch.cuda.Event:
        """An event of now."""
        event = record_cuda_event(self._device)
        if self._origin is None:
            self._origin = event
        return event

    def read_seconds(self, event: torch.cuda.Event) -> float | None:
        """Seconds from the first event to this one; None if the GPU has not passed it."""
        if self._origin is None or not event.query():
            return None
        return float(self._origin.elapsed_time(event)) / 1e3

    def read_host_seconds(self) -> float:
        """Seconds of the machine's monotonic clock."""
        return time.perf_counter()


@dataclass(slots=True)
class Pace:
    """What is known of the calls of one form.

    Attributes:
        num_measured: how many were measured.
        num_host_limited: how many of the last ones, without a gap, were limited by the host.
    """

    num_measured: int = 0
    num_host_limited: int = 0

    @property
    def is_host_limited(self) -> bool:
        """Whether the host limits such calls."""
        return self.num_host_limited >= CALLS_IN_A_ROW

    @property
    def is_gpu_limited(self) -> bool:
        """Whether the GPU limited the last one."""
        return self.num_measured > 0 and self.num_host_limited == 0


class _Mark(NamedTuple):
    """A point in time on the host, and the event that the device passes then or later."""

    host_seconds: float
    event: Any


class _MeasuredCall(NamedTuple):
    """A call whose events may be under way."""

    pace: Pace
    begin: _Mark
    end: _Mark


class HostLimit:
    """Measures the calls of a generation that run as code."""

    def __init__(self, make_events: Callable[[], DeviceEvents]) -> None:
        self._make_events = make_events
        self._events = make_events()
        self._unread: deque[_MeasuredCall] = deque(maxlen=MAX_UNREAD)
        self._least_lag = 0.0

    def begin_generation(self) -> None:
        """A generation begins, with nothing left to do for the device."""
        self._unread.clear()
        # Of torch's events a time is a number of 32 bits, which is too coarse after an hour.
        self._events = self._make_events()
        # The clocks of host and device have no common zero, and drift apart: lags count from the least one.
        self._least_lag = float("inf")
        start = self._mark_point()
        self._unread.append(_MeasuredCall(Pace(), start, start))

    def limits(self, pace: Pace) -> bool:
        """Whether the host is known by now to limit such calls."""
        if not pace.is_host_limited:
            self.read_passed_events()
        return pace.is_host_limited

    def measure_call(self, pace: Pace, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call with its code; what it shows is noted once the device has done it."""
        begin = self._mark_point()
        result = forward(*args, **kwargs)
        self._unread.append(_MeasuredCall(pace, begin, self._mark_point()))
        return result

    def read_passed_events(self) -> None:
        """Notes the calls that the device has done by now."""
        while self._unread:
            call = self._unread[0]
            begin = self._events.read_seconds(call.begin.event)
            end = self._events.read_seconds(call.end.event)
            # Later ones are not passed either.
            if begin is None or end is None:
                return
            self._unread.popleft()
            lag = end - call.end.host_seconds
            self._least_lag = min(self._least_lag, begin - call.begin.host_seconds, lag)
            seconds = end - begin
            call.pace.num_measured += 1
            if lag - self._least_lag < LIMITING_LAG * seconds:
                call.pace.num_host_limited += 1
            else:
                call.pace.num_host_limited = 0

    def _mark_point(self) -> _Mark:
        event = self._events.record_event()
        return _Mark(self._events.read_host_seconds(), event)

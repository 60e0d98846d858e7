"""Trace: when each op of the schedule ran on this rank, for Chrome's trace viewer (chrome://tracing, Perfetto).

On CUDA the times are those of the GPU's own events, read after the call, so that tracing never synchronises.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Event(NamedTuple):
    """One op with its start and end in seconds of the machine's monotonic clock."""

    kind: str
    step: int
    patch: int | None
    branch: int
    start: float
    end: float


class Trace:
    """Records the ops of one generation; costs nothing while it is off."""

    def __init__(self) -> None:
        self.on = False
        self._events: list[tuple[str, int, int | None, int, Any, Any]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def clear(self) -> None:
        """Forgets what was recorded."""
        self._events.clear()
        self._origin = None

    @contextmanager
    def span(self, kind: str, step: int, patch: int | None, branch: int = 0) -> Iterator[None]:
        """Records what happens within."""
        start = self.now()
        yield
        self.add(kind, step, patch, branch, start)

    def now(self) -> Any:
        """A point in time, on the device's own clock."""
        if not self.on:
            return None
        if not torch.cuda.is_available():
            return time.perf_counter()
        if self._origin is None:
            self._origin = (time.perf_counter(), _mark())
        return _mark()

    def add(self, kind: str, step: int, patch: int | None, branch: int, start: Any) -> None:
        """Records an op that began at `start` and ends now."""
        if self.on and start is not None:
            self._events.append((kind, step, patch, branch, start, self.now()))

    def events(self) -> list[Event]:
        """What was recorded. Waits for the GPU."""
        return [Event(*event[:4], self._seconds(event[4]), self._seconds(event[5])) for event in self._events]

    def _seconds(self, point: Any) -> float:
        if isinstance(point, float):
            return point
        assert self._origin is not None
        wall, origin = self._origin
        point.synchronize()
        return wall + float(origin.elapsed_time(point)) / 1e3


def write_chrome(path: str | Path, events_of_rank: list[list[Event]]) -> None:
    """Writes a Chrome trace: one row per rank, one slice per op, times in microseconds from the first."""
    origin = min((e.start for events in events_of_rank for e in events), default=0.0)
    slices = [
        {
            "name": event.kind if event.patch is None else f"{event.kind} p{event.patch}",
            "cat": event.kind, "ph": "X", "pid": 0, "tid": rank,
            "ts": round((event.start - origin) * 1e6, 3), "dur": round((event.end - event.start) * 1e6, 3),
            "args": {"step": event.step, "patch": event.patch, "branch": event.branch},
        }
        for rank, events in enumerate(events_of_rank)
        for event in events
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"stage {rank}"}}
        for rank in range(len(events_of_rank))
    ]
    Path(path).write_text(json.dumps({"traceEvents": names + slices, "displayTimeUnit": "ms"}))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

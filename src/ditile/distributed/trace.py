"""Trace: the times of each op of the schedule on this rank, for Chrome's trace viewer (chrome://tracing, Perfetto).

On CUDA the times come from the GPU's own events, read after the call, so that tracing never synchronises. The
transport records every wait for a message, in every method; `measure_waits` says how long each step waited.
"""

from __future__ import annotations

import itertools
import json
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ditile.distributed import files


class TraceEvent(NamedTuple):
    """One op with its start and end in seconds of the machine's monotonic clock."""

    kind: str
    step: int
    patch: int | None
    branch: int
    start: float
    end: float


_NULL_CONTEXT = nullcontext()


class DeviceClock:
    """The clock of a device. On a GPU a point in time is a CUDA event in the current stream, and nothing waits for it
    until it is read.

    Args:
        device: the device to measure; None is the current GPU, or the CPU without a GPU.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._is_cuda = (device is None or device.type == "cuda") and torch.cuda.is_available()
        # CUDA events give only the time between two of them, so this one is recorded at a known time of the clock.
        self._origin_seconds = time.perf_counter()
        self._origin = self.mark_point() if self._is_cuda else None

    def mark_point(self) -> Any:
        """Mark the point in time at which the device has done all its work so far."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def convert_to_seconds(self, point: Any) -> float:
        """Convert a point to seconds of the machine's monotonic clock. Waits until a GPU has passed it."""
        if self._origin is None:
            return float(point)
        point.synchronize()
        return self._origin_seconds + float(self._origin.elapsed_time(point)) / 1e3


class GenerationTrace:
    """Records the ops of one generation; costs nothing while it is off.

    Attributes:
        device: the device with the clock; None is the current GPU, or the CPU without a GPU.
    """

    def __init__(self) -> None:
        self.on = False
        self.device: torch.device | None = None
        # The start and end of these events are points of the device's clock; `_read_clock` makes seconds of them.
        self._events: list[TraceEvent] = []
        self._waits: list[TraceEvent] = []
        self._marks: list[Any] = []
        self._clock: DeviceClock | None = None

    def clear_records(self) -> None:
        """Forget all records."""
        self._events.clear()
        self._waits.clear()
        self._marks.clear()
        self._clock = None

    def mark_step(self) -> None:
        """Record the beginning of the first step, or the end of a step."""
        if self.on:
            self._marks.append(self.mark_point())

    def record_wait(self, kind: str) -> AbstractContextManager[None]:
        """Record the wait for messages of a kind within this context."""
        return self._record_wait(kind) if self.on else _NULL_CONTEXT

    @contextmanager
    def _record_wait(self, kind: str) -> Iterator[None]:
        start = self.mark_point()
        yield
        self._waits.append(TraceEvent(kind, len(self._marks) - 1, None, 0, start, self.mark_point()))

    @contextmanager
    def record_span(self, kind: str, step: int, patch: int | None, branch: int = 0) -> Iterator[None]:
        """Record the op within this context."""
        start = self.mark_point()
        yield
        self.record_op(kind, step, patch, branch, start)

    def mark_point(self) -> Any:
        """Mark a point in time on the device's own clock. None while the trace is off."""
        if not self.on:
            return None
        if self._clock is None:
            self._clock = DeviceClock(self.device)
        return self._clock.mark_point()

    def record_op(self, kind: str, step: int, patch: int | None, branch: int, start: Any) -> None:
        """Record an op that began at `start` and ends now."""
        if self.on and start is not None:
            self._events.append(TraceEvent(kind, step, patch, branch, start, self.mark_point()))

    def list_events(self) -> list[TraceEvent]:
        """List the recorded ops. Waits for the GPU."""
        return [self._read_clock(event) for event in self._events]

    def list_waits(self) -> list[TraceEvent]:
        """List the waits as events. Waits for the GPU."""
        return [self._read_clock(wait)._replace(kind=f"wait {wait.kind}") for wait in self._waits]

    def measure_waits(self) -> tuple[list[float], dict[str, list[float]]]:
        """Measure the seconds of each step, and those in which this rank waited, by kind. Waits for the GPU."""
        if self._clock is None:
            return [], {}
        marks = [self._clock.convert_to_seconds(mark) for mark in self._marks]
        waits = [self._read_clock(wait) for wait in self._waits]
        seconds = [end - begin for begin, end in itertools.pairwise(marks)]
        return seconds, sum_waits_by_step(waits, marks)

    def _read_clock(self, event: TraceEvent) -> TraceEvent:
        assert self._clock is not None
        start = self._clock.convert_to_seconds(event.start)
        return event._replace(start=start, end=self._clock.convert_to_seconds(event.end))


def sum_waits_by_step(waits: Sequence[TraceEvent], marks: Sequence[float]) -> dict[str, list[float]]:
    """Sum the seconds of waiting in each step, by kind.

    Args:
        waits: in any order. Where two overlap, the time counts for the one that began first.
        marks: when the first step began, and when each one ended; waits outside do not count.
    """
    by_kind: dict[str, list[float]] = {}
    counted_until = marks[0] if marks else 0.0
    for wait in sorted(waits, key=operator.attrgetter("start", "end")):
        start = max(wait.start, counted_until)
        counted_until = max(wait.end, counted_until)
        for step, (step_start, step_end) in enumerate(itertools.pairwise(marks)):
            seconds = min(wait.end, step_end) - max(start, step_start)
            if seconds > 0:
                by_kind.setdefault(wait.kind, [0.0] * (len(marks) - 1))[step] += seconds
    return by_kind


def write_chrome_trace(path: str | Path, events_of_rank: list[list[TraceEvent]]) -> None:
    """Write a Chrome trace: one row per rank, one slice per op, times in microseconds from the first op's start.

    Raises:
        OSError: if it cannot be written.
    """
    origin = min((event.start for event in itertools.chain(*events_of_rank)), default=0.0)
    slices: list[dict[str, Any]] = []
    for rank, events in enumerate(events_of_rank):
        # The name of a row; "M" is metadata in Chrome's format, and "X" a slice with a duration.
        name = {"name": f"stage {rank}"}
        slices.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for event in events:
            label = event.kind
            if event.patch is not None:
                label = f"{event.kind} p{event.patch}"
            slices.append(
                {
                    "name": label,
                    "cat": event.kind,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": round((event.start - origin) * 1e6, 3),
                    "dur": round((event.end - event.start) * 1e6, 3),
                    "args": {"step": event.step, "patch": event.patch, "branch": event.branch},
                }
            )
    files.write_atomically(Path(path), json.dumps({"traceEvents": slices, "displayTimeUnit": "ms"}))

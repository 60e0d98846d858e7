"""The report of one call of a runner on one rank: seconds by the device's own clock, bytes sent, and memory."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass, field

import torch

from ditile.distributed.trace import DeviceClock, GenerationTrace
from ditile.distributed.transport import Traffic
from ditile.model.recording.recorded_calls import RecordedCalls
from ditile.plan.option_classes import JsonObject


@dataclass(frozen=True, slots=True)
class Report:
    """The measurements of one call on this rank.

    Attributes:
        seconds: total, text (until the first step), denoise, decode.
        steps: number of steps that ran.
        synchronous: the synchronous steps, from 0.
        warmup_mode: how these steps ran; with warmup_mode=auto the chosen mode.
        sent: bytes sent by kind: activations, latents, result, callback, control.
        peak_memory_bytes: resident memory on a CPU, allocated memory on a GPU.
        key_bytes: bytes of stale keys and values at the end of the last step.
        cache_bytes: bytes that caches keep at the end of the last step.
        text_tokens: text tokens in the sequence of joint attention; None if no block had hooks.
        recorded: the recorded and played calls of models; None if nothing is recorded, such as on a CPU.
        reference_tokens: the tokens of reference images, if a plan chooses the steps that compute them.
        reference_steps: the steps that computed them, from 0.
        step_seconds: the seconds of each step on this rank's device; empty unless the call was traced.
        waited: seconds of each step in which this rank waited for messages and computed nothing, by kind of message;
            empty unless the call was traced.
    """

    seconds: dict[str, float]
    steps: int
    synchronous: list[int]
    warmup_mode: str
    sent: dict[str, int]
    peak_memory_bytes: int
    key_bytes: int
    cache_bytes: int
    text_tokens: int | None
    recorded: RecordedCalls | None = None
    reference_tokens: int = 0
    reference_steps: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    waited: dict[str, list[float]] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of all kinds together."""
        return sum(self.sent.values())

    def to_dict(self) -> JsonObject:
        """Convert the report to JSON types."""
        return asdict(self) | {"bytes_sent": self.bytes_sent}


class CallMeter:
    """Times and counts one call. Before its end it never waits for the device.

    Args:
        traffic: the messages of the call.
        traced: whether to record a trace.
    """

    def __init__(self, device: torch.device, trace: GenerationTrace, traffic: Traffic, *, traced: bool) -> None:
        self._device = device
        self._trace = trace
        self._traffic = traffic
        self._steps = 0
        self._key_bytes = 0
        self._reference_tokens = 0
        self._reference_steps: list[int] = []
        self._text_tokens: int | None = None
        traffic.reset_counts()
        trace.clear_records()
        trace.on = traced
        trace.device = device
        # Everything that runs on the device shares its counter of peak memory.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._clock = DeviceClock(device)
        self._began = self._loop_began = self._ended = self._clock.mark_point()

    def mark_loop_begin(self) -> None:
        """Note that the loop begins."""
        self._loop_began = self._ended = self._clock.mark_point()
        self._trace.mark_step()

    def record_step_end(self, key_bytes: int, text: int | None, references: int = 0, *, computed: bool = True) -> None:
        """Note the end of a step.

        Args:
            key_bytes: bytes of stale keys.
            text, references: how many tokens of text, and of reference images that are patches of their own.
            computed: whether the step computed the reference images.
        """
        self._ended = self._clock.mark_point()
        self._trace.mark_step()
        if references and computed:
            self._reference_steps.append(self._steps)
        self._steps += 1
        self._key_bytes = key_bytes
        self._text_tokens = text
        self._reference_tokens = references

    def build_report(
        self, synchronous: list[int], warmup_mode: str, cache_bytes: int, recorded: RecordedCalls | None = None
    ) -> Report:
        """End the call, and wait for the device.

        Args:
            synchronous, warmup_mode: the call's synchronous steps, and how they ran.
            cache_bytes: bytes that caches keep.
            recorded: counts of recorded and played calls.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            # Linux counts the peak in KiB, not in bytes.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        now = time.perf_counter()
        began = self._clock.convert_to_seconds(self._began)
        loop_began = self._clock.convert_to_seconds(self._loop_began)
        ended = self._clock.convert_to_seconds(self._ended)
        seconds = {
            "total": now - began,
            "text": loop_began - began,
            "denoise": ended - loop_began,
            "decode": now - ended,
        }
        step_seconds, waited = self._trace.measure_waits()
        return Report(
            seconds=seconds,
            steps=self._steps,
            synchronous=synchronous,
            warmup_mode=warmup_mode,
            sent=dict(self._traffic.bytes),
            peak_memory_bytes=peak,
            key_bytes=self._key_bytes,
            cache_bytes=cache_bytes,
            text_tokens=self._text_tokens,
            recorded=recorded,
            reference_tokens=self._reference_tokens,
            reference_steps=self._reference_steps,
            step_seconds=step_seconds,
            waited=waited,
        )

"""What one call of a runner took, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """What one call took on this rank.

    Attributes:
        seconds: total, text (until the first step), denoise, decode.
        steps: steps that ran.
        synchronous: those of them that were, from 0; what warmup=auto chose.
        sent: bytes sent by kind: activations, latents, result, callback, control.
        peak_memory_bytes: resident memory on a CPU, allocated memory on a GPU.
        key_bytes: bytes of stale keys and values held at the end of the last step.
        cache_bytes: held by caches at the end of the last step.
        text_tokens: in the sequence of joint attention; None where no block was looked into.
        step_seconds: of each step on this rank's device; empty unless the call was traced.
        waited: seconds of each step in which this rank waited for messages and computed nothing, by kind of message;
            empty unless the call was traced.
    """

    seconds: dict[str, float]
    steps: int
    synchronous: list[int]
    sent: dict[str, int]
    peak_memory_bytes: int
    key_bytes: int
    cache_bytes: int
    text_tokens: int | None
    step_seconds: list[float] = field(default_factory=list)
    waited: dict[str, list[float]] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sent.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self) | {"bytes_sent": self.bytes_sent}

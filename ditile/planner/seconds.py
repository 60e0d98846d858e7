"""Seconds of counted work on a device (roofline model, Williams et al. 2009, with measured roofs)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ditile.planner.kernels import Kernel, Stream, Work
from ditile.planner.profile import Profile


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a rank has in a micro-step, for one call.

    Attributes:
        rows: of the batch.
        image, text: tokens that it computes.
        image_keys, text_keys: tokens that they attend to.
        heads: share of the heads that it attends with.
        split: ranks that share out every matrix.
        share: tokens that it attends from, over those that it computes: with fewer heads it has those of other ranks.
    """

    rows: int
    image: int
    text: int
    image_keys: int
    text_keys: int
    heads: float = 1.0
    split: int = 1
    share: float = 1.0

    def of(self, stream: Stream) -> int:
        """Tokens of a stream."""
        return {"image": self.image, "text": self.text, "both": self.image + self.text, "once": 1}[stream]

    def keys(self, stream: Stream) -> int:
        """Keys of a stream."""
        sizes = {"image": self.image_keys, "text": self.text_keys, "both": self.image_keys + self.text_keys}
        return sizes.get(stream, 1)


class Load(NamedTuple):
    """Seconds that a device and its host are each busy."""

    device: float
    host: float

    def plus(self, other: Load, times: float = 1.0) -> Load:
        """Both, one after the other."""
        return Load(self.device + times * other.device, self.host + times * other.host)

    def seconds(self, profile: Profile) -> float:
        """Until both are done: a host runs ahead of a GPU, and a CPU is its own."""
        return max(self.device, self.host) if profile.runs_ahead else self.device + self.host


def load(work: Work, tokens: Tokens, profile: Profile) -> Load:
    """Of some work by one rank."""
    device = sum(times * _device(kernel, tokens, profile) for kernel, times in work.items())
    return Load(device, sum(work.values()) * profile.kernel_s)


def seconds(work: Work, tokens: Tokens, profile: Profile) -> float:
    """The same, until both are done."""
    return load(work, tokens, profile).seconds(profile)


def _device(kernel: Kernel, tokens: Tokens, profile: Profile) -> float:
    count = tokens.of(kernel.stream)
    rows = tokens.rows * count
    if kernel.kind == "matmul":
        k, n = kernel.size
        operations = 2 * rows * k * n / tokens.split
        return operations / profile.matmul.at(rows, (k * n / tokens.split) ** 0.5)
    if kernel.kind == "attention":
        keys = tokens.keys(kernel.keys)
        queries = count * tokens.share
        operations = 4 * tokens.rows * queries * keys * kernel.size[0] * tokens.heads
        return operations / profile.attention.at(queries, keys) / profile.head.at(kernel.size[1])
    size = kernel.size[0] * rows * profile.element_size
    return size / profile.pointwise.get(kernel.kind, profile.pointwise["pointwise"]).at(size)


def flops(work: Work, tokens: Tokens) -> float:
    """Operations of matrices and attention."""
    total = 0.0
    for kernel, times in work.items():
        rows = tokens.rows * tokens.of(kernel.stream)
        if kernel.kind == "matmul":
            total += times * 2 * rows * kernel.size[0] * kernel.size[1] / tokens.split
        elif kernel.kind == "attention":
            keys = tokens.keys(kernel.keys)
            total += times * 4 * rows * tokens.share * keys * kernel.size[0] * tokens.heads
    return total


def together(works: Mapping[int, Work] | list[Work] | tuple[Work, ...]) -> dict[Kernel, int]:
    """Several pieces of work as one."""
    found: dict[Kernel, int] = {}
    for work in works.values() if isinstance(works, Mapping) else works:
        for kernel, times in work.items():
            found[kernel] = found.get(kernel, 0) + times
    return found

"""Seconds of counted work on a device (roofline model, Williams et al. 2009, with measured roofs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ditile.planner.kernel_times import Kernel, Stream, Work
from ditile.planner.profile import FUSED, Profile


class Tokens(NamedTuple):
    """What a rank has in a micro-step, for one call.

    Attributes:
        rows: of the batch.
        image, text: tokens that it computes.
        image_keys, text_keys: tokens that they attend to.
        heads: share of the heads that it attends with.
        split: ranks that share out every matrix.
        share: tokens that it attends from, over those that it computes: with fewer heads it has those of other ranks.
        fused: whether GELU is one kernel with the product in front of it.
    """

    rows: int
    image: int
    text: int
    image_keys: int
    text_keys: int
    heads: float = 1.0
    split: int = 1
    share: float = 1.0
    fused: bool = False

    def of(self, stream: Stream) -> int:
        """Tokens of a stream."""
        return _of_stream(stream, self.image, self.text)

    def keys(self, stream: Stream) -> int:
        """Keys of a stream."""
        return _of_stream(stream, self.image_keys, self.text_keys)


def _of_stream(stream: Stream, image: int, text: int) -> int:
    if stream == "image":
        return image
    if stream == "text":
        return text
    return image + text if stream == "both" else 1


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


class Device:
    """A device of a machine, with the seconds of each kernel remembered: many plans have most of them in common.

    Args:
        profile: the machine.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._seen: dict[tuple[Kernel, int, int, bool], float] = {}

    def load(self, work: Work, tokens: Tokens) -> Load:
        """Of some work by one rank."""
        device = sum(times * self._seconds(kernel, tokens) for kernel, times in work.items())
        return Load(device, sum(work.values()) * self._profile.kernel_s)

    def _seconds(self, kernel: Kernel, tokens: Tokens) -> float:
        if kernel.kind == "attention":
            return self._attention(kernel, tokens)
        key = kernel, tokens.rows * tokens.of(kernel.stream), tokens.split, tokens.fused
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._over(*key)
        return found

    def _attention(self, kernel: Kernel, tokens: Tokens) -> float:
        keys = tokens.keys(kernel.keys)
        queries = tokens.of(kernel.stream) * tokens.share
        operations = 4 * tokens.rows * queries * keys * kernel.size[0] * tokens.heads
        return operations / self._profile.attention.at(queries, keys) / self._profile.head.at(kernel.size[1])

    def _over(self, kernel: Kernel, rows: int, split: int, fused: bool) -> float:
        """Of a matrix of which a rank has its share, or of going over numbers; for so many rows."""
        profile = self._profile
        if kernel.kind == "matmul":
            k, n = kernel.size
            return 2 * rows * k * n / split / profile.matmul.at(rows, (k * n / split) ** 0.5)
        size, curves = kernel.size[0] * rows * profile.element_size, profile.pointwise
        kind = FUSED if fused and kernel.kind == "gelu" else kernel.kind
        return size / curves.get(kind, curves["pointwise"]).at(size)


def seconds(work: Work, tokens: Tokens, profile: Profile) -> float:
    """Seconds of some work by one rank, until device and host are done."""
    return Device(profile).load(work, tokens).seconds(profile)


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

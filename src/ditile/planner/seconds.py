"""Seconds of counted work on a device (roofline model, Williams et al. 2009, with measured roofs), and of messages.

A rank has a part of the links and the cores of a machine while others use them too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ditile.plan.plan import AXES, Plan
from ditile.planner.kernel_times import RooflineKernel, Stream, Work, select_stream_length
from ditile.planner.profile import FUSED, Link, Profile


class RankTokens(NamedTuple):
    """What a rank has in a micro-step, for one call.

    Attributes:
        batch: pictures that it computes together.
        image, text: tokens that it computes.
        image_keys, text_keys: tokens that they attend to.
        heads: share of the heads that it attends with.
        split: ranks that share out every matrix.
        share: tokens that it attends from, over those that it computes: with fewer heads it has those of other ranks.
        fused: whether GELU is one kernel with the product in front of it.
    """

    batch: int
    image: int
    text: int
    image_keys: int
    text_keys: int
    heads: float = 1.0
    split: int = 1
    share: float = 1.0
    fused: bool = False

    def count_tokens(self, stream: Stream) -> int:
        """Tokens of a stream."""
        return select_stream_length(stream, self.image, self.text)

    def count_keys(self, stream: Stream) -> int:
        """Keys of a stream."""
        return select_stream_length(stream, self.image_keys, self.text_keys)


class DeviceLoad(NamedTuple):
    """Seconds that a device and its host are each busy."""

    device: float
    host: float

    def combine_loads(self, other: DeviceLoad, times: float = 1.0) -> DeviceLoad:
        """Both, one after the other."""
        return DeviceLoad(self.device + times * other.device, self.host + times * other.host)

    def get_busy_seconds(self, profile: Profile) -> float:
        """Until both are done: a host runs ahead of a GPU, and a CPU is its own."""
        return max(self.device, self.host) if profile.runs_ahead else self.device + self.host


class RooflineDevice:
    """A device of a machine, with the seconds of each kernel remembered: many plans have most of them in common.

    Args:
        profile: the machine.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._seen: dict[tuple[RooflineKernel, int, int, bool], float] = {}

    def compute_load(self, work: Work, tokens: RankTokens) -> DeviceLoad:
        """Of some work by one rank."""
        device = sum(times * self._get_kernel_seconds(kernel, tokens) for kernel, times in work.items())
        return DeviceLoad(device, sum(work.values()) * self._profile.kernel_s)

    def _get_kernel_seconds(self, kernel: RooflineKernel, tokens: RankTokens) -> float:
        if kernel.kind == "attention":
            return self._compute_attention_seconds(kernel, tokens)
        key = kernel, tokens.batch * tokens.count_tokens(kernel.stream), tokens.split, tokens.fused
        kernel_seconds = self._seen.get(key)
        if kernel_seconds is None:
            kernel_seconds = self._seen[key] = self._compute_roofline_seconds(*key)
        return kernel_seconds

    def _compute_attention_seconds(self, kernel: RooflineKernel, tokens: RankTokens) -> float:
        keys = tokens.count_keys(kernel.keys)
        queries = tokens.count_tokens(kernel.stream) * tokens.share
        operations = 4 * tokens.batch * queries * keys * kernel.size[0] * tokens.heads
        rate = self._profile.attention.interpolate(queries, keys) * self._profile.head.interpolate(kernel.size[1])
        return operations / rate

    def _compute_roofline_seconds(self, kernel: RooflineKernel, rows: int, split: int, fused: bool) -> float:
        """Of a matrix of which a rank has its share, or of going over numbers; for so many rows."""
        profile = self._profile
        if kernel.kind == "matmul":
            k, n = kernel.size
            return 2 * rows * k * n / split / profile.matmul.interpolate(rows, (k * n / split) ** 0.5)
        size, curves = kernel.size[0] * rows * profile.element_size, profile.pointwise
        kind = FUSED if fused and kernel.kind == "gelu" else kernel.kind
        return size / curves.get(kind, curves["pointwise"]).interpolate(size)


def merge_work(works: Iterable[Work]) -> Work:
    """The work of several together."""
    return sum(map(Counter, works), Counter[RooflineKernel]())


def find_crossed_link(plan: Plan, profile: Profile, host: int, axis: str) -> Link:
    """The link that an axis crosses at its widest, and what each of the ranks that share it has of it.

    Args:
        plan: the plan.
        profile: the machine.
        host: ranks that fill one, one host after the other.
        axis: of the mesh.
    """
    n = getattr(plan, axis)
    inner = math.prod(getattr(plan, name) for name in AXES[AXES.index(axis) + 1 :])
    if profile.interlink is None or n == 1 or inner * n <= host:
        return profile.link
    # Messages of neighbours: one rank of each pipeline or ring sends out of a host.
    sharing: float = min(inner, host)
    if axis == "ulysses":
        # Each rank exchanges with all, of which some are on the same host.
        sharing = host * (n - max(1, host // inner)) / (n - 1)
    return replace(profile.interlink, bandwidth=profile.interlink.bandwidth / sharing)


def compute_slowdown(profile: Profile, ranks: int) -> float:
    """How many times as long work takes while so many ranks of a host do theirs."""
    busy = min(ranks, profile.devices)
    slower = (profile.together - 1) * (busy - 1) / (profile.devices - 1) if profile.devices > 1 else 0.0
    return max(1.0, ranks / profile.devices) * (1 + slower)


def get_bandwidth_share(link: Link, kind: str, n: int) -> float:
    """Share of a link's bandwidth in an exchange."""
    if kind == "tensor":
        return link.reduce
    if kind == "ring":
        return link.neighbours
    if kind in ("distrifusion", "pipefusion"):
        return link.neighbours if link.gather is None else link.gather
    crowded = n**2 / 4 / (n - 1) / link.crossing if 0 < link.socket < n else 0.0
    return min(link.collective, 1 / crowded) if crowded else link.collective


def compute_exposed_seconds(sending: float, overlap: float, compute: float) -> float:
    """Seconds of a message that computing does not hide."""
    return sending * (1 - overlap) + max(0.0, sending * overlap - compute)


class WarmupBlock(NamedTuple):
    """A block that the stages of the warmup group compute together, in seconds.

    Attributes:
        weights: the transfer of its weights from the stage that owns it; 0 where every member has them.
        before: work up to its attention, before which keys are gathered.
        keys: the gather.
        after: the rest of its work.
    """

    weights: float
    before: float
    keys: float
    after: float


def compute_warmup_seconds(blocks: Sequence[WarmupBlock], ahead: int, overlap: float) -> float:
    """Seconds of blocks whose weights are sent so many blocks ahead of their use (`weight_streaming`).

    One group carries weights and keys in the order in which they are started: a gather stands behind the weights that
    were started before it.
    """
    now = line = 0.0
    arrived: list[float] = []

    def start_weights(index: int) -> None:
        nonlocal now, line
        line = max(line, now) + blocks[index].weights
        now += (1 - overlap) * blocks[index].weights
        arrived.append(line)

    for index in range(min(ahead, len(blocks))):
        start_weights(index)
    for index, block in enumerate(blocks):
        if index + ahead < len(blocks):
            start_weights(index + ahead)
        now = max(now, arrived[index]) + block.before
        if block.keys:
            now = line = max(line, now) + block.keys
        now += block.after
    return now

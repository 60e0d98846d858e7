"""Seconds of counted work on a device (roofline model, Williams et al. 2009, with measured roofs), and of messages.

Ranks share the links and the cores of a machine, so that each has only a part of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ditile.planner.kernel_times import RooflineKernel, Stream, Work, select_stream_length
from ditile.planner.profile import Link, Profile

MERGING_KERNELS = 9
"""Kernels that `merge_attention` starts for each message of a ring."""
MERGING_PASSES = {4: 3, 2: 12}
"""Bytes of a number -> how often merging reads or writes the bytes of an output.

fp32: two reads and a write. Half precision is first converted to fp32 (two reads, and two writes of twice the bytes),
and then merged in twice the bytes."""


class RankTokens(NamedTuple):
    """The tokens of a rank in a micro-step, for one call.

    Attributes:
        batch: rows of the batch that it computes together.
        image, text: tokens that it computes.
        image_keys, text_keys: tokens that they attend to.
        heads: share of the heads for which it computes attention.
        split: ranks that split every matrix; if their shares are uneven, the whole divided by this rank's share.
        attended: tokens whose attention it computes, divided by its own tokens: more than 1 under Ulysses.
    """

    batch: int
    image: int
    text: int
    image_keys: int
    text_keys: int
    heads: float = 1.0
    split: float = 1
    attended: float = 1.0

    def count_tokens(self, stream: Stream) -> int:
        """Count the tokens of a stream."""
        return select_stream_length(stream, self.image, self.text)

    def take_all_tokens(self) -> RankTokens:
        """Return the tokens of a rank that computes all of them, and attends with all heads."""
        return self._replace(image=self.image_keys, text=self.text_keys, heads=1.0, split=1, attended=1.0)

    def count_keys(self, stream: Stream) -> int:
        """Count the keys of a stream."""
        return select_stream_length(stream, self.image_keys, self.text_keys)


class DeviceLoad(NamedTuple):
    """Seconds that a device and its host are each busy."""

    device: float
    host: float

    def combine_loads(self, other: DeviceLoad, times: float = 1.0) -> DeviceLoad:
        """Add the other load `times` times to this one."""
        return DeviceLoad(self.device + times * other.device, self.host + times * other.host)

    def get_busy_seconds(self, profile: Profile) -> float:
        """Return the seconds until both are done. A host runs ahead of a GPU, but a CPU is device and host at once."""
        if profile.runs_ahead:
            return max(self.device, self.host)
        return self.device + self.host


class RooflineDevice:
    """A device of a machine. The seconds of each kernel are cached, because most are the same in many plans."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._seen: dict[tuple[RooflineKernel, int, float], float] = {}

    def compute_load(self, work: Work, tokens: RankTokens) -> DeviceLoad:
        """Compute the load of some work on one rank."""
        device = sum(times * self._get_kernel_seconds(kernel, tokens) for kernel, times in work.items())
        num_kernels = sum(work.values())
        return DeviceLoad(device + num_kernels * self._profile.kernel_gap_s, num_kernels * self._profile.kernel_s)

    def _get_kernel_seconds(self, kernel: RooflineKernel, tokens: RankTokens) -> float:
        if kernel.kind == "attention":
            return self._compute_attention_seconds(kernel, tokens)
        key = kernel, tokens.batch * tokens.count_tokens(kernel.stream), tokens.split
        kernel_seconds = self._seen.get(key)
        if kernel_seconds is None:
            kernel_seconds = self._seen[key] = self._compute_roofline_seconds(*key)
        return kernel_seconds

    def _compute_attention_seconds(self, kernel: RooflineKernel, tokens: RankTokens) -> float:
        keys = tokens.count_keys(kernel.keys)
        queries = tokens.count_tokens(kernel.stream) * tokens.attended
        channels, head_dim = kernel.size
        # Two products, of queries with keys and with values, each of a multiplication and an addition.
        operations = 4 * tokens.batch * queries * keys * channels * tokens.heads
        rate = self._profile.attention.interpolate(queries, keys)
        rate *= self._profile.head.interpolate(head_dim)
        return operations / rate

    def _compute_roofline_seconds(self, kernel: RooflineKernel, rows: int, split: float) -> float:
        """Compute the seconds of a kernel for some rows: a product with a rank's share of a matrix, or one pass."""
        profile = self._profile
        if kernel.kind == "matmul":
            k, n = kernel.size
            # The curve's second size is the geometric mean of a matrix's sides.
            width = (k * n / split) ** 0.5
            return 2 * rows * k * n / split / profile.matmul.interpolate(rows, width)
        size = kernel.size[0] * rows * profile.element_size
        curves = profile.pointwise
        curve = curves.get(kernel.kind, curves["pointwise"])
        return size / curve.interpolate(size)


def merge_work(works: Iterable[Work]) -> Work:
    """Merge the work of several kernels or blocks."""
    return sum(map(Counter, works), Counter[RooflineKernel]())


def get_bandwidth_share(link: Link, kind: str, n: int) -> float:
    """Return the share of a link's bandwidth that an exchange among `n` ranks has."""
    if kind == "tensor":
        return link.reduce
    if kind == "ring":
        return link.neighbours
    if kind in ("gather", "distrifusion", "pipefusion"):
        if link.gather is None:
            return link.neighbours
        return link.gather
    # All ranks are on one socket: there is only one (0), or the first has room for all.
    if not 0 < link.socket < n:
        return link.collective
    # In an all-to-all of n ranks, n^2 / 4 messages cross the link between two sockets in each direction. In that time
    # a rank sends its n - 1 messages.
    slowdown = n**2 / 4 / (n - 1) / link.crossing
    return min(link.collective, 1 / slowdown)


def compute_exposed_seconds(sending: float, overlap: float, compute: float) -> float:
    """Compute the seconds of a message without those overlapped by computing."""
    return sending * (1 - overlap) + max(0.0, sending * overlap - compute)


def compute_merging_load(profile: Profile, size: float, messages: float) -> DeviceLoad:
    """Compute the load to merge the outputs of a ring, of `size` bytes in all, one after each message."""
    if not messages:
        return DeviceLoad(0.0, 0.0)
    device = MERGING_PASSES[profile.element_size] * size / profile.pointwise["pointwise"].interpolate(size / messages)
    return DeviceLoad(device, messages * MERGING_KERNELS * profile.kernel_s)


class WarmupBlock(NamedTuple):
    """The seconds of a block that the stages of a warmup group compute together.

    Attributes:
        weights: the transfer of its weights from their stage; 0 if every member has them.
        before: its work up to its attention, before which keys are gathered.
        keys: the gather of the keys.
        after: the rest of its work.
    """

    weights: float
    before: float
    keys: float
    after: float


def compute_warmup_seconds(blocks: Sequence[WarmupBlock], ahead: int, overlap: float) -> float:
    """Compute the seconds of blocks with weights sent `ahead` blocks before their use (`weight_streaming`).

    One process group sends weights and keys in the order of their start, so a gather of keys waits for earlier weights.
    """
    now = 0.0
    # The time at which the link is free again.
    link_free = 0.0
    # The times at which the weights of each block arrive.
    arrived = []

    def start_weights(index: int) -> None:
        nonlocal now, link_free
        link_free = max(link_free, now) + blocks[index].weights
        now += (1 - overlap) * blocks[index].weights
        arrived.append(link_free)

    for index in range(min(ahead, len(blocks))):
        start_weights(index)
    for index, block in enumerate(blocks):
        if index + ahead < len(blocks):
            start_weights(index + ahead)
        now = max(now, arrived[index]) + block.before
        if block.keys:
            now = max(link_free, now) + block.keys
            link_free = now
        now += block.after
    return now

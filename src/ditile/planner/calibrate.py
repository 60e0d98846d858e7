"""Measures this machine into a profile: curves of one device, links between ranks, and what the host adds.

Every rank computes with the same number of threads; rank 0 measures the curves while the others wait. What kernels and
iterations of the loop cost besides their work is fitted to calls of a bundled model, which is in no curve.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ditile.distributed import cpus
from ditile.distributed.transport import Traffic, start_shift
from ditile.hooks.feed_forward import can_fuse, linear_gelu
from ditile.planner.disturbance import Again
from ditile.planner.profile import FUSED, Curve, Link

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
WIDTHS = (128, 256, 512, 1024, 2048)
LENGTHS = (16, 64, 256, 512, 1024, 4096)
SIZES = tuple(2**k for k in range(12, 27, 2))
MESSAGES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
HEADS, HEAD, WIDTH = 8, 64, 256
HEAD_SIZES = (16, 32, 64, 128)
PARTS = len(ROWS) + len(LENGTHS) + 1 + len(SIZES)
"""Parts that the curves of a device are measured in."""
LINK_PARTS = 9
LARGEST = 2**33  # operations of a call that is timed
BUDGET = 0.03
REPEATS = 5


class Bench:
    """Times calls on one device.

    Args:
        device, dtype: what is measured.
        done: called when a part of it is.
        group: the ranks whose links are measured; all by default.
        again: what measures again where others disturbed it; nothing by default.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, done: Callable[[], None] = lambda: None,
        group: dist.ProcessGroup | None = None, again: Again | None = None,
    ) -> None:  # fmt: skip
        self._make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.done, self.group, self._again = done, group, again or Again(lambda: 1.0, 0, 0)
        self._is_gpu = device.type == "cuda"

    def numbers(self, *shape: int) -> torch.Tensor:
        """Random numbers."""
        return torch.randn(*shape, **self._make)

    def message(self, size: int, parts: int = 1) -> torch.Tensor:
        """Random numbers of so many bytes, or of so many such parts."""
        return self.numbers(size // self._make["dtype"].itemsize * parts)

    @property
    def rank(self) -> int:
        """This rank among those of the group."""
        return dist.get_rank(self.group)

    def peer(self, rank: int) -> int:
        """The number that a rank of the group has among all."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def seconds(self, call: Callable[[], Any], budget: float = BUDGET) -> float:
        """Of a call: the shortest of some runs, none of them the first; what else the machine does only adds.

        One that fills the budget by itself is made four times.
        """
        return self._again.measured(lambda: self._shortest(call, budget))

    def part(self, measure: Callable[[], float]) -> float:
        """What a part of all that is measured comes to."""
        found = self._again.measured(measure)
        self.done()
        return found

    def _shortest(self, call: Callable[[], Any], budget: float) -> float:
        self.many(call, 1)
        once = self.many(call, 1)
        if once > budget:
            return min(once, self.many(call, 1), self.many(call, 1))
        times = max(1, min(1000, int(budget / REPEATS / max(once, 1e-7))))
        return min(self.many(call, times) for _ in range(REPEATS))

    def many(self, call: Callable[[], Any], times: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(times):
            call()
        self._wait()
        return (time.perf_counter() - began) / times

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


def matmul(bench: Bench) -> Curve:
    """Operations a second of linear layers, over (rows, width)."""

    def rate(rows: int, width: int) -> float | None:
        work = 2 * rows * width**2
        if work > LARGEST:
            return None
        x, weight, bias = bench.numbers(rows, width), bench.numbers(width, width), bench.numbers(width)
        return work / bench.seconds(lambda: functional.linear(x, weight, bias))

    return _table(bench, ROWS, WIDTHS, rate)


def attention(bench: Bench) -> Curve:
    """Operations a second of attention, over (queries, keys)."""

    def rate(queries: int, keys: int) -> float | None:
        work = 4 * queries * keys * HEADS * HEAD
        if work > LARGEST:
            return None
        q, k = bench.numbers(1, HEADS, queries, HEAD), bench.numbers(1, HEADS, keys, HEAD)
        return work / bench.seconds(lambda: functional.scaled_dot_product_attention(q, k, k))

    return _table(bench, LENGTHS, LENGTHS, rate)


def heads(bench: Bench) -> Curve:
    """Operations a second of attention over channels of a head, as a share of those with `HEAD`."""
    length, found = LENGTHS[-2], []
    for size in HEAD_SIZES:
        q, k = (bench.numbers(1, HEADS * HEAD // size, length, size) for _ in range(2))
        found.append(1 / bench.seconds(lambda q=q, k=k: functional.scaled_dot_product_attention(q, k, k)))  # type: ignore[misc]
    bench.done()
    return Curve(tuple(map(float, HEAD_SIZES)), tuple(rate / found[HEAD_SIZES.index(HEAD)] for rate in found))


def pointwise(bench: Bench) -> dict[str, Curve]:
    """Bytes a second of what goes over numbers once, by kind, over bytes read and written."""
    found: dict[str, list[float]] = {}
    for size in SIZES:
        x = bench.numbers(max(size // 8 // WIDTH, 1), WIDTH)
        y, scale, real = torch.randn_like(x), bench.numbers(1, WIDTH), x.numel() * x.element_size()
        both = bench.seconds(lambda x=x, y=y: x + y) + bench.seconds(lambda x=x, scale=scale: x * scale)  # type: ignore[misc]
        norm = bench.seconds(lambda x=x: functional.layer_norm(x, (WIDTH,)))  # type: ignore[misc]
        gelu = bench.seconds(lambda x=x: functional.gelu(x, approximate="tanh"))  # type: ignore[misc]
        woven = bench.seconds(lambda x=x, y=y: torch.stack([x, y], dim=-1))  # type: ignore[misc]
        bytes_of = {"pointwise": (5, both), "norm": (2, norm), "gelu": (2, gelu), "interleave": (4, woven)}
        if can_fuse(x.device, x.dtype):
            bytes_of[FUSED] = (2, _fused(bench, len(x), gelu))
        for name, (tensors, seconds) in bytes_of.items():
            found.setdefault(name, []).append(tensors * real / seconds)
        bench.done()
    return {name: Curve(tuple(map(float, SIZES)), tuple(rates)) for name, rates in found.items()}


def _fused(bench: Bench, rows: int, apart: float) -> float:
    """Seconds that GELU adds to the product in front of it in one kernel; a tenth of those `apart` at least."""
    x, weight, bias = bench.numbers(rows, HEAD), bench.numbers(WIDTH, HEAD), bench.numbers(WIDTH)
    both = bench.seconds(lambda: linear_gelu(x, weight, bias, "tanh"))
    return min(max(both - bench.seconds(lambda: functional.linear(x, weight, bias)), apart / 10), apart)


def _table(bench: Bench, xs: Sequence[int], ys: Sequence[int], rate: Callable[[int, int], float | None]) -> Curve:
    """A curve over two sizes; what is too large to be timed has the rate of the next smaller."""
    rows = []
    for x in xs:
        row: list[float] = []
        for y in ys:
            found = rate(x, y)
            row.append(row[-1] if found is None else found)
        rows.append(tuple(row))
        bench.done()
    return Curve(tuple(map(float, xs)), tuple(rows), tuple(map(float, ys)))


def link(bench: Bench) -> Link:
    """What joins the ranks of a group: messages from its first to its second, and collectives of all."""
    world, group = dist.get_world_size(bench.group), bench.group
    small, large = (_one_way(bench, size) for size in (MESSAGES[0], MESSAGES[-1]))
    bandwidth = MESSAGES[-1] / max(large - small, 1e-9)
    size = MESSAGES[-2]
    x = bench.message(size, world)
    parts, out = list(x.chunk(world)), torch.empty_like(x)
    exchanged = _together(bench, lambda: dist.all_to_all_single(out, x, group=group))
    tiny = bench.numbers(world)
    started = _between_work(bench, lambda: dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group))
    summed = _together(bench, lambda: dist.all_reduce(x, group=group))
    gathered = _together(bench, lambda: dist.all_gather([torch.empty_like(p) for p in parts], parts[0], group=group))
    sent = x.numel() * x.element_size() * (world - 1) / world
    once, longer = (_shifted(bench, length) for length in MESSAGES[-2:])
    return Link(
        latency_s=small, bandwidth=bandwidth, collective=_share(sent, exchanged - started, bandwidth),
        call_s=max(started - small, 0.0), neighbours=_share(MESSAGES[-1] - MESSAGES[-2], longer - once, bandwidth),
        gather=_share(sent, gathered - started, bandwidth), reduce=_share(2 * sent, summed - started, bandwidth),
        overlap=_overlap(bench),
    )  # fmt: skip


def _between_work(bench: Bench, call: Callable[[], Any]) -> float:
    """Seconds that a call adds to work, after which no rank is ready at the same time."""
    x, weight = bench.numbers(128, 512), bench.numbers(512, 512)

    def work() -> None:
        for _ in range(4):
            functional.linear(x, weight)

    def both() -> None:
        work()
        call()

    def added() -> float:
        found = []
        for _ in range(REPEATS):
            dist.barrier(bench.group)
            found.append(bench.many(both, 40) - bench.many(work, 40))
        return max(statistics.median(found), 1e-7)

    both()
    work()
    return bench.part(added)


def _share(sent: float, seconds: float, bandwidth: float) -> float:
    return min(1.0, sent / max(seconds, 1e-9) / bandwidth)


def _one_way(bench: Bench, size: int) -> float:
    """Seconds of a message: half of there and back."""
    x, group, rank = bench.message(size), bench.group, bench.rank
    first, second = bench.peer(0), bench.peer(1)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(x, second, group)
            dist.recv(x, second, group)
        elif rank == 1:
            dist.recv(x, first, group)
            dist.send(x, first, group)

    return _together(bench, there_and_back) / 2


def _shifted(bench: Bench, size: int) -> float:
    """Seconds in which each rank sends so many bytes to the next one, as a ring does."""
    x, group = bench.message(size), bench.group or dist.group.WORLD
    assert group is not None
    return _together(bench, lambda: start_shift(x, x.shape, group, Traffic(), "ring").wait())


def _together(bench: Bench, call: Callable[[], Any], times: int = 10) -> float:
    """Seconds of a call that all ranks make, the same number of times on each."""

    def shortest() -> float:
        found = []
        for _ in range(REPEATS):
            dist.barrier(bench.group)
            found.append(bench.many(call, times))
        return min(found)

    call()
    return bench.part(shortest)


def _overlap(bench: Bench) -> float:
    """The share of a message's time under which both ends compute on: 1 if it costs no time at all."""
    rank, size, first, second = bench.rank, MESSAGES[-1], bench.peer(0), bench.peer(1)
    x, weight, message = bench.numbers(256, 512), bench.numbers(512, 512), bench.message(size)

    def compute() -> None:
        for _ in range(6):  # about as long as the message
            functional.linear(x, weight)

    def started() -> Any:
        if rank == 0:
            return dist.isend(message, second, bench.group)
        return dist.irecv(message, first, bench.group)

    def send() -> None:
        if rank < 2:
            started().wait()

    def both() -> None:
        work = started() if rank < 2 else None
        compute()
        if work is not None:
            work.wait()

    def share() -> float:
        found = []
        for _ in range(2 * REPEATS):  # in turn: what is sought is a difference
            dist.barrier(bench.group)
            alone, sent, together = (bench.many(call, 5) for call in (compute, send, both))
            found.append((alone + sent - together) / min(alone, sent))
        return min(1.0, max(0.0, statistics.median(found)))

    for call in (compute, send, both):
        call()
    return bench.part(share)


def provenance() -> str:
    """What machine, with what, when."""
    when = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return f"measured by ditile calibrate on {machine()}, torch {torch.__version__}, {when}"


def machine() -> str:
    """The device's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpus.name()}, {cpus.cores()} cores"

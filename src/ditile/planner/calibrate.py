"""Measures this machine into a profile: curves of one device, links between ranks, and what the host adds.

Every rank computes with the same number of threads; rank 0 measures the curves while the others wait. What kernels and
iterations of the loop cost besides their work is fitted to calls of a bundled model, which is in no curve.

A profile fitted to calls that were measured: what curves of single kernels, and loops of exchanges, do not say.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from ditile.distributed import cpus
from ditile.distributed.transport import Traffic, start_shift
from ditile.hooks.fused import can_fuse_gelu, compute_linear_gelu
from ditile.planner.disturbance import DisturbanceGuard
from ditile.planner.profile import FUSED, Curve, Link, Profile

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
        self,
        device: torch.device,
        dtype: torch.dtype,
        done: Callable[[], None] = lambda: None,
        group: dist.ProcessGroup | None = None,
        again: DisturbanceGuard | None = None,
    ) -> None:
        self._make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.done, self.group, self._again = done, group, again or DisturbanceGuard(lambda: 1.0, 0, 0)
        self._is_gpu = device.type == "cuda"

    def make_random_tensor(self, *shape: int) -> torch.Tensor:
        """Random numbers."""
        return torch.randn(*shape, **self._make)

    def make_message(self, size: int, parts: int = 1) -> torch.Tensor:
        """Random numbers of so many bytes, or of so many such parts."""
        return self.make_random_tensor(size // self._make["dtype"].itemsize * parts)

    @property
    def group_rank(self) -> int:
        """This rank among those of the group."""
        return dist.get_rank(self.group)

    def get_global_rank(self, rank: int) -> int:
        """The number that a rank of the group has among all."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def measure_seconds(self, call: Callable[[], Any], budget: float = BUDGET) -> float:
        """Of a call: the shortest of some runs, none of them the first; what else the machine does only adds.

        One that fills the budget by itself is made four times.
        """
        return self._again.measure_undisturbed(lambda: self._time_shortest_run(call, budget))

    def measure_and_report(self, measure: Callable[[], float]) -> float:
        """What a part of all that is measured comes to."""
        value = self._again.measure_undisturbed(measure)
        self.done()
        return value

    def _time_shortest_run(self, call: Callable[[], Any], budget: float) -> float:
        self.time_average_call(call, 1)
        once = self.time_average_call(call, 1)
        if once > budget:
            return min(once, self.time_average_call(call, 1), self.time_average_call(call, 1))
        times = max(1, min(1000, int(budget / REPEATS / max(once, 1e-7))))
        return min(self.time_average_call(call, times) for _ in range(REPEATS))

    def time_average_call(self, call: Callable[[], Any], times: int) -> float:
        self._synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        self._synchronize()
        return (time.perf_counter() - began) / times

    def _synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


def measure_matmul(bench: Bench) -> Curve:
    """Operations a second of linear layers, over (rows, width)."""

    def measure_matmul_rate(rows: int, width: int) -> float | None:
        work = 2 * rows * width**2
        if work > LARGEST:
            return None
        x, weight, bias = (
            bench.make_random_tensor(rows, width),
            bench.make_random_tensor(width, width),
            bench.make_random_tensor(width),
        )
        return work / bench.measure_seconds(lambda: functional.linear(x, weight, bias))

    return _tabulate_rates(bench, ROWS, WIDTHS, measure_matmul_rate)


def measure_attention(bench: Bench) -> Curve:
    """Operations a second of attention, over (queries, keys)."""

    def measure_attention_rate(queries: int, keys: int) -> float | None:
        work = 4 * queries * keys * HEADS * HEAD
        if work > LARGEST:
            return None
        q, k = bench.make_random_tensor(1, HEADS, queries, HEAD), bench.make_random_tensor(1, HEADS, keys, HEAD)
        return work / bench.measure_seconds(lambda: functional.scaled_dot_product_attention(q, k, k))

    return _tabulate_rates(bench, LENGTHS, LENGTHS, measure_attention_rate)


def measure_head_sizes(bench: Bench) -> Curve:
    """Operations a second of attention over channels of a head, as a share of those with `HEAD`."""
    length, rates = LENGTHS[-2], []
    for size in HEAD_SIZES:
        q, k = (bench.make_random_tensor(1, HEADS * HEAD // size, length, size) for _ in range(2))
        rates.append(1 / bench.measure_seconds(lambda q=q, k=k: functional.scaled_dot_product_attention(q, k, k)))  # type: ignore[misc]
    bench.done()
    return Curve(tuple(map(float, HEAD_SIZES)), tuple(rate / rates[HEAD_SIZES.index(HEAD)] for rate in rates))


def measure_pointwise(bench: Bench) -> dict[str, Curve]:
    """Bytes a second of what goes over numbers once, by kind, over bytes read and written."""
    rates_by_kind: dict[str, list[float]] = {}
    for size in SIZES:
        x = bench.make_random_tensor(max(size // 8 // WIDTH, 1), WIDTH)
        y, scale, real = torch.randn_like(x), bench.make_random_tensor(1, WIDTH), x.numel() * x.element_size()
        both = bench.measure_seconds(lambda x=x, y=y: x + y) + bench.measure_seconds(lambda x=x, scale=scale: x * scale)  # type: ignore[misc]
        norm = bench.measure_seconds(lambda x=x: functional.layer_norm(x, (WIDTH,)))  # type: ignore[misc]
        gelu = bench.measure_seconds(lambda x=x: functional.gelu(x, approximate="tanh"))  # type: ignore[misc]
        woven = bench.measure_seconds(lambda x=x, y=y: torch.stack([x, y], dim=-1))  # type: ignore[misc]
        bytes_of = {"pointwise": (5, both), "norm": (2, norm), "gelu": (2, gelu), "interleave": (4, woven)}
        if can_fuse_gelu(x.device, x.dtype):
            bytes_of[FUSED] = (2, _time_fused_gelu(bench, len(x), gelu))
        for name, (tensors, seconds) in bytes_of.items():
            rates_by_kind.setdefault(name, []).append(tensors * real / seconds)
        bench.done()
    return {name: Curve(tuple(map(float, SIZES)), tuple(rates)) for name, rates in rates_by_kind.items()}


def _time_fused_gelu(bench: Bench, rows: int, apart: float) -> float:
    """Seconds that GELU adds to the product in front of it in one kernel; a tenth of those `apart` at least."""
    x, weight, bias = (
        bench.make_random_tensor(rows, HEAD),
        bench.make_random_tensor(WIDTH, HEAD),
        bench.make_random_tensor(WIDTH),
    )
    both = bench.measure_seconds(lambda: compute_linear_gelu(x, weight, bias, "tanh"))
    return min(max(both - bench.measure_seconds(lambda: functional.linear(x, weight, bias)), apart / 10), apart)


def _tabulate_rates(
    bench: Bench, xs: Sequence[int], ys: Sequence[int], rate: Callable[[int, int], float | None]
) -> Curve:
    """A curve over two sizes; what is too large to be timed has the rate of the next smaller."""
    rows = []
    for x in xs:
        row: list[float] = []
        for y in ys:
            cell_rate = rate(x, y)
            row.append(row[-1] if cell_rate is None else cell_rate)
        rows.append(tuple(row))
        bench.done()
    return Curve(tuple(map(float, xs)), tuple(rows), tuple(map(float, ys)))


def measure_link(bench: Bench) -> Link:
    """What joins the ranks of a group: messages from its first to its second, and collectives of all."""
    world, group = dist.get_world_size(bench.group), bench.group
    small, large = (_time_one_way(bench, size) for size in (MESSAGES[0], MESSAGES[-1]))
    bandwidth = MESSAGES[-1] / max(large - small, 1e-9)
    size = MESSAGES[-2]
    x = bench.make_message(size, world)
    parts, out = list(x.chunk(world)), torch.empty_like(x)
    exchanged = _time_on_all_ranks(bench, lambda: dist.all_to_all_single(out, x, group=group))
    tiny = bench.make_random_tensor(world)
    started = _time_between_work(bench, lambda: dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group))
    summed = _time_on_all_ranks(bench, lambda: dist.all_reduce(x, group=group))
    gathered = _time_on_all_ranks(
        bench, lambda: dist.all_gather([torch.empty_like(p) for p in parts], parts[0], group=group)
    )
    sent = x.numel() * x.element_size() * (world - 1) / world
    once, longer = (_time_ring_shift(bench, length) for length in MESSAGES[-2:])
    return Link(
        latency_s=small,
        bandwidth=bandwidth,
        collective=_get_achieved_share(sent, exchanged - started, bandwidth),
        call_s=max(started - small, 0.0),
        neighbours=_get_achieved_share(MESSAGES[-1] - MESSAGES[-2], longer - once, bandwidth),
        gather=_get_achieved_share(sent, gathered - started, bandwidth),
        reduce=_get_achieved_share(2 * sent, summed - started, bandwidth),
        overlap=_measure_overlap(bench),
    )


def _time_between_work(bench: Bench, call: Callable[[], Any]) -> float:
    """Seconds that a call adds to work, after which no rank is ready at the same time."""
    x, weight = bench.make_random_tensor(128, 512), bench.make_random_tensor(512, 512)

    def compute_linears() -> None:
        for _ in range(4):
            functional.linear(x, weight)

    def compute_and_call() -> None:
        compute_linears()
        call()

    def measure_added_seconds() -> float:
        differences = []
        for _ in range(REPEATS):
            dist.barrier(bench.group)
            differences.append(
                bench.time_average_call(compute_and_call, 40) - bench.time_average_call(compute_linears, 40)
            )
        return max(statistics.median(differences), 1e-7)

    compute_and_call()
    compute_linears()
    return bench.measure_and_report(measure_added_seconds)


def _get_achieved_share(sent: float, seconds: float, bandwidth: float) -> float:
    return min(1.0, sent / max(seconds, 1e-9) / bandwidth)


def _time_one_way(bench: Bench, size: int) -> float:
    """Seconds of a message: half of there and back."""
    x, group, rank = bench.make_message(size), bench.group, bench.group_rank
    first, second = bench.get_global_rank(0), bench.get_global_rank(1)

    def send_there_and_back() -> None:
        if rank == 0:
            dist.send(x, second, group)
            dist.recv(x, second, group)
        elif rank == 1:
            dist.recv(x, first, group)
            dist.send(x, first, group)

    return _time_on_all_ranks(bench, send_there_and_back) / 2


def _time_ring_shift(bench: Bench, size: int) -> float:
    """Seconds in which each rank sends so many bytes to the next one, as a ring does."""
    x, group = bench.make_message(size), bench.group or dist.group.WORLD
    assert group is not None
    return _time_on_all_ranks(bench, lambda: start_shift(x, x.shape, group, Traffic(), "ring").wait_for_tensors())


def _time_on_all_ranks(bench: Bench, call: Callable[[], Any], times: int = 10) -> float:
    """Seconds of a call that all ranks make, the same number of times on each."""

    def measure_shortest() -> float:
        timings = []
        for _ in range(REPEATS):
            dist.barrier(bench.group)
            timings.append(bench.time_average_call(call, times))
        return min(timings)

    call()
    return bench.measure_and_report(measure_shortest)


def _measure_overlap(bench: Bench) -> float:
    """The share of a message's time under which both ends compute on: 1 if it costs no time at all."""
    rank, size, first, second = bench.group_rank, MESSAGES[-1], bench.get_global_rank(0), bench.get_global_rank(1)
    x, weight, message = (
        bench.make_random_tensor(256, 512),
        bench.make_random_tensor(512, 512),
        bench.make_message(size),
    )

    def compute_meanwhile() -> None:
        for _ in range(6):  # about as long as the message
            functional.linear(x, weight)

    def start_message() -> Any:
        if rank == 0:
            return dist.isend(message, second, bench.group)
        return dist.irecv(message, first, bench.group)

    def send_message() -> None:
        if rank < 2:
            start_message().wait()

    def compute_while_sending() -> None:
        work = start_message() if rank < 2 else None
        compute_meanwhile()
        if work is not None:
            work.wait()

    def measure_hidden_share() -> float:
        shares = []
        for _ in range(2 * REPEATS):  # in turn: what is sought is a difference
            dist.barrier(bench.group)
            alone, sent, together = (
                bench.time_average_call(call, 5) for call in (compute_meanwhile, send_message, compute_while_sending)
            )
            shares.append((alone + sent - together) / min(alone, sent))
        return min(1.0, max(0.0, statistics.median(shares)))

    for call in (compute_meanwhile, send_message, compute_while_sending):
        call()
    return bench.measure_and_report(measure_hidden_share)


def describe_provenance() -> str:
    """What machine, with what, when."""
    when = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return f"measured by ditile calibrate on {get_device_name()}, torch {torch.__version__}, {when}"


def get_device_name() -> str:
    """The device's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpus.read_cpu_name()}, {cpus.count_usable_cores()} cores"


EXPECTED = 0.1
"""What it weighs that bytes take as long in a call as in a loop: calls are off by a twentieth, that by a half."""


class SharedCall(NamedTuple):
    """A call that all ranks make together.

    Attributes:
        took: seconds.
        known: those of its work, without its exchanges.
        sending: those of its exchanges' bytes, at the profile's rate.
        exchanges: how many there are.
    """

    took: float
    known: float
    sending: float
    exchanges: float


def fit_kernel_costs(profile: Profile, measured: Sequence[tuple[float, float, float]]) -> Profile:
    """The profile by which it comes closest to calls that were measured.

    What a kernel costs besides its work is `kernel_s`; and all rates have one factor, for a call finds caches colder
    than a kernel that runs over and over.

    Args:
        profile: with curves.
        measured: of each call its seconds in the transformer, those of its work on the curves alone, its kernels.
    """
    terms = torch.tensor([[known / took, kernels / took] for took, known, kernels in measured], dtype=torch.float64)
    slower, kernel_s = _solve_least_squares(terms, torch.ones(len(terms), dtype=terms.dtype))
    return dataclasses.replace(
        profile,
        kernel_s=kernel_s,
        matmul=_slow_down_curve(profile.matmul, slower),
        attention=_slow_down_curve(profile.attention, slower),
        pointwise={name: _slow_down_curve(curve, slower) for name, curve in profile.pointwise.items()},
    )


def fit_collectives(profile: Profile, exchanged: Sequence[SharedCall], summed: Sequence[SharedCall]) -> Profile:
    """The profile whose collectives start as slowly, and move bytes as slowly, as in calls that ranks make together.

    In a call ranks meet at every exchange, one of them later than the other; in a loop of exchanges they are in step.

    Args:
        profile: with everything else.
        exchanged: calls with all-to-alls; `call_s` and `collective` are fitted to them.
        summed: calls with all-reduces; `sum_s` and `reduce`.
    """
    link = profile.link
    if exchanged:
        slower, start = _fit_exchanges(exchanged)
        link = dataclasses.replace(link, call_s=start, collective=link.collective / slower)
    if summed:
        slower, start = _fit_exchanges(summed)
        link = dataclasses.replace(link, sum_s=start, reduce=link.reduce / slower)
    return dataclasses.replace(profile, link=link)


def _fit_exchanges(calls: Sequence[SharedCall]) -> tuple[float, float]:
    """How many times as long bytes take as in a loop, and the seconds that an exchange takes besides.

    Two sizes hardly tell the two apart where calls differ by a few per cent from turn to turn, so what they leave open
    goes to the start of an exchange: bytes are expected at the loop's rate.
    """
    terms = [[call.sending / call.took, call.exchanges / call.took] for call in calls]
    wanted = [1 - call.known / call.took for call in calls]
    terms, wanted = [*terms, [EXPECTED, 0.0]], [*wanted, EXPECTED]
    return _solve_least_squares(torch.tensor(terms, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))


def _solve_least_squares(terms: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """The two numbers, the first not below 1 and the second not below 0, by which sums of terms come closest."""
    slower, start = torch.linalg.lstsq(terms, wanted[:, None], driver="gelsd").solution.flatten().tolist()
    if start < 0:
        slower, start = float((terms[:, 0] * wanted).sum() / terms[:, 0].square().sum()), 0.0
    if slower < 1:
        slower, rest = 1.0, wanted - terms[:, 0]
        start = max(0.0, float((terms[:, 1] * rest).sum() / terms[:, 1].square().sum()))
    return slower, start


def _slow_down_curve(curve: Curve, slower: float) -> Curve:
    def divide_rates(row: Any) -> Any:
        return tuple(divide_rates(rate) for rate in row) if isinstance(row, tuple) else row / slower

    return dataclasses.replace(curve, rates=divide_rates(curve.rates))

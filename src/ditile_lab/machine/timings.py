"""Measures this machine for a profile: curves of one device, links between ranks, and a fit to real calls.

Every rank computes with the same number of threads. One rank measures the curves. The curves do not show the cost of a
kernel besides its work, so it is fitted to calls of the bundled models.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ditile.distributed.transport import Traffic, start_shift
from ditile.planner.profile import Curve, Link, Profile

# The sizes go from a patch of few tokens to a whole image; a curve is interpolated between them.
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
WIDTHS = (128, 256, 512, 1024, 2048)
LENGTHS = (16, 64, 256, 512, 1024, 4096)
SIZES = tuple(2**k for k in range(12, 27, 2))
# These are bytes. The shortest message shows the fixed cost of each; two lengths far apart show the bandwidth.
MESSAGES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
# These are the heads of attention, the channels of each, and the width of rows that pointwise kernels read.
HEADS = 8
HEAD = 64
WIDTH = 256
HEAD_SIZES = (16, 32, 64, 128)
PARTS = len(ROWS) + len(LENGTHS) + 1 + len(SIZES)
LINK_PARTS = 10
"""The numbers of parts in a progress bar, for the curves and for a link."""
LARGEST = 2**33
"""Operations of the largest timed call."""
BUDGET = 0.03
"""Seconds for which a call is repeated."""
RATED_SECONDS = 0.5
"""The time over which a rank is rated: a limit on a CPU, such as a quota, lets it compute for a tenth of a second."""
RATED_SIZES = {"cpu": (256, 512), "cuda": (4096, 3072)}
"""Kind of device -> tokens and channels of the kernels by which ranks are compared; a GPU needs more to be busy."""
REPEATS = 5
"""The number of parts into which `BUDGET` is divided."""


class Bench:
    """Times calls on one device.

    Args:
        device, dtype: the device and the type of the measured tensors.
        done: called after each part of the measurements.
        group: the ranks whose links are measured; all by default.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        done: Callable[[], None] = lambda: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.done = done
        self.group = group

    def make_random_tensor(self, *shape: int) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def make_linear(self, rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the input, the weight and the bias of a linear layer."""
        return self.make_random_tensor(rows, k), self.make_random_tensor(n, k), self.make_random_tensor(n)

    def make_message(self, size: int, parts: int = 1) -> torch.Tensor:
        """Return random numbers of `size` bytes, or of `parts` times as many."""
        return self.make_random_tensor(size // self.dtype.itemsize * parts)

    def measure_seconds(self, call: Callable[[], Any]) -> float:
        """Return the shortest time of a call without the first run: other work on the machine can only add to it."""
        # The first call allocates memory and chooses kernels.
        self.time_average_call(call, 1)
        once = self.time_average_call(call, 1)
        # A long call is its own average; three of them are enough.
        if once > BUDGET:
            return min(once, self.time_average_call(call, 1), self.time_average_call(call, 1))
        fitting = int(BUDGET / REPEATS / max(once, 1e-7))
        times = max(1, min(1000, fitting))
        return min(self.time_average_call(call, times) for _ in range(REPEATS))

    def time_average_call(self, call: Callable[[], Any], times: int) -> float:
        """Return the mean seconds of a call that is repeated `times` times."""
        self._synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        self._synchronize()
        return (time.perf_counter() - began) / times

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure_matmul(bench: Bench) -> Curve:
    """Measure the operations a second of linear layers, over (rows, width)."""

    def prepare_linear(rows: int, width: int) -> Callable[[], Any]:
        operands = bench.make_linear(rows, width, width)
        return lambda: functional.linear(*operands)

    return _tabulate_rates(bench, ROWS, WIDTHS, lambda rows, width: 2 * rows * width**2, prepare_linear)


def measure_attention(bench: Bench) -> Curve:
    """Measure the operations a second of attention, over (queries, keys)."""

    def prepare_attention(queries: int, keys: int) -> Callable[[], Any]:
        q = bench.make_random_tensor(1, HEADS, queries, HEAD)
        k = bench.make_random_tensor(1, HEADS, keys, HEAD)
        return lambda: functional.scaled_dot_product_attention(q, k, k)

    return _tabulate_rates(bench, LENGTHS, LENGTHS, lambda q, k: 4 * q * k * HEADS * HEAD, prepare_attention)


def _tabulate_rates(
    bench: Bench,
    xs: Sequence[int],
    ys: Sequence[int],
    count_operations: Callable[[int, int], int],
    prepare: Callable[[int, int], Callable[[], Any]],
) -> Curve:
    """Tabulate a curve over two sizes; a call too large to time gets the rate of the next smaller call."""
    rows = []
    for x in xs:
        row: list[float] = []
        for y in ys:
            work = count_operations(x, y)
            # It would take seconds, and its rate equals that of the largest size before.
            if work > LARGEST:
                row.append(row[-1])
            else:
                row.append(work / bench.measure_seconds(prepare(x, y)))
        rows.append(tuple(row))
        bench.done()
    return Curve(tuple(map(float, xs)), tuple(rows), tuple(map(float, ys)))


def measure_head_sizes(bench: Bench) -> Curve:
    """Measure attention's operations a second over channels of a head, relative to `HEAD` channels."""
    length = LENGTHS[-2]
    rates = {}
    for size in HEAD_SIZES:
        q = bench.make_random_tensor(1, HEADS * HEAD // size, length, size)
        k = bench.make_random_tensor(1, HEADS * HEAD // size, length, size)
        attend = functools.partial(functional.scaled_dot_product_attention, q, k, k)
        rates[size] = 1 / bench.measure_seconds(attend)
    bench.done()
    shares = [rate / rates[HEAD] for rate in rates.values()]
    return Curve(tuple(map(float, HEAD_SIZES)), tuple(shares))


def measure_pointwise(bench: Bench) -> dict[str, Curve]:
    """Measure the bytes a second of operators that read every number once, by kind, over bytes read and written."""
    rates_by_kind: dict[str, list[float]] = {}
    for size in SIZES:
        for name, rate in _measure_pointwise_rates(bench, max(size // 8 // WIDTH, 1)).items():
            rates_by_kind.setdefault(name, []).append(rate)
        bench.done()
    sizes = tuple(map(float, SIZES))
    return {name: Curve(sizes, tuple(rates)) for name, rates in rates_by_kind.items()}


def _measure_pointwise_rates(bench: Bench, rows: int) -> dict[str, float]:
    x = bench.make_random_tensor(rows, WIDTH)
    y = bench.make_random_tensor(rows, WIDTH)
    scale = bench.make_random_tensor(1, WIDTH)
    both = bench.measure_seconds(lambda: x + y) + bench.measure_seconds(lambda: x * scale)
    # These are counts of tensors read and written: x + y takes three, x * scale two, and a stack doubles its inputs.
    tensors_and_seconds = {
        "pointwise": (5, both),
        "norm": (2, bench.measure_seconds(lambda: functional.layer_norm(x, (WIDTH,)))),
        "gelu": (2, bench.measure_seconds(lambda: functional.gelu(x, approximate="tanh"))),
        "interleave": (4, bench.measure_seconds(lambda: torch.stack([x, y], dim=-1))),
    }
    return {name: tensors * x.nbytes / seconds for name, (tensors, seconds) in tensors_and_seconds.items()}


def measure_rank_rate(bench: Bench) -> float:
    """Measure how often a second this rank runs some kernels of a block, while all ranks of the group do."""
    rows, width = RATED_SIZES.get(bench.device.type, RATED_SIZES["cuda"])
    x, weight, bias = bench.make_linear(rows, width, width)
    q = bench.make_random_tensor(1, HEADS, rows, HEAD)

    def compute_kernels() -> None:
        out = functional.linear(x, weight, bias)
        functional.layer_norm(out, out.shape[-1:])
        functional.scaled_dot_product_attention(q, q, q)

    once = bench.measure_seconds(compute_kernels)
    times = max(1, int(RATED_SECONDS / once))
    rates = []
    for _ in range(REPEATS):
        dist.barrier(bench.group)
        rates.append(1 / bench.time_average_call(compute_kernels, times))
    bench.done()
    # Other work on the machine can only lower the rate, so the best one counts.
    return max(rates)


def measure_link(bench: Bench) -> Link:
    """Measure the link between the ranks of a group: messages from the first to the second, and collectives of all."""
    world = dist.get_world_size(bench.group)
    group = bench.group or dist.group.WORLD
    assert group is not None
    small = _time_one_way(bench, MESSAGES[0])
    large = _time_one_way(bench, MESSAGES[-1])
    # The difference of two lengths cancels the fixed cost of a message.
    bandwidth = MESSAGES[-1] / max(large - small, 1e-9)
    x = bench.make_message(MESSAGES[-2], world)
    tiny = bench.make_random_tensor(world)
    parts = list(x.chunk(world))
    out = torch.empty_like(x)
    sent = x.nbytes * (world - 1) / world

    def get_achieved_share(size: float, seconds: float) -> float:
        # A difference of two times may be zero or negative.
        return min(1.0, size / max(seconds, 1e-9) / bandwidth)

    exchanged = _time_on_all_ranks(bench, lambda: dist.all_to_all_single(out, x, group=group))
    started = _time_between_work(bench, lambda: dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group))
    summed = _time_on_all_ranks(bench, lambda: dist.all_reduce(x, group=group))
    sum_started = _time_between_work(bench, lambda: dist.all_reduce(tiny, group=group))
    gathered = _time_on_all_ranks(bench, lambda: dist.all_gather(list(out.chunk(world)), parts[0], group=group))
    shorter = _time_shift(bench, group, MESSAGES[-2])
    longer = _time_shift(bench, group, MESSAGES[-1])
    return Link(
        latency_s=small,
        bandwidth=bandwidth,
        collective=get_achieved_share(sent, exchanged - started),
        call_s=max(started - small, 0.0),
        sum_s=max(sum_started - small, 0.0),
        neighbours=get_achieved_share(MESSAGES[-1] - MESSAGES[-2], longer - shorter),
        gather=get_achieved_share(sent, gathered - started),
        reduce=get_achieved_share(2 * sent, summed - sum_started),
        overlap=_measure_overlap(bench),
    )


def _time_shift(bench: Bench, group: dist.ProcessGroup, size: int) -> float:
    """Time a shift, in which each rank sends a message to the next one."""
    x = bench.make_message(size)
    return _time_on_all_ranks(bench, lambda: start_shift(x, x.shape, group, Traffic(), "ring").wait_for_tensors())


def _time_between_work(bench: Bench, call: Callable[[], Any]) -> float:
    """Time the seconds that a call adds to some work. After work, ranks are not ready together, like in real calls."""
    x, weight, bias = bench.make_linear(128, 512, 512)

    def compute_linears() -> None:
        for _ in range(4):
            functional.linear(x, weight, bias)

    def compute_and_call() -> None:
        compute_linears()
        call()

    # The first call is slower: it may connect ranks and allocate memory.
    compute_and_call()
    differences = []
    for _ in range(REPEATS):
        dist.barrier(bench.group)
        both = bench.time_average_call(compute_and_call, 40)
        alone = bench.time_average_call(compute_linears, 40)
        # Work before the call takes the same time on every rank, so it is subtracted.
        differences.append(both - alone)
    bench.done()
    # On a busy machine the difference may be negative.
    return max(statistics.median(differences), 1e-7)


def _get_end_ranks(bench: Bench) -> tuple[int, int, int]:
    """Return this rank's number in the group, and the global numbers of the group's first two ranks."""
    own = dist.get_rank(bench.group)
    if bench.group is None:
        return own, 0, 1
    return own, dist.get_global_rank(bench.group, 0), dist.get_global_rank(bench.group, 1)


def _time_one_way(bench: Bench, size: int) -> float:
    """Time a message one way: half of the way there and back."""
    x = bench.make_message(size)
    group = bench.group
    rank, first, second = _get_end_ranks(bench)

    def send_there_and_back() -> None:
        if rank == 0:
            dist.send(x, second, group)
            dist.recv(x, second, group)
        elif rank == 1:
            dist.recv(x, first, group)
            dist.send(x, first, group)

    return _time_on_all_ranks(bench, send_there_and_back) / 2


def _time_on_all_ranks(bench: Bench, call: Callable[[], Any]) -> float:
    """Time a call that all ranks make, the same number of times on each."""
    call()
    timings = []
    for _ in range(REPEATS):
        # Ranks start together; otherwise the first would wait for the last within the measurement.
        dist.barrier(bench.group)
        timings.append(bench.time_average_call(call, 10))
    bench.done()
    return min(timings)


def _measure_overlap(bench: Bench) -> float:
    """Measure the share of a message's time during which both ends can compute: 1 if the message costs no time."""
    rank, first, second = _get_end_ranks(bench)
    operands = bench.make_linear(256, 512, 512)
    message = bench.make_message(MESSAGES[-1])

    def compute_meanwhile() -> None:
        # This takes about as long as the message.
        for _ in range(6):
            functional.linear(*operands)

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

    calls = (compute_meanwhile, send_message, compute_while_sending)

    for call in calls:
        call()
    shares = []
    # The three calls take turns, because their share is a difference of times.
    for _ in range(2 * REPEATS):
        dist.barrier(bench.group)
        alone, sent, together = (bench.time_average_call(call, 5) for call in calls)
        # The time of both separately, minus their time together, was hidden.
        shares.append((alone + sent - together) / min(alone, sent))
    bench.done()
    return min(1.0, max(0.0, statistics.median(shares)))


def fit_kernel_costs(profile: Profile, measured: Sequence[tuple[float, float, float]]) -> Profile:
    """Fit kernel costs to measured calls by least squares of relative errors, and return the fitted profile.

    `kernel_s`, at least 0, is the cost of a kernel besides its work. All rates are divided by one factor, at least 1,
    because a kernel in a real call finds colder CPU caches than a repeated one.

    Args:
        profile: the profile, with curves.
        measured: for each call its seconds in the transformer, the seconds that the curves predict, and its kernels.
    """
    work = torch.tensor([predicted / seconds for seconds, predicted, _ in measured], dtype=torch.float64)
    kernels = torch.tensor([count / seconds for seconds, _, count in measured], dtype=torch.float64)
    terms = torch.stack([work, kernels], 1)
    ones = torch.ones(len(work), 1, dtype=work.dtype)
    slower, kernel_s = torch.linalg.lstsq(terms, ones, driver="gelsd").solution.flatten().tolist()
    # Fitted costs must not be negative: the remaining term is fitted again with the bound in place of this one.
    if kernel_s < 0:
        slower = float(work.sum() / work.square().sum())
        kernel_s = 0.0
    if slower < 1:
        slower = 1.0
        residuals = kernels * (1 - work)
        kernel_s = max(0.0, float(residuals.sum() / kernels.square().sum()))
    return dataclasses.replace(profile.slow_down(slower), kernel_s=kernel_s)

"""The profile of a machine: how fast its devices compute, and the bandwidth of its links. It is kept as JSON.

Curves are interpolated between their points on logarithmic scales, and are constant outside of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ditile.distributed import files
from ditile.plan.errors import ModelError, PlanError

# Far wider than the range of any machine; products of two stay finite.
LEAST = 1e-30
MOST = 10**30
Rate = Annotated[float, Field(ge=LEAST, le=MOST, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MOST)]
# Profiles are read from files, so numbers written as strings, and unknown fields, are refused.
CONFIG = ConfigDict(strict=True, extra="forbid")
WIDE = 2048.0
"""The width of the matrices used to price encoders and decoders."""
KINDS = ("pointwise", "norm", "gelu")
"""The kinds of pointwise work that every profile has a curve for; others fall back on the first one."""


class DecodeWork(NamedTuple):
    """The work of a decode.

    Attributes:
        operations: operations in matrix products and convolutions, for each latent pixel.
        exchanges: layers with an exchange of rows or sums between ranks if the decode is divided by rows.
    """

    operations: float
    exchanges: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate over one or two sizes.

    Attributes:
        x, y: sizes of the points, rising; `y` is empty if the rate depends only on `x`.
        rates: one for each x, or a row for each x with one for each y.
    """

    x: tuple[Rate, ...]
    rates: tuple[Rate, ...] | tuple[tuple[Rate, ...], ...]
    y: tuple[Rate, ...] = ()
    __pydantic_config__ = CONFIG

    def __post_init__(self) -> None:
        for sizes in (self.x, self.y):
            for low, high in itertools.pairwise(sizes):
                if high <= low:
                    raise ValueError(f"no rising sizes: {high!r} is after {low!r}")
        lengths = set()
        for row in self.rates:
            # A rate over one size has no row.
            length = len(row) if isinstance(row, tuple) else 0
            lengths.add(length)
        has_rates = len(self.rates) == len(self.x) and lengths == {len(self.y)}
        if not self.x or not has_rates:
            raise ValueError("not one rate for each of its sizes")

    def interpolate(self, x: float, y: float = 1.0) -> float:
        """Return the rate at some sizes."""
        k, part = _locate_on_log_scale(self.x, x)
        # The neighbours on the first axis, each interpolated on the second.
        low: Any = self.rates[k]
        high: Any = self.rates[min(k + 1, len(self.x) - 1)]
        if self.y:
            low = _interpolate_row(self.y, y, low)
            high = _interpolate_row(self.y, y, high)
        return _mix_on_log_scale(low, high, part)

    def slow_down(self, slower: float) -> Curve:
        """Divide all rates of the curve by one factor."""

        def divide_rates(row: Any) -> Any:
            if isinstance(row, tuple):
                return tuple(map(divide_rates, row))
            return row / slower

        return dataclasses.replace(self, rates=divide_rates(self.rates))


def _interpolate_row(points: tuple[float, ...], value: float, rates: Sequence[float]) -> float:
    k, part = _locate_on_log_scale(points, value)
    return _mix_on_log_scale(rates[k], rates[min(k + 1, len(rates) - 1)], part)


def _mix_on_log_scale(low: float, high: float, part: float) -> float:
    return math.exp((1 - part) * math.log(low) + part * math.log(high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link between two ranks.

    Attributes:
        latency_s: seconds until the first byte of a message arrives.
        bandwidth: bytes a second of one message at a time, from one rank to another.
        collective: share of that bandwidth for each rank while all ranks of a group exchange.
        call_s: seconds of a collective besides its bytes, such as those of starting it.
        sum_s: seconds of an all-reduce besides its bytes; None if they are `call_s`.
        neighbours: share of the bandwidth while each rank sends to the next one.
        gather: share of the bandwidth in an all-gather or a broadcast, which go round a ring; None for `neighbours`.
        reduce: share of the bandwidth in an all-reduce.
        overlap: share of a message's time during which a rank can compute.
        socket: ranks of one CPU socket; 0 if there is one socket. One link joins two sockets. In each direction,
            n^2 / 4 messages of an all-to-all of n ranks cross it, but only one message between neighbours.
        crossing: share of its bandwidth that the link between sockets has while an all-to-all crosses it.
    """

    latency_s: Amount
    bandwidth: Rate
    collective: Rate = 1.0
    call_s: Amount = 0.0
    neighbours: Rate = 1.0
    reduce: Rate = 1.0
    overlap: Amount = 1.0
    socket: Count = 0
    crossing: Rate = 1.0
    sum_s: Amount | None = None
    gather: Rate | None = None
    __pydantic_config__ = CONFIG


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """The device of a rank, measured while all ranks compute.

    Attributes:
        speed: its speed divided by that of the first rank's device.
    """

    name: str
    memory_bytes: Count
    speed: Rate
    __pydantic_config__ = CONFIG

    def is_unlike(self, other: RankDevice) -> bool:
        """Return whether two devices differ so much that they should have unequal shares."""
        speeds = sorted((self.speed, other.speed))
        memories = sorted((self.memory_bytes, other.memory_bytes))
        return speeds[1] > UNLIKE * speeds[0] or memories[1] > UNLIKE * memories[0]


UNLIKE = 1.1
"""Devices are planned for one by one if their speeds or memories differ by more than this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A machine, or several alike.

    Attributes:
        source: where the numbers are from, and when.
        memory_bytes: bytes of a device's memory.
        host_memory_bytes: bytes of a host's memory, which all of its ranks share; 0 if it is not known.
        element_size: bytes of a number of the type in which the curves were measured.
        matmul: operations a second, over (rows, geometric mean of the matrix's sides).
        attention: operations a second, over (queries, keys).
        head: share of the rate of attention, over channels of a head.
        pointwise: bytes a second by kind ("pointwise", "norm", "gelu", "interleave"), over bytes.
        kernel_s: seconds of the host for each kernel.
        kernel_gap_s: seconds of the device for each kernel besides its work; small kernels take little else.
        block_s: the least seconds of the host for each call of a block, with its hooks and key stores.
        segment_s: seconds of the host for each segment of a recorded call, besides those of the message after it.
        runs_ahead: whether the host runs ahead of the device (a GPU), or is the device itself (a CPU).
        micro_s: seconds of the pipeline and its scheduler for each iteration of the loop.
        idle_bytes: memory of a process that has loaded no model yet.
        host_bandwidth: bytes a second from the host's pinned memory to a device, if each device has its own link.
        link: the link between ranks of a host.
        interlink: the link between hosts; None if there was one host.
        devices: ranks that compute at once on a host.
        together: the slowdown of work while all of them compute; `ditile calibrate` leaves it at 1.
        ranks: the measured device of each rank, over all hosts; empty if it was not measured.
        by_rank: the profile of each rank's device, if the planner tells them apart; empty if all are like this one.
        also: further facts, which the planner does not read.
    """

    name: str
    source: str
    memory_bytes: Count
    element_size: Count
    matmul: Curve
    attention: Curve
    pointwise: Mapping[str, Curve]
    kernel_s: Amount
    runs_ahead: bool
    micro_s: Amount
    link: Link
    block_s: Amount = 0.0
    kernel_gap_s: Amount = 0.0
    # Computed, not measured: a segment and its message make 31 calls of Python and C, and the host of an H200 took 3.3
    # microseconds for a call in steps without recording. The message takes 60 of these 100 microseconds.
    segment_s: Amount = 4e-5
    idle_bytes: Count = 0
    host_memory_bytes: Count = 0
    host_bandwidth: Rate = 25e9  # PCIe 4.0 x16
    interlink: Link | None = None
    devices: Annotated[int, Field(ge=1, le=MOST)] = 8
    together: Rate = 1.0
    head: Curve = Curve((64.0,), (1.0,))
    also: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[RankDevice, ...] = ()
    by_rank: tuple[Profile, ...] = ()
    __pydantic_config__ = CONFIG

    def __post_init__(self) -> None:
        missing = set(KINDS).difference(self.pointwise)
        if missing:
            raise ValueError(f"no pointwise curve of {', '.join(sorted(missing))}")

    def knows_ranks(self, count: int) -> bool:
        """Return whether the devices of `count` ranks are known, as they are if all are alike."""
        return not self.by_rank or count <= len(self.by_rank)

    def check_rank_count(self, count: int) -> None:
        """Check the number of ranks. Raises `PlanError` if devices are not alike, and are known for fewer ranks."""
        if not self.knows_ranks(count):
            known = len(self.by_rank)
            raise PlanError(
                f"{count} devices are asked for, and those of {known} rank(s) are known, which are not alike: "
                f"{self.name}; name the device of each rank (--hardware A,B,..), or calibrate with as many ranks"
            )

    @property
    def has_unlike_ranks(self) -> bool:
        """Return whether measured ranks differ so much that they should have unequal shares."""
        return any(one.is_unlike(other) for one, other in itertools.combinations(self.ranks, 2))

    def list_measured_ranks(self) -> list[Profile]:
        """List the profiles of the measured ranks, which have these curves, scaled by the speed of each rank."""
        profiles = []
        for device in self.ranks:
            slower = 1 / device.speed
            own = dataclasses.replace(self.slow_down(slower), name=device.name, memory_bytes=device.memory_bytes)
            # A CPU that is slower also starts kernels more slowly; the host of a GPU is another device.
            if not self.runs_ahead:
                own = dataclasses.replace(own, kernel_s=slower * self.kernel_s, micro_s=slower * self.micro_s)
            profiles.append(own)
        return profiles

    def get_rank_profile(self, rank: int) -> Profile:
        """Return the device of a rank, with the links of the machine."""
        if not self.by_rank:
            return self
        own = self.by_rank[rank]
        return dataclasses.replace(own, link=self.link, interlink=self.interlink, devices=self.devices)

    def compute_text_seconds(self, parameters: int, tokens: int) -> float:
        """Compute the seconds of text encoders on one rank. Each weight is read once, and multiplied with every token.

        Ranks that split the layers (text=split) compute one after the other, so they take the same time.
        """
        if not parameters * tokens:
            return 0.0
        size = parameters * self.element_size
        reading = size / self.pointwise["pointwise"].interpolate(size)
        return max(reading, 2 * parameters * tokens / self.matmul.interpolate(tokens, WIDE))

    def compute_decode_seconds(self, work: DecodeWork, pixels: int, share: float) -> float:
        """Compute the seconds to decode some latent pixels on a rank with a share of their rows; 1 is all of them.

        Convolutions are priced like products with the same number of operations; kernels that only read and write are
        not counted.
        """
        whole = work.operations * pixels / self.matmul.interpolate(pixels, WIDE)
        if share == 1:
            return whole
        return whole * share + work.exchanges * (self.link.latency_s + self.link.call_s)

    def slow_down(self, slower: float) -> Profile:
        """Divide all rates of a device by one factor."""
        return dataclasses.replace(
            self,
            matmul=self.matmul.slow_down(slower),
            attention=self.attention.slow_down(slower),
            pointwise={name: curve.slow_down(slower) for name, curve in self.pointwise.items()},
        )

    def to_json(self) -> str:
        """Format the profile in JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the profile") -> Profile:
        """Parse the JSON of `to_json`. `where` names the text in errors. Raises `ModelError` if it is not a profile."""
        try:
            values = files.parse_json(text)
            if isinstance(values, dict):
                # Profiles of older versions say how busy the machine was, which no version reads any more.
                for name in ("product_s", "disturbed"):
                    values.pop(name, None)
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except ValidationError as invalid:
            problem = invalid.errors(include_url=False)[0]
            what = ".".join(map(str, problem["loc"])) or "it"
            if not isinstance(problem["input"], dict):
                what += f"={problem['input']!r:.80}"
            what += f": {problem['msg']}"
        except ValueError as error:
            what = str(error)
        raise ModelError(f"{where} is not a profile of a machine ({what}); make one with `ditile calibrate`")

    @classmethod
    def from_json_file(cls, path: str | Path) -> Profile:
        """Read a profile from a file. Raises `ModelError` if the file cannot be read, or is not a profile."""
        try:
            text = files.read_text(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"the profile {path} cannot be read: {error}") from error
        return cls.from_json(text, str(path))


# Many plans ask for the rates of the same sizes.
@lru_cache(maxsize=65536)
def _locate_on_log_scale(points: tuple[float, ...], value: float) -> tuple[int, float]:
    """Return the point at or below a value, and its part of the way to the next one on a logarithmic scale."""
    # Outside of the measured sizes, the rate of the nearest size is used.
    if value <= points[0]:
        return 0, 0.0
    if value >= points[-1]:
        return len(points) - 1, 0.0
    k = bisect.bisect_right(points, value) - 1
    step = math.log(points[k + 1] / points[k])
    return k, math.log(value / points[k]) / step

"""The profile of a machine: how fast its devices compute, and the bandwidth of its links. It is kept as JSON.

Curves are interpolated between their points on logarithmic scales, and are constant outside of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ditile.distributed import files
from ditile.plan.errors import ModelError
from ditile.plan.numbers import is_number, is_whole_number


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate over one or two sizes.

    Attributes:
        x, y: sizes of the points, rising; `y` is empty if the rate depends only on `x`.
        rates: one for each x, or a row for each x with one for each y.
    """

    x: tuple[float, ...]
    rates: tuple[Any, ...]
    y: tuple[float, ...] = ()

    def interpolate(self, x: float, y: float = 1.0) -> float:
        """The rate at some sizes."""
        k, part = _locate_on_log_scale(self.x, x)
        # The neighbours on the first axis, each interpolated on the second.
        low = self.rates[k]
        high = self.rates[min(k + 1, len(self.x) - 1)]
        if self.y:
            low = _interpolate_row(self.y, y, low)
            high = _interpolate_row(self.y, y, high)
        return _mix_on_log_scale(low, high, part)


def _interpolate_row(points: tuple[float, ...], value: float, rates: Sequence[float]) -> float:
    k, part = _locate_on_log_scale(points, value)
    return _mix_on_log_scale(rates[k], rates[min(k + 1, len(rates) - 1)], part)


def _mix_on_log_scale(low: float, high: float, part: float) -> float:
    return math.exp((1 - part) * math.log(low) + part * math.log(high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What joins two ranks.

    Attributes:
        latency_s: seconds until the first byte of a message arrives.
        bandwidth: bytes a second of one message at a time, from one rank to another.
        collective: share of that bandwidth that each rank has while all ranks of a group exchange.
        call_s: seconds of a collective besides its bytes, such as those of starting it.
        sum_s: the same for an all-reduce; None if it is `call_s`.
        neighbours: share of the bandwidth while each rank sends to the next one.
        gather: share of it in an all-gather or a broadcast, which go round a ring; None if it is `neighbours`.
        reduce: share of it in an all-reduce.
        overlap: share of a message's time during which a rank can compute.
        socket: ranks of one CPU socket; 0 if there is one socket. One link joins two sockets. Half of an all-to-all of
            n ranks, n^2 / 4 messages, crosses it, but only one message of neighbours does.
        crossing: share of its bandwidth that the link between sockets has while an all-to-all crosses it.
    """

    latency_s: float
    bandwidth: float
    collective: float = 1.0
    call_s: float = 0.0
    neighbours: float = 1.0
    reduce: float = 1.0
    overlap: float = 1.0
    socket: int = 0
    crossing: float = 1.0
    sum_s: float | None = None
    gather: float | None = None


FUSED = "fused gelu"
"""The kind of GELU in one kernel with the product before it (`fuse_linear_gelu`), as in stale steps on CPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A machine, or several alike.

    Attributes:
        name: the name of the hardware.
        source: where the numbers are from, and when.
        memory_bytes: bytes of a device's memory.
        host_memory_bytes: bytes of a host's memory, which all of its ranks share; 0 if it is not known.
        element_size: bytes of a number of the type in which the curves were measured.
        matmul: operations a second, over (rows, geometric mean of the matrix's sides).
        attention: operations a second, over (queries, keys).
        head: share of that rate, over channels of a head.
        pointwise: bytes a second by kind ("pointwise", "norm", "gelu", "interleave"; `FUSED` where there is such a
            kernel), over bytes.
        kernel_s: seconds of the host for each kernel.
        block_s: seconds of the host for each call of a block, at least: hooks and key stores included.
        runs_ahead: whether the host runs ahead of the device (a GPU), or is the device itself (a CPU).
        micro_s: seconds of the pipeline and its scheduler for each iteration of the loop.
        idle_bytes: memory of a process that has loaded no model yet.
        host_bandwidth: bytes a second from the host's pinned memory to a device, each over a link of its own.
        link: the link between ranks of a host.
        interlink: the link between hosts; None if there was one host.
        devices: ranks that compute at once on a host.
        together: by what factor work takes longer while all of them compute; `ditile calibrate` leaves it at 1.
        also: further facts, which the planner does not read.
    """

    name: str
    source: str
    memory_bytes: int
    element_size: int
    matmul: Curve
    attention: Curve
    pointwise: Mapping[str, Curve]
    kernel_s: float
    runs_ahead: bool
    micro_s: float
    link: Link
    block_s: float = 0.0
    idle_bytes: int = 0
    host_memory_bytes: int = 0
    host_bandwidth: float = 25e9  # PCIe 4.0 x16
    interlink: Link | None = None
    devices: int = 8
    together: float = 1.0
    head: Curve = Curve((64.0,), (1.0,))
    also: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The profile as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the profile") -> Profile:
        """The inverse of `to_json`; `where` names the text in errors.

        Raises:
            ModelError: if the text is no profile.
        """
        try:
            values = dict(files.parse_json(text))
            # Profiles of older versions say how busy the machine was.
            values.pop("product_s", None)
            values.pop("disturbed", None)
            _check_fields(cls, values, "it", apart=("matmul", "attention", "head", "pointwise", "link", "interlink"))
            values |= {name: _parse_curve(values[name], name) for name in _CURVES if name in values}
            values["pointwise"] = {name: _parse_curve(curve, name) for name, curve in values["pointwise"].items()}
            values["link"] = _parse_link(values["link"], "link")
            if values.get("interlink") is not None:
                values["interlink"] = _parse_link(values["interlink"], "interlink")
            # Other kinds fall back on the general curve.
            for name in _POINTWISE:
                _ = values["pointwise"][name]  # it raises where there is none
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A KeyError has nothing but the name.
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ModelError(f"{where} is no profile of a machine ({what}); make one with `ditile calibrate`") from None

    @classmethod
    def from_json_file(cls, path: str | Path) -> Profile:
        """A profile from a file.

        Raises:
            ModelError: if the file cannot be read, or is no profile.
        """
        try:
            text = files.read_text(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"profile={str(path)!r} cannot be read: {error}") from error
        return cls.from_json(text, str(path))


_CURVES = ("matmul", "attention", "head")
_RANGE = 1e-30, 1e30
"""Of sizes and rates: far wider than any machine's, and products of two stay finite."""
_DIVISORS = {
    "bandwidth",
    "collective",
    "neighbours",
    "gather",
    "reduce",
    "crossing",
    "devices",
    "together",
    "host_bandwidth",
}
"""Fields that must be above 0."""
_POINTWISE = ("pointwise", "norm", "gelu")
"""The kinds of pointwise work that every profile has a curve for."""


def _check_fields(cls: type, values: Mapping[str, Any], what: str, apart: Sequence[str] = ()) -> None:
    """Raises `ValueError` unless the numbers of a class are finite and not below 0, and its texts are texts."""
    for field_of_class in dataclasses.fields(cls):
        name = field_of_class.name
        type_name = str(field_of_class.type)
        # Missing fields have defaults, or are refused by the class itself.
        if name in apart or name not in values:
            continue
        value: Any = values[name]
        if value is None and "None" in type_name:
            continue
        if type_name.startswith(("float", "int")):
            is_right = is_whole_number(value) if type_name == "int" else is_number(value)
            least = _RANGE[0] if name in _DIVISORS else 0
            is_right = is_right and least <= value <= _RANGE[1]
        else:
            is_right = isinstance(value, {"str": str, "bool": bool}.get(type_name, Mapping))
        if not is_right:
            raise ValueError(f"{what} has {name}={value!r:.80}")


def _parse_link(values: Mapping[str, Any], name: str) -> Link:
    _check_fields(Link, values, name)
    return Link(**values)


def _parse_curve(values: Mapping[str, Any], name: str) -> Curve:
    """A curve. Raises `ValueError` unless sizes rise, rates are above 0, and there is one for each size."""
    x = tuple(_check_sizes(values["x"], f"{name}.x"))
    y = tuple(_check_sizes(values["y"], f"{name}.y"))
    rows: list[Any] = []
    shape = set()
    for row in values["rates"]:
        is_row = isinstance(row, list)
        rates = tuple(row) if is_row else (row,)
        for rate in rates:
            if not is_number(rate) or not _RANGE[0] <= rate <= _RANGE[1]:
                raise ValueError(f"{name} has the rate {rate!r:.80}")
        rows.append(rates if is_row else row)
        shape.add(len(rates) if is_row else 0)
    if not x or len(rows) != len(x) or shape != {len(y)}:
        raise ValueError(f"{name} has not one rate for each of its sizes")
    return Curve(x, tuple(rows), y)


def _check_sizes(sizes: Sequence[Any], what: str) -> Sequence[float]:
    for low, size in zip((0.0, *sizes), sizes, strict=False):
        if not is_number(size) or not low < size <= _RANGE[1]:
            raise ValueError(f"{what} are no rising sizes: {size!r:.80} is after {low!r:.80}")
    return sizes


@lru_cache(maxsize=65536)
def _locate_on_log_scale(points: tuple[float, ...], value: float) -> tuple[int, float]:
    """The point at or below a value, and how far it is to the next one on a logarithmic scale."""
    # Outside of what was measured, the rate stays what it was at the nearest size.
    if value <= points[0]:
        return 0, 0.0
    if value >= points[-1]:
        return len(points) - 1, 0.0
    k = bisect.bisect_right(points, value) - 1
    return k, math.log(value / points[k]) / math.log(points[k + 1] / points[k])

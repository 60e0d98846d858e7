"""Profiles of hardware elsewhere: from datasheets, and from measurements in this package.

A datasheet gives the peak rates of a device. `EFFICIENCY` gives the shares of them reached by a diffusion transformer,
the same for all GPUs. `python -m benchmarks.published` fits these shares to published latencies.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ditile.plan.errors import PlanError, suggest_nearest
from ditile.planner.profile import Curve, Link, Profile

PROFILES = Path(__file__).parents[1] / "model" / "assets" / "profiles"
"""Profiles that were measured, one JSON file each."""

SOCKET = 4
"""GPUs on one CPU socket, if PCIe joins them."""
# The roofs below are smooth on logarithmic scales, so that a few powers of two are enough.
SIZES = tuple(2.0**k for k in range(0, 19, 2))
WIDTHS = tuple(2.0**k for k in range(7, 15))


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasheet:
    """A device and its links to others of its host.

    Attributes:
        flops: the peak rate of dense 16-bit matrix products with 32-bit sums, in operations a second.
        bandwidth: bytes a second of its memory.
        memory_gb: memory of the device, in 10^9 bytes.
        link: "pcie" or "nvlink".
        p2p: bytes a second from one device to another.
        source, note: where the numbers are from, and what else is known of them.
        block_s: see `Profile`; 0 if it was not measured.
        kernel_gap_s: see `Profile`; 0 if it was not measured.
        call_s: see `Link`; the value of `EFFICIENCY` if it was not measured.
        host_bandwidth: see `Profile`; nine tenths of PCIe's rate in one direction, which its protocol leaves, rounded.
    """

    flops: float
    bandwidth: float
    memory_gb: int
    link: str
    p2p: float
    source: str
    note: str = ""
    block_s: float = 0.0
    kernel_gap_s: float = 0.0
    call_s: float | None = None
    host_bandwidth: float = 25e9


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEfficiency:
    """The share of a link's bandwidth reached by transformers, and the cost of a message besides its bytes.

    Attributes:
        latency_s, call_s, crossing, reduce, overlap: see `Link`.
        exchange: share of the bandwidth between two devices that each has while all devices exchange at once, either
            with their whole socket or with neighbours.
    """

    latency_s: float
    call_s: float
    exchange: float
    crossing: float
    reduce: float
    overlap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """The share of a GPU's peak rates reached by transformers.

    Attributes:
        matmul: share of the operations in large matrices.
        matmul_half: rows x width at half of that rate.
        attention: share of the operations in long attention.
        attention_half: tokens, of queries and of keys, at half of that rate.
        memory: share of the memory's bandwidth.
        kernel_s, micro_s: see `Profile`.
    """

    matmul: float
    matmul_half: float
    attention: float
    attention_half: float
    memory: float
    kernel_s: float
    micro_s: float
    wire: LinkEfficiency


# Fitted by `python -m benchmarks.published`.
EFFICIENCY = Efficiency(
    matmul=0.638,
    matmul_half=317e3,
    attention=0.496,
    attention_half=133.0,
    memory=0.526,
    kernel_s=2.59e-5,
    micro_s=9.93e-4,
    wire=LinkEfficiency(latency_s=1.59e-4, call_s=4.23e-4, exchange=0.393, crossing=0.174, reduce=1.0, overlap=0.168),
)


@lru_cache(maxsize=1)
def read_datasheets() -> Mapping[str, Datasheet]:
    """Read the datasheet of each card.

    The rate of a link is measured for L20 and A100 only. Other NVLink cards are taken to reach the A100's share of
    their link. GeForce cards send through the host's memory, so they are taken to reach less than an L20. They have all
    16 lanes here; a board that gives two cards 8 lanes each has links of half the rate.
    """
    rows = json.loads((PROFILES.parent / "cards.json").read_text("utf-8"))
    return {name: Datasheet(**row) for name, row in rows.items()}


def list_hardware() -> list[str]:
    """List the names of the profiles in this package."""
    return sorted([*read_datasheets(), *(path.stem for path in PROFILES.glob("*.json"))])


def load_profile(name: str, interlink: str | None = None) -> Profile:
    """Load the profile of some hardware.

    Args:
        name: one of `list_hardware()`, or the device of each rank with `,` between them.
        interlink: bits a second between hosts, such as "10Gbit".

    Raises:
        PlanError: if a name is not known, devices were measured in unlike types, or the interlink is not a bandwidth.
    """
    profiles = [_load_device_profile(each.strip()) for each in name.split(",")]
    machine_profile = profiles[0]
    if len(profiles) > 1:
        machine_profile = join_devices(profiles)
    if interlink is None:
        return machine_profile
    return add_interlink(machine_profile, interlink)


def _load_device_profile(name: str) -> Profile:
    sheet = read_datasheets().get(name)
    if sheet is not None:
        return make_datasheet_profile(name, sheet, EFFICIENCY)
    if os.path.exists(PROFILES / f"{name}.json"):
        return Profile.from_json_file(PROFILES / f"{name}.json")
    hint = suggest_nearest(name, list_hardware(), cutoff=0.5)
    raise PlanError(f"hardware={name!r} is not known; {hint}")


def join_devices(profiles: Sequence[Profile]) -> Profile:
    """Join devices in the order of the ranks into the profile of one machine.

    Raises:
        PlanError: if their curves were measured with numbers of unlike sizes.
    """
    first = profiles[0]
    link = first.link
    for each in profiles:
        if each.element_size != first.element_size:
            raise PlanError(
                f"{first.name} was measured with numbers of {first.element_size} bytes and {each.name} with numbers of "
                f"{each.element_size}; name devices of one kind"
            )
        # A message is as fast as the slower of its two ends.
        if each.link.bandwidth < link.bandwidth:
            link = each.link
    by_rank = tuple(profiles)
    if by_rank.count(first) == len(by_rank):
        by_rank = ()
    name = first.name
    if by_rank:
        name = " + ".join(each.name for each in profiles)
    return dataclasses.replace(first, name=name, link=link, devices=len(profiles), by_rank=by_rank)


def make_datasheet_profile(name: str, sheet: Datasheet, reached: Efficiency) -> Profile:
    """Make the profile of a device that reaches some shares of its datasheet."""
    # Products and attentions of these sizes reach half of their rate.
    matmul_half = reached.matmul_half
    attention_half = reached.attention_half
    best = sheet.flops * reached.matmul
    matmul = []
    attention = []
    for rows in SIZES:
        sizes = [rows * width for width in WIDTHS]
        matmul.append(tuple(best * size / (size + matmul_half) for size in sizes))
        rate = sheet.flops * reached.attention * rows / (rows + attention_half)
        attention.append(tuple(rate * keys / (keys + attention_half) for keys in SIZES))
    numbers = Curve((1.0,), (sheet.bandwidth * reached.memory,))
    socket = SOCKET if sheet.link == "pcie" else 0
    call_s = reached.wire.call_s if sheet.call_s is None else sheet.call_s
    return Profile(
        name=name,
        source=f"{sheet.source}; shares fitted by benchmarks.published",
        memory_bytes=sheet.memory_gb * 10**9,
        element_size=2,
        matmul=Curve(SIZES, tuple(matmul), WIDTHS),
        attention=Curve(SIZES, tuple(attention), SIZES),
        pointwise=dict.fromkeys(("pointwise", "norm", "gelu"), numbers),
        kernel_s=reached.kernel_s,
        block_s=sheet.block_s,
        kernel_gap_s=sheet.kernel_gap_s,
        host_bandwidth=sheet.host_bandwidth,
        runs_ahead=True,
        micro_s=reached.micro_s,
        link=Link(
            latency_s=reached.wire.latency_s,
            bandwidth=sheet.p2p,
            collective=reached.wire.exchange,
            call_s=call_s,
            neighbours=reached.wire.exchange,
            reduce=reached.wire.reduce,
            overlap=reached.wire.overlap,
            socket=socket,
            crossing=reached.wire.crossing,
        ),
    )


def add_interlink(profile: Profile, interlink: str) -> Profile:
    """Add a link between hosts, in bits a second, to a profile. Its messages overlap as those within a host do."""
    # The protocol is taken to need a tenth of the bandwidth, and a message 50 microseconds from host to host.
    bits = parse_bandwidth(interlink)
    host_link = Link(
        latency_s=5e-5,
        bandwidth=bits / 8 * 0.9,
        overlap=profile.link.overlap,
        call_s=profile.link.call_s,
    )
    return dataclasses.replace(profile, interlink=host_link)


def parse_bandwidth(text: str) -> float:
    """Parse the bits a second of a text such as "100Mbit" or "10Gbit". Raises `PlanError` if it is not a bandwidth."""
    bits = _parse_amount(text, "([kmg])()bit(?:/s)?")
    if not bits:
        raise PlanError(f"interlink={text!r} is not a bandwidth; write 10Gbit, 1Gbit or 100Mbit")
    return bits


def parse_byte_amount(text: str, name: str = "memory") -> int:
    """Parse the bytes of a text such as "48GB", "40GiB" or "512MB". `name` is the option's name for errors.

    Raises:
        PlanError: if the text is not an amount.
    """
    amount = _parse_amount(text, "([kmgt])(i?)b")
    if not amount:
        raise PlanError(f"{name}={text!r} is not an amount; write 48GB or 40GiB")
    return int(amount)


def _parse_amount(text: str, unit: str) -> float:
    """Parse a number with a unit; 0 if nothing matches. The groups of `unit` are the prefix and the "i" of powers of
    1024."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text.strip().lower())
    if match is None:
        return 0.0
    amount = float(match[1])
    # GiB counts in powers of 1024, GB in powers of 1000.
    thousand = 1024.0 if match[3] else 1000.0
    for _ in range(1 + "kmgt".index(match[2])):
        amount *= thousand
    return amount

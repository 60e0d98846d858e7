"""Profiles of hardware elsewhere: from datasheets, and from measurements in this package.

A datasheet gives the peak rates of a device. `EFFICIENCY` gives the shares of them reached by a diffusion transformer,
the same for all GPUs. `python -m benchmarks.published` fits these shares to published latencies.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ditile.plan.errors import PlanError, find_nearest
from ditile.planner.profile import Curve, Link, Profile

PROFILES = Path(__file__).parents[1] / "model" / "assets" / "profiles"
"""Profiles that were measured, one JSON file each."""

SOCKET = 4
"""GPUs on one CPU socket, of those that PCIe joins."""
# The roofs below are smooth on logarithmic scales, so that a few powers of two are enough.
SIZES = tuple(2.0**k for k in range(0, 19, 2))
WIDTHS = tuple(2.0**k for k in range(7, 15))


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasheet:
    """A device and its links to others of its host.

    Attributes:
        flops: operations a second at most, of 16-bit matrices with 32-bit sums, dense.
        bandwidth: bytes a second of its memory.
        memory_gb: of a device, in 10^9 bytes.
        link: "pcie" or "nvlink".
        p2p: bytes a second from one device to another.
        source: where the numbers are from.
        block_s: see `Profile`; 0 where it was not measured.
        kernel_gap_s: see `Profile`; 0 where it was not measured.
        call_s: see `Link`; the value of `EFFICIENCY` if it was not measured.
        host_bandwidth: see `Profile`: nine tenths of PCIe's in one direction, rounded, as its protocol leaves them.
    """

    flops: float
    bandwidth: float
    memory_gb: int
    link: str
    p2p: float
    source: str
    block_s: float = 0.0
    kernel_gap_s: float = 0.0
    call_s: float | None = None
    host_bandwidth: float = 25e9


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEfficiency:
    """The share of a link's bandwidth reached by transformers, and the cost of a message besides its bytes.

    Attributes:
        latency_s, call_s, crossing, reduce, overlap: see `Link`.
        exchange: share of the bandwidth between two devices that each device has while all of them exchange, with all
            of their socket or with their neighbours.
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

_NVIDIA = "NVIDIA's datasheet"
_RTX = "NVIDIA's whitepaper of the architecture"
_H100_BLOCK = 1.5e-3
"""Measured on one H100 with torch 2.11, without compiling: a call of a block of FLUX.1-dev for a patch."""
_H200_BLOCK = 1.7e-3
_H200_CALL = 6e-5
"""Measured on one H200 with torch 2.11, without compiling or recorded steps: what the host needs for a call of a block
of FLUX.1-dev, and more for a message of it. Least squares over ranks alone at 1024 px, each of which is within a fourth
(`benchmarks/data/gpu/h200-alone.jsonl`, `h200-alone-2.jsonl`)."""
_H200_GAP = 2.5e-6
"""Measured on one H200: ranks with recorded calls, so that their host limits nothing, are slower than the work of their
kernels by this factor (`benchmarks/data/gpu/h200-recorded-steps-prototype.jsonl`)."""
SHEETS = {
    "l40-pcie": Datasheet(flops=181e12, bandwidth=864e9, memory_gb=48, link="pcie", p2p=26e9, source=_NVIDIA),
    "l20-pcie": Datasheet(flops=119.5e12, bandwidth=864e9, memory_gb=48, link="pcie", p2p=26e9, source=_NVIDIA),
    "a100-pcie": Datasheet(flops=312e12, bandwidth=1935e9, memory_gb=80, link="pcie", p2p=23e9, source=_NVIDIA),
    "a100-nvlink": Datasheet(flops=312e12, bandwidth=2039e9, memory_gb=80, link="nvlink", p2p=268e9, source=_NVIDIA),
    "h100-nvlink": Datasheet(
        flops=989e12,
        bandwidth=3350e9,
        memory_gb=80,
        link="nvlink",
        p2p=402e9,
        source=_NVIDIA,
        block_s=_H100_BLOCK,
        host_bandwidth=50e9,
    ),
    "h200-nvlink": Datasheet(
        flops=989e12,
        bandwidth=4800e9,
        memory_gb=141,
        link="nvlink",
        p2p=402e9,
        source=_NVIDIA,
        block_s=_H200_BLOCK,
        kernel_gap_s=_H200_GAP,
        call_s=_H200_CALL,
        host_bandwidth=50e9,
    ),
    # NVIDIA's product page: 112 tensor cores, 1.777 GHz, 360 GB/s, 12 GB; as many operations a clock of a core as the
    # whitepaper below says of the same architecture: 128 with 32-bit sums.
    "rtx-3060": Datasheet(flops=25.5e12, bandwidth=360e9, memory_gb=12, link="pcie", p2p=20e9, source=_RTX),
    # Whitepaper "NVIDIA Ampere GA102 GPU Architecture", of the RTX 3090: 71 TFLOPS, 936 GB/s, 24 GB, PCIe 4.0 x16.
    "rtx-3090": Datasheet(flops=71e12, bandwidth=936e9, memory_gb=24, link="pcie", p2p=20e9, source=_RTX),
    # Whitepaper "NVIDIA Ada GPU Architecture", table of the RTX 4090: 165.2 TFLOPS, 1008 GB/s, 24 GB, PCIe 4.0 x16.
    "rtx-4090": Datasheet(flops=165.2e12, bandwidth=1008e9, memory_gb=24, link="pcie", p2p=20e9, source=_RTX),
    # The same, of the RTX 4080: 97.5 TFLOPS, 717 GB/s, 16 GB, PCIe 4.0 x16.
    "rtx-4080": Datasheet(flops=97.5e12, bandwidth=717e9, memory_gb=16, link="pcie", p2p=20e9, source=_RTX),
    # Whitepaper "NVIDIA RTX Blackwell GPU Architecture", of the RTX 5090: 209.5 TFLOPS, 1792 GB/s, 32 GB, PCIe 5.0 x16.
    "rtx-5090": Datasheet(
        flops=209.5e12,
        bandwidth=1792e9,
        memory_gb=32,
        link="pcie",
        p2p=40e9,
        source=_RTX,
        host_bandwidth=50e9,
    ),
    # The same, of the RTX 5080: 112.6 TFLOPS, 960 GB/s, 16 GB, PCIe 5.0 x16.
    "rtx-5080": Datasheet(
        flops=112.6e12,
        bandwidth=960e9,
        memory_gb=16,
        link="pcie",
        p2p=40e9,
        source=_RTX,
        host_bandwidth=50e9,
    ),
    # The same, of the RTX 5070: 61.7 TFLOPS, 672 GB/s, 12 GB, PCIe 5.0 x16.
    "rtx-5070": Datasheet(
        flops=61.7e12,
        bandwidth=672e9,
        memory_gb=12,
        link="pcie",
        p2p=40e9,
        source=_RTX,
        host_bandwidth=50e9,
    ),
    # Whitepaper "NVIDIA RTX Blackwell PRO GPU Architecture", of the workstation's card: 503.8 TFLOPS, as sums of 32
    # bits are not slower there, 1792 GB/s, 96 GB, PCIe 5.0 x16.
    "rtx-pro-6000": Datasheet(
        flops=503.8e12,
        bandwidth=1792e9,
        memory_gb=96,
        link="pcie",
        p2p=40e9,
        source=_RTX,
        host_bandwidth=50e9,
    ),
}
"""P2P bandwidths of A100 PCIe, A100 NVLink and L20 are those that the PipeFusion article measured (2024-09: 23, 268 and
26 GB/s, in this order); L40 is taken to be as L20, the others as the same share of their link. GeForce cards send
through the host's memory. They have all 16 lanes here; a board that gives two cards 8 lanes each has links of half the
rate."""


def list_hardware() -> list[str]:
    """List the names of the profiles in this package."""
    return sorted([*SHEETS, *(path.stem for path in PROFILES.glob("*.json"))])


def load_profile(name: str, interlink: str | None = None) -> Profile:
    """Load the profile of some hardware.

    Args:
        name: one of `list_hardware()`, or the device of each rank with `,` between them.
        interlink: bits a second between hosts, such as "10Gbit".

    Raises:
        PlanError: if it is not known, devices have curves of unlike types, or the interlink is not a bandwidth.
    """
    profiles = [_load_device_profile(each.strip()) for each in name.split(",")]
    machine_profile = profiles[0]
    if len(profiles) > 1:
        machine_profile = join_devices(profiles)
    return machine_profile if interlink is None else add_interlink(machine_profile, interlink)


def _load_device_profile(name: str) -> Profile:
    if name in SHEETS:
        return make_datasheet_profile(name, SHEETS[name], EFFICIENCY)
    if os.path.exists(PROFILES / f"{name}.json"):
        return Profile.from_json_file(PROFILES / f"{name}.json")
    near = find_nearest(name, list_hardware(), cutoff=0.5)
    hint = "" if near is None else f"did you mean {near}? "
    raise PlanError(f"hardware={name!r} is not known; {hint}known are {', '.join(list_hardware())}")


def join_devices(profiles: Sequence[Profile]) -> Profile:
    """Join devices in the order of the ranks into the profile of one machine.

    Raises:
        PlanError: if their curves are of numbers of unlike sizes.
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


def make_datasheet_profile(name: str, sheet: Datasheet, gets: Efficiency) -> Profile:
    """Make the profile of a device with the shares `gets` of its datasheet."""
    # A product or an attention of this size reaches half of the rate.
    matmul_half = gets.matmul_half
    half = gets.attention_half
    best = sheet.flops * gets.matmul
    matmul = []
    attention = []
    for rows in SIZES:
        sizes = [rows * width for width in WIDTHS]
        matmul.append(tuple(best * size / (size + matmul_half) for size in sizes))
        rate = sheet.flops * gets.attention * rows / (rows + half)
        attention.append(tuple(rate * keys / (keys + half) for keys in SIZES))
    numbers = Curve((1.0,), (sheet.bandwidth * gets.memory,))
    socket = SOCKET if sheet.link == "pcie" else 0
    call_s = gets.wire.call_s if sheet.call_s is None else sheet.call_s
    return Profile(
        name=name,
        source=f"{sheet.source}; shares fitted by benchmarks.published",
        memory_bytes=sheet.memory_gb * 10**9,
        element_size=2,
        matmul=Curve(SIZES, tuple(matmul), WIDTHS),
        attention=Curve(SIZES, tuple(attention), SIZES),
        pointwise=dict.fromkeys(("pointwise", "norm", "gelu"), numbers),
        kernel_s=gets.kernel_s,
        block_s=sheet.block_s,
        kernel_gap_s=sheet.kernel_gap_s,
        host_bandwidth=sheet.host_bandwidth,
        runs_ahead=True,
        micro_s=gets.micro_s,
        link=Link(
            latency_s=gets.wire.latency_s,
            bandwidth=sheet.p2p,
            collective=gets.wire.exchange,
            call_s=call_s,
            neighbours=gets.wire.exchange,
            reduce=gets.wire.reduce,
            overlap=gets.wire.overlap,
            socket=socket,
            crossing=gets.wire.crossing,
        ),
    )


def add_interlink(profile: Profile, interlink: str) -> Profile:
    """Add a link between hosts to a profile, in bits a second. Messages on it overlap like within a host."""
    # A tenth of the bandwidth is taken to be protocol, and 50 microseconds the way from host to host.
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

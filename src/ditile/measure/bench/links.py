"""Two hosts on one machine: network namespaces joined by a link of a chosen bandwidth. Linux, needs root and iproute2.

with create_two_hosts("100mbit") as hosts:
    subprocess.run([*hosts[0].prefix, "ping", "-c1", hosts[1].address])
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ditile.plan.errors import PlanError

_RATE = re.compile(r"(\d+)([kmg])bit")
_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_TIMER_HZ = 250
"""Ticks a second of the kernel's timer; a token bucket must hold the bytes that pass between two ticks."""


class Host(NamedTuple):
    """One end of the link; `prefix` in front of a command runs it on this host."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def create_two_hosts(rate: str | None) -> Iterator[tuple[Host, Host]]:
    """Makes two hosts and their link, and removes them at the end.

    Args:
        rate: such as 100mbit or 10gbit; None is no limit.

    Raises:
        PlanError: if the process is not root, iproute2 is missing, or the rate cannot be read.
    """
    check_namespace_rights()
    burst = _compute_burst_bytes(rate)
    with ExitStack() as stack:
        hosts = []
        for k in (0, 1):
            space = f"ditile-{os.getpid()}-{k}"
            _run_network_command(f"ip netns add {space}")
            stack.callback(_run_network_command, f"ip netns delete {space}")
            hosts.append(Host(("ip", "netns", "exec", space), f"10.77.0.{k + 1}", f"ditile{k}"))
        here, there = (f"{host.interface} netns {host.prefix[-1]}" for host in hosts)
        _run_network_command(f"ip link add {here} type veth peer name {there}")
        for host in hosts:
            within = " ".join(host.prefix)
            interface = host.interface
            _run_network_command(f"{within} ip address add {host.address}/24 dev {interface}")
            for name in ("lo", interface):
                _run_network_command(f"{within} ip link set {name} up")
            if rate is not None:
                shape = f"tbf rate {rate} burst {burst} latency 100ms"
                _run_network_command(f"{within} tc qdisc add dev {interface} root {shape}")
        yield hosts[0], hosts[1]


def parse_link_rate(rate: str) -> int:
    """Bits per second of a rate such as 100mbit.

    Raises:
        PlanError: if the text is no rate.
    """
    match = _RATE.fullmatch(rate)
    if match is None or not int(match[1]):
        raise PlanError(f"link {rate!r} is no rate; write it as 100mbit, 1gbit or 10gbit")
    return int(match[1]) * _BITS[match[2]]


def check_namespace_rights() -> None:
    """Raises `PlanError` unless this process can make network namespaces."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        raise PlanError("links between two hosts need root and iproute2 (ip, tc); run as root, or leave --links out")


def _compute_burst_bytes(rate: str | None) -> int:
    return 0 if rate is None else max(64 * 1024, 2 * parse_link_rate(rate) // 8 // _TIMER_HZ)


def _run_network_command(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlanError(f"{command} failed: {' '.join(done.stderr.split())}")

"""Two hosts on one machine: network namespaces that are joined by a link of a given rate. Needs root and iproute2."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ditile.plan.errors import PlanError

# Ticks a second of the kernel's timer; a token bucket must hold the bytes that pass between two ticks.
TIMER_HZ = 250
BITS = {"k": 10**3, "m": 10**6, "g": 10**9}


class Host(NamedTuple):
    """One end of the link; `prefix` in front of a command runs it on this host."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def create_two_hosts(rate: str | None) -> Iterator[tuple[Host, Host]]:
    """Creates two hosts and their link, and removes them at the end.

    Args:
        rate: such as 100mbit or 10gbit; None is no limit.

    Raises:
        PlanError: if the process is not root, iproute2 is missing, or the rate cannot be read.
    """
    check_namespace_rights()
    bits = None if rate is None else parse_link_rate(rate)
    with ExitStack() as stack:
        hosts = []
        for index in (0, 1):
            space = f"ditile-{os.getpid()}-{index}"
            _run_network_command(f"ip netns add {space}")
            stack.callback(_run_network_command, f"ip netns delete {space}")
            # Hosts are told apart by their names.
            renamed = ("unshare", "--uts", "sh", "-c", f'hostname {space}; exec "$@"', "sh")
            hosts.append(Host(("ip", "netns", "exec", space, *renamed), f"10.77.0.{index + 1}", f"ditile{index}"))
        # Both ends of a link are made by one command, each in its namespace.
        first, second = (f"{host.interface} netns {host.prefix[3]}" for host in hosts)
        _run_network_command(f"ip link add {first} type veth peer name {second}")
        for host in hosts:
            prefix = " ".join(host.prefix[:4])
            _run_network_command(f"{prefix} ip address add {host.address}/24 dev {host.interface}")
            for name in ("lo", host.interface):
                _run_network_command(f"{prefix} ip link set {name} up")
            if bits is not None:
                burst = max(64 * 1024, 2 * bits // 8 // TIMER_HZ)
                shape = f"tbf rate {rate} burst {burst} latency 100ms"
                _run_network_command(f"{prefix} tc qdisc add dev {host.interface} root {shape}")
        yield hosts[0], hosts[1]


def parse_link_rate(rate: str) -> int:
    """Bits per second of a rate such as 100mbit. Raises `PlanError` if the text is not a rate."""
    match = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if match is None or not int(match[1]):
        raise PlanError(f"link {rate!r} is not a rate; write it as 100mbit, 1gbit or 10gbit")
    return int(match[1]) * BITS[match[2]]


def check_namespace_rights() -> None:
    """Raises `PlanError` unless this process can create network namespaces."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        raise PlanError("links between two hosts need root and iproute2 (ip, tc); run as root")


def _run_network_command(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if result.returncode:
        raise PlanError(f"{command} failed: {' '.join(result.stderr.split())}")

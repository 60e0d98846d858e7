"""Two hosts that are network namespaces of this machine: a link of its rate both ways, ranks across it, nothing left.

Needs root and iproute2; skipped, with the reason, where this machine does not let it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import links, two_hosts
from benchmarks.links import list_link_plans
from benchmarks.sweep_figures import name_plan_methods
from benchmarks.two_hosts import check_namespace_rights, create_two_hosts
from ditile.plan.errors import PlanError, RankError
from ditile_lab.bench.cells import ONE_RANK
from ditile_lab.bench.options import Workload
from ditile_lab.bench.subjects import create_bench_subject

BYTES = 250_000
ECHO = """
import socket, sys, time
size, address = int(sys.argv[1]), sys.argv[2]

def receive(peer):
    left = size
    while left:
        left -= len(peer.recv(min(left, 65536))) or sys.exit("the other host is gone")

if sys.argv[3:]:
    server = socket.create_server((address, 29400))
    print("ready", flush=True)
    peer, _ = server.accept()
    receive(peer)
    peer.sendall(bytes(size))
else:
    peer = socket.create_connection((address, 29400), timeout=30)
    began = time.perf_counter()
    peer.sendall(bytes(size))
    receive(peer)
    print(time.perf_counter() - began)
"""


def hosts_left() -> list[str]:
    """The namespaces and interfaces of this process that are there."""
    left: list[str] = []
    for what in (("netns", "list"), ("-brief", "link")):
        lines = subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout.splitlines()
        left += [line for line in lines if line.startswith((f"ditile-{os.getpid()}-", "ditile0", "ditile1"))]
    return left


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Skips where no namespace can be made, or no link slowed down; asserts that nothing is left behind."""
    try:
        check_namespace_rights()
    except PlanError as error:
        pytest.skip(str(error))
    space = f"probe-{os.getpid()}"
    slow = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "64kb", "latency", "100ms")
    made = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True, check=False)
    shaped = subprocess.run(["ip", "netns", "exec", space, *slow], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
    for done in (made, shaped):
        if done.returncode:
            pytest.skip(f"{' '.join(done.args)}: {done.stderr.strip()}")
    yield
    assert hosts_left() == []


def test_a_link_has_its_rate_both_ways_and_goes() -> None:
    """250 KB there and back at 4 Mbit/s: a second, less what the buckets hold. A failure means that figures over links
    are of no link, or that the machine keeps what was made for them."""
    with create_two_hosts("4mbit") as (one, other):
        assert len(hosts_left()) == 2
        words = [sys.executable, "-c", ECHO, str(BYTES), one.address]
        with subprocess.Popen([*one.prefix, *words, "serve"], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            try:
                done = subprocess.run([*other.prefix, *words], capture_output=True, text=True, check=True, timeout=60)
            finally:
                server.kill()
    assert float(done.stdout) > 2 * (BYTES - 2**16) * 8 / 4e6


def test_hosts_go_when_what_ran_on_them_fails() -> None:
    """A failure means that the next run finds names that are taken."""
    with pytest.raises(ValueError, match="in between"), create_two_hosts(None):
        raise ValueError("in between")
    assert hosts_left() == []


def test_rates_and_the_plans_of_two_hosts() -> None:
    assert links.parse_link_rate("100mbit") == 10**8
    for rate in ("fast", "0gbit"):
        with pytest.raises(PlanError, match="write it as 100mbit"):
            links.parse_link_rate(rate)
    plans = list_link_plans(create_bench_subject(Workload(model="shapes-pixart")), 64, 64)
    assert [plan.warmup_mode for plan in plans[:2]] == ["serial", "pipelined"] and {plan.world for plan in plans} == {2}
    kinds = [name_plan_methods(str(plan)) for plan in plans]
    assert kinds == ["PipeFusion", "PipeFusion", "DistriFusion", "Ulysses", "ring", "tensor", "cfg"]


def test_links_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(PlanError, match="need root"):
        check_namespace_rights()


def test_plans_across_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run, of a model that is hardly there. A failure means that `benchmarks.links` measures nothing."""
    words = ["--model", "random-pixart blocks=1 heads=1", "--steps", "1", "--height", "64", "--width", "64"]
    words += ["--rates", "100mbit", "--plans", "ulysses=2", "--rounds", "1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(links.sys, "argv", ["links", *words])
    links.main()
    plain, linked = (json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines())
    assert (plain["plan"], linked["plan"], linked["link"], linked["world"]) == (ONE_RANK, "ulysses=2", "100mbit", 2)
    assert min(linked["bytes_sent"]) > 0 and linked["ratio"] > 0
    assert (tmp_path / "out" / "links.png").stat().st_size > 1000


RANK = """#!/bin/sh
[ "$RANK" = 1 ] && exec sleep 60
exit 2
"""


def test_a_rank_that_fails_ends_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of shell, of which one would stay. A failure means a hang."""
    script = tmp_path / "rank"
    script.write_text(RANK)
    script.chmod(0o755)
    monkeypatch.setattr(links.sys, "executable", str(script))
    monkeypatch.setattr(links, "PATIENCE", 0.2)
    with pytest.raises(RankError, match="rank 0: ended with code 2 across 100mbit"):
        links.run_across_link(["bench"], "100mbit")


DRAW = ["--model", "shapes-flux", "--pipefusion", "2", "--steps", "5000", "--height", "64", "--width", "64"]


def test_a_link_that_is_cut_ends_both_hosts(tmp_path: Path) -> None:
    """A failure means that each host waits for the other until somebody looks."""
    with create_two_hosts(None) as hosts:
        runs, said = [], [tmp_path / "0", tmp_path / "1"]
        try:
            for number, host in enumerate(hosts):
                place = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", hosts[0].address]
                command = [*host.prefix, sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *place]
                command += ["-m", "ditile", "generate", "a red ring", *DRAW, "--out", str(tmp_path / "x.png")]
                with said[number].open("wb") as errors:
                    environ = os.environ | {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
                    runs.append(subprocess.Popen(command, env=environ, stderr=errors, stdout=subprocess.DEVNULL))
            until = time.monotonic() + 120
            while b"it/s" not in said[0].read_bytes() and time.monotonic() < until:
                assert not any(run.poll() for run in runs), said[0].read_text()
                time.sleep(0.2)
            subprocess.run([*hosts[1].prefix, "ip", "link", "set", hosts[1].interface, "down"], check=True)
            assert [run.wait(timeout=25) for run in runs] == [1, 1]
        finally:
            for run in runs:
                run.kill()
                run.wait()
    for path, other in zip(said, (1, 0), strict=True):
        lines = [line for line in path.read_text().splitlines() if line.startswith("ditile:")]
        assert len(lines) == 1 and f"rank {other}" in lines[0] and "link" in lines[0]

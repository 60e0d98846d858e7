"""A plan over two "hosts" of one machine: network namespaces joined by a link, with torchrun in each.

    sudo .venv/bin/python -m examples.two_hosts [--rate 100mbit] [words for ditile]

Needs Linux, root (for the namespaces, which are taken away again) and iproute2. Without words it draws a picture with a
bundled model; with words such as `verify --model shapes-flux --pipefusion 2` it does that.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

from benchmarks.two_hosts import Host, create_two_hosts
from ditile.plan.errors import PlanError

DRAW = "--model shapes-flux --pipefusion 2 --patches 4 --seed 7 --out two-hosts.png"
CAPTION = "a large red circle on the left on a gray background"


def start_torchrun(number: int, hosts: tuple[Host, Host], words: list[str]) -> subprocess.Popen[bytes]:
    """Torchrun on one of the hosts, with one rank."""
    host = hosts[number]
    launcher = (
        f"--nnodes 2 --node-rank {number} --nproc-per-node 1 --master-addr {hosts[0].address} --master-port 29500"
    )
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
    command = [*host.prefix, sys.executable, "-m", "torch.distributed.run", *launcher.split(), "-m", "ditile", *words]
    return subprocess.Popen(command, env=environment)


def main() -> int:
    """Runs both and returns the exit code of the first that failed; a failure of one ends the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of the link, such as 100mbit; as fast as the machine by default")
    arguments, words = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with create_two_hosts(arguments.rate) as hosts:
        running = [start_torchrun(number, hosts, words or ["generate", CAPTION, *DRAW.split()]) for number in (0, 1)]
        try:
            codes = [process.poll() for process in running]
            while None in codes and not any(codes):
                time.sleep(0.2)
                codes = [process.poll() for process in running]
            return next(filter(None, codes), 0)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PlanError as error:
        sys.exit(f"two_hosts.py: {error}")

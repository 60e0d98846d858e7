"""A session over a link: two ranks on two hosts, which are network namespaces of this machine. It needs root.

    measure_across_link(task, "100mbit")

The ranks are started as torchrun would start them on two hosts. If one fails, the other is ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ditile.distributed import env
from ditile.distributed.heartbeat import die_with_parent
from ditile.distributed.launch import unwind_on_signals
from ditile.measure.bench.links import create_two_hosts
from ditile.plan import errors
from ditile.plan.errors import DitileError, RankError

if TYPE_CHECKING:
    from ditile.measure.bench.session import BenchTask

RANKS, PATIENCE = 2, 5.0
"""The number of ranks; seconds in which a rank may end by itself when the other has failed."""


def measure_across_link(task: BenchTask, rate: str) -> None:
    """Runs a session with the ranks at both ends of a link.

    Raises:
        PlanError: if this needs root.
        DitileError: the error of a rank; `RankError` if it is no `DitileError`.
    """
    with (
        unwind_on_signals() as check,
        create_two_hosts(rate) as hosts,
        tempfile.TemporaryDirectory(prefix="ditile-") as folder,
    ):
        notes = [Path(folder, f"error-{rank}") for rank in range(RANKS)]
        ranks = [
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", "ditile.measure.bench.across", task.to_json(), str(note)],
                env=env.build_host_environment(rank, RANKS, hosts[0].address, host.interface),
            )
            for rank, (host, note) in enumerate(zip(hosts, notes, strict=True))
        ]
        try:
            _wait_for_link_ranks(ranks, check)
        finally:
            _end_link_ranks(ranks)
        for note in notes:
            if note.exists():
                kind, message = json.loads(note.read_text("utf-8"))
                raise getattr(errors, kind)(message)
        for rank, process in enumerate(ranks):
            if process.returncode:
                raise RankError(rank, "exit", f"ended with code {process.returncode} across {rate}")


def main() -> None:
    """Runs the session on one host; its arguments are the task, and the file for an error."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal too, and ends this process
    text, note = sys.argv[1:]
    # Before the next import, which imports diffusers.
    env.silence_library_imports()
    from ditile.measure.bench.session import BenchTask, run_session

    try:
        run_session(BenchTask.from_json(text))
    except DitileError as error:
        Path(note).write_text(json.dumps([type(error).__name__, str(error)]), "utf-8")
        raise SystemExit(2) from None


def _wait_for_link_ranks(ranks: list[subprocess.Popen[bytes]], check: Callable[[], None]) -> None:
    """Waits until all ranks have ended, or one has failed."""
    while any(process.poll() is None for process in ranks):
        check()
        if any(process.poll() for process in ranks):
            return
        time.sleep(0.05)


def _end_link_ranks(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks that still run, after `PATIENCE`."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()


if __name__ == "__main__":
    main()

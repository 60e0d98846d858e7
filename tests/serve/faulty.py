"""Faults of a real `ditile serve`: what happens to its requests when something happens to one of its processes.

python -m tests.serve.faulty          # every cell; writes the table into docs/serving.md
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests.serve.running import RunningServer

PAGE = Path(__file__).parents[2] / "docs/serving.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"
WHEN, KINDS, TARGETS = ("idle", "running", "queued"), ("KILL", "TERM", "INT", "STOP"), ("rank", "server")
FLAGS = ("--cfg", "2", "--threads", "1")
LONG, SHORT = 60, 2
"""Steps of the request that runs when the fault comes, and of others."""
PAUSE = 4.0
"""Seconds after which a server that was stopped is continued."""
LIMIT = 90.0


class FaultCell(NamedTuple):
    """One fault: when, of what kind, to whom."""

    when: str
    kind: str
    target: str


class Recovery(NamedTuple):
    """What followed.

    Attributes:
        noticed: seconds until health was not ok, or the server did not answer; None if neither happened.
        ended: seconds until the process was gone; of a server, until all of its processes were. None if it lives on.
        served: seconds until the next picture was there, of a server that ended from its start.
        answers: statuses of the requests that ran or waited, in their order; 0 for a connection that was cut.
        orphans: processes that were left.
    """

    noticed: float | None
    ended: float | None
    served: float
    answers: tuple[int, ...]
    orphans: int


class FaultyServer:
    """A server that is started again when a fault has ended it.

    Args:
        folder: of its state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = self._start_server()

    def close_server(self) -> None:
        """Ends it."""
        self._server.end(signal.SIGKILL)

    def run_with_fault(self, cell: FaultCell) -> Recovery:
        """Brings a fault about, and waits until the server draws again."""
        family = psutil.Process(self._server.process.pid).children()
        with ThreadPoolExecutor(3) as clients:
            asked = [clients.submit(self.ask_for_picture, LONG)] if cell.when != "idle" else []
            if asked:
                self._wait_for_health(running=1)
            if cell.when == "queued":
                asked += [clients.submit(self.ask_for_picture, SHORT) for _ in range(2)]
                self._wait_for_health(running=1, waiting=2)
            if cell.target == "rank":
                return self._fail_rank(cell, family, asked)
            return self._fail_server(cell, family, asked)

    def ask_for_picture(self, steps: int = SHORT) -> int:
        """Asks for a picture; returns the status, or 0 if there is no answer."""
        with self._server.client() as client:
            try:
                body = {"prompt": "a red ring", "seed": 1, "num_inference_steps": steps, "size": "64x64"}
                return client.post("/v1/images/generations", json=body).status_code
            except httpx.TransportError:
                return 0

    def _start_server(self) -> RunningServer:
        return RunningServer("shapes-pixart", FLAGS, self._folder / "state").wait_until_ready()

    def _fail_rank(self, cell: FaultCell, family: list[psutil.Process], asked: list[Future[int]]) -> Recovery:
        victim, since = family[-1], time.monotonic()
        victim.send_signal(getattr(signal, f"SIG{cell.kind}"))
        noticed = ended = None
        if cell.kind != "INT":  # which ranks ignore
            noticed = wait_until(lambda: self._read_health()["status"] != "ok", since)
            ended = wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, since)
        answers = tuple(one.result() for one in asked)
        served = wait_until(lambda: self.ask_for_picture() == 200, since)
        assert served is not None, self._server.log[-2000:]
        mine = set(psutil.Process(self._server.process.pid).children())
        orphans = 0 if cell.kind == "INT" else sum(process.is_running() for process in family if process in mine)
        return Recovery(noticed, ended, served, answers, orphans + len(mine) - len(family))

    def _fail_server(self, cell: FaultCell, family: list[psutil.Process], asked: list[Future[int]]) -> Recovery:
        process, since = self._server.process, time.monotonic()
        process.send_signal(getattr(signal, f"SIG{cell.kind}"))
        if cell.kind == "STOP":
            noticed = wait_until(lambda: self._read_health()["status"] != "ok", since)
            time.sleep(max(0.0, since + PAUSE - time.monotonic()))
            process.send_signal(signal.SIGCONT)
            answers, since = tuple(one.result() for one in asked), time.monotonic()
            served = wait_until(lambda: self.ask_for_picture() == 200, since)
            assert served is not None, self._server.log[-2000:]
            left = set(psutil.Process(process.pid).children()).symmetric_difference(family)
            return Recovery(noticed, None, served, answers, len(left))
        noticed = wait_until(lambda: self._read_health()["status"] != "ok", since)
        process.wait(LIMIT)
        _, alive = psutil.wait_procs(family, timeout=15)
        ended, answers = time.monotonic() - since, tuple(one.result() for one in asked)
        for orphan in alive:
            orphan.kill()
        since = time.monotonic()
        self._server = self._start_server()
        assert self.ask_for_picture() == 200
        return Recovery(noticed, ended, time.monotonic() - since, answers, len(alive))

    def _read_health(self) -> dict[str, Any]:
        """What the server says of itself; the status is "silent" if it says nothing within half a second."""
        try:
            answer = httpx.get(f"{self._server.url}/health", timeout=0.5, trust_env=False)
        except httpx.TransportError:
            return {"status": "silent"}
        health: dict[str, Any] = answer.json()
        return health

    def _wait_for_health(self, **wanted: int) -> None:
        found = wait_until(lambda: wanted.items() <= self._read_health().items(), time.monotonic())
        assert found is not None, f"never {wanted}"


def wait_until(holds: Callable[[], bool], since: float) -> float | None:
    """Waits until something holds; returns the seconds since a time of the monotonic clock, None after too many."""
    while time.monotonic() < since + LIMIT:
        if holds():
            return time.monotonic() - since
        time.sleep(0.05)
    return None


def list_fault_cells() -> list[FaultCell]:
    """Every cell; those that end the server last."""
    return [FaultCell(when, kind, target) for target in TARGETS for kind in KINDS for when in WHEN]


def find_wrong(cell: FaultCell, recovery: Recovery) -> list[str]:
    """What is not as it must be."""
    wrong = [f"{recovery.orphans} orphans"] if recovery.orphans else []
    lives_on = (cell.kind, cell.target) in (("INT", "rank"), ("STOP", "server"))
    if not lives_on and (recovery.noticed is None or recovery.noticed > 5):
        wrong.append(f"noticed after {recovery.noticed}")
    running, waiting = recovery.answers[:1], recovery.answers[1:]
    drains = cell.target == "server" and cell.kind in ("TERM", "INT")
    expected = (200,) if lives_on or drains else (503,) if cell.target == "rank" else (0,)
    if running and running != expected:
        wrong.append(f"the running request was answered {running}")
    expected = (503,) if drains else (0,) if cell.target == "server" and not lives_on else (200,)
    if waiting and set(waiting) != set(expected):
        wrong.append(f"the waiting requests were answered {waiting}")
    return wrong


def write_table(recoveries: dict[FaultCell, Recovery]) -> str:
    """The table in Markdown."""
    lines = ["| to | signal | when | noticed, s | ended, s | serves again, s | running | waiting | left |"]
    lines.append("|---|---|---|--:|--:|--:|---|---|--:|")
    names = {200: "generated", 503: "503", 0: "cut off"}
    for cell, seen in recoveries.items():
        noticed, ended = ("" if s is None else f"{s:.1f}" for s in (seen.noticed, seen.ended))
        answers = [names.get(answer, str(answer)) for answer in seen.answers]
        running, waiting = "".join(answers[:1]), ", ".join(dict.fromkeys(answers[1:]))
        words = [cell.target, cell.kind, cell.when, noticed, ended, f"{seen.served:.1f}", running, waiting]
        lines.append(f"| {' | '.join(words)} | {seen.orphans} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs every cell and writes the table; returns 1 if one is not as it must be."""
    recoveries, wrong = {}, []
    with tempfile.TemporaryDirectory(prefix="ditile-fault-") as folder:
        faulty = FaultyServer(Path(folder))
        try:
            for cell in list_fault_cells():
                recoveries[cell] = faulty.run_with_fault(cell)
                wrong += [f"{', '.join(cell)}: {what}" for what in find_wrong(cell, recoveries[cell])]
                print(cell, recoveries[cell], flush=True)
        finally:
            faulty.close_server()
    text = PAGE.read_text("utf-8")
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:before] + write_table(recoveries) + text[after:], "utf-8")
    print("\n".join(wrong) or "every cell is as it must be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

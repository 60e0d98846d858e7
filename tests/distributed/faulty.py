"""Runs of `ditile generate` on two ranks in which one fault happens: how they end, how soon, and what they leave.

python -m tests.distributed.faulty          # every cell; writes docs/faults.md (`make faults`)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]
STAGES = ("imports", "joining", "loading", "text", "first step", "mid-loop", "decode", "saving", "between prompts")
KINDS = ("KILL", "TERM", "INT", "HUP", "STOP", "raise", "memory")
TARGETS = ("rank 0", "rank 1", "parent")
PLAN = (
    "--model",
    "shapes-flux",
    "--pipefusion",
    "2",
    "--threads",
    "1",
    "--steps",
    "4",
    "--height",
    "64",
    "--width",
    "64",
)
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "-m", "ditile")
PAUSE = 14.0
"""Seconds after which a parent that was stopped is continued: more than a rank may be silent."""
AT_ONCE = 3


class Cell(NamedTuple):
    """One fault: in which stage, of what kind, to whom, of ranks started by whom."""

    stage: str
    kind: str
    target: str
    starter: str = "ditile"


class Ending(NamedTuple):
    """How a run ended.

    Attributes:
        seconds: from the fault to the end of the last process.
        code: the exit code of the parent.
        lines: what it said by itself: the lines that begin with `ditile:`.
        left: processes and files that it left.
        said: all that it wrote to the standard error.
    """

    seconds: float
    code: int
    lines: list[str]
    left: list[str]
    said: str


def list_cells() -> list[Cell]:
    """Every cell. A parent raises nothing by itself."""
    return [
        Cell(stage, kind, target)
        for stage in STAGES
        for target in TARGETS
        for kind in KINDS
        if (kind, target) != ("raise", "parent")
    ]


def run_with_fault(cell: Cell, prefix: tuple[str, ...] = (), limit: float = 180.0) -> Ending:
    """Runs a picture, or two for the stage between prompts, with the fault of a cell."""
    with tempfile.TemporaryDirectory(prefix="ditile-fault-") as name:
        folder = Path(name)
        for part in ("out", "temporary"):
            (folder / part).mkdir()
        words = ["a red ring", "--out", str(folder / "out" / "x.png")]
        if cell.stage == "between prompts":
            (folder / "prompts.txt").write_text("a red ring\na blue square\n")
            words = ["--prompts-file", str(folder / "prompts.txt"), "--out-dir", str(folder / "out")]
        starter = ["ditile"] if cell.starter == "ditile" else TORCHRUN
        command = [*prefix, sys.executable, "-W", "ignore", "-m", *starter, "generate", *words, *PLAN]
        fault = " | ".join((cell.stage, cell.kind, cell.target, name))
        path = os.pathsep.join([str(ROOT / "tests/distributed/injected"), str(ROOT / "src")])
        environ = {"PYTHONPATH": path, "FAULT": fault, "TMPDIR": str(folder / "temporary"), "OMP_NUM_THREADS": "1"}
        with (folder / "said").open("wb") as errors:
            run = subprocess.Popen(
                command, env=os.environ | environ, stdout=subprocess.DEVNULL, stderr=errors, preexec_fn=_hear_control_c
            )
        try:
            family = _wait_for_end(run, folder, limit)
        finally:
            run.kill()
            code = run.wait()
        began = float((folder / "happened").read_text().split()[0]) if (folder / "happened").exists() else time.time()
        _, alive = psutil.wait_procs(family, timeout=5)
        seconds = time.time() - began
        left = [" ".join(process.cmdline()[:6]) for process in alive]
        for process in alive:
            process.kill()
        left += [path.name for path in (folder / "temporary").glob("ditile*")]
        left += [path.name for path in (folder / "out").glob(".*")]
        said = (folder / "said").read_text(errors="replace")
        return Ending(seconds, code, [line for line in said.splitlines() if line.startswith("ditile:")], left, said)


def _hear_control_c() -> None:
    """A run in the background of a shell would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_end(run: subprocess.Popen[bytes], folder: Path, limit: float) -> list[psutil.Process]:
    """Waits until the run ends; returns all processes that it had."""
    family: dict[int, psutil.Process] = {}
    until, happened, continued = time.monotonic() + limit, folder / "happened", False
    while run.poll() is None and time.monotonic() < until:
        try:
            family |= {process.pid: process for process in psutil.Process(run.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        if not continued and happened.exists() and " " in (text := happened.read_text()):
            since, pid = text.split()
            if int(pid) == run.pid and time.time() - float(since) > PAUSE:
                run.send_signal(signal.SIGCONT)
                continued = True
        time.sleep(0.1)
    return list(family.values())


def main() -> None:
    """Runs every cell and writes the page."""
    cells = [cell for cell in list_cells() if not sys.argv[1:] or cell.stage in sys.argv[1:]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for cell, ending in zip(cells, pool.map(run_with_fault, cells), strict=True):
            print(f"{cell} {ending.seconds:.1f} {ending.code} {ending.lines} {ending.left}", flush=True)


if __name__ == "__main__":
    main()

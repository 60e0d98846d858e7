"""Runs of `ditile generate` on two ranks in which one fault happens: how they end, how soon, and what they leave.

python -m tests.distributed.faulty          # every cell; writes docs/faults.md
"""

from __future__ import annotations

import itertools
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
    "--model", "shapes-flux", "--pipefusion", "2", "--threads", "1", "--steps", "4", "--height", "64", "--width", "64",
)  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ditile")
PAUSE = 14.0
"""Seconds after which a parent that was stopped is continued: more than a rank may be silent."""
AT_ONCE = 3


PAGE = """# When a process fails

What a run of two ranks does when something happens to one of its processes. `make nightly PARTS=faults` runs every cell
of {{stage}} x {{fault}} x {{process}}, and two of torchrun, checks them and writes this page.
The command is `ditile generate --pipefusion 2` on the CPU; the parent is its own process, which started the ranks.

- Stages: imports, joining (the ranks connect), loading, text (encoding), first step, mid-loop, decode (behind the last
  step), saving (rank 0 is about to write the file, the last rank is done), between prompts (of a file of
  prompts).
- Faults: the signals KILL, TERM, INT, HUP and STOP; `raise`, an exception; `memory`, no more memory for this process
  (its limit is set to what it has, and then, in a rank, 1 GiB is asked for). A parent raises nothing by itself. One
  that was stopped is continued after 14 seconds.
- Seconds: from the fault to the end of the last process, on two cores with other work. Where the run goes on and ends
  well, with code 0, they are those of the rest of the run. Ranks ignore INT: a Ctrl-C is the parent's to decide.
- Left: processes, unfinished files (`.ditile-*.part`) and temporary folders. After KILL of the parent nobody is left to
  remove the folder.

{cells} cells, {day}:

| fault | to | stages | seconds | exit code | message, after `ditile: ` | left |
|---|---|---|--:|--:|---|---|
{rows}
"""


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
    cells = [Cell("mid-loop", "KILL", "parent", "torchrun"), Cell("mid-loop", "STOP", "rank 0", "torchrun")]
    for cell in itertools.starmap(Cell, itertools.product(STAGES, KINDS, TARGETS)):
        if (cell.kind, cell.target) != ("raise", "parent"):
            cells.append(cell)
    return cells


def run_with_fault(cell: Cell, limit: float = 180.0) -> Ending:
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
        command = [sys.executable, "-W", "ignore", "-m", *starter, "generate", *words, *PLAN]
        fault = " | ".join((cell.stage, cell.kind, cell.target, name))
        path = os.pathsep.join([str(ROOT / "tests/distributed/injected"), str(ROOT / "src")])
        environ = {"PYTHONPATH": path, "FAULT": fault, "TMPDIR": str(folder / "temporary"), "OMP_NUM_THREADS": "1"}
        with (folder / "said").open("wb") as errors:
            run = subprocess.Popen(
                command, env=os.environ | environ, stdout=subprocess.DEVNULL, stderr=errors, preexec_fn=_hear_signals
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


def _hear_signals() -> None:
    """A run in the background of a shell would ignore Ctrl-C, and one under nohup the end of its terminal."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


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


def find_wrong(cell: Cell, ending: Ending) -> list[str]:
    """What is not as it must be in a run with a fault."""
    to_parent, wrong = cell.target == "parent", []
    survives = cell.kind == "INT" and not to_parent or cell.kind == "STOP" and to_parent
    codes: tuple[int, ...] = (0,) if survives else (1,)
    # Before it has imported torch a rank under torchrun has two minutes to show signs of life.
    limit = 5.0 if cell.kind != "STOP" else 16.0
    if cell.starter == "torchrun" and cell.stage == "imports" and cell.kind == "STOP":
        limit = 125.0
    if survives:
        limit = 120.0
    elif cell.kind == "memory" and to_parent:  # it may need no more
        codes, limit = (0, 1), 120.0
    elif to_parent and cell.starter == "ditile":
        codes = (-9,) if cell.kind == "KILL" else (128 + getattr(signal, f"SIG{cell.kind}"),)
    elif to_parent:
        codes = (-9,) if cell.kind == "KILL" else (1,)
    if ending.code not in codes:
        wrong.append(f"exit code {ending.code}, not {codes}")
    if ending.seconds > limit:
        wrong.append(f"{ending.seconds:.1f} s, not {limit:g}")
    left = [name for name in ending.left if not (cell.kind == "KILL" and to_parent and name.startswith("ditile-"))]
    if left:
        wrong.append(f"left {left}")
    own = cell.target if not to_parent else "rank"
    if not survives and not to_parent and not (len(ending.lines) == 1 and own in ending.lines[0]):
        wrong.append(f"said {ending.lines}, not one line about {own}")
    if len(ending.lines) > 1:
        wrong.append(f"said {len(ending.lines)} lines")
    return wrong


def write_page(endings: dict[Cell, Ending]) -> str:
    """The page of the matrix: stages that end alike are one row."""
    rows: dict[tuple[str, ...], list[Cell]] = {}
    for cell, ending in endings.items():
        message = "; ".join(line.removeprefix("ditile: ") for line in ending.lines) or "none"
        # The temporary folder of a run has another name each time.
        left = ", ".join("ditile-*" if name.startswith("ditile-") else name for name in ending.left) or "nothing"
        target = cell.target if cell.starter == "ditile" else f"{cell.target} of torchrun"
        rows.setdefault((cell.kind, target, str(ending.code), message, left), []).append(cell)
    table = []
    for (kind, target, code, message, left), cells in sorted(rows.items(), key=_order_of_row):
        seconds = sorted(endings[cell].seconds for cell in cells)
        stages = "all" if len(cells) == len(STAGES) else ", ".join(cell.stage for cell in cells)
        span = f"{seconds[0]:.1f} to {seconds[-1]:.1f}" if len(cells) > 1 else f"{seconds[0]:.1f}"
        table.append(f"| {kind} | {target} | {stages} | {span} | {code} | {message} | {left} |")
    return PAGE.format(rows="\n".join(table), cells=len(endings), day=time.strftime("%Y-%m-%d"))


def _order_of_row(row: tuple[tuple[str, ...], list[Cell]]) -> tuple[int, ...]:
    cell = row[1][0]
    return KINDS.index(cell.kind), TARGETS.index(cell.target), STAGES.index(cell.stage)


def main() -> int:
    """Runs every cell and writes the page; returns 1 if one is not as it must be."""
    cells = list_cells()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        endings = dict(zip(cells, pool.map(run_with_fault, cells), strict=True))
    (ROOT / "docs/faults.md").write_text(write_page(endings), "utf-8")
    wrong = {cell: found for cell, ending in endings.items() if (found := find_wrong(cell, ending))}
    for cell, found in wrong.items():
        print(f"{', '.join(cell)}: {'; '.join(found)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""A picture that goes wrong halfway: the whole run ends in seconds, says which rank, and leaves nothing behind."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ditile.cli import main
from tests.distributed.faulty import Cell, find_wrong, run_with_fault

PLAN = ["--pipefusion", "2", "--steps", "500", "--threads", "1", "--height", "64", "--width", "64"]
CELLS = [
    Cell("loading", "KILL", "rank 0"),
    Cell("text", "memory", "rank 1"),
    Cell("mid-loop", "INT", "parent"),
    Cell("between prompts", "raise", "rank 1"),
    Cell("mid-loop", "KILL", "parent", "torchrun"),
]
"""Some of the cells of docs/faults.md; `make nightly PARTS=faults` runs all."""
STOPPED = [Cell("mid-loop", "STOP", "rank 1"), Cell("mid-loop", "STOP", "rank 0", "torchrun")]
"""Their parents wait for most of the time."""


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_a_fault_ends_the_run_soon_and_is_named(cell: Cell) -> None:
    """A failure would mean that a user waits for a time-out, blames the wrong rank, or finds what a run left."""
    ending = run_with_fault(cell)
    assert find_wrong(cell, ending) == [], ending.said


def test_a_stopped_rank_ends_the_run_and_is_named() -> None:
    """The same of ranks that the system has stopped, whoever started them; both runs at the same time."""
    with ThreadPoolExecutor() as pool:
        for cell, ending in zip(STOPPED, pool.map(run_with_fault, STOPPED), strict=True):
            assert find_wrong(cell, ending) == [], ending.said


def nap() -> None:
    time.sleep(1000)


def stall(*_: object) -> None:
    """What a rank does instead of drawing."""
    if dist.get_rank() == 0:
        nap()
    dist.barrier()


def test_a_run_that_stalls_shows_every_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure would mean that --stall-timeout is taken and changes nothing, or does not say who waits where."""
    monkeypatch.setattr(main, "_call_by_name", stall)
    before = set(psutil.Process().children())
    words = [*PLAN, "--out", str(tmp_path / "x.png"), "--stall-timeout", "2"]
    assert main.main(["generate", "a red ring", *words]) == 1
    stacks, said = capsys.readouterr().err.rstrip().rsplit("\n", 1)
    first, second = stacks.split("rank 0:")[1].split("rank 1:")
    assert "in nap" in first and "in barrier" in second and "in nap" not in second
    assert said.startswith("ditile: rank ") and "no rank made progress for" in said
    assert not list(tmp_path.iterdir()) and set(psutil.Process().children()) <= before

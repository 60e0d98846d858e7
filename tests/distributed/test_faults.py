"""A picture that goes wrong halfway: the whole run ends in seconds, says which rank, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ditile.cli import main

pytestmark = pytest.mark.alone

PLAN = ["--pipefusion", "2", "--steps", "500", "--threads", "1", "--height", "64", "--width", "64"]


@contextmanager
def drawing(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process], Path]]:
    """A run of two ranks that is in its denoising loop: the command, its ranks in order, its standard error."""
    said = folder / "said.txt"
    prompt = "a red ring at the top on a white background"
    command = [sys.executable, "-W", "ignore", "-m", "ditile", "generate", prompt]
    with said.open("wb") as errors:
        run = subprocess.Popen(
            [*command, *PLAN, "--out", str(folder / "x.png")],
            stderr=errors,
            stdout=subprocess.DEVNULL,
            preexec_fn=_hears_control_c,
        )
        try:
            wait_for(lambda: b"it/s" in said.read_bytes() or b"s/it" in said.read_bytes(), run)
            ranks = [p for p in psutil.Process(run.pid).children() if "ditile-rank" in p.cmdline()]
            ranks.sort(key=lambda p: int(p.cmdline()[p.cmdline().index("ditile-rank") + 1]))
            yield run, ranks, said
        finally:
            run.kill()
            run.wait()


def _hears_control_c() -> None:
    """Whoever runs these tests in the background of a shell has had Ctrl-C ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the run never began"
        assert run.poll() is None, "the run ended before it began to draw"
        time.sleep(0.1)


def nothing_is_left(ranks: list[psutil.Process], folder: Path) -> bool:
    psutil.wait_procs(ranks, timeout=5)
    return not any(rank.is_running() for rank in ranks) and not (folder / "x.png").exists()


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, number: int) -> None:
    """A failure would mean that a user waits ten minutes for a time-out, or blames the wrong rank."""
    with drawing(tmp_path) as (run, ranks, said):
        ranks[number].kill()
        assert run.wait(timeout=5) == 1
        assert f"ditile: rank {number}: killed by SIGKILL" in said.read_text()
        assert nothing_is_left(ranks, tmp_path)


def test_a_stopped_rank_is_noticed(tmp_path: Path) -> None:
    """A failure would mean that a rank which hangs without dying hangs the run."""
    with drawing(tmp_path) as (run, ranks, said):
        ranks[1].suspend()
        ranks[0].wait(timeout=15)  # which goes on until the other is noticed, and is ended then
        assert run.wait(timeout=5) == 1
        assert "rank 1" in said.read_text()
        assert nothing_is_left(ranks, tmp_path)


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
    monkeypatch.setattr(main, "_draw_pictures", stall)
    before = set(psutil.Process().children())
    words = [*PLAN, "--out", str(tmp_path / "x.png"), "--stall-timeout", "2"]
    assert main.main(["generate", "a red ring", *words]) == 1
    stacks, said = capsys.readouterr().err.rstrip().rsplit("\n", 1)
    first, second = stacks.split("rank 0:")[1].split("rank 1:")
    assert "in nap" in first and "in barrier" in second and "in nap" not in second
    assert said.startswith("ditile: rank ") and "no rank made progress for" in said
    assert not list(tmp_path.iterdir()) and set(psutil.Process().children()) <= before


def test_control_c_ends_the_run_cleanly(tmp_path: Path) -> None:
    """A failure would mean tracebacks of every rank on the terminal, or processes that go on."""
    with drawing(tmp_path) as (run, ranks, said):
        os.kill(run.pid, signal.SIGINT)
        assert run.wait(timeout=8) == 130
        assert "Traceback" not in said.read_text()
        assert nothing_is_left(ranks, tmp_path)

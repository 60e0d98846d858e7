"""`launch` ends honestly: the right error, soon, nothing left. A failure means orphans or false blame."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from ditile.cli import main
from ditile.distributed.failure_detection import LaunchLimits
from ditile.distributed.heartbeat import note_shared_call
from ditile.distributed.launch import launch
from ditile.distributed.mesh import Communicators
from ditile.distributed.private_network import create_private_network
from ditile.plan.errors import PlanError, RankError, StateError

ROOT = Path(__file__).parents[2]


def _ranks(folder: Path) -> list[psutil.Process]:
    """Every living rank whose directory is below `folder`, whoever started it."""
    marked = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "ditile-rank" in words and str(folder) in words[2] and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
        except psutil.Error:  # gone meanwhile
            continue
    return marked


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """After every test: no rank, no child, no descriptor and no file of `launch` is left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before, descriptors = set(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
    yield
    assert _ranks(tmp_path) == []
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(scratch.iterdir()) == []
    assert psutil.Process().num_fds() <= descriptors


def place(number: float) -> tuple[Any, ...]:
    rank, total = dist.get_rank(), torch.tensor([number])
    dist.all_reduce(total)
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")]
    return rank, total.item(), dist.get_backend(), torch.get_num_threads(), variables


def test_results_come_in_rank_order() -> None:
    for rank, result in enumerate(launch(place, 3, (2.0,), threads=1)):
        assert result == (rank, 6.0, "gloo", 1, [str(rank), str(rank), "3", "1"])


def echo(values: tuple[Any, ...]) -> tuple[Any, ...]:
    print("a rank may print")
    return (*values, dist.get_rank())


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError(f"{time.monotonic()}")
    dist.barrier()


def test_a_rank_that_raises() -> None:
    with pytest.raises(RankError) as caught:
        launch(fail_on_one, 2)
    assert (caught.value.rank, caught.value.cause) == (1, "KeyError")
    assert "in fail_on_one" in caught.value.traceback and "raise KeyError" in caught.value.traceback
    # the one contract about time: 5 s from the failure to the error, of which about 1 is used
    assert time.monotonic() - float(caught.value.message.split("'")[1]) < 5


def catch_on_one() -> None:
    with contextlib.suppress(ValueError), note_shared_call():
        if dist.get_rank() == 1:
            raise ValueError(f"{time.monotonic()}")
        dist.barrier()
    nap()


def test_an_error_that_one_rank_catches() -> None:
    """The other one waits for it. A failure means that it does so until the stall limit, and nobody learns why."""
    with pytest.raises(RankError, match="rank 1: left a call with an error, and other ranks wait for it") as caught:
        launch(catch_on_one, 2)
    assert caught.value.cause == "ValueError" and "in catch_on_one" in caught.value.traceback
    # the contract: 5 s from the error to the end
    assert time.monotonic() - float(caught.value.message.split("ValueError: ")[1]) < 5


def close_then_fail() -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.1)
        raise ValueError("the cause")
    dist.barrier()


def test_peers_are_not_blamed() -> None:
    """Rank 0 fails first, with a closed connection; rank 1 closed it."""
    with pytest.raises(RankError, match="rank 1: ValueError: the cause"):
        launch(close_then_fail, 2)


def kill_one(number: int, stamp: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        Path(stamp).write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        launch(kill_one, 3, (signal.SIGKILL, str(tmp_path / "stamp")))
    assert (caught.value.rank, caught.value.cause) == (1, "killed by SIGKILL")
    assert "killed by SIGKILL" in str(caught.value)
    assert time.monotonic() - float((tmp_path / "stamp").read_text()) < 5


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: no sign of life") as caught:
        launch(kill_one, 2, (signal.SIGSTOP, str(tmp_path / "stamp")), limits=LaunchLimits(silence=3))
    assert "in kill_one" in caught.value.traceback.split("rank 1:")[0]
    assert LaunchLimits().silence + 5 <= 15, "the limit by default"


def leave(code: int) -> Any:
    return sys.stdout if code == 0 else os._exit(code)


@pytest.mark.parametrize(("code", "cause"), [(0, "TypeError"), (3, "exited with code 3 before it returned")])
def test_a_rank_that_gives_no_result(code: int, cause: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(leave, 1, (code,))
    assert caught.value.cause == cause


def nap() -> None:
    time.sleep(1000)


def report(count: int) -> str:
    for _ in range(count if dist.get_rank() == 0 else 0):
        time.sleep(0.5)
        os.write(int(os.environ["DITILE_PROGRESS_FD"]), b".")
    dist.barrier()
    return "done"


def test_progress_of_one_rank_keeps_the_run_alive() -> None:
    reports = []
    assert launch(report, 2, (9,), stall_timeout=3, progress=lambda *seen: reports.append(seen)) == ["done"] * 2
    assert {rank for rank, _ in reports} == {0}
    assert sum(number for _, number in reports) == 9


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: launch(nap, 0), PlanError, "ranks=0.*try ranks=1"),
        (lambda: launch(nap, 2, stall_timeout=0), PlanError, "stall_timeout=0"),
        (lambda: launch(echo, 2, ((sys.stdout,),)), StateError, "cannot be sent"),
        (lambda: launch(echo, 1, "abc"), PlanError, "args='abc' should be"),  # type: ignore[arg-type]
    ],
)
def test_bad_calls_start_nothing(
    call: Callable[[], object], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(error, match=text):
        call()


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a script without the `__main__` guard would start processes for ever."""
    monkeypatch.setenv("DITILE_PROGRESS_FD", "7")
    with pytest.raises(StateError, match="inside a rank"):
        launch(nap, 2)


SCRIPT = """
    import ctypes, logging, os, signal, sys, time
    from pathlib import Path
    from ditile import launch

    assert "torch" not in sys.modules
    logging.getLogger("torchao").warning("Failed to load kernels")  # as an import of torchao says

    def block(folder):
        import torch.distributed as dist
        Path(folder, f"running-{dist.get_rank()}").touch()
        if dist.get_rank() == 0:
            dist.barrier()
        ctypes.PyDLL(None).sleep(1000)  # in C, and it keeps the interpreter's lock

    def double(number):
        return 2 * number

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(launch(double, 2, (21,)) if sys.argv[1] == "double" else launch(block, 2, (sys.argv[1],)))
"""


def _script(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path / "scratch")}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, script, *words], env=environ, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_parent_that_is_ended_takes_its_ranks_along(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Both ranks are blocked in C, one of them with its interpreter's lock held."""
    deadline = time.monotonic() + 60
    with _script(tmp_path, str(tmp_path)) as parent:
        try:
            while len(list(tmp_path.glob("running-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            assert len(_ranks(tmp_path)) == 2
            parent.send_signal(number)
            _, err = parent.communicate(timeout=20)
        finally:
            parent.kill()
    assert parent.returncode == code
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert err.count("Traceback") == (number == signal.SIGINT), "ranks print none"
    if number == signal.SIGKILL:  # nobody was left to remove the directory
        for directory in (tmp_path / "scratch").iterdir():
            shutil.rmtree(directory)
    while _ranks(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)


def list_reachable_ports() -> list[str]:
    """The ports on which this process listens that every user of the machine can see, after a group of two was made."""
    Communicators().get_or_make_group("test", range(dist.get_world_size()), "gloo")
    links = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if Path("/proc/self/fd", name).exists()
    ]
    own = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert own and total == dist.get_world_size()
    return [row[1] for row in rows if row[3] == "0A" and row[9] in own]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_no_other_user_can_reach_the_ports_of_gloo() -> None:
    """gloo takes who connects first for a rank. A failure means that any user of the machine can end a run."""
    with create_private_network() as network:
        if network is None:
            pytest.skip("this machine lets this user make no network")
    assert launch(list_reachable_ports, 2) == [[], []]


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs are not bound")
def test_ranks_that_fill_the_cores_keep_to_their_own() -> None:
    """A failure means that two ranks compute on one core while another idles, or a lone one may not move."""
    mine = cores()
    assert sum(launch(cores, len(mine), threads=1), []) == mine
    assert launch(cores, 1, threads=1) == [mine]
    assert launch(cores, len(mine) + 1, threads=1) == [mine] * (len(mine) + 1)


def test_large_values_travel_both_ways() -> None:
    """Tens of MB per rank, far more than a pipe holds; nothing may block and nothing may change."""
    tensor = torch.randn(2000, 2000)
    array = np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    for rank, result in enumerate(launch(echo, 2, ((tensor, array, [image, image]),))):
        assert torch.equal(result[0], tensor)
        assert np.array_equal(result[1], array)
        assert all(picture.tobytes() == image.tobytes() for picture in result[2])
        assert result[3] == rank


def deaf(rank: int, reports: int) -> None:
    """A Ctrl-C that comes where nothing can be raised."""
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_lost_interrupt_ends_the_run() -> None:
    """Python prints what is raised in a destructor, and goes on. A failure means that Ctrl-C does nothing at times."""
    # Tests may run where it is ignored: in the background, or as workers.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(report, 1, (100,), progress=deaf)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


PLAN = ["--pipefusion", "2", "--steps", "500", "--threads", "1", "--height", "64", "--width", "64"]


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
    words = [*PLAN, "--out", str(tmp_path / "x.png"), "--stall-timeout", "2"]
    assert main.main(["generate", "a red ring", *words]) == 1
    stacks, said = capsys.readouterr().err.rstrip().rsplit("\n", 1)
    first, second = stacks.split("rank 0:")[1].split("rank 1:")
    assert "in nap" in first and "in barrier" in second and "in nap" not in second
    assert said.startswith("ditile: rank ") and "no rank made progress for" in said
    # No image; the fixture above looks for what else may be left.
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]

"""The server as a process: what it imports, what it draws, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ditile.cli import main
from ditile.serve import replica
from ditile.serve.link import WorkerSetup
from tests.serve.running import RunningServer, run_server

PROMPT = "a large red circle on the left on a gray background"


def test_the_server_does_not_import_torch() -> None:
    """A failure would cost every server seconds and hundreds of megabytes."""
    code = "import sys, ditile.serve.server; assert not {'torch', 'diffusers', 'numpy'} & {*sys.modules}"
    code = f"import ditile.cli.main; {code}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "words, says",
    [
        (["--host", "0.0.0.0"], "--api-key FILE or DITILE_API_KEY, or --insecure"),
        (["--port", "99999"], "'99999' should be less than 65536"),
        (["--lora-dir", "nowhere"], "is not a folder"),
        (["--tensor", "3"], "tensor=3"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A failure would mean a traceback, or a server that starts its ranks for ever."""
    code = main.main(["serve", "--port", "0", "--state", str(tmp_path / "state"), *words])
    *before, line = capsys.readouterr().err.splitlines()
    assert code == 2
    assert before in ([], ["ditile: shapes-pixart: the ranks load the model .."])
    assert says in line


def fail_to_start(setup: WorkerSetup) -> None:
    """In place of `run_worker`, on a rank."""
    raise RuntimeError("libcudnn.so.9 is missing")


def test_a_server_exits_when_its_ranks_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is told to. A failure would mean a service manager that never starts it again."""
    monkeypatch.setattr(replica, "run_worker", fail_to_start)
    monkeypatch.setattr(replica, "FAILED_STARTS", 1)
    # A server that goes on is ended by a signal.
    too_late = threading.Timer(300, os.kill, (os.getpid(), signal.SIGTERM))
    too_late.start()
    try:
        words = ["--port", "0", "--state", str(tmp_path / "state"), "--no-page", "--exit-on-failure"]
        assert main.main(["serve", *words]) == 1
        assert too_late.is_alive()
    finally:
        too_late.cancel()


def test_a_server_shares_no_state_folder_and_ends_by_sigterm(tmp_path: Path) -> None:
    """A failure would mean jobs that are generated twice, or processes that are left."""
    with run_server("shapes-pixart", state=tmp_path / "state") as server:
        second = RunningServer("shapes-pixart", (), tmp_path / "state")
        assert second.process.wait(60) == 2
        assert "state" in second.log.splitlines()[-1]
        ranks = psutil.Process(server.process.pid).children(recursive=True)
        assert ranks
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.log
        assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_replicas_generate_at_the_same_time_and_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """A failure would mean a second group of ranks that generates nothing, or ranks that keep a GPU for nobody."""
    with run_server("shapes-pixart", "--replicas", "2", state=tmp_path / "state") as server:
        ranks = psutil.Process(server.process.pid).children(recursive=True)
        assert sorted(rank.environ()["LOCAL_RANK"] for rank in ranks) == ["0", "1"]
        with server.client() as client, ThreadPoolExecutor(2) as pool:

            def draw(seed: int) -> bytes:
                asked = {"prompt": PROMPT, "seed": seed, "num_inference_steps": 30}
                return bytes(client.post("/v1/images/generations", json=asked).content)

            drawing = [pool.submit(draw, seed) for seed in (1, 1)]
            deadline = time.monotonic() + 60
            while (health := client.get("/health").json())["running"] < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert health["running"] == 2
            pictures = [json.loads(each.result())["data"][0]["b64_json"] for each in drawing]
        assert pictures[0] == pictures[1]
        server.end(signal.SIGKILL)
        assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_an_idle_server_holds_no_memory_and_generates_the_next_request(tmp_path: Path) -> None:
    """A failure would mean weights that stay on a GPU all night, or a request that is lost after it."""
    with run_server("shapes-pixart", "--cfg", "2", "--idle-unload", "1", state=tmp_path / "state") as server:
        process = psutil.Process(server.process.pid)
        asked = {"prompt": PROMPT, "seed": 7, "num_inference_steps": 2}
        with server.client() as client:
            pictures = []
            for _ in range(2):
                deadline = time.monotonic() + 60
                while process.children(recursive=True) and time.monotonic() < deadline:
                    time.sleep(0.05)
                answer = client.get("/health")
                assert (answer.status_code, answer.json()["status"]) == (200, "unloaded"), server.log
                assert [one["state"] for one in answer.json()["replicas"]] == ["asleep"]
                pictures.append(client.post("/v1/images/generations", json=asked).json()["data"][0]["b64_json"])
        assert pictures[0] == pictures[1]
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.log and "failed" not in server.log

"""The arithmetic of `ditile bench`: what rows say, what is measured again, and what is exposed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ditile.cli import main
from ditile_lab.bench import command, runs
from ditile_lab.bench.cells import BenchCell
from ditile_lab.bench.session import compute_exposed_shares
from ditile_lab.bench.submission import Submission
from ditile_lab.machine import comparison

pytestmark = pytest.mark.usefixtures("elsewhere", "forked_ranks")

MACHINE: dict[str, Any] = {"processor": "a processor", "cores": 2, "gpus": []}
JOB = {"model": "shapes-pixart", "steps": 4, "threads": 1, "machine": MACHINE}


def run(cell: BenchCell, seconds: float, one: float, **more: Any) -> dict[str, Any]:
    key = json.loads(runs.make_run_key(JOB, cell))
    record: dict[str, Any] = {"key": key, "seconds": seconds, "world": cell.num_ranks}
    record |= {"when": "now", "load": 0.5, "bound": 2.0, "steps": 4, "bytes_sent": [10, 30], "loop": seconds / 2}
    waits = [{"share": 0.1, "warmup": 0.0, "kinds": {"ring": 0.1}}, {"share": 0.3, "warmup": 0.2, "kinds": {}}]
    return record | {"one_rank_s": one, "exposed": waits} | more


def test_a_row_by_hand() -> None:
    """The speed-up is the median of the ratios within rounds: not that of medians, which here is 2.0."""
    cell = BenchCell("ring=2")
    memory = [{"parameters": 5, "keys": 1, "cache": 0, "activations": 2}, dict.fromkeys(("parameters", "keys"), 1)]
    lines = [run(cell, 1.0, 3.0), run(cell, 2.0, 3.0), run(cell, 3.0, 4.0)]
    (row,) = runs.summarize_runs(
        [{"key": lines[0]["key"], "memory": memory}, *lines], {runs.make_run_key(JOB, cell): runs.Prediction(1.5, 6)}
    )
    assert row["seconds"] == [1.0, 2.0, 3.0] and row["one_rank_seconds"] == [3.0, 3.0, 4.0]
    assert (row["ratio"], row["ratio_lowest"], row["ratio_highest"]) == (1.5, 4 / 3, 3.0)
    assert (row["median_s"], row["lowest_s"], row["highest_s"], row["rounds"]) == (2.0, 1.0, 3.0, 3)
    assert row["exposed"] == pytest.approx(0.2) and row["exposed_warmup"] == pytest.approx(0.1)
    assert row["exposed_kinds"] == {"ring": pytest.approx(0.05)} and row["exposed_of_rank"] == [0.1, 0.3]
    assert row["load_before"] == 0.5 and row["peak_memory_bytes"] == 8 and row["bound"] == 2.0
    assert row["loop_s"] == 1.0 and row["predicted_loop_s"] == 1.5 and row["predicted_error"] == 0.5
    assert row["predicted_memory_bytes"] == 6 and row["predicted_memory_error"] == -0.25


def test_exposed_by_hand() -> None:
    """Of 10 s in 3 steps 4 s are waits, 1.5 s of them in the synchronous step."""
    report: dict[str, Any] = {"step_seconds": [4.0, 3.0, 3.0], "steps": 3, "synchronous": [0]}
    report["waited"] = {"activations": [1.0, 0.5, 1.0], "latents": [0.5, 0.0, 1.0]}
    found = compute_exposed_shares(report)
    assert found == {"share": 0.4, "warmup": 0.15, "kinds": {"activations": 0.25, "latents": 0.15}}
    exact = compute_exposed_shares(report | {"synchronous": [0, 1, 2]})
    assert exact["share"] == 0.4 and exact["warmup"] == 0, "where all steps are synchronous there is no warmup"
    assert compute_exposed_shares({"step_seconds": [], "waited": {}, "steps": 0, "synchronous": []})["share"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "all"), "there are methods"),
        (("--plans", "tensor=5", "--alone"), "tensor=5 does not divide"),
        (("--plans", "ulysses=2", "--out", "nowhere/there"), "nowhere"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    for module in (command, comparison):
        monkeypatch.setattr(module, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    assert main.main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ditile: ") and err.count("\n") == 1 and says in err, err
    assert not list(Path().iterdir())


def test_torchrun_must_have_started_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["bench", "--plans", "ulysses=4"]) == 2
    assert "a plan needs 4 ranks and torchrun started 2" in capsys.readouterr().err
    assert not list(Path().iterdir())


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("b/rows.jsonl").read_text().splitlines()]


def test_two_ranks_measured_and_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and numbers of a real run; a second time nothing is measured, and one plan more is that alone."""
    plans = "pipefusion=2 patches=2; ulysses=2 | F=1 W=1 R=0.5"
    words = ["--steps", "3", "--rounds", "1", "--threads", "1", "--out", "b", "--height", "64", "--width", "64"]
    submitted = ["--submit", "mine.json"]
    assert main.main(["bench", "--plans", plans, *words, *submitted, "--hardware", "l40-pcie"]) == 0
    out = capsys.readouterr().out
    assert "pipefusion=2 patches=2" in out and "predicted: seconds of the loop and memory on l40-pcie" in out, out
    found = {(row["plan"], row["cache"]): row for row in rows()}
    one, pipe = found["", ""], found["pipefusion=2 patches=2", ""]
    assert found.keys() == {("", ""), ("pipefusion=2 patches=2", ""), ("ulysses=2", "F=1 W=1 R=0.5")}
    assert pipe["world"] == 2 and len(pipe["seconds"]) == 1 and pipe["ratio"] > 0 and pipe["bound"] > 1
    assert all(0 < row["loop_s"] < row["median_s"] for row in found.values()), "text and decode are beside the loop"
    assert one["predicted_loop_s"] > 0 and pipe["predicted_loop_s"] > 0
    assert len(pipe["bytes_sent"]) == len(pipe["memory"]) == 2 and min(pipe["bytes_sent"]) > 0
    assert 0 < pipe["exposed"] < 1 and pipe["exposed_kinds"].keys() >= {"activations", "latents"}
    assert all(rank["keys"] > 0 and rank["activations"] > 0 for rank in pipe["memory"])
    assert all(rank["parameters"] < one["memory"][0]["parameters"] for rank in pipe["memory"]), "half the blocks"
    assert found["ulysses=2", "F=1 W=1 R=0.5"]["memory"][0]["cache"] > 0
    submission = Submission.model_validate_json(Path("mine.json").read_text())
    assert [(run.plan, run.cache) for run in submission.runs] == list(found), "the plain pipeline and each plan"
    assert all(run.digest and run.seconds == found[run.plan, run.cache]["median_s"] for run in submission.runs)
    assert submission.runs[0].digest != submission.runs[1].digest, "stale keys give another image"
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setenv("DITILE_PROFILE", "none")
    before = Path("b/runs.jsonl").read_text()
    assert main.main(["bench", "--plans", plans, *words]) == 0
    out = capsys.readouterr().out
    assert "speed-up" in out and "run `ditile calibrate`" in out and Path("b/runs.jsonl").read_text() == before
    missing: list[Any] = []
    monkeypatch.setattr(command, "launch", lambda fn, world, args, **_: missing.extend(args[0].missing.items()))
    assert main.main(["bench", "--plans", f"{plans}; ring=2", *words]) == 0
    assert [(cell.plan, left) for cell, left in missing] == [("ring=2", 1)]

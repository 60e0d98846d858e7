"""`ditile bench` as a person meets it. A failure would mean no rows, no figures, or a traceback for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ditile.cli import main
from ditile_lab.bench import command
from ditile_lab.machine import comparison


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "all"), "there are methods"),
        (("--sweep", "methods", "--alone"), "--alone measures ranks of --plans"),
        (("--plans", "ulysses=2", "--alone", "--steps", "4"), "steps=4 is too few"),
        (("--plans", "tensor=5", "--alone"), "tensor=5 does not divide"),
        (("--plans", "ulysses=2", "--alone", "--model", "random-ltx-2"), "gets no random weights"),
        (("--plans", "ulysses=2", "--model", "nothing-like-it"), "shapes-flux"),
        (("--plans", "tensor=3"), "tensor=3 does not divide"),
        (("--plans", "ulysses=2", "--out", "nowhere/there"), "nowhere"),
        (("--plans", "ulysses=2", "--profile", "nowhere"), "the profile nowhere cannot be read"),
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


def test_ranks_alone_are_measured_without_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["bench", "--plans", "ulysses=2", "--alone"]) == 2
    assert "--alone is for one process, and torchrun started 2" in capsys.readouterr().err


def test_torchrun_must_have_started_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["bench", "--plans", "ulysses=4", "--no-figures"]) == 2
    assert "a plan needs 4 ranks and torchrun started 2" in capsys.readouterr().err
    assert not list(Path().iterdir())


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("b/rows.jsonl").read_text().splitlines()]


def test_two_ranks_measured_with_figures_and_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, figures and numbers of a real run; a second time nothing is measured, and one plan more is that alone."""
    plans = "pipefusion=2 patches=2; ulysses=2 | F=1 W=1 R=0.5"
    words = ["--steps", "3", "--rounds", "1", "--threads", "1", "--out", "b", "--height", "64", "--width", "64"]
    assert main.main(["bench", "--plans", plans, *words, "--hardware", "l40-pcie"]) == 0
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
    with Image.open("b/plans-latency.png") as image:
        assert image.width > 900
    assert "<svg" in Path("b/plans-latency.svg").read_text()
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setenv("DITILE_PROFILE", "none")
    before = Path("b/runs.jsonl").read_text()
    assert main.main(["bench", "--plans", plans, *words, "--no-figures"]) == 0
    out = capsys.readouterr().out
    assert "speed-up" in out and "run `ditile calibrate`" in out and Path("b/runs.jsonl").read_text() == before
    missing: list[Any] = []
    monkeypatch.setattr(command, "launch", lambda fn, world, args, **_: missing.extend(args[0].missing.items()))
    assert main.main(["bench", "--plans", f"{plans}; ring=2", *words, "--no-figures"]) == 0
    assert [(cell.plan, left) for cell, left in missing] == [("ring=2", 1)]

"""`ditile evaluate`, and a budget on what it wrote, as a person meets them, with a bundled model on two ranks.

A failure would mean a number that belongs to another picture, a picture that is drawn twice, or a stray file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ditile.cli import main
from ditile_lab.quality import command, scores
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting
from tests.cli.test_cli import refused
from tests.lab.quality.test_evaluate import mean_colors
from tests.pool import fork_ranks

CACHE = "F=1 W=1 R=1"
SMALL = ("--steps", "3", "--height", "64", "--width", "64", "--threads", "1")
WORDS = ("evaluate", *SMALL, "--plans", "pipefusion=1; pipefusion=2", "--caches", f"none; {CACHE}", "--out", "out")
SETTINGS = [
    ORIGINAL,
    EvaluationSetting("pipefusion=1", CACHE),
    EvaluationSetting("pipefusion=2", "none"),
    EvaluationSetting("pipefusion=2", CACHE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one evaluation of two captions was written to."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "references").mkdir()
    for name, color in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        Image.new("RGB", (80, 40), color).save(folder / "references" / f"{name}.jpg")
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.chdir(folder)
        patch.setattr(scores, "NUM_FEATURES", 3)
        patch.setattr(scores, "load_inception_features", lambda: mean_colors)
        assert main.main([*WORDS, "--num", "2", "--resize", "32", "--references", "references"]) == 0
    shutil.copy(folder / "out" / "evaluation.json", folder / "first.json")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)


def test_what_is_written(folder: Path) -> None:
    """All settings in the order asked for, what was left out where something was, and files that can be opened."""
    found = json.loads((folder / "first.json").read_text())
    assert [(row["plan"], row["cache"]) for row in found["settings"]] == [tuple(each) for each in SETTINGS]
    original, cached, planned, both = found["settings"]
    assert (original["psnr"], original["latency_ratio"], original["frechet_original"]) == (100.0, 1.0, 0.0)
    assert all(10 < row["psnr"] < 100 and 0 < row["ssim"] < 1 for row in (cached, planned, both))
    assert all(row["frechet_original"] > 0 and row["latency_ratio"] > 0 for row in (cached, planned, both))
    assert cached["blocks_saved"] == both["blocks_saved"] > 0 == planned["blocks_saved"]
    assert {row["world"] for row in (planned, both)} == {2} and found["references"]["count"] == 2
    assert all(row["frechet_references"] > 0 and "all_right" in row for row in found["settings"])
    assert found["job"]["call"]["num_inference_steps"] == 3 and "original and all settings" in found["measured"]["how"]
    rows = [json.loads(line) for line in (folder / "out" / "pictures.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and {row["seed"] for row in rows} == {0, 1} and len({row["prompt"] for row in rows}) == 2
    for name in (*(row["file"] for row in rows), "contact-sheet.png"):
        with Image.open(folder / "out" / name) as image:
            assert image.size == (64, 64) or name == "contact-sheet.png"


def test_it_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there is judged and not drawn; a lost picture alone is drawn again, and is the same."""
    monkeypatch.chdir(folder)
    drawn: list[Any] = []

    def none(task: Any, turns: Any) -> None:
        drawn.append([(turn.place, turn.settings) for turn in turns])

    monkeypatch.setattr(command, "_run_session_task", none)
    assert main.main([*WORDS, "--num", "2"]) == 0 and drawn == []
    out = capsys.readouterr().out
    assert "pipefusion=2" in out and "no fid: " in out and "FID to" not in out and "no clip: no CLIP was named" in out
    found = json.loads((folder / "out" / "evaluation.json").read_text())
    lost = next(row for row in map(json.loads, (folder / "out" / "pictures.jsonl").read_text().splitlines())
                if (row["plan"], row["cache"], row["caption"]) == ("pipefusion=1", CACHE, 1))  # fmt: skip
    path = folder / "out" / lost["file"]
    before = path.read_bytes()
    path.unlink()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main.main([*WORDS, "--num", "2", "--plans", "pipefusion=1"]) == 0 and path.read_bytes() == before
    again = json.loads((folder / "out" / "evaluation.json").read_text())
    assert [row["psnr"] for row in again["settings"]] == [row["psnr"] for row in found["settings"]]
    assert again["measured"]["original_again_psnr"] == 100.0, "the original was drawn beside it, as it was before"


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--steps", "4"), "has images of call="), (("--captions", "other.txt"), "images of other captions: number 0")],
)
def test_another_job_in_the_same_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(folder)
    Path("other.txt").write_text("a small blue square in the center on a white background\n")
    num = () if "--captions" in words else ("--num", "2")
    assert says in refused(capsys, *WORDS, *num, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "nothing-like-it"), "shapes-flux, shapes-flux-turbo, shapes-pixart"),
        (("--plans", "pipefusion=64"), "pipefusion=64"),
        (("--plans", "data=2"), "leave data out"),
        (("--caches", "mask=2,1/1,1 policy=static"), "steps"),
        (("--captions", "empty.txt"), "has no prompt"),
        (("--num", "201"), "exceeds the 200 captions"),
        (("--clip", "nowhere"), "not a CLIP that transformers can load"),
        (("--out", "empty.txt"), "is a file; give a folder"),
        (("--out", "."), "has files and no job.json"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    Path("empty.txt").touch()
    Path("there").mkdir()
    Path("there", "a.png").touch()
    assert says in refused(capsys, "evaluate", "--plans", "patches=2", "--caches", "none", "--num", "1", *words)

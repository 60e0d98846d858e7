"""A file of prompts: a picture per line, resumed where it stopped. A failure would mean work done twice, or never."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ditile.cli import main
from ditile.runner.requests import pictures
from ditile_lab.quality.store import save_image_with_texts
from tests.cli.test_cli import opened

FILE = """# shapes
a red circle

a blue square
  a green ring
"""
WORDS = ("--prompts-file", "prompts.txt", "--steps", "2", "--height", "64", "--width", "64", "--threads", "1")
PROMPTS = ["a red circle", "a blue square", "a green ring"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a working directory of its own, with a file of prompts."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text(FILE)


def made(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The summary of a run."""
    assert main.main(["generate", *WORDS, *words, "--json", "-"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_a_picture_per_line_and_only_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines and comments are none; a picture that is cut short, or of another prompt or seed, is made anew."""
    facts = made(capsys, "--out", "x.png")
    names = [f"x-{k:04}.png" for k in range(3)]
    assert facts["images"] == names and facts["skipped"] == 0
    assert facts["steps"] == facts["synchronous_steps"] == 6
    for k, name in enumerate(names):
        assert (opened(name).text["prompt"], opened(name).text["seed"]) == (PROMPTS[k], str(k))
    assert sorted(p.name for p in Path().iterdir()) == ["prompts.txt", *names], "no half files"

    whole = [Path(name).read_bytes() for name in names]
    Path(names[0]).write_bytes(whole[0][:-40])
    Path(names[1]).write_bytes(whole[2])
    facts = made(capsys, "--out", "x.png")
    assert facts["skipped"] == 1 and facts["steps"] == 4
    assert [Path(name).read_bytes() for name in names] == whole

    monkeypatch.setattr("ditile.runner.load.load", lambda *_, **__: pytest.fail("nothing is left to make"))
    facts = made(capsys, "--out", "x.png")
    assert facts["skipped"] == 3 and facts["bytes_sent"] == []


def levels(one: str, other: str) -> int:
    """The largest difference of two pictures."""
    return int(np.abs(np.subtract(*(np.asarray(opened(path)).astype(int) for path in (one, other)))).max())


def test_replicas_share_out_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Three lines over two replicas; then again with two of the three removed, which make up one batch."""
    made(capsys, "--out-dir", "one")
    names = [f"{k:04}.png" for k in range(3)]
    facts = made(capsys, "--data", "2", "--out-dir", "two")
    assert facts["plan"] == "data=2" and facts["skipped"] == 0 and len(facts["bytes_sent"]) == 2
    for mine in names:
        near = [name for name in names if levels(f"two/{mine}", f"one/{name}") <= 1]
        assert near == [mine], "the picture of a line is that of one rank, and of no other line"
    before = {name: Path("two", name).stat().st_mtime_ns for name in names}
    for name in (names[0], names[2]):
        Path("two", name).unlink()
    assert made(capsys, "--data", "2", "--out-dir", "two")["skipped"] == 1
    assert {name: Path("two", name).stat().st_mtime_ns > before[name] for name in names} == {
        names[0]: True, names[1]: False, names[2]: True
    }  # fmt: skip
    for k, name in enumerate(names):
        assert levels(f"two/{name}", f"one/{name}") <= 1
        assert (opened(f"two/{name}").text["prompt"], opened(f"two/{name}").text["seed"]) == (PROMPTS[k], str(k))
    assert made(capsys, "--data", "2", "--out-dir", "one")["skipped"] == 3, "one rank's are as good"


def test_a_picture_appears_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure would mean that a run which was stopped leaves half a file under a picture's name."""

    def fill_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    image = Image.new("RGB", (8, 8))
    save_image_with_texts(image, Path("a.png"), {"prompt": "first"})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "replace", fill_disk)
        save_image_with_texts(image, Path("a.png"), {"prompt": "second"})
    assert pictures.read_picture_texts(Path("a.png"))["prompt"] == "first"
    assert sorted(p.name for p in Path().iterdir()) == ["a.png", "prompts.txt"]
    assert pictures.read_picture_texts(Path("nothing.png")) == pictures.read_picture_texts(Path("prompts.txt")) == {}


def test_files_that_were_given_are_known_by_what_is_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure would mean that pictures made from another picture, or in another type, pass as made."""
    words = ("--model", "shapes-flux", "--image", "in.png", "--strength", "0.5", "--out-dir", "pictures")
    Path("prompts.txt").write_text("\ufeff# by an editor that begins with a mark\na red circle\n", "utf-8")
    for colour, skipped in (("red", 0), ("red", 1), ("blue", 0)):
        Image.new("RGB", (64, 64), colour).save("in.png")
        assert made(capsys, *words)["skipped"] == skipped, colour
    assert made(capsys, *words, "--dtype", "float32")["skipped"] == 1
    assert made(capsys, *words, "--dtype", "bfloat16")["skipped"] == 0
    assert [path.name for path in Path("pictures").iterdir()] == ["0000.png"]

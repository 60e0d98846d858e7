"""A transformer in one file on the command line: the image of the folder, what is said of a file, and refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from ditile.cli import main
from ditile.model.known import ASSETS
from tests.runner.single_files import COMFY, write_sparse_flux

ROOT = Path(__file__).parents[2]
WORDS = ("generate", "a red circle", "--steps", "2", "--seed", "7", "--threads", "1")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of FLUX.1-dev at its own size."""
    path = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    write_sparse_flux(path)
    return str(path)


def generate(*words: str) -> np.ndarray:
    command = [sys.executable, "-m", "ditile", *WORDS, *words, "--out", "a.png"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    with Image.open("a.png") as image:
        return np.asarray(image)


def test_the_image_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that ranks of the command read something else than the file has."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ASSETS / "shapes-flux", "model")
    (own,) = Path("model", "transformer").glob("*.safetensors")
    save_file({COMFY + name: tensor for name, tensor in load_file(own).items()}, "file.safetensors")
    own.unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    images = [
        generate("--model", "shapes-flux", "--pipefusion", "2"),
        generate("--model=~/model", "--transformer", "file.safetensors", "--pipefusion", "2"),
    ]
    assert np.array_equal(*images)
    with Image.open("a.png") as image:
        components = image.text["components"]  # type: ignore[attr-defined]
    size = os.path.getsize("file.safetensors")
    assert re.fullmatch(rf'{{"transformer": "file.safetensors: {size} bytes of 20..-..-..T.*"}}', components)


def test_what_is_said_of_a_file(flux: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure means that a file is taken for another model, or cannot be planned for without its weights."""
    assert main.main(["models", flux]) == 0
    shown = capsys.readouterr().out
    assert "flux.1-dev" in shown and "BF16 100%" in shown and "--model FOLDER --transformer FILE" in shown
    for name in ("text_encoder", "vae"):
        (own,) = (ASSETS / "shapes-flux" / name).glob("*.safetensors")
        assert main.main(["models", str(own)]) == 0
        assert f"--model FOLDER --component {name}=FILE" in capsys.readouterr().out
        assert main.main(["generate", "a", "--model", str(own), "--dry-run"]) == 2
        assert f"has no transformer; give --model FOLDER --component {name}=" in capsys.readouterr().err
    assert main.main(["plan", "--model", flux, "--hardware", "l40-pcie", "--devices", "2"]) == 0
    assert "flux.1-dev" in capsys.readouterr().out
    assert main.main(["generate", "a", "--model", flux, "--pipefusion", "2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"transformer: {flux}" in shown and "57 blocks" in shown


@pytest.mark.parametrize("words", [("generate", "a")])
def test_what_a_file_lacks_is_said(flux: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A failure means a traceback, or a reader who does not know what to give."""
    assert main.main([*words, "--model", flux]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"--model FOLDER --component transformer={flux}" in line, line

"""The command line, as a person meets it. A failure would mean a traceback, a wrong exit code, or a stray file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ditile import RankError, cli
from ditile.load import ASSETS

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "2", "--seed", "7", "--threads", "1")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)


def ditile(*words: str, module: tuple[str, ...] = ("ditile",)) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", *module, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the one line says, of a command that must leave nothing behind."""
    before = sorted(Path().rglob("*"))
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ditile: ") and err.count("\n") == 1, err
    assert sorted(Path().rglob("*")) == before
    return err


def opened(path: str) -> Image.Image:
    """A picture, with its file closed."""
    with Image.open(path) as image:
        image.load()
    return image


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "COMMAND"),
        (("paint", "a"), "generate"),
        (("generate",), "PROMPT"),
        (("generate", " "), "prompt is empty"),
        (("generate", "a", "circle"), "in quotes"),
        (("generate", "a", "--stpes", "3"), "did you mean --steps?"),
        (("generate", "a", "--pipefusio", "2"), "did you mean --pipefusion?"),
        (("generate", "a", "--qqq"), "--help"),
        (("generate", "a", "--steps", "-3"), "steps=-3"),
        (("generate", "a", "--steps", "many"), "--steps"),
        (("generate", "a", "--height", "0"), "height=0"),
        (("generate", "a", "--width", "-8"), "width=-8"),
        (("generate", "a", "--num-images", "0"), "num_images=0"),
        (("generate", "a", "--seed", "-1"), "seed=-1"),
        (("generate", "a", "--threads", "0"), "threads=0"),
        (("generate", "a", "--stall-timeout", "0"), "stall_timeout=0"),
        (("generate", "a", "--stall-timeout", "nan"), "stall_timeout=nan"),
        (("generate", "a", "--dtype", "int8"), "bfloat16"),
        (("generate", "a", "--model", "nothing-like-it"), "shapes-flux, shapes-pixart"),
        (("generate", "a", "--pipefusion", "0"), "pipefusion=0"),
        (("generate", "a", "--pipefusion", "2", "--stage-blocks", "1,x"), "--stage-blocks"),
        (("generate", "a", "--pipefusion", "2", "--stage_blocks", "1,2,3"), "give 2 numbers"),
        (("generate", "a", "--out", "nowhere/a.png"), "nowhere"),
        (("generate", "a", "--out", "."), "folder"),
        (("generate", "a", "--out", "a.jpg"), "a.png"),
        (("generate", "a", "--json", "nowhere/a.json"), "nowhere"),
        (("generate", "a", "--trace", "nowhere/a.json"), "nowhere"),
        (("generate", "a", "--image", "nothing.png"), "nothing.png"),
        (("generate", "a", "--strength", "0.5"), "--image"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert says in refused(capsys, *words)


@pytest.mark.parametrize("strength", ["0", "1.5", "nan"])
def test_a_strength_out_of_range(capsys: pytest.CaptureFixture[str], strength: str) -> None:
    Image.new("RGB", (8, 8)).save("a.png")
    assert "strength=" in refused(capsys, "generate", "a", "--image", "a.png", "--strength", strength)


def test_a_picture_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.png").write_text("no picture")
    assert "a.png" in refused(capsys, "generate", "a", "--image", "a.png")


def test_damaged_weights_are_seen_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    weights = Path(shutil.copytree(ASSETS / "shapes-pixart", "model")) / "vae/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "no whole safetensors file" in refused(capsys, "generate", "a", "--model", "model", "--pipefusion", "2")
    weights.unlink()
    assert "vae has no weights" in refused(capsys, "generate", "a", "--model", "model")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--height", "100"), "height=100"),
        (("--negative-prompt", "red", "--guidance", "1"), "ignores a negative prompt"),
        (("--device", "toaster"), "toaster"),
        (("--image", str(ROOT / "tests" / "surface" / "..")), "picture"),
    ],
)
def test_what_only_the_model_can_refuse(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert says in refused(capsys, "generate", "a circle", *SMALL, *words)


def test_patches_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are known at the first step, when the progress bar stands already."""
    assert cli.main(["generate", "a circle", *SMALL, "--patches", "999"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("ditile: patches=999 exceeds the 16 token rows")
    assert not list(Path().iterdir())


def test_pixart_has_no_image_to_image(capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (128, 128)).save("a.png")
    assert "no image-to-image pipeline" in refused(capsys, "generate", "a circle", *SMALL, "--image", "a.png")


def test_degrees_that_do_not_fit_are_refused_by_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pipefusion", "2", "--stage-blocks", "1,1")
    assert "add up to" in refused(capsys, "generate", "a circle", *SMALL, *words)


@pytest.mark.parametrize(
    "words", [["--help"], ["generate", "--help"], ["--version"], ["generate", "a", "--stpes", "3"]]
)
def test_help_version_and_refusals_do_not_import_torch(words: list[str]) -> None:
    code = f"""
import sys
from ditile.cli import main
try:
    main({words})
finally:
    assert not {{"torch", "diffusers", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "AssertionError" not in done.stderr and done.stdout + done.stderr


def test_help_names_every_flag() -> None:
    text = ditile("generate", "--help").stdout
    flags = """model steps guidance negative-prompt seed height width num-images image strength out pipefusion patches
               warmup stage-blocks dtype device threads stall-timeout trace json dry-run"""
    for flag in flags.split():
        assert f"--{flag}" in text


def test_a_rank_that_failed_is_its_traceback_and_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*args: Any, **options: Any) -> None:
        raise RankError(1, "ValueError", "it broke", "Traceback:\n  there\n")

    monkeypatch.setattr(cli, "launch", launch)
    assert cli.main(["generate", "a", "--pipefusion", "2"]) == 1
    assert capsys.readouterr().err == "Traceback:\n  there\nditile: rank 1: it broke\n"


def test_control_c_is_130_and_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "launch", launch)
    assert cli.main(["generate", "a", "--pipefusion", "2"]) == 130
    assert capsys.readouterr().err == "ditile: interrupted\n"


def test_models_lists_families_and_bundled_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    for word in ("FluxTransformer2DModel", "PixArtSigmaPipeline", "StableDiffusion3Pipeline", "shapes-flux"):
        assert word in out


def test_a_dry_run_shows_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "a circle", "--model", "shapes-flux", "--pipefusion", "2", "--dry-run"]) == 0
    assert "pipefusion=2" in capsys.readouterr().out
    assert not list(Path().iterdir())


def test_several_images_have_seeds_that_count_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The second of two is the first of the next seed: 1e-5 in a batch, so at most one level of 255."""
    assert cli.main(["generate", "a blue square", *SMALL, "--num-images", "2", "--out", "a.png", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == ["a-0.png", "a-1.png"]
    assert cli.main(["generate", "a blue square", "--steps", "2", "--seed", "8", "--out", "b.png"]) == 0
    pair = [np.asarray(opened(path)).astype(int) for path in ("a-1.png", "b.png")]
    assert np.abs(pair[0] - pair[1]).max() <= 1
    assert opened("a-1.png").text["seed"] == "8"


def test_a_picture_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (128, 128), "gray").save("start.png")
    words = ("--model", "shapes-flux", "--image", "start.png", "--strength", "0.5", "--out", "a.png", "--json", "-")
    assert cli.main(["generate", "a red circle", *SMALL, *words]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert opened("a.png").size == (128, 128)


def test_two_ranks_draw_what_one_draws() -> None:
    """All steps synchronous: bit-identical, and the summary is the only thing on the standard output."""
    words = ("a red circle", "--model", "shapes-flux", *SMALL)
    two = ditile("generate", *words, "--pipefusion", "2", "--warmup", "2", "--out", "two.png", "--trace", "t.json",
                 "--json", "-")  # fmt: skip
    assert two.returncode == 0, two.stderr
    facts = json.loads(two.stdout)
    assert facts["plan"] == "pipefusion=2 warmup=2" and facts["ranks"] == 2 and facts["images"] == ["two.png"]
    assert set(facts["seconds"]) == {"total", "text", "denoise", "decode"}
    assert len(facts["peak_memory_bytes"]) == len(facts["bytes_sent"]) == 2 and min(facts["bytes_sent"]) > 0
    assert json.loads(Path("t.json").read_text())
    assert cli.main(["generate", *words, "--out", "one.png"]) == 0
    one, two_ = opened("one.png"), opened("two.png")
    assert one.tobytes() == two_.tobytes()
    assert two_.text["prompt"] == "a red circle" and two_.text["plan"] == facts["plan"]
    assert json.loads(two_.text["settings"])["num_inference_steps"] == 2


def test_under_torchrun_the_ranks_are_those_that_it_started() -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ditile")
    done = ditile("generate", "a red circle", "--steps", "1", "--pipefusion", "2", "--out", "a.png", "--json", "a.json",
                  module=launcher)  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(Path("a.json").read_text())
    assert facts["ranks"] == 2 and opened("a.png").text["seed"] == str(facts["seed"])

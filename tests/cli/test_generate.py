"""What single flags of `ditile generate` do, and files in place of models. A failure: a flag that does nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from ditile import ModelError
from ditile.cli import main
from ditile.model.known import ASSETS
from ditile.runner.requests import arguments
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pictures import read_picture_texts
from ditile.runner.requests.pipelines import convert_value_errors
from tests import tiny
from tests.cli.test_cli import ditile, opened, refused
from tests.parallel.sequence import planned
from tests.runner.single_files import COMFY, write_sparse_flux

pytestmark = pytest.mark.usefixtures("elsewhere")


GANTT = """
steps 0 to 2 (= a whole synchronous step, 0-9.. a patch of an asynchronous one, . idle):
stage 0  |==..0101.|
stage 1  |..==.0101|
"""


def test_a_dry_run_shows_the_schedule_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure would mean that weights are read or must be there, or a schedule that is not that of the run."""
    shutil.copytree(ASSETS / "shapes-pixart", "model", ignore=shutil.ignore_patterns("*.safetensors"))
    words = ("--model", "model", "--steps", "17", "--pipefusion", "2", "--patches", "2", "--dry-run")
    assert main.main(["generate", "a circle", *words]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\n" + GANTT) and "PixArt, 12 blocks, 3.36 M" in out
    # A longer warmup than the call has steps.
    assert main.main(["generate", "a circle", *words, "--steps", "1", "--warmup", "3"]) == 0
    assert "\nsteps 0 to 0 (" in capsys.readouterr().out
    assert "model/text_encoder has no weights" in refused(capsys, "generate", "a circle", "--model", "model")
    shutil.rmtree("model/transformer")
    assert "configs of 'model' cannot be read" in refused(capsys, "generate", "a circle", *words)
    Path("model/model_index.json").unlink()
    assert "model has no model_index.json" in refused(capsys, "generate", "a circle", *words)


TURBO = ("generate", "a red circle", "--model", "shapes-flux-turbo", "--steps", "1", "--threads", "1", "--seed", "7")


def test_names_of_files_with_placeholders(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure would mean a name that is not filled, or two pictures in one file."""
    assert main.main([*TURBO, "--num-images", "2", "--out", "{model}-{seed}.jpg"]) == 0
    assert "shapes-flux-turbo-7.jpg shapes-flux-turbo-8.jpg" in capsys.readouterr().out
    assert main.main([*TURBO, "--num-images", "2", "--out", "{{{model}}}.webp"]) == 0
    Path("prompts.txt").write_text("a red circle\na blue square")
    words = ["generate", "--prompts-file", "prompts.txt", *TURBO[2:], "--out", "{index:03}-{seed}.jpg"]
    assert main.main(words) == 0
    drawn = {path.name for path in Path().glob("*.*")} - {"prompts.txt"}
    assert drawn == {
        "shapes-flux-turbo-7.jpg", "shapes-flux-turbo-8.jpg", "{shapes-flux-turbo}-0.webp",
        "{shapes-flux-turbo}-1.webp", "000-7.jpg", "001-8.jpg",
    }  # fmt: skip
    capsys.readouterr()
    assert main.main(words) == 0
    assert "2 of them there before" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "format"), [("a.png", "PNG"), ("a.JPEG", "JPEG")])
def test_a_file_of_each_format_says_how_it_was_made(name: str, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As ditile reads it, and as AUTOMATIC1111 and programs of its kind do."""
    words = ["--out", name, "--true-cfg", "2", "--negative-prompt", "a ring, blue", "--json", "-"]
    assert main.main([*TURBO, *words]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == [name]
    picture = opened(name)
    texts = read_picture_texts(Path(name))
    assert picture.format == format and texts["prompt"] == "a red circle" and texts["seed"] == "7"
    if format == "PNG":
        parameters = picture.text["parameters"]
    else:
        comment = picture.getexif().get_ifd(0x8769)[0x9286]
        assert comment.startswith(b"UNICODE\0")
        parameters = comment[8:].decode("utf-16-be")
    assert parameters == texts["parameters"]
    prompt, negative, values = parameters.split("\n")
    assert (prompt, negative) == ("a red circle", "Negative prompt: a ring, blue")
    assert values.startswith("Steps: 1, Sampler: Euler, CFG scale: 3.5, True CFG scale: 2.0, Seed: 7, Size: 128x128, ")
    assert "Model: shapes-flux-turbo" in values


def test_the_default_file_is_no_input(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure would mean a picture that is written over, or a command that is refused for what nobody asked for."""
    Image.new("RGB", (64, 64), "red").save("ditile-image.png")
    before = Path("ditile-image.png").read_bytes()
    words = [*TURBO, "--image", "./ditile-image.png", "--height", "64", "--width", "64", "--strength", "1"]
    assert main.main(words) == 0
    assert opened("ditile-image-2.png").size == (64, 64) and Path("ditile-image.png").read_bytes() == before
    capsys.readouterr()
    assert "are one file; name another" in refused(capsys, *words, "--out", "ditile-image.png")


def asked(pipe: Any, height: int, width: int) -> dict[str, Any]:
    return arguments.build_call_arguments(pipe, GenerateOptions(prompt="a circle", height=height, width=width), {})


def test_a_size_is_checked_where_a_token_is_known() -> None:
    """A failure: a model's own size is refused, or a size that patches cannot divide is taken; or a traceback."""
    qwen = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, planned.qwen(2, 2, 4)[0])
    for height, width in ((1328, 1328), (1472, 1104)):
        assert asked(qwen, height, width)["height"] == height
    assert asked(planned.wan_pipeline()[0], 480, 832)["width"] == 832
    for make in tiny.FAMILIES.values():  # whose VAEs have half the side, and tokens half of that
        assert asked(make(), 64, 36)["width"] == 36
        with pytest.raises(ModelError, match="width=34 is not a multiple of 4, a token of this model; try width=32"):
            asked(make(), 64, 34)


def test_what_the_pipeline_itself_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure: a traceback for a size, where only the pipeline knows which ones will do."""
    tiny.stable_diffusion().save_pretrained("model")
    size = ("--steps", "1", "--height", "66", "--width", "64")
    assert main.main(["generate", "a circle", "--model", "model", *size]) == 2
    said = capsys.readouterr().err
    why = "`height` and `width` have to be divisible by 8 but are 66 and 64."
    assert said.splitlines()[-1] == f"ditile: StableDiffusionPipeline refuses this call: {why}"
    assert "Traceback" not in said and not list(Path().glob("*.png"))


def test_an_error_that_is_not_the_pipelines_is_not_called_a_refusal() -> None:
    """A failure: a bug, of which the traceback is wanted, is told as if the user had made it."""
    pipe = tiny.stable_diffusion()
    for bug in (lambda: int("x"), lambda: pipe.image_processor.postprocess("x")):
        with pytest.raises(ValueError) as caught, convert_value_errors(pipe):
            bug()
        assert not isinstance(caught.value, ModelError)


WORDS = ("generate", "a red circle", "--steps", "2", "--seed", "7", "--threads", "1")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of FLUX.1-dev at its own size."""
    path = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    write_sparse_flux(path)
    return str(path)


def generate(*words: str) -> np.ndarray:
    done = ditile(*WORDS, *words, "--out", "a.png")
    assert done.returncode == 0, done.stderr
    return np.asarray(opened("a.png"))


def test_the_image_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that ranks of the command read something else than the file has."""
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
    components = opened("a.png").text["components"]
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
    assert main.main(["generate", "a", "--model", flux]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "(--model FOLDER --component NAME=FILE)" in line, line

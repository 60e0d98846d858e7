"""The command line, as a person meets it. A failure would mean a traceback, a wrong exit code, or a stray file."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import ditile as package
from benchmarks.matrix_page import format_page, read_families
from benchmarks.method_matrix import build_matrix
from ditile import Plan, RankError
from ditile.cli import main
from ditile.cli.models import read_matrix
from ditile.model.known import ASSETS
from ditile.plan.flag_parser import normalize_flags
from ditile.runner.requests.pictures import read_picture_texts
from tests import tiny

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "2", "--seed", "7", "--threads", "1")


def ditile(*words: str, module: tuple[str, ...] = ("ditile",)) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", *module, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the one line says, of a command that must leave nothing behind."""
    before = sorted(Path().rglob("*"))
    assert main.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ditile: ") and err.count("\n") == 1, err
    assert sorted(Path().rglob("*")) == before
    return err


def opened(path: str) -> Image.Image:
    """A picture, with its file closed."""
    with Image.open(path) as image:
        image.load()
    return image


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--hlep",), "did you mean --help?"),
        (("paint", "a"), "'paint' is not a command; did you mean plan? there are generate, "),
        (("generate",), "give a PROMPT, or --prompts-file"),
        (("generate", "a", "--steps", "-3"), "--steps: '-3' should be"),
        (("generate", "a", "--image", "x" * 300), "image="),
        (("generate", "caf\udce9 red"), "'caf\\udce9 red' is not UTF-8"),
        (("generate", "a", "--json", "p.png", "--out", "p.png"), "out='p.png' and json='p.png' are one file"),
        (("generate", "a", "--model", "nothing-like-it"), "is not known; ditile models lists the known ones"),
        (("generate", "a", "--height", "100"), "not a multiple of 8, a token of this model; try height=96"),
        (("generate", "a", "--pipefusion", "20"), "pipefusion=20 exceeds the 12 blocks of PixArtTransformer2DModel"),
        (("plan", "--hardware", "l40-pcie", "--cache", "F=x"), "Fn_compute_blocks='x'"),
        (("generate", "a", "--out", "nowhere/a.png"), "nowhere"),
        (("generate", "a", "--out", "a.bmp"), "this model makes images; name it a.png, .jpg or .webp"),
        (("generate", "a", "--prompts-file", "p.txt"), "give one of them"),
        (("models", "no.gguf"), "'no.gguf' is not a file; give a .safetensors or .gguf file"),
        (("generate", "a", "--component", "vae="), "component='vae=' is not NAME=FILE; try vae=FILE"),
        (("models", "a", "foo"), "'foo' is one argument too many"),
        (("generate", "a", "--out", "{foo}.png"), "brace of no placeholder; known are {seed}, {index}"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    """A failure means a traceback, or seconds of imports before a mistake is told, none of which needs torch."""
    monkeypatch.setattr(main, "silence_libraries", lambda: pytest.fail("torch would be imported"))
    monkeypatch.setattr(main, "_run_on_ranks", lambda *_: pytest.fail("torch would be imported"))
    assert says in refused(capsys, *words)


def make_png_header(side: int) -> bytes:
    """A PNG that claims to have so many pixels on a side, and has none."""
    size = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + size, b"IDAT" + zlib.compress(b""), b"IEND"]
    parts = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_a_picture_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """No picture, one of 400 million pixels in 100 bytes, none of its pixels, and the first half of one."""
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(whole, "JPEG")
    half = whole.getvalue()[: len(whole.getvalue()) // 2]
    for content in (b"no picture", make_png_header(20_000), make_png_header(64), half, b""):
        Path("a.png").write_bytes(content)
        assert "image='a.png' cannot be read as an image" in refused(capsys, "generate", "a", "--image", "a.png")
        assert read_picture_texts(Path("a.png")) == {}


def test_what_cannot_be_written_behind_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure means that a full disk, or a slip in a name, costs a picture that took minutes."""
    words = ("generate", "a red circle", *SMALL, "--steps", "1", "--out", "a.png")
    for option in ("--trace", "--json"):
        assert main.main([*words, option, "/dev/full"]) == 2
        assert f"ditile: {option[2:]}='/dev/full' cannot be written" in capsys.readouterr().err.splitlines()[-1]
        assert opened("a.png").size == (128, 128)
        Path("a.png").unlink()


def test_pictures_hold_no_local_paths(tmp_path: Path) -> None:
    """A failure means that whoever gets a picture reads the names of a user's folders."""
    model = shutil.copytree(ASSETS / "shapes-flux", "a-model")
    Image.new("RGB", (64, 64), "red").save("in.png")
    Path("prompts.txt").write_text("a red circle")
    words = ("--model", str(tmp_path / model), "--image", str(tmp_path / "in.png"), *SMALL, "--height", "64", "--width")
    assert main.main(["generate", "--prompts-file", "prompts.txt", "--out-dir", "out", *words, "64"]) == 0
    assert main.main(["generate", "a red circle", "--out", "out/one.png", *words, "64"]) == 0
    for name in ("0000.png", "one.png"):
        texts = read_picture_texts(Path("out", name))
        assert texts["model"].startswith("a-model (") and str(tmp_path) not in str(texts)


def test_flux_heeds_a_negative_prompt_with_true_guidance(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside guidance that is embedded; a folder has no options of its own that would turn it on."""
    tiny.flux(guidance=True).save_pretrained("model")
    capsys.readouterr()  # a progress bar
    words = ["generate", "a circle", "--model", "model", "--height", "32", "--width", "32", *SMALL, "--guidance", "4"]
    assert "try --true-cfg above 1" in refused(capsys, *words, "--negative-prompt", "a ring")
    assert "takes no --true-cfg" in refused(capsys, "generate", "a circle", *SMALL, "--true-cfg", "3")
    for plan in (("--cfg", "2"), ("--cfg", "1")):
        out = ["--out", f"{plan[1]}.png", "--true-cfg", "3", "--negative-prompt", "a ring"]
        assert main.main([*words, *plan, *out]) == 0
    one, two = opened("1.png"), opened("2.png")
    settings = json.loads(two.text["settings"])
    assert (settings["true_cfg_scale"], settings["guidance_scale"]) == (3, 4)
    assert settings["negative_prompt"] == "a ring" and two.text["plan"] == "cfg=2"
    assert np.array_equal(np.asarray(one), np.asarray(two))


def test_a_scale_that_the_model_does_not_embed(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure: the image is unguided, and nothing says so."""
    tiny.flux().save_pretrained("model")
    assert main.main(["models", "model"]) == 0
    assert "tokens (at most " in capsys.readouterr().out
    words = ["generate", "a circle", "--model", "model", "--height", "32", "--width", "32", *SMALL]
    said = "FluxTransformer2DModel embeds no guidance here, so FluxPipeline would ignore it; try --true-cfg 4"
    assert said in refused(capsys, *words, "--guidance", "4").replace("true_cfg=", "--true-cfg ")
    Path("model", "generation.json").write_text('{"guidance_scale": 4, "true_cfg_scale": 2}')
    assert main.main([*words, "--guidance", "3"]) == 0
    assert json.loads(opened("ditile-image.png").text["settings"])["true_cfg_scale"] == 3


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["--help"], ["models"], ["generate", "a", "--pipefusion", "20"]])
def test_help_version_models_and_refusals_do_not_import_torch(words: list[str]) -> None:
    code = f"""
import sys
from ditile.cli import main
from ditile.runner.requests.pictures import read_picture_texts
try:
    main({words})
finally:
    assert not {{"torch", "diffusers", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "AssertionError" not in done.stderr and done.stdout + done.stderr


BROKEN = RankError(1, "ValueError", "it broke", "Traceback:\n  there\n")
NO_MEMORY = ImportError("IMPORTANT:\n\nread this\n\nx.so: failed to map segment from shared object\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (BROKEN, 1, "Traceback:\n  there\nditile: rank 1: it broke"),
        (KeyboardInterrupt(), 130, "ditile: interrupted"),
        (NO_MEMORY, 1, ".*out of memory: .*x.so: failed to map.*"),
    ],
)
def test_what_ends_the_ranks_is_said(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that ends in an import is as under `ulimit -v`. A failure means advice on how to install numpy."""

    def launch(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(main, "launch", launch)
    assert main.main(["generate", "a", "--pipefusion", "2"]) == code
    assert re.fullmatch(says + "\n", capsys.readouterr().err)


@pytest.mark.parametrize("allocate", [lambda: bytearray(1 << 62), lambda: torch.empty(1 << 60)])
def test_memory_that_is_used_up_while_a_model_is_loaded_is_told_as_such(
    allocate: Callable[[], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Python and by torch. A failure means that a user blames a model that is whole."""
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda *_, **__: allocate())
    assert main.main(["generate", "a red ring"]) == 1
    assert re.fullmatch(r"ditile: out of memory: (MemoryError|.*DefaultCPUAllocator.*)\n", capsys.readouterr().err)


def test_models_lists_families_and_bundled_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["models", "Qwen-Image"]) == 0
    out = capsys.readouterr().out
    assert "qwen-image-edit-2511" in out and "Qwen/Qwen-Image" in out and "flux" not in out.lower()
    assert main.main(["models"]) == 0
    out = capsys.readouterr().out
    for word in ("FluxTransformer2DModel", "PixArtSigmaPipeline", "StableDiffusion3Img2ImgPipeline", "shapes-flux"):
        assert word in out
    for word in ("PipeFusion", "caches", "two calls", "batched", "row, sequence"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.skipif(diffusers.__version__.startswith("0.41."), reason="the page has classes that came later")
def test_the_page_of_the_matrix_is_up_to_date() -> None:
    """A failure means: `python -m benchmarks.method_matrix > src/ditile/model/assets/matrix.json`, and then
    `python -m benchmarks.matrix_page > docs/matrix.md`."""
    assert json.loads((ASSETS / "matrix.json").read_text("utf-8")) == build_matrix()
    page = format_page(read_matrix(), read_families())
    assert page + "\n" == (ROOT / "docs" / "matrix.md").read_text("utf-8")


EVERY_AXIS = "--data 2 --use_cfg_parallel --pipefusion 2 --ring_degree 2 --tensor 2 --num-images 2 --dry-run"
XDIT = """--use_cfg_parallel --data_parallel_degree 2 --ulysses_degree 2 --ring_degree 3 --num_pipeline_patch 4
          --pipefusion_parallel_degree 2 --attn_layer_num_for_pp 7 8 --tensor_parallel_degree 2
          --split_scheme sequence --warmup_steps 3 --use_parallel_vae --ulysses 2"""


def test_a_dry_run_of_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has a row with its place; true guidance is two calls, of which a half makes one."""
    assert main.main(["generate", "a circle", "--model", "shapes-flux", *EVERY_AXIS.split()]) == 0
    out = capsys.readouterr().out
    assert "plan: data=2 cfg=2 pipefusion=2 ring=2 tensor=2" in out and "2 call(s) per step" in out
    for word in ("data 1", "cfg 1", "stage 1", "ring 1", "tensor 1", "\n 31 ", "activations", "latents", "prediction"):
        assert word in out, word
    assert any(line.startswith("speed-up over one rank") and "x data 2 x cfg 2" in line for line in out.splitlines())


def test_flags_of_xdit_are_the_plan() -> None:
    plan = main.build_options(Plan, main.build_parser().parse_args(normalize_flags(["generate", "a", *XDIT.split()])))
    assert plan == Plan(
        cfg=2, data=2, ulysses=2, ring=3, pipefusion=2, patches=4, stage_blocks=(7, 8), tensor=2,
        split_scheme="sequence", warmup=3, vae="rows",
    )  # fmt: skip
    commas = ["generate", "a", "--pipefusion", "2", "--attn_layer_num_for_pp", "7,8", "--stage-blocks", "7,8"]
    assert main.build_options(Plan, main.build_parser().parse_args(normalize_flags(commas))).stage_blocks == (7, 8)


def test_python_draws_what_the_command_draws(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With `ditile.defaults`. A failure means a worse picture by one of them. A prompt without a shape is told so, and
    of a long one by both how much is read."""
    prompt = "a lighthouse" + " in the dawn" * 20
    assert main.main(["generate", prompt, "--model", "shapes-flux", *SMALL, "--out", "a.png"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("note: shapes-flux is small and knows circle, ")
    runner = package.parallelize(package.load("shapes-flux"))
    options = package.defaults("shapes-flux") | {"num_inference_steps": 2}
    drawn = runner(prompt, generator=torch.Generator().manual_seed(7), **options).images[0]
    assert drawn.tobytes() == opened("a.png").tobytes()
    said = [record.getMessage() for record in caplog.records if "tokens" in record.getMessage()]
    assert said == ["the prompt has 63 tokens, and 32 are read"] * 2


def test_two_ranks_draw_what_one_draws(capfd: pytest.CaptureFixture[str]) -> None:
    """All steps synchronous: bit-identical, and the summary is the only thing on the standard output."""
    words = ("a red circle", "--model", "shapes-flux", *SMALL)
    plan = ("--pipefusion", "2", "--warmup", "2")
    assert main.main(["generate", *words, *plan, "--out", "two.png", "--trace", "t.json", "--json", "-"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["plan"] == "pipefusion=2 warmup=2" and facts["ranks"] == 2 and facts["images"] == ["two.png"]
    assert set(facts["seconds"]) == {"total", "text", "denoise", "decode"} and facts["synchronous_steps"] == 2
    assert len(facts["peak_memory_bytes"]) == len(facts["bytes_sent"]) == 2 and min(facts["bytes_sent"]) > 0
    assert json.loads(Path("t.json").read_text())
    assert main.main(["generate", *words, "--out", "one.png"]) == 0
    one, two_ = opened("one.png"), opened("two.png")
    assert one.tobytes() == two_.tobytes()
    assert two_.text["prompt"] == "a red circle" and two_.text["plan"] == facts["plan"]
    assert json.loads(two_.text["settings"])["num_inference_steps"] == 2

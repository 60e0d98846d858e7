"""What README says to install is enough: the wheel in environments of its own, each with the main job of an extra.

A failure means that something works for the developers alone, who have everything.
"""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

import ditile
from ditile.plan.extras import EXTRAS
from tests.packaging.environments import (
    COMMAND_SECONDS,
    ROOT,
    Environment,
    build_environment_beside,
    build_wheel,
    run_pip,
)
from tests.runner.single_files import save_gguf
from tests.serve.running import run_server
from tests.serve.test_replica import write_lora

PROMPT = "a large red circle on the left on a gray background"
SHORT = ("--steps", "2", "--threads", "1")
BROUGHT_BY_THE_BASE = {"pydantic"}
"""Packages of extras that a dependency of the base needs too."""
FIND_PACKAGES = """
import json
from ditile.plan.extras import EXTRAS, is_installed
print(json.dumps([package for packages in EXTRAS.values() for package in packages if is_installed(package)]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and no extra."""
    return Environment(tmp_path_factory.mktemp("base"), wheel)


Make = Callable[..., Environment]


@pytest.fixture
def make(wheel: Path, base: Environment, tmp_path: Path) -> Make:
    """Makes an environment with these extras and no others."""

    def make_environment(*extras: str) -> Environment:
        made = Environment(tmp_path, wheel, extras, base)
        check_packages(made, extras)
        return made

    return make_environment


def check_packages(made: Environment, extras: tuple[str, ...]) -> None:
    """The packages of these extras can be imported, and those of no other one."""
    wanted = {package for extra in extras for package in EXTRAS[extra]}
    assert set(json.loads(made.run_python("-c", FIND_PACKAGES))) - BROUGHT_BY_THE_BASE == wanted - BROUGHT_BY_THE_BASE


@contextmanager
def serve(made: Environment, *flags: str, page: bool = False) -> Iterator[httpx.Client]:
    """Yield a client of a server, which is told to end afterwards and must do so in order."""
    place = {"state": made.work / "state", "python": made.python, "environ": made.build_variables()}
    flags = (*flags, "--threads", "1")
    with run_server("shapes-flux", *flags, page=page, **place) as server, server.client() as client:
        yield client
        assert server.end() == 0, server.log


def check_picture(path: Path) -> None:
    """A file is a picture that can be read."""
    with Image.open(path) as picture:
        picture.load()


def test_the_base_draws(base: Environment) -> None:
    check_packages(base, ())
    done = base.run(
        "ditile", "generate", PROMPT, "--model", "shapes-flux", "--pipefusion", "2", *SHORT, "--out", "a.png"
    )
    assert done.returncode == 0, done.stderr
    check_picture(base.work / "a.png")


def test_the_base_names_the_extra(base: Environment) -> None:
    """In one line, before torch is imported or a rank started."""
    video = ("generate", PROMPT, "--model", "shapes-wan", "--out", "a.mp4")
    for words, extra in ((("serve",), "serve"), (video, "video")):
        assert f"pip install 'ditile[{extra}]'" in base.read_refusal(*words)


def test_serve(make: Make) -> None:
    """Without peft, which diffusers wants wherever it is asked for LoRAs."""
    with serve(make("serve"), "--pipefusion", "2") as client:
        drawn = client.post("/v1/images/generations", json={"prompt": PROMPT, "num_inference_steps": 2}).json()
        assert len(drawn["data"]) == 1, drawn


def test_page(make: Make) -> None:
    with serve(make("serve", "page"), page=True) as client:
        assert "gradio" in client.get("/").text


IMAGES = {
    "lora": "--pipefusion 2 --lora lora.safetensors",
    "quantize": "--quantize --quantize-type int8_weight_only",
    "gguf": "--pipefusion 2 --transformer transformer.gguf",
}


@pytest.mark.parametrize("extra", IMAGES)
def test_an_image_with_an_extra(make: Make, extra: str) -> None:
    made = make(extra)
    write_lora(made.work / "lora.safetensors", seed=0)
    save_gguf(ditile.load("shapes-flux").transformer, "flux", made.work / "transformer.gguf")
    made.run_ditile("generate", PROMPT, "--model", "shapes-flux", *SHORT, *IMAGES[extra].split(), "--out", "a.png")
    check_picture(made.work / "a.png")


def test_video(make: Make) -> None:
    made = make("video")
    made.run_ditile("generate", PROMPT, "--model", "shapes-wan", *SHORT, "--frames", "5", "--out", "a.mp4")
    assert (made.work / "a.mp4").read_bytes()[4:8] == b"ftyp"


def test_bitsandbytes(tmp_path: Path) -> None:
    """It prints while it is imported, so it is beside the developers' packages here alone, with its own tests."""
    made = build_environment_beside(tmp_path, "bitsandbytes")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "nf4 or bitsandbytes")
    command = [str(made), *words, "tests/runner/test_prequantized.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("extra", [*EXTRAS, "docs", "plots", "dev"])
def test_no_extra_moves_torch(wheel: Path, tmp_path: Path, extra: str) -> None:
    """With the oldest torch that is supported, which a driver may ask for. A failure means that the GPUs are gone."""
    venv.create(tmp_path / "environment", symlinks=True)
    (site_packages,) = tmp_path.glob("environment/lib/python*/site-packages")
    oldest = site_packages / "torch-2.9.0.dist-info"
    oldest.mkdir()
    (oldest / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n", "utf-8")
    (oldest / "INSTALLER").write_text("pip\n", "utf-8")
    (oldest / "RECORD").write_text("", "utf-8")
    report = tmp_path / "report.json"
    python = str(tmp_path / "environment" / "bin" / "python")
    words = ("install", "--dry-run", "--quiet", "--report", str(report), f"{wheel}[{extra}]")
    run_pip("--python", python, *words)
    chosen = {item["metadata"]["name"] for item in json.loads(report.read_text("utf-8"))["install"]}
    assert "ditile" in chosen and not chosen & {"torch", "torchvision"}


def test_evaluate(make: Make) -> None:
    made = make("evaluate")
    words = ("--model", "shapes-flux-turbo", "--plans", "pipefusion=2", "--num", "2", "--out", "evaluation")
    made.run_ditile("evaluate", *words)
    evaluation = json.loads((made.work / "evaluation" / "evaluation.json").read_text("utf-8"))
    assert {"psnr", "ssim"} <= evaluation["metrics"].keys()


def test_ray(make: Make) -> None:
    """A cluster takes minutes; without one the address is refused, by Ray itself."""
    line = make("serve", "ray").read_refusal("serve", "--ray", "127.0.0.1:1", "--model", "shapes-flux")
    assert "no cluster can be reached" in line

"""README.md, the commands of each page's first screen, and the examples and notebooks run as they stand.

A failure means that the first thing a new user tries does not work.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image

from ditile.cli import main
from ditile.model.known import ASSETS, list_bundled_models
from tests.cache.test_cache_dit_scripts import flux
from tests.pool import Pool
from tests.serve.running import run_server

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted(ROOT.glob("docs/*.md"))
ONLY_PARSED = {
    "serve": "it runs until it is stopped",
    "bench": "it takes minutes",
    "evaluate": "it takes minutes",
    "calibrate": "it takes minutes",
    "verify": "its models are on the hub",
    "--evaluation": "it reads what `evaluate` wrote",
}
"""Commands and flags of pages that are read and not run, and why."""


def environment() -> dict[str, str]:
    """That of a user who has installed this checkout."""
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


def iterate_commands(text: str) -> Iterator[list[str]]:
    """The words of each indented line that begins with `ditile`, without comments; `\\` continues a line."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("    ditile ") and "[" not in line:
            yield shlex.split(line, comments=True)[1:]


def names_bundled_model(words: list[str]) -> bool:
    """Whether a command's model comes with the package, as the default does."""
    return "--model" not in words or words[words.index("--model") + 1] in list_bundled_models()


def read_first_screen(page: Path) -> str:
    """What stands before the first heading of a section."""
    return page.read_text("utf-8").partition("\n## ")[0]


def test_the_script_of_the_readme_draws_its_picture(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    (tmp_path / "script.py").write_text(script, "utf-8")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    assert not re.search("torchao|torchvision|Enum subclass", done.stderr), "nothing is logged by our imports"
    with Image.open(tmp_path / "circle.png") as picture:
        red, green, blue = picture.convert("RGB").getpixel((32, 64))
    assert red > 150 > max(green, blue), "a large red circle on the left"


def test_the_commands_of_the_readme_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one folder; what a command writes is what the next one reads."""
    commands = list(iterate_commands(README.read_text("utf-8")))
    assert [words[0] for words in commands] == ["generate"] * 4 + ["serve"]
    for words in commands[:-1]:
        assert main.main(words) == 0, (words, capsys.readouterr().err)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ditile-image.png", "edit.png", "cached.png", "ditile-video.mp4", "ditile-video.png"}
    with Image.open("edit.png") as picture:
        red, green, blue = picture.convert("RGB").getpixel((32, 64))
    assert blue > 150 > max(red, green), "a large blue square on the left"


def test_the_server_of_the_readme_answers_where_it_says(tmp_path: Path) -> None:
    *_, (_, *flags) = iterate_commands(README.read_text("utf-8"))
    # On another port than the README's, as another server may be running on this machine.
    run = run_server("shapes-pixart", *flags, "--port", "0", state=tmp_path / "jobs", page=True)
    with run as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert "<html" in client.get("/").text.lower()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_first_screen_run_in_order(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that are not bundled are planned and not loaded; `ONLY_PARSED` says what is not run at all."""
    # What `ditile calibrate` would have written.
    monkeypatch.setenv("DITILE_PROFILE", str(ASSETS / "profiles" / "epyc-2-cores.json"))
    screen = read_first_screen(page)
    for line in re.findall(r"^    (printf .*)$", screen, re.MULTILINE):
        subprocess.run(["bash", "-c", line], check=True)
    for words in iterate_commands(screen):
        if ONLY_PARSED.keys() & set(words):
            main.build_parser().parse_args(words)
            continue
        if words[0] == "generate" and not names_bundled_model(words):
            words = [*words, "--dry-run"]
        assert main.main(words) == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("script", "written"),
    [("qwen_image.py", "qwen-image.png"), ("wan_video.py", "wan.webp"), ("edit_image.py", "edited.png")],
)
def test_an_example_runs_without_arguments(script: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example(script, [], monkeypatch)
    with Image.open(written) as picture:
        assert picture.convert("RGB").resize((8, 8)).getcolors(1) is None, "not one colour alone"


def run_example(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as a module: a rank that is forked finds its functions by its name."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [script, *words])
    importlib.import_module(script.removesuffix(".py")).main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "flux"
    flux(2, 8).save_pretrained(path)
    call = {"height": 32, "width": 24, "num_inference_steps": 12, "max_sequence_length": 12}
    (path / "generation.json").write_text(json.dumps(call))
    return str(path)


def run_example_on_rank(words: list[str]) -> str:
    """What the example prints on a rank."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["run_flux_cp.py", *words])
        # The pool ends the group itself.
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(str(ROOT / "examples" / "run_flux_cp.py"), run_name="__main__")
    return said.getvalue()


def test_the_example_on_two_ranks(pool: Pool, tmp_path: Path, folder: str) -> None:
    line = "--cache --parallel-type ulysses --uaa --dcco --attn native"
    words = ["--model-path", folder, "--out", str(tmp_path / "flux.png"), *line.split()]
    first, second = pool.run(run_example_on_rank, 2, words)
    assert "under ulysses=2 uaa=True" in first and "what the cache left out" in first and not second
    assert (tmp_path / "flux.png").exists()


def write_script(notebook: Path, folder: Path) -> Path:
    """Write the cells in order; `%%writefile` is done here, as it is all that they have of Jupyter's own."""
    parts = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        first, _, rest = source.partition("\n")
        if cell["cell_type"] == "code" and first.startswith("%%writefile "):
            (folder / first.split()[1]).write_text(rest + "\n", "utf-8")
        elif cell["cell_type"] == "code":
            assert "\n%" not in source and not first.startswith(("%", "!"))
            parts.append(source)
    script = folder / "notebook.py"
    script.write_text("\n\n".join(parts) + "\n", "utf-8")
    return script


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_the_cells_run_in_order(path: Path, tmp_path: Path) -> None:
    """Without Jupyter, which the developers' packages do not bring."""
    script = write_script(path, tmp_path)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr

"""The Dockerfile installs what README says. A failure means an image that cannot be built."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

from ditile.plan.extras import EXTRAS
from tests.packaging.environments import ROOT, SOURCES


def read_dockerfile() -> list[list[str]]:
    """The words of the instructions."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_dockerfile_copies_what_a_build_needs() -> None:
    instructions = read_dockerfile()
    copied = {name for words in instructions if words[0] == "COPY" for name in words[1:-1]}
    assert copied == {*SOURCES, "constraints.txt"}
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert set(kept) == copied


def test_the_dockerfile_runs_as_a_user_and_opens_nothing() -> None:
    instructions = read_dockerfile()
    steps = [words[0] for words in instructions]
    assert ["USER", "ditile"] in instructions and steps.index("USER") > len(steps) - 1 - steps[::-1].index("RUN")
    assert ["ENTRYPOINT", "[ditile]"] in instructions
    assert not any("0.0.0.0" in word for words in instructions for word in words)
    arguments = dict(words[1].split("=", 1) for words in instructions if words[0] == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= EXTRAS.keys()


def test_the_steps_of_the_dockerfile(tmp_path: Path) -> None:
    """Its installation, in a folder with what it copies and in an environment in place of the image's Python."""
    context, environment = tmp_path / "context", tmp_path / "environment"
    context.mkdir()
    for name in (*SOURCES, "constraints.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    venv.create(environment, symlinks=True, with_pip=True)
    arguments = dict(words[1].split("=", 1) for words in read_dockerfile() if words[0] == "ARG")
    # The index of torch's builds for CPUs; any other one of the machine's has them too.
    variables = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "EXTRAS": arguments["EXTRAS"]}
    line = next(line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if line.startswith("RUN python"))
    command = line.removeprefix("RUN ").replace('--extra-index-url "${TORCH_INDEX}"', "")
    done = subprocess.run(["sh", "-c", command], cwd=context, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entry = subprocess.run([environment / "bin" / "ditile", "--help"], capture_output=True, text=True)
    assert entry.returncode == 0 and "serve" in entry.stdout

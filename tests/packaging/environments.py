"""Environments that have the wheel with some extras and nothing else: not what the developers' one has besides.

The base is installed once, and an environment of an extra finds it through a path file, so that only what the extra
brings is installed for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE")
COMMAND_SECONDS = 600.0


def build_wheel(folder: Path) -> Path:
    """A wheel of the checkout, built from a copy: a build leaves folders, whose old files would come into the next."""
    copied = folder / "checkout"
    copied.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        else:
            shutil.copy(ROOT / name, copied / name)
    run_pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(copied))
    (wheel,) = folder.glob("ditile-*.whl")
    return wheel


def build_environment_beside(folder: Path, package: str) -> Path:
    """The Python of an environment with the packages of this one and one more."""
    venv.create(folder / "beside", symlinks=True)
    (site_packages,) = (folder / "beside").glob("lib/python*/site-packages")
    # The .pth files of a folder that a .pth names are not read: the checkout itself is a path of its own.
    paths = [sysconfig.get_path("purelib"), str(ROOT / "src")]
    (site_packages / "beside.pth").write_text("\n".join(paths) + "\n", "utf-8")
    python = folder / "beside" / "bin" / "python"
    run_pip("--python", str(python), "install", "--no-deps", package)
    return python


class Environment:
    """A virtual environment outside of the checkout, and commands in it.

    Args:
        folder: where it is made.
        wheel: what is installed.
        extras: the extras of the wheel.
        base: an environment with the wheel alone, whose packages this one has too; None installs all.
    """

    def __init__(
        self, folder: Path, wheel: Path, extras: tuple[str, ...] = (), base: Environment | None = None
    ) -> None:
        self.folder = folder / "environment"
        self.work = folder / "work"
        """The folder in which commands run."""
        self.work.mkdir(parents=True)
        venv.create(self.folder, symlinks=True)
        self.python = self.folder / "bin" / "python"
        (self.site_packages,) = self.folder.glob("lib/python*/site-packages")
        if base is not None:
            (self.site_packages / "base.pth").write_text(f"{base.site_packages}\n", "utf-8")
        wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        # Compiled when imported: most of what is installed never is.
        flags = ("--no-compile", "--constraint", str(ROOT / "constraints.txt"))
        run_pip("--python", str(self.python), "install", *flags, wanted)

    def build_variables(self) -> dict[str, str]:
        """The variables of commands: without those that lead to other packages or to files of the user's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DITILE"))}
        home = {"HOME": str(self.work), "XDG_CACHE_HOME": str(self.work / "cache"), "HF_HUB_OFFLINE": "1"}
        return kept | home | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment, such as `ditile`."""
        program = self.folder / "bin" / words[0]
        return subprocess.run(
            [str(program), *words[1:]],
            cwd=self.work,
            env=self.build_variables(),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )

    def run_python(self, *words: str) -> str:
        """What Python writes to its standard output; fails unless it succeeds."""
        done = self.run("python", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_ditile(self, *words: str) -> str:
        return self.run_python("-m", "ditile", *words)

    def read_refusal(self, *words: str) -> str:
        """The one line with which `ditile` refuses something."""
        done = self.run("python", "-m", "ditile", *words)
        assert done.returncode == 2 and done.stdout == "", done.stderr
        (line,) = done.stderr.splitlines()
        return line


def run_pip(*words: str) -> None:
    """Run pip, without the variables of this Python; fails unless it succeeds."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr

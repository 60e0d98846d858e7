"""Runs the mutants: `python -m tests.mutants [WORD]`, some of them by a word of their name.

Prints a line for each: killed and by which test file, or survived. The exit status is 1 if one survived.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SECONDS = 900.0
"""After which a test file counts as failed: some mutants hang."""
NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED
"""Of a file of which nothing runs on a commit."""


def find_killer(mutant: Mutant, source: Path) -> str | None:
    """The first test file that fails with the mutant in a copy of the package, or None."""
    path = source / "ditile" / mutant.path
    right = path.read_text("utf-8")
    if right.count(mutant.right) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.path} has its text {right.count(mutant.right)} times, not once")
    path.write_text(right.replace(mutant.right, mutant.wrong), "utf-8")
    try:
        for test in mutant.tests:
            if not do_tests_pass(test, source):
                return test
    finally:
        path.write_text(right, "utf-8")
    return None


def do_tests_pass(test: str, source: Path) -> bool:
    """Return whether the tests of a file that run on a commit pass with the package of a folder."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "--suite", "commit")
    command = [sys.executable, "-m", "pytest", *options, f"tests/{test}"]
    environ = os.environ | {"PYTHONPATH": str(source)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, NO_TESTS)


def main(words: list[str]) -> int:
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in MUTANTS:
            if words and not any(word in mutant.name for word in words):
                continue
            killer = find_killer(mutant, source)
            survived += killer is None
            print(f"{mutant.name}: {'SURVIVED' if killer is None else f'killed by {killer}'}", flush=True)
    print(f"{survived} survived")
    return min(survived, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Every test runs on a commit or in a part of the night. A failure means that tests are run by nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

import ditile
from tests.mutants.table import MUTANTS, Mutant
from tests.nightly import PARTS, find_part
from tests.suites import read_commit_list

ROOT = Path(__file__).parents[2]


def test_every_file_of_tests_is_in_a_part_of_the_night() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [file for file in files if find_part(file) is None and not file.startswith("tests/house/")] == []
    assert [path for paths in PARTS.values() for path in paths if not (ROOT / path).exists()] == []


def test_every_test_of_a_commit_is_there() -> None:
    """The run itself refuses rows that are not there: to list those takes a minute."""
    lost = []
    for name in read_commit_list():
        file, _, test = name.partition("[")[0].partition("::")
        text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
        if f"def {test}(" not in text and (test or not text):
            lost.append(name)
    assert lost == []


TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_package(mutant: Mutant) -> None:
    """A failure means that a line was changed: write the mutant for the new one."""
    text = (Path(ditile.__file__).parent / mutant.path).read_text("utf-8")
    assert text.count(mutant.right) == 1
    compile(text.replace(mutant.right, mutant.wrong), mutant.path, "exec")
    assert all((TESTS / test.partition("::")[0]).is_file() for test in mutant.tests)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_on_a_commit(mutant: Mutant) -> None:
    """A failure means that none of its tests is in tests/commit.txt."""
    files = {name.partition("::")[0] for name in read_commit_list()}
    assert files & {f"tests/{test.partition('::')[0]}" for test in mutant.tests}

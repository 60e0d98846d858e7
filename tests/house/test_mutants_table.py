"""Mutants that no longer fit the package would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import ditile
from tests.mutants.table import MUTANTS, Mutant
from tests.suites import read_commit_list

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

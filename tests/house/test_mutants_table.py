"""Mutants that no longer fit the package would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import ditile
from tests.mutants.table import MUTANTS, Mutant

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_package(mutant: Mutant) -> None:
    """A failure means that a line was changed: write the mutant for the new one."""
    text = (Path(ditile.__file__).parent / mutant.path).read_text("utf-8")
    assert text.count(mutant.right) == 1
    compile(text.replace(mutant.right, mutant.wrong), mutant.path, "exec")
    assert all((TESTS / test.partition("::")[0]).is_file() for test in mutant.tests)

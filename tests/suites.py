"""Which tests run on a commit, and which in the night: `pytest --suite commit tests`, `pytest --suite nightly tests`.

tests/commit.txt names those of a commit: a file, a test or a row a line. Of a file that it names, all tests run on a
commit, new ones too, but those marked `nightly`. A test or a row that it names runs whatever its marks are. The rest
runs in the night.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parent / "commit.txt"


def read_commit_list() -> frozenset[str]:
    """Return the names that run on a commit."""
    lines = [line.strip() for line in TABLE.read_text("utf-8").splitlines()]
    return frozenset(line for line in lines if line and not line.startswith("#"))


def split_suites(items: Iterable[pytest.Item], names: Collection[str]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of a commit, and those of the night."""
    commit, nightly = [], []
    for item in items:
        file, test, row = _name_levels(item)
        is_marked = item.get_closest_marker("nightly") is not None
        runs_on_commit = row in names or test in names or (file in names and not is_marked)
        (commit if runs_on_commit else nightly).append(item)
    return commit, nightly


def find_lost_names(items: Iterable[pytest.Item], names: Collection[str]) -> set[str]:
    """Return the names that no test has."""
    known: set[str] = set()
    for item in items:
        known.update(_name_levels(item))
    return set(names) - known


class LostNames(pytest.Item):
    """A test that fails, because a worker of xdist that raises while it collects does not say why."""

    def __init__(self, *, lost: Collection[str], **of_item: Any) -> None:
        super().__init__(**of_item)
        self._lost = sorted(lost)

    def runtest(self) -> None:
        pytest.fail(f"tests/commit.txt names what is not there: {', '.join(self._lost)}", pytrace=False)


def _name_levels(item: pytest.Item) -> tuple[str, str, str]:
    """Return the names of the file, the test and the row."""
    module = item.getparent(pytest.Module)
    assert module is not None, item.nodeid
    return module.nodeid, item.nodeid.partition("[")[0], item.nodeid

"""Which rows of long tables of tests run on a commit: those without a mark, or the first, those of changed classes, and
a tenth of the others.

    pytest --rotate tests/zoo            # as CI runs them
    python -m tests.rotation             # writes tests/proven.json, after all rows passed in `make nightly`

Rows are marked `rotating` where they repeat a mechanism on another model. Another commit runs another tenth. A row of a
family's name runs on every commit while what ditile knows of its class differs from what it was when all rows passed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest

import ditile

TENTHS = 10
PROVEN = Path(__file__).parent / "proven.json"
TABLE = Path(ditile.__file__).parent / "model" / "anatomies.json"


def choose_rows(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that run on this commit, and those that do not."""
    chosen, left = [], []
    tenth = choose_tenth(read_commit())
    # Tables with rows that are not marked need no first one.
    tables = {name_table(item) for item in items if item.get_closest_marker("rotating") is None}
    for item in items:
        is_first = name_table(item) not in tables
        is_always = item.get_closest_marker("rotating") is None or is_first or is_changed(item)
        tables.add(name_table(item))
        runs = is_always or choose_tenth(name_row(item)) == tenth
        (chosen if runs else left).append(item)
    return chosen, left


def rotate(rows: Iterable[Any], *, always: Collection[Any] = ()) -> list[Any]:
    """Parameters of a test: rows that are the only ones of their mechanism run on every commit, the others rotate."""
    parameters = []
    for row in rows:
        marks = () if row in always else pytest.mark.rotating
        values = row if isinstance(row, tuple) else (row,)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters


def choose_tenth(text: str) -> int:
    """A number from 0 to 9 of a text."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % TENTHS


def read_commit() -> str:
    """The hash of the commit that is checked out; without git it is one text for all."""
    root = Path(__file__).parents[1]
    try:
        return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=root, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""


def name_table(item: pytest.Item) -> str:
    """A test without its parameters."""
    return item.nodeid.partition("[")[0]


def name_row(item: pytest.Item) -> str:
    """The first parameter of a test, so that all tests of a family run on one commit; otherwise its own name."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        if isinstance(value, str):
            return value
    return item.nodeid


def is_changed(item: pytest.Item) -> bool:
    """Whether a row is of a class, or of a family whose class, is not what it was when all rows passed."""
    name = name_row(item)
    name = read_proven()["classes"].get(name, name)
    return read_proven()["digests"].get(name) != compute_digests().get(name)


@functools.cache
def read_proven() -> Mapping[str, Mapping[str, str]]:
    """Entry of the zoo -> its class, and class -> the digest with which all rows passed."""
    proven: Mapping[str, Mapping[str, str]] = json.loads(PROVEN.read_text("utf-8"))
    return proven


@functools.cache
def compute_digests() -> Mapping[str, str]:
    """Class -> a digest of the version of diffusers and of the rows of the table of anatomies."""
    table: Mapping[str, Any] = json.loads(TABLE.read_text("utf-8"))
    digests = {}
    for name, rows in table.items():
        text = diffusers.__version__ + json.dumps(rows, sort_keys=True)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return digests


def main() -> None:
    """Writes what all rows passed with."""
    from tests.zoo import ZOO

    classes = {}
    for name, entry in ZOO.items():
        classes[name] = type(getattr(entry.make(), entry.transformers[0])).__name__
    proven = {"classes": classes, "digests": dict(compute_digests())}
    PROVEN.write_text(json.dumps(proven, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()

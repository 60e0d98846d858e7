"""A commit runs the first row of a long table, a tenth of the others, and all those of changed classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import rotation

ROWS = """
import pytest

@pytest.mark.rotating
@pytest.mark.parametrize("name", ["sana", "flux", *map(str, range(38))])
def test_row(name):
    pass

@pytest.mark.parametrize("name", [pytest.param("marked", marks=pytest.mark.rotating), "unmarked"])
def test_mixed(name):
    pass

def test_always():
    pass
"""


def choose(pytester_items: list[pytest.Item], commit: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(rotation, "read_commit", lambda: commit)
    return {item.name for item in rotation.choose_rows(pytester_items)[0]}


def test_ten_commits_run_every_row(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each tenth is part of the table, what is not marked runs always, and so does a class that has changed."""
    path = tmp_path / "test_rows.py"
    path.write_text(ROWS)
    module = pytest.Module.from_parent(request.session, path=path)
    items = [item for collected in module.collect() for item in [collected] if isinstance(item, pytest.Item)]
    commits = {rotation.choose_tenth(str(number)): str(number) for number in range(200)}
    tenths = [choose(items, commit, monkeypatch) for commit in commits.values()]
    assert len(commits) == 10 and len(items) == 43
    assert set[str]().union(*tenths) == {item.name for item in items}
    assert sum("test_mixed[marked]" in names for names in tenths) == 1
    assert all(
        {"test_always", "test_mixed[unmarked]", "test_row[sana]"} <= names and len(names) < 20 for names in tenths
    )
    proven = {"classes": {"flux": "FluxTransformer2DModel"}, "digests": {"FluxTransformer2DModel": "of another table"}}
    monkeypatch.setattr(rotation, "read_proven", lambda: proven)
    assert all("test_row[flux]" in choose(items, commit, monkeypatch) for commit in commits.values())

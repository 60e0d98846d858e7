"""Files are whole, or as they were before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ditile import files


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    files.write(path, b"old")
    files.write_json(path, {"a": [1, "\u00e9"]})
    assert json.loads(path.read_text("utf-8")) == {"a": [1, "\u00e9"]}
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A failure means that a full disk or a break costs a user what was there, or leaves half a file beside it."""
    path = tmp_path / "rows.json"
    path.mkdir()
    with pytest.raises(OSError, match="rows.json"):
        files.write(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir()
    absent = tmp_path / "absent" / "rows.json"
    with pytest.raises(FileNotFoundError) as failed:
        files.write(absent, "new")
    assert failed.value.filename == str(absent), "a user is told of a file that he never named"


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """A failure means that `--out /dev/null`, as root, takes the machine's /dev/null away."""
    path, link, pipe = tmp_path / "rows.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(path)
    files.write(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write(pipe, "rows")
        assert os.read(reader, 9) == b"rows" and pipe.is_fifo()
    finally:
        os.close(reader)

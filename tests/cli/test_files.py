"""Files are whole, or as they were before."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import pytest

from ditile.cli import files


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    files.write_atomically(path, b"old")
    files.write_json_file(path, {"a": [1, "\u00e9"]})
    assert json.loads(path.read_text("utf-8")) == {"a": [1, "\u00e9"]}
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A failure means that a full disk or a break costs a user what was there, or leaves half a file beside it."""
    path = tmp_path / "rows.json"
    path.mkdir()
    with pytest.raises(OSError, match="rows.json"):
        files.write_atomically(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir()
    absent = tmp_path / "absent" / "rows.json"
    with pytest.raises(FileNotFoundError) as failed:
        files.write_atomically(absent, "new")
    assert failed.value.filename == str(absent), "a user is told of a file that he never named"


def test_two_writers_of_a_path_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a writer takes another one's file away, and one of two runs ends with an error."""
    path, replace = tmp_path / "rows.json", os.replace

    def late(part: Path, name: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        files.write_atomically(path, "of the other")
        replace(part, name)

    monkeypatch.setattr(os, "replace", late)
    files.write_atomically(path, "of the one")
    assert path.read_text() == "of the one" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("guessed", [False, True])
def test_no_link_is_followed_that_somebody_has_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guessed: bool
) -> None:
    """Not even one whose name was guessed. A failure means that whoever may write to a shared folder has a user write
    over any file of his."""
    path, own, token = tmp_path / "rows.json", tmp_path / "own", "00" * 8
    own.write_text("own")
    (tmp_path / ".rows.json.part").symlink_to(own)
    if guessed:
        monkeypatch.setattr(secrets, "token_hex", lambda count: token)
        (tmp_path / f".ditile-{os.getpid()}-{token}.part").symlink_to(own)
        with pytest.raises(FileExistsError, match="rows.json"):
            files.write_atomically(path, "new")
    else:
        files.write_atomically(path, "new")
        assert path.read_text() == "new" and not path.is_symlink()
    assert own.read_text() == "own"


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """A failure means that `--out /dev/null`, as root, takes the machine's /dev/null away."""
    path, link, pipe = tmp_path / "rows.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(path)
    files.write_atomically(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_atomically(pipe, "rows")
        assert os.read(reader, 9) == b"rows" and pipe.is_fifo()
    finally:
        os.close(reader)

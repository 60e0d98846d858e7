"""Files are whole, or as they were before. What is read has an end, and no output is written over an input."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ditile.distributed import files
from ditile.plan.errors import ModelError


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A failure means that a full disk or a break costs a user what was there, or leaves half a file beside it."""
    path = tmp_path / "rows.json"
    path.mkdir()
    with pytest.raises(OSError, match="rows.json"):
        files.write_atomically(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop", "nul\0"):
        with pytest.raises(OSError, match=name[:3]):
            files.write_atomically(tmp_path / name, "new")
    absent = tmp_path / "absent" / "rows.json"
    with pytest.raises(FileNotFoundError) as failed:
        files.write_atomically(absent, "new")
    assert failed.value.filename == str(absent), "a user is told of a file that he never named"


@pytest.mark.parametrize("guessed", [False, True])
def test_no_link_is_followed_that_somebody_has_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guessed: bool
) -> None:
    """Not even with a guessed name. Otherwise who may write to a shared folder has a user write over his own files."""
    path, own, token = tmp_path / "rows.json", tmp_path / "own", "00" * 8
    own.write_text("own")
    path.touch()
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_writer_that_is_killed_before_it_renames_leaves_the_old_file(tmp_path: Path, number: signal.Signals) -> None:
    """A failure means that a user whose run is ended loses what he had, or finds half a file under its name."""
    path = tmp_path / "rows.json"
    path.write_text("old")
    code = (
        "import os, signal, sys, time; from pathlib import Path; from ditile.distributed import files\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.replace = lambda *_: (print('writes', flush=True), time.sleep(60))\n"
        "files.write_atomically(Path(sys.argv[1]), 'new')"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[2])}
    words = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writes\n"
        writer.send_signal(number)
    assert writer.returncode in (-number, 128 + number)
    assert path.read_text() == "old"
    # Nothing can be done at SIGKILL.
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == [path]


def test_two_names_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a summary takes the place of the picture, or of the prompts that somebody wrote."""
    monkeypatch.chdir(tmp_path)
    prompts = Path("prompts.txt")
    prompts.touch()
    Path("link").symlink_to(prompts)
    Path("twin").hardlink_to(prompts)
    for other in ("prompts.txt", "./prompts.txt", str(tmp_path / "prompts.txt"), "link", "twin"):
        with pytest.raises(ModelError, match="json=.* and prompts_file=.* are one file"):
            files.check_different_files([("prompts_file", prompts)], [("json", Path(other))])
    with pytest.raises(ModelError, match="out=.* and json=.* are one file"):
        files.check_different_files([], [("json", Path("new.png")), ("out", Path("./new.png"))])
    files.check_different_files([("image", prompts), ("lora", prompts)], [("out", Path("new.png"))])
    files.check_different_files([], [("trace", Path("/dev/null")), ("json", Path("/dev/null"))])


@pytest.mark.parametrize(("end", "code", "says"), [(">&-", 0, ""), (">/dev/full", 1, "No space left"), ("2>&-", 0, "")])
def test_a_standard_output_that_takes_nothing(end: str, code: int, says: str) -> None:
    """A failure means that a job of a daemon, or one on a full disk, ends with a traceback after it has drawn."""
    words = f'"$0" -c "import sys; from ditile.cli.main import main; sys.exit(main())" models qwen {end}'
    environ = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[2])}
    done = subprocess.run(["sh", "-c", words, sys.executable], capture_output=True, text=True, env=environ)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and len(done.stderr.splitlines()) <= 1


def test_two_writers_of_a_path_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a writer takes another one's file away, and one of two runs ends with an error."""
    path, replace = tmp_path / "rows.json", os.replace
    path.touch()

    def late(part: Path, name: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        files.write_atomically(path, "of the other")
        replace(part, name)

    monkeypatch.setattr(os, "replace", late)
    files.write_atomically(path, "of the one")
    assert path.read_text() == "of the one" and list(tmp_path.iterdir()) == [path]

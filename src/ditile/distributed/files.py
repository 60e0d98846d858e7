"""Reads files that a user names, and writes files atomically.

Reading ends whatever a name stands for: a pipe into which nothing comes, a device that never ends, a file that is too
large for its purpose. A file gets its name only when it is whole.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ditile.plan.errors import ModelError

MAX_TEXT_BYTES = 64 * 2**20
"""The most bytes of a text, more than any settings, captions or prompts have."""
OPEN_SECONDS = 2.0
"""The time to wait for a writer of a pipe."""
READ_SECONDS = 60.0
"""The time to wait for the next bytes of a pipe that has a writer."""


def read_file(path: str | Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file, or the data from a pipe.

    Raises:
        OSError: if it cannot be read, has more than `most` bytes, or is a pipe into which nothing comes.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer would block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0):
            return _read_descriptor(descriptor, most)
    except ValueError as error:  # a name with a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def describe_error(error: BaseException) -> str:
    """Describe an error without the path of a file. The message around it names that already."""
    return isinstance(error, OSError) and error.strerror or str(error)


def _read_descriptor(descriptor: int, most: int) -> bytes:
    content = bytearray()
    # Until a pipe has a writer, a read returns nothing, which looks like its end.
    has_writer = not stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    while True:
        try:
            part = os.read(descriptor, 2**20)
        except BlockingIOError:  # a writer has nothing yet
            _wait_for_bytes(descriptor, READ_SECONDS)
            continue
        if not part and not has_writer:
            _wait_for_bytes(descriptor, OPEN_SECONDS)
            has_writer = True
            continue
        content += part
        has_writer = True
        if len(content) > most:
            raise OSError(errno.EFBIG, f"more than {most / 2**20:g} MiB")
        if not part:
            return bytes(content)


def _wait_for_bytes(descriptor: int, seconds: float) -> None:
    if not select.select([descriptor], [], [], seconds)[0]:
        raise OSError(errno.ETIMEDOUT, f"nothing came through this pipe for {seconds:g} s")


def read_text(path: str | Path) -> str:
    """Read the text of a file in UTF-8. The byte order mark that some editors write is left out.

    Raises:
        OSError: as `read_file`.
        ValueError: if it is not UTF-8.
    """
    return read_file(path).decode("utf-8-sig")


def parse_json(text: str | bytes) -> Any:
    """Parse a text in JSON. Raises `ValueError` if it is not JSON, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in place of an existing one. Links stay links; a pipe or another special file is written to.

    Raises:
        OSError: if it cannot be written; the error names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            # With O_NONBLOCK a pipe without a reader raises; without it, opening the pipe would block forever.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as file:
                file.write(data)
        else:
            _write_and_rename(path.resolve(), data)
    except OSError as error:
        if error.errno is None:
            raise
        # The error names the file that the user gave, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write_and_rename(path: Path, data: bytes) -> None:
    # `tempfile` would make the file readable only by its owner, whatever the umask. The random name keeps writers of
    # one path apart, and mode "x" never opens a link that another process has put there.
    part = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")
    with part.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.replace(part, path)
        except BaseException:
            # An interrupt may come after the file has its name.
            part.unlink(missing_ok=True)
            raise


def write_json_file(path: Path, value: Any) -> None:
    """Write an indented file of JSON. Raises `OSError` if it cannot be written."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def check_different_files(read: Iterable[tuple[str, Path]], written: Iterable[tuple[str, Path]]) -> None:
    """Raise `ModelError` if two options of a command name one file, under any names, and it is written.

    Args:
        read, written: (option, path) of each file. Pipes and devices may be given several times.
    """
    owners: dict[Any, tuple[str, Path]] = {}
    for option, path in read:
        owners.setdefault(identify_file(path), (option, path))
    for option, path in written:
        identity = identify_file(path)
        if identity is not None and identity in owners:
            first_option, first_path = owners[identity]
            raise ModelError(
                f"{option}={str(path)!r} and {first_option}={str(first_path)!r} are one file; name another"
            )
        owners[identity] = (option, path)


def identify_file(path: Path) -> Any:
    """Return a value that is equal for all names of a file. None for pipes and devices."""
    try:
        facts = os.stat(path)
    except ValueError:  # a name with a NUL
        return str(path)
    except OSError:  # it is yet to be made
        return os.path.realpath(path.absolute())
    if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):
        return facts.st_dev, facts.st_ino
    return None

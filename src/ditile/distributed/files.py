"""Reads files that a user names, writes files atomically, and keeps the standard streams from failing.

What is read is limited in size. A file gets its name only when it is whole.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import signal
import stat
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from ditile.plan.errors import ModelError

MAX_TEXT_BYTES = 64 * 2**20
"""Larger than any settings, captions or prompts."""
PIECE_BYTES = 2**20


def read_file(path: str | Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: if it cannot be read, or has more than `most` bytes.
    """
    content = bytearray()
    try:
        with open(path, "rb") as file:
            # In pieces, because read(n) allocates n bytes, however short the file is.
            for piece in iter(lambda: file.read(PIECE_BYTES), b""):
                content += piece
                if len(content) > most:
                    break
    except ValueError as error:  # a name with a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most / 2**20:g} MiB", str(path))
    return bytes(content)


def describe_error(error: BaseException) -> str:
    """Describe an error without the path of a file. The message around it names that already."""
    return isinstance(error, OSError) and error.strerror or str(error)


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
            path.write_bytes(data)
        else:
            _write_and_rename(path.resolve(), data)
    except (ValueError, RuntimeError) as error:  # a name with a NUL; a loop of links
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        # The error names the file that the user gave, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write_and_rename(path: Path, data: bytes) -> None:
    # `tempfile` would make the file readable only by its owner, whatever the umask. The random name keeps writers of
    # one path apart, and mode "x" never opens a link that another process has put there.
    part = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")

    def remove_and_end(number: int, frame: FrameType | None) -> None:
        part.unlink(missing_ok=True)
        os._exit(128 + number)

    # Only the default action would skip the `finally` below. Python lets only the main thread set a handler.
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, remove_and_end)
    try:
        with part.open("xb") as file:
            file.write(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        if signal.getsignal(signal.SIGTERM) is remove_and_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StandardStream(io.FileIO):
    """A standard stream that drops what cannot be written: nobody reads it, or its disk is full.

    Attributes:
        error: what its first failing write raised.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, or drop them once a write has failed; dropped ones count as written."""
        try:
            if self.error is None:
                return super().write(data)
        except OSError as error:
            self.error = error
        return len(data)


def open_closed_streams() -> None:
    """Open the standard streams that are closed. Otherwise the next file or socket would become one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def guard_standard_stream(name: str, number: int) -> StandardStream:
    """Replace a standard stream of `sys` by a `StandardStream`, and return that."""
    raw = StandardStream(number, "w", closefd=False)
    # What the locale cannot encode is escaped.
    text = io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)
    setattr(sys, name, text)
    return raw


def check_different_files(read: Iterable[tuple[str, Path]], written: Iterable[tuple[str, Path]]) -> None:
    """Raise `ModelError` if a file to be written is also the file of another option, whatever path names it.

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

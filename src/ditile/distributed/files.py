"""Reads files that a user names, and writes files atomically.

Reading has an end whatever a name stands for: a pipe into which nothing comes, a device that never ends, a file that is
too large for what is wanted. A written file gets its name when it is whole, and a failure or a signal leaves nothing of
it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ditile.plan.errors import ModelError

MAX_TEXT_BYTES = 64 * 2**20
"""Larger than any settings, captions or prompts."""
OPEN_SECONDS, READ_SECONDS = 2.0, 60.0
"""How long to wait for a writer of a pipe, and for the next bytes of one that has a writer."""


def read_file(path: str | Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a file, or what comes through a pipe.

    Raises:
        OSError: if it cannot be read, has more than `most` bytes, or is a pipe into which nothing comes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe without a writer blocks here for ever
        with open(descriptor, "rb", buffering=0):
            return _read_descriptor(descriptor, most)
    except ValueError as error:  # a name with a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def describe_error(error: BaseException) -> str:
    """What an error says, without the path of a file that the message around it names already."""
    return isinstance(error, OSError) and error.strerror or str(error)


def _read_descriptor(descriptor: int, most: int) -> bytes:
    content = bytearray()
    is_open = not stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    while True:
        try:
            part = os.read(descriptor, 2**20)
        except BlockingIOError:  # a writer has nothing yet
            _wait_for_bytes(descriptor, READ_SECONDS)
            continue
        if not part and not is_open:
            _wait_for_bytes(descriptor, OPEN_SECONDS)
            is_open = True
            continue
        content += part
        is_open = True
        if len(content) > most:
            raise OSError(errno.EFBIG, f"more than {most / 2**20:g} MiB")
        if not part:
            return bytes(content)


def _wait_for_bytes(descriptor: int, seconds: float) -> None:
    if not select.select([descriptor], [], [], seconds)[0]:
        raise OSError(errno.ETIMEDOUT, f"nothing came through this pipe for {seconds:g} s")


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        OSError: as `read_file`.
        ValueError: if it is not UTF-8.
    """
    return read_file(path).decode("utf-8-sig")  # some editors write a byte order mark


def parse_json(text: str | bytes) -> Any:
    """The value of a text in JSON.

    Raises:
        ValueError: if it is none, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file in place of one that is there. Links stay links; a pipe or another special file is written to.

    Raises:
        OSError: if it cannot be written; the error names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            _write_to_special_file(path, data)
            return
        path = path.resolve()
        if not _write_unnamed_file(path, data):
            _write_and_rename(path, data)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # and not the name of the temporary file


def _write_to_special_file(path: Path, data: bytes) -> None:
    # A pipe without a reader raises; opened as usual it would block for ever.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(data)


def _write_unnamed_file(path: Path, data: bytes) -> bool:
    """Writes a file that has no name until it is whole, so that even a killed process leaves nothing of it.

    Returns:
        False where the system or the file system has no such files; nothing was written then.
    """
    flag = getattr(os, "O_TMPFILE", 0)
    if not flag:
        return False
    try:
        descriptor = os.open(path.parent, flag | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return False
        raise
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        source = f"/proc/self/fd/{descriptor}"
        if not os.path.exists(source):
            return False
        try:
            _link_file(source, path)
        except FileExistsError:
            with _reserve_name(path) as name:  # a link cannot take the place of a file
                _link_file(source, name)
                os.replace(name, path)
    return True


def _link_file(source: str, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(source, path.name, dst_dir_fd=folder)  # with a folder Python follows the link that `source` is
    finally:
        os.close(folder)


def _write_and_rename(path: Path, data: bytes) -> None:
    with _reserve_name(path) as name:
        with name.open("xb") as file:  # "x" never opens a link that another process made
            file.write(data)
        os.replace(name, path)


@contextlib.contextmanager
def _reserve_name(path: Path) -> Iterator[Path]:
    """A name beside a file that no other writer uses; what has it at the end is removed."""
    name = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")
    with _unwind_before_death():
        try:
            yield name
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or never made
                name.unlink()


class _EndingSignal(BaseException):
    """Unwinds the stack after a signal that ends this process."""


@contextlib.contextmanager
def _unwind_before_death() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end this process only after its stack is unwound; no effect outside the main thread.

    A handler that a program has set, or a signal that it ignores, stays.
    """
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():  # no other one may set handlers
        numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # a second one must not stop the unwinding
            raise _EndingSignal

    try:
        for number in numbers:
            signal.signal(number, unwind)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])


def write_json_file(path: Path, value: Any) -> None:
    """Writes an indented file of JSON.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def check_different_files(read: Iterable[tuple[str, Path]], written: Iterable[tuple[str, Path]]) -> None:
    """Raises `ModelError` if two files of a command are one, under whatever names, and one of them is written.

    Args:
        read, written: (option, path) of each file. Pipes and devices may be given several times.
    """
    owners: dict[Any, tuple[str, Path]] = {}
    written = list(written)
    for name, path in read:
        owners.setdefault(identify_file(path), (name, path))
    for name, path in written:
        identity = identify_file(path)
        if identity is not None and identity in owners:
            other, other_path = owners[identity]
            raise ModelError(f"{name}={str(path)!r} and {other}={str(other_path)!r} are one file; name another")
        owners[identity] = (name, path)


def identify_file(path: Path) -> Any:
    """What is equal for all names of a file; None for pipes and devices."""
    try:
        facts = os.stat(path)
    except ValueError:  # a name with a NUL
        return str(path)
    except OSError:
        return os.path.realpath(path.absolute())
    return (facts.st_dev, facts.st_ino) if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode) else None

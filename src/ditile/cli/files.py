"""Files that get their names when they are whole: nobody ever sees half of one, and none is left where that failed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file, in place of one that is there; a link stays one. What is no file, such as a pipe, is written to.

    Raises:
        OSError: if it cannot be written; it names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary_path = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")  # no other writer has it
    try:
        with temporary_path.open("xb") as file:  # never through a link that somebody has put there
            file.write(data)
        os.replace(temporary_path, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # of the part nobody knows
    finally:
        with contextlib.suppress(OSError):  # it has got its name, or was never made
            temporary_path.unlink()


def write_json_file(path: Path, value: Any) -> None:
    """Writes a file of JSON, for people to read too.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomically(path, json.dumps(value, indent=1) + "\n")

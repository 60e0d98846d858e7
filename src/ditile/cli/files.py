"""Files that get their names when they are whole: nobody ever sees half of one, and none is left where that failed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def write(path: Path, content: str | bytes) -> None:
    """Writes a file, in place of one that is there; a link stays one. What is no file, such as a pipe, is written to.

    Raises:
        OSError: if it cannot be written; it names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    part = path.with_name(f".ditile-{os.getpid()}-{secrets.token_hex(8)}.part")  # no other writer has it
    try:
        with part.open("xb") as file:  # never through a link that somebody has put there
            file.write(data)
        os.replace(part, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # of the part nobody knows
    finally:
        with contextlib.suppress(OSError):  # it has got its name, or was never made
            part.unlink()


def write_json(path: Path, value: Any) -> None:
    """Writes a file of JSON, for people to read too.

    Raises:
        OSError: if it cannot be written.
    """
    write(path, json.dumps(value, indent=1) + "\n")

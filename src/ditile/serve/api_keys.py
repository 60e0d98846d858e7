"""The keys of a server."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from ditile.distributed import env
from ditile.plan.errors import ModelError

LOG = logging.getLogger("ditile")
LEAST_KEY_LETTERS = 8
MAX_KEY_FILE_BYTES = 2**20
# (owner, key) of each key that a server requires; empty if it requires none.
ApiKeys = list[tuple[str, bytes]]


def read_api_keys(path: str | None) -> ApiKeys:
    """Return the keys (owner, key) of a file, or of DITILE_API_KEY without a file.

    A line is a key, or its owner's name, a colon and a key; the owner of a key without a name is "key-N", N the number
    of the line. Empty lines and lines that begin with # do not count.

    Raises:
        ModelError: if the file cannot be read, or there is no key in it, or a short one.
    """
    source = "DITILE_API_KEY"
    text = env.read_api_key()
    if path is not None:
        source = f"api_key={path!r}"
        try:
            with Path(path).open("rb") as file:
                text = file.read(MAX_KEY_FILE_BYTES).decode("utf-8")
                mode = os.fstat(file.fileno()).st_mode
        except (OSError, ValueError) as error:
            raise ModelError(f"{source} cannot be read: {error}; give a file with a key on each line") from None
        # The permissions of a pipe, such as a shell's <(..), do not matter.
        if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
            LOG.warning("%s can be read by other users of this machine; try chmod 600 %s", source, path)
    if text is None:
        return []
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if not colon:
            key = name
            name = f"key-{number}"
        name = name.strip()
        key = key.strip()
        if len(key) < LEAST_KEY_LETTERS or not name:
            raise ModelError(f"{source}: line {number} has no key of {LEAST_KEY_LETTERS} letters or more; try name:key")
        keys.append((name, key.encode()))
    if not keys:
        raise ModelError(f"{source} has no key; write one on a line, as key or name:key")
    return keys

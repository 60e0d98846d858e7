"""Where a forward server listens: a Unix socket of this user, or a port of this machine alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from ditile.distributed import env
from ditile.plan.errors import ModelError, quote_value
from ditile.serve.api_keys import ApiKeys

UNIX = "unix:"
LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "[::1]": socket.AF_INET6}
BACKLOG = 64
# Of Linux's `struct ucred`: process, user and group.
PEER_CREDENTIALS = struct.Struct("3i")


@contextlib.contextmanager
def listen_on_address(address: str, keys: ApiKeys) -> Iterator[tuple[socket.socket, str]]:
    """Take unix:/path or 127.0.0.1:PORT, and yield the socket and the address with its port.

    The caller lets it listen when it is ready; until then connections to a path are refused.

    Raises:
        ModelError: if it is none of this machine, others may write to its folder, it is taken, or a port has no keys.
    """
    if address.startswith(UNIX):
        path = Path(os.path.expanduser(address.removeprefix(UNIX)))
        with _own_path(path, address):
            listener = _bind_to_path(path, address)
            try:
                yield listener, f"{UNIX}{path}"
            finally:
                listener.close()
                path.unlink(missing_ok=True)
        return
    host, _, port = address.rpartition(":")
    if host not in LOOPBACK or not (port.isdecimal() and int(port) < 2**16):
        raise ModelError(f"forward={quote_value(address)} is not on this machine; give unix:/path or 127.0.0.1:PORT")
    if not keys:
        raise ModelError(
            f"forward={address!r} is reached by all users of this machine; give --api-key FILE or DITILE_API_KEY, or "
            "listen on unix:/path"
        )
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=LOOPBACK[host], backlog=BACKLOG)
    except OSError as error:
        raise ModelError(f"forward={address!r}: the server cannot listen there ({error.strerror})") from error
    with listener:
        yield listener, f"{host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _own_path(path: Path, address: str) -> Iterator[None]:
    """Keep other servers off a path, which only this user can write to.

    Raises:
        ModelError: if it is not so, or another server has the path.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise ModelError(f"forward={address!r}: this system does not say who connects; give 127.0.0.1:PORT and keys")
    if not path.is_absolute():
        raise ModelError(f"forward={address!r} has no absolute path; try {UNIX}{env.find_data_folder()}/forward.sock")
    lock = Path(f"{path}.lock")
    try:
        # Only ditile's own folder is made.
        if path.is_relative_to(env.find_data_folder()):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or folder.st_uid not in (0, os.geteuid()):
            raise ModelError(f"forward={address!r}: others can write to {path.parent}; take a folder of your own")
        file = lock.open("w")
    except OSError as error:
        raise ModelError(f"forward={address!r}: the server cannot listen there ({error.strerror})") from error
    with file:
        # A server that was killed leaves its lock open.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ModelError(f"forward={address!r}: another server has it; give another path") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _bind_to_path(path: Path, address: str) -> socket.socket:
    """Return a socket at a path, in the place of one that a killed server has left. Raises `ModelError` if it cannot
    be."""
    try:
        if path.exists() and not path.is_socket():
            raise ModelError(f"forward={address!r}: {path} is there, and is not a socket; give another path")
        path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX)
        # The socket never has wider permissions, not even for a moment.
        mask = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(mask)
    except OSError as error:
        raise ModelError(f"forward={address!r}: the server cannot listen there ({error.strerror or error})") from error
    return bound


def read_peer_user(connection: socket.socket) -> int:
    """Return the id of the user at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    return int(PEER_CREDENTIALS.unpack(credentials)[1])

"""Where a forward server listens: a Unix socket of this user, or a port that only this machine reaches."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from ditile.plan.errors import ModelError, quote_value
from ditile.serve.api_keys import ApiKeys

UNIX = "unix:"
LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "[::1]": socket.AF_INET6}


@contextlib.contextmanager
def listen_on_address(address: str, keys: ApiKeys) -> Iterator[tuple[socket.socket, str]]:
    """Listen on unix:path or 127.0.0.1:PORT, and yield the socket and its full address.

    Raises:
        ModelError: if it is not on this machine, others may write to its folder, it is taken, or a port has no keys.
    """
    with contextlib.ExitStack() as stack:
        try:
            if address.startswith(UNIX):
                path = Path(os.path.expanduser(address.removeprefix(UNIX)))
                stack.enter_context(_own_path(path, address))
                listener = _listen_on_path(path)
                stack.callback(path.unlink, missing_ok=True)
                place = f"{UNIX}{path}"
            else:
                host, _, port = address.rpartition(":")
                if host not in LOOPBACK or not port.isdecimal():
                    raise ModelError(
                        f"forward={quote_value(address)} is not on this machine; give unix:/path or 127.0.0.1:PORT"
                    )
                if not keys:
                    raise ModelError(
                        f"forward={address!r} is reached by all users of this machine; give --api-key FILE or "
                        "DITILE_API_KEY, or listen on unix:/path"
                    )
                listener = socket.create_server((host.strip("[]"), int(port)), family=LOOPBACK[host])
                # Without this option an answer waits until its header is acknowledged. Connections inherit the option.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                place = f"{host}:{listener.getsockname()[1]}"
        except (OSError, OverflowError) as error:
            raise ModelError(f"forward={quote_value(address)}: the server cannot listen there ({error})") from error
        with listener:
            yield listener, place


@contextlib.contextmanager
def _own_path(path: Path, address: str) -> Iterator[None]:
    """Keep other servers off a path. Raises `ModelError` if others can write there, or a server has it."""
    if not path.is_absolute():
        raise ModelError(f"forward={quote_value(address)} has no absolute path; give unix:/path")
    folder = path.parent.stat()
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or folder.st_uid not in (0, os.geteuid()):
        raise ModelError(f"forward={address!r}: others can write to {path.parent}; take a folder of your own")
    # The lock file is never removed: if it were made anew, two servers could each lock a file of their own.
    with Path(f"{path}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ModelError(f"forward={address!r}: another server has it; give another path") from None
        yield


def _listen_on_path(path: Path) -> socket.socket:
    """Return a socket that listens on a path, in the place of one that a killed server has left.

    Raises `OSError` if it cannot, for instance because another program listens there.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        # If the backlog of a living program is full, a blocking connect would wait.
        probe.setblocking(False)
        if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    # The socket never has wider permissions, not even for a moment: whoever may write to it may connect.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        # The access list that a folder gives to new files would override the mask.
        path.chmod(0o600)
        listener.listen()
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener

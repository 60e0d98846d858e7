"""A network of their own for gloo's ports, so that no other user of the machine can connect to them.

gloo listens on the loopback device, asks nobody who he is, and takes who connects first for a rank. On Linux a process
can make a network that only those reach who have a descriptor of it; `launch` makes one for each run. A rank enters it
with one thread, for as long as that makes process groups: sockets, and the threads that are started meanwhile, stay in
the network in which they were made. Everything else, such as downloads, uses the network of the machine.

It needs root, or user namespaces (`unshare --user --net` works). Elsewhere gloo listens on the loopback device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed import env

_NEW_USER = 0x10000000
_NEW_NET = 0x40000000
_MAKE = f"""
import ctypes, fcntl, os, pathlib, socket, struct, sys
user, group = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare({_NEW_NET} | (user and {_NEW_USER})):
    sys.exit(1)
if user:
    pathlib.Path("/proc/self/setgroups").write_text("deny")
    pathlib.Path("/proc/self/uid_map").write_text(f"{{user}} {{user}} 1")
    pathlib.Path("/proc/self/gid_map").write_text(f"{{group}} {{group}} 1")
up = struct.pack("16sh22x", b"lo", 1)
fcntl.ioctl(socket.socket(), 0x8914, up)  # SIOCSIFFLAGS: the loopback device is up
print("made", flush=True)
sys.stdin.read()
"""


class PrivateNetwork(NamedTuple):
    """Descriptors of a network, and of the user namespace that owns it; None where root made it."""

    network: int
    users: int | None

    def list_descriptors(self) -> tuple[int, ...]:
        """Those that there are."""
        return (self.network,) if self.users is None else (self.network, self.users)


@contextlib.contextmanager
def create_private_network() -> Iterator[PrivateNetwork | None]:
    """Makes a network, which lasts as long as somebody has its descriptor; None where this process may not.

    A machine with NVIDIA GPUs gets one from root alone: what their driver does in a user namespace is not known.
    """
    is_root = not hasattr(os, "geteuid") or os.geteuid() == 0
    if sys.platform != "linux" or (not is_root and Path("/dev/nvidiactl").exists()):
        yield None
        return
    pipe = subprocess.PIPE
    quiet = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", _MAKE], stdin=pipe, stdout=pipe, stderr=quiet) as maker:
        assert maker.stdin is not None and maker.stdout is not None
        try:
            network = _open_spaces(maker.pid, is_root) if maker.stdout.readline() == b"made\n" else None
        finally:
            maker.stdin.close()
    try:
        yield network
    finally:
        for fd in () if network is None else network.list_descriptors():
            os.close(fd)


def _open_spaces(pid: int, is_root: bool) -> PrivateNetwork | None:
    try:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        return PrivateNetwork(network, None if is_root else os.open(f"/proc/{pid}/ns/user", os.O_RDONLY))
    except OSError:
        return None


def join_user_space(network: PrivateNetwork) -> bool:
    """Makes this process one that may enter the network; False if it may not. It must have one thread alone."""
    return network.users is None or _set_space(network.users, _NEW_USER)


@contextlib.contextmanager
def make_groups() -> Iterator[None]:
    """A context in which a rank makes process groups: in the run's private network if it has one.

    What torch's native code prints goes to the standard error.
    """
    network = env.read_network_fd()
    with env.redirect_native_stdout():
        if network is None:
            yield
            return
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            if not _set_space(network, _NEW_NET):
                raise OSError(ctypes.get_errno(), "the network of the run cannot be entered")
            yield
        finally:
            _set_space(home, _NEW_NET)
            os.close(home)


def _set_space(fd: int, kind: int) -> bool:
    """Moves the calling thread, or for a user namespace the process, into a namespace."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    return bool(library.setns(fd, kind) == 0)

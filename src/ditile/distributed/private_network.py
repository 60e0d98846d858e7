"""Makes a private network for gloo's ports, so that no other user of the machine can connect to them.

gloo listens on the loopback device, does not authenticate connections, and takes whatever connects first for a rank. On
Linux a process can make a network that only processes with a descriptor of it can enter; `launch` makes one for each
run. A rank enters it with one thread, which makes process groups there. Sockets and threads stay in the network in
which they were made. Everything else, such as downloads, uses the network of the machine.

It needs root, or user namespaces (`unshare --user --net` works). Without them gloo listens on the loopback device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ditile.distributed import env

# Flags of unshare(2) and setns(2). Python has these two functions from 3.12 on; 3.10 is supported.
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


@contextlib.contextmanager
def create_private_network() -> Iterator[tuple[int, ...] | None]:
    """Make a network, and yield its descriptor and, unless root made it, its user namespace's; None if not allowed.

    The network lasts as long as a process has its descriptor. A machine with NVIDIA GPUs gets one only from root: what
    their driver does in a user namespace is not known.
    """
    is_root = not hasattr(os, "geteuid") or os.geteuid() == 0
    if sys.platform != "linux" or (not is_root and Path("/dev/nvidiactl").exists()):
        yield None
        return
    names = ["net"] if is_root else ["net", "user"]
    descriptors: tuple[int, ...] | None = None
    # A child makes the network, because the process that makes one moves into it.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _MAKE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as maker:
        assert maker.stdin is not None and maker.stdout is not None
        try:
            if maker.stdout.readline() == b"made\n":
                with contextlib.suppress(OSError):
                    descriptors = tuple(os.open(f"/proc/{maker.pid}/ns/{name}", os.O_RDONLY) for name in names)
        finally:
            maker.stdin.close()
    try:
        yield descriptors
    finally:
        for fd in descriptors or ():
            os.close(fd)


def join_user_space(fd: int) -> bool:
    """Move this process into a user namespace, whose networks it may then enter. Returns False if it may not.

    The process must have only one thread.
    """
    return _set_space(fd, _NEW_USER)


@contextlib.contextmanager
def make_groups() -> Iterator[None]:
    """Make process groups within this context: in the run's private network if it has one.

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


def _set_space(fd: int, space_type: int) -> bool:
    """Move the calling thread, or for a user namespace the process, into a namespace."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    return bool(library.setns(fd, space_type) == 0)

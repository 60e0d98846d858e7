"""Starts a watcher for each of torchrun's ranks: if a rank fails, all end within seconds, and a line says why.

torchrun ends the ranks of its own host when one of them exits. It does not notice a rank that hangs, and other hosts
learn nothing. So each rank starts a small process, its watcher (`torchrun_watcher`), which does not import torch. A
watcher reads what its rank reports about itself (`heartbeat`) and passes it on to the watcher of rank 0, the hub. The
hub applies the rules of `launch` (`failure_detection`) and tells all others its verdict:

    rank 0 -> its watcher, the hub <=> watcher <- rank 1

A watcher ends its rank when the hub says so or falls silent, and exits once all ranks have ended. The hub listens on
its own port. A watcher that connects must know a secret. It is random in each run, and ranks read it from torchrun's
store.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ditile.distributed import env
from ditile.distributed.failure_detection import is_consequence
from ditile.distributed.heartbeat import (
    PROGRESS,
    RankFailure,
    describe_error,
    die_with_parent,
    send_heartbeats,
    send_note,
    shorten_failure,
)
from ditile.distributed.torchrun_watcher import read_line, run_watcher
from ditile.plan.errors import JoinError

LOG = logging.getLogger("ditile")
STORE_KEY = "ditile-watch"
"""The key in torchrun's store under which rank 0 writes where the hub listens."""
START_SECONDS = 120.0
"""Seconds within which torchrun's ranks must start; reading torch from a cold disk takes long."""


def begin_watch(stall: float | None) -> None:
    """Start the watcher of this rank, if torchrun started this process with others and it has none yet.

    Args:
        stall: seconds without progress after which the run is ended. None for a script: then only calls of a runner
            are timed, which must make progress every minute.

    Raises:
        JoinError: if rank 0 cannot be reached in `START_SECONDS`.
    """
    place = env.read_torchrun_place()
    if not needs_watch():
        return
    assert place is not None
    process = start_watcher()
    assert process.stdin is not None
    task = place._asdict() | {"stall": stall, "host": socket.gethostname()}
    try:
        store = open_torchrun_store(place, START_SECONDS)
        if place.rank == 0:
            # The watcher of rank 0 becomes the hub.
            assert process.stdout is not None
            addresses = ["127.0.0.1"]
            if env.read_local_world() != task["world"]:
                addresses = [env.read_master_address()]
                # If MASTER_ADDR is not of this host, the hub listens on all its addresses, such as the one added now.
                with contextlib.suppress(OSError):
                    addresses.append(socket.gethostbyname(socket.gethostname()))
            secret = secrets.token_hex(32)
            _write_line(process.stdin, task | {"secret": secret, "master": addresses[0]})
            port = int(read_line(process.stdout.fileno()))
            store.set(STORE_KEY, json.dumps({"addresses": addresses, "port": port, "secret": secret}))
        else:
            with explain_join_errors(place, START_SECONDS):
                hub_address = json.loads(store.get(STORE_KEY))
            _write_line(process.stdin, task | hub_address)
    except JoinError:
        process.kill()
        # A script may try again.
        start_watcher.cache_clear()
        raise
    fd = process.stdin.fileno()
    env.set_progress_fd(fd)
    env.send_to_watcher(PROGRESS)
    threading.Thread(target=send_heartbeats, args=(fd,), daemon=True).start()
    threading.Thread(target=_obey_watcher, args=(process,), daemon=True).start()
    sys.excepthook = functools.partial(_report_uncaught, sys.excepthook)


def needs_watch() -> bool:
    """Return whether torchrun started this process with others, and it has no watcher yet."""
    return env.is_under_torchrun() and env.read_progress_fd() is None and env.read_torchrun_place() is not None


@functools.cache
def start_watcher() -> subprocess.Popen[bytes]:
    """Start this rank's watcher, or return the one that was started. The rank now ends when torchrun does."""
    die_with_parent()
    code = f"import sys; sys.path[:] = {sys.path}; from {run_watcher.__module__} import run_watcher; run_watcher()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "ditile-watch", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def report_failure(failure: RankFailure, code: int) -> bool:
    """Let the watchers print, once for the whole run, why this rank ends. Returns False if it has no watcher."""
    if not env.is_under_torchrun() or env.read_progress_fd() is None:
        return False
    send_note(failed=list(shorten_failure(failure)[1:]), code=code)
    return True


def _report_uncaught(
    hook: Any,
    error_class: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    failure = describe_error(error)
    # If this rank failed only because another one did, its traceback would mislead.
    if not is_consequence(failure):
        hook(error_class, error, trace)
    report_failure(failure._replace(plain=""), 1)


def _obey_watcher(process: subprocess.Popen[bytes]) -> None:
    """Exit with the code that the watcher sends. The code is 1 if the watcher was killed and sends none."""
    assert process.stdout is not None
    code = os.read(process.stdout.fileno(), 1) or b"\1"
    os._exit(code[0])


def _write_line(pipe: Any, value: dict[str, Any]) -> None:
    pipe.write(json.dumps(value).encode() + b"\n")
    pipe.flush()


NOTICE_SECONDS = 10.0
"""Seconds after which a rank logs that it is still waiting for others."""


def open_torchrun_store(place: env.Torchrun, timeout: float) -> Any:
    """Connect to the store that all of torchrun's ranks share.

    Raises:
        JoinError: if it cannot be reached within `timeout` seconds.
    """
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=timeout)
    with explain_join_errors(place, timeout):
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        store.set_timeout(limit)
        return store


@contextlib.contextmanager
def explain_join_errors(place: env.Torchrun, timeout: float) -> Iterator[None]:
    """Raise `JoinError` for torch's errors while ranks connect. Logs once if that takes `NOTICE_SECONDS`."""
    waits = (
        f"rank {place.rank} of {place.world} still waits for the others at {env.describe_master()}; if torchrun did "
        "not start this process, unset RANK and WORLD_SIZE"
    )
    timer = threading.Timer(NOTICE_SECONDS, LOG.warning, (waits,))
    timer.daemon = True
    timer.start()
    try:
        yield
    # torch raises ValueError if MASTER_ADDR or MASTER_PORT is missing or not an address.
    except (RuntimeError, ValueError) as error:
        raise JoinError(
            f"rank {place.rank} of {place.world} cannot connect to the others at {env.describe_master()} "
            f"({str(error).splitlines()[0]}); if torchrun did not start this process, unset RANK and WORLD_SIZE; "
            "between hosts, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface that joins them; "
            f"if a rank needs more than {timeout:g} s to fetch its model, fetch it first"
        ) from error
    finally:
        timer.cancel()

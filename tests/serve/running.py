"""A real `ditile serve` in a process of its own, on a free port of the loopback device."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ditile.model.known import ASSETS

START_SECONDS = 120.0
CACHE_FLAGS = ("--cache", "--max-warmup-steps", "1", "--rdt", "0.5")
PIXART_FILE = ASSETS / "shapes-pixart" / "transformer" / "diffusion_pytorch_model.safetensors"
PIXART_FLAGS = ("--cfg", "2", *CACHE_FLAGS, "--transformer", str(PIXART_FILE))


class RunningServer:
    """A server, and what it has written.

    Args:
        model: which is served.
        flags: further words of the command.
        state: its state folder.
        page: whether it has its web page.
        python: which runs it.
        environ: variables of the process.

    Attributes:
        url: where it listens, when it is ready.
    """

    def __init__(
        self,
        model: str,
        flags: tuple[str, ...],
        state: Path,
        *,
        page: bool = False,
        python: Path | str = sys.executable,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        state = state.resolve()
        self.url, self._log, self.state = "", state.with_suffix(".log"), state
        # A server that ran on this folder before has written there too.
        self._since = self._log.stat().st_size if self._log.exists() else 0
        words = ["serve", "--model", model, "--port", "0", "--state", str(state)]
        words += [*([] if page else ["--no-page"]), *flags]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", "ditile", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=state.parent,
                env={**environ, "HF_HUB_OFFLINE": "1"},
            )

    @property
    def log(self) -> str:
        """What the server has written to its outputs."""
        return self._log.read_bytes()[self._since :].decode(errors="replace")

    def wait_until_ready(self, seconds: float = START_SECONDS) -> RunningServer:
        """Returns when the server says where it is; fails if it ends before."""
        deadline = time.monotonic() + seconds
        while not (found := re.findall(r" on (http://\S+)", self.log)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        self.url = found[-1]
        return self

    def client(self, **options: object) -> httpx.Client:
        """A client of its address."""
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, **options)  # type: ignore[arg-type]

    def end(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Sends a signal and waits; returns the exit code. Kills it if it does not end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def run_server(model: str, *flags: str, state: Path, **options: Any) -> Iterator[RunningServer]:
    """A server that is ready, until the context is left."""
    server = RunningServer(model, flags, state, **options)
    try:
        yield server.wait_until_ready()
    finally:
        server.end(signal.SIGKILL)

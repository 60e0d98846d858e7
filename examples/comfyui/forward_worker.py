"""Starts `ditile serve --forward` for a node, and ends it with the models that use it, or with ComfyUI.

Run as a program this is the guard of one worker: it ends the worker as soon as its standard input ends, which it does
however ComfyUI ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHECK_SECONDS = 0.2
END_SECONDS = 15.0


class WorkerError(Exception):
    """A worker that cannot be started; the text has its own first line of error."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is started with.

    Attributes:
        model: a bundled or published model, a folder or a hub id.
        component: which of its transformers, "transformer_2" for the low noise of Wan 2.2.
        file: the weights of the transformer in one file; the model's own if it is empty.
        plan: such as "ulysses=2"; by `cards` if it is empty.
        cards: how many share the tokens of an image if there is no plan.
        dtype: of the weights; the model's own if it is empty.
        lora_dir: folder of LoRAs; none if it is empty.
    """

    model: str
    component: str = "transformer"
    file: str = ""
    plan: str = ""
    cards: int = 1
    dtype: str = ""
    lora_dir: str = ""

    def list_arguments(self, address: str) -> list[str]:
        """Return the arguments of `ditile`, each with its value in one word, so that no value is taken for a flag."""
        values = {
            "forward": address,
            "model": self.model,
            "forward-component": self.component,
            "component": f"{self.component}={self.file}" if self.file else "",
            "plan": self.plan or (f"ulysses={self.cards}" if self.cards > 1 else ""),
            "dtype": self.dtype,
            "lora-dir": self.lora_dir,
        }
        return ["serve", *(f"--{name}={value}" for name, value in values.items() if value)]


class Worker:
    """One process of `ditile serve --forward`, and those of its ranks.

    Args:
        options: what it is started with.

    Attributes:
        address: where it listens once it is ready.
        num_users: models that use it.

    Raises:
        WorkerError: if ditile is not installed.
    """

    def __init__(self, options: WorkerOptions) -> None:
        program = find_ditile()
        self._folder = tempfile.TemporaryDirectory(prefix="ditile-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        self.address = f"unix:{self._folder.name}/forward.sock"
        self.num_users = 0
        # No workflow downloads a model, unless whoever started ComfyUI says so.
        environment = {"HF_HUB_OFFLINE": "1", **os.environ}
        command = [program, *options.list_arguments(self.address)]
        with self._log.open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, __file__, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self._guard.poll() is None

    def wait_until_ready(self, check: Callable[[], None]) -> None:
        """Wait until it is ready.

        Args:
            check: raises if the user has pressed Cancel.

        Raises:
            WorkerError: if it ends instead.
        """
        # Connections wait until its ranks are ready, when it says where it listens.
        while f" on {self.address}\n" not in self._log.read_text("utf-8", "replace"):
            check()
            if not self.is_running():
                raise WorkerError(f"ditile did not start: {self.find_error()}")
            time.sleep(CHECK_SECONDS)

    def find_error(self) -> str:
        """Return the line in which `ditile` says why it ended, or the last line of its log."""
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines()]
        lines = [line for line in lines if line]
        said = [line for line in lines if re.match(r"ditile( \w+)?: ", line)]
        return (said or lines or [f"it wrote nothing; exit code {self._guard.returncode}"])[-1]

    def end(self) -> None:
        """End it and its ranks."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(END_SECONDS + 5.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
        self._folder.cleanup()


class WorkerPool:
    """The workers of this ComfyUI, one for each set of options."""

    def __init__(self) -> None:
        self._workers: dict[WorkerOptions, Worker] = {}
        self._lock = threading.Lock()

    def has_ended(self, options: WorkerOptions) -> bool:
        """Return whether the worker of these options was started and does not run any more."""
        worker = self._workers.get(options)
        return worker is not None and not worker.is_running()

    def start(self, options: WorkerOptions, check: Callable[[], None]) -> Worker:
        """Return a worker that is ready; a running one of the same options is shared.

        Raises:
            WorkerError: if it does not start.
        """
        worker = self._workers.get(options)
        if worker is not None and worker.is_running():
            return worker
        worker = Worker(options)
        self._workers[options] = worker
        try:
            worker.wait_until_ready(check)
        except BaseException:
            del self._workers[options]
            worker.end()
            raise
        return worker

    def add_user(self, worker: Worker) -> None:
        """Count a model that uses a worker."""
        with self._lock:
            worker.num_users += 1

    def remove_user(self, worker: Worker) -> None:
        """Count a model that is gone, and end its worker if it was the last one."""
        with self._lock:
            worker.num_users -= 1
            if worker.num_users:
                return
            for options, other in list(self._workers.items()):
                if other is worker:
                    del self._workers[options]
        worker.end()


def find_ditile() -> str:
    """Return the path of the `ditile` program, in DITILE_COMMAND or PATH.

    Raises:
        WorkerError: if there is none.
    """
    command = os.environ.get("DITILE_COMMAND") or shutil.which("ditile")
    if not command or not os.access(command, os.X_OK):
        raise WorkerError(f"no program {command or 'ditile'!r}; install ditile, or name its program in DITILE_COMMAND")
    return command


def guard_process(command: list[str]) -> int:
    """Run a command until it ends or standard input does. Return its exit code."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_input() -> None:
        # Not by sys.stdin, whose lock would be held when this program ends before its input.
        while os.read(0, 4096):
            pass
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

    threading.Thread(target=end_with_input, daemon=True).start()
    # An interrupt of the terminal is ComfyUI's to answer: it ends, and with it this one's input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return process.wait()


if __name__ == "__main__":
    sys.exit(guard_process(sys.argv[1:]))

"""Python imports this in every process of a faulty run: at one stage it does to one of them what FAULT says.

FAULT is "stage | kind | target | folder"; see `tests/distributed/faulty.py`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

PLACES = {
    "imports": ("ditile.distributed.launch", "_set_up_process_group"),
    "joining": ("ditile.distributed.backend", "choose_backend"),
    "loading": ("ditile.runner.load", "load_model"),
    "text": ("diffusers.pipelines.flux.pipeline_flux", "FluxPipeline.encode_prompt"),
    "first step": ("ditile.runner.callbacks", "StepEndCallbacks._handle_step_end"),
    "mid-loop": ("ditile.runner.callbacks", "StepEndCallbacks._handle_step_end"),
    "decode": ("ditile.runner.callbacks", "StepEndCallbacks._handle_step_end"),
    "saving": ("ditile.distributed.files", "_write_and_rename"),
    "between prompts": ("ditile.cli.generate", "_call_and_report"),
}
"""Stage -> the module and the function in which its fault comes."""
STEPS = {"first step": 0, "mid-loop": 2, "decode": 3}
TORCHRUN_IMPORTS = ("ditile.distributed.start_watcher", "open_torchrun_store")


class InjectedError(Exception):
    """An error that nothing foresees: what diffusers may raise for a bad model would be told as one."""


class Fault:
    """What to do, once."""

    def __init__(self, words: str) -> None:
        stage, self.kind, self.target, self.folder = words.split(" | ")
        self.stage, self.rank = stage, os.environ.get("RANK", "")
        self.calls, self.done = 0, False
        # A process that saves is rank 0; the last rank waits for it then, at the end of its own work.
        self.place = PLACES[stage]
        if stage == "saving" and self.rank != "0":
            self.place = ("ditile.cli.generate", "generate_images")
        if stage == "imports" and "TORCHELASTIC_RUN_ID" in os.environ:
            self.place = TORCHRUN_IMPORTS

    def wrap_function(self, module: ModuleType) -> None:
        """Puts the fault before the function of its stage, or behind it where something must be half done."""
        *owners, name = self.place[1].split(".")
        owner = functools.reduce(getattr, owners, module)
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            due: bool | None = True
            if self.stage in STEPS:
                due = args[1] == STEPS[self.stage]
            elif self.stage == "between prompts":
                due = self.calls == 2
            elif self.place[1] == "generate_images":
                due = None  # at its end
            if due:
                self.happen()
            result = inner(*args, **kwargs)
            if due is None:
                self.happen()
            return result

        setattr(owner, name, faulty)

    def happen(self) -> None:
        """Lets it happen, if it is this process's turn."""
        own = "rank 0" if self.target == "parent" else self.target
        if self.done or own != f"rank {self.rank}":
            return
        self.done = True
        pid = os.getppid() if self.target == "parent" else os.getpid()
        Path(self.folder, "happened").write_text(f"{time.time()} {pid}")
        if self.kind == "raise":
            raise InjectedError("a fault of this test")
        if self.kind == "memory":
            used = int(Path("/proc", str(pid), "statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
            if pid == os.getpid():
                self.kept = bytearray(1 << 30)
            return
        os.kill(pid, getattr(signal, f"SIG{self.kind}"))
        if self.target == "parent" and self.kind != "STOP":
            time.sleep(2)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module of the stage, and wraps its function when it has been imported."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.loader = fault, None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.fault.place[0]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.fault.wrap_function(module)


if words := os.environ.get("FAULT"):
    sys.meta_path.insert(0, Finder(Fault(words)))

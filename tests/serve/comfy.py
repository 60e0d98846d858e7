"""The nodes of examples/comfyui as ComfyUI loads them, and what of ComfyUI they call."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "comfyui"


class InterruptProcessingException(Exception):  # noqa: N818
    """What ComfyUI raises when its user has pressed Cancel."""


class ComfyStub:
    """ComfyUI's progress bars and its Cancel.

    Attributes:
        shown: (done, total, preview) of each change of a bar.
        interrupted: set by a test that presses Cancel.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[tuple[int, int, Any]] = []
        self.interrupted = threading.Event()
        stub = self

        class ProgressBar:
            def __init__(self, total: int) -> None:
                self.total = total

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                self.total = self.total if total is None else total
                stub.shown.append((value, self.total, preview))

        def check() -> None:
            if stub.interrupted.is_set():
                raise InterruptProcessingException

        contents: dict[str, dict[str, Any]] = {
            "comfy": {},
            "comfy.utils": {"ProgressBar": ProgressBar},
            "comfy.model_management": {"throw_exception_if_processing_interrupted": check},
        }
        install_modules(monkeypatch, contents)


def install_modules(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Put modules of ComfyUI in place, the package first."""
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, own_name = name.rpartition(".")
        if package:
            setattr(sys.modules[package], own_name, module)


def load_nodes(name: str = "custom_nodes_ditile") -> ModuleType:
    """The folder as ComfyUI's `load_custom_node` imports it."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

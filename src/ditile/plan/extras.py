"""Optional packages: the extra that brings each, and the check before they are needed.

    require_extra("lora", "lora='style.safetensors'")

Options call `require_extra` before ranks start and before a model is loaded; so does every function that imports such a
package. Packages are only looked for, because importing some of them takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ditile.plan.errors import ModelError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "lora": ("peft",),
    "quantize": ("torchao",),
    "gguf": ("gguf",),
    "video": ("av", "ftfy"),
    "serve": (
        "fastapi",
        "httptools",
        "prometheus_client",
        "python_multipart",
        "sse_starlette",
        "starlette",
        "uvicorn",
    ),
    "page": ("gradio",),
    "ray": ("ray",),
    "evaluate": ("torchmetrics",),
}  # fmt: skip
"""The extras of pyproject.toml -> the packages that each brings, by the names under which they are imported.

None of them may need torchvision: pip takes its newest release, which brings another torch in place of the one that the
user installed for a driver."""


def is_installed(package: str) -> bool:
    """Return whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def require_extra(extra: str, purpose: str, packages: Sequence[str] = (), instead: str = "") -> None:
    """Raise `ModelError` unless packages of an extra are installed.

    Args:
        extra: a name in `EXTRAS`.
        purpose: what needs them, for the message: an option with its value, or a command.
        packages: the packages of the extra that are needed; all by default.
        instead: what would work without them, for the message.
    """
    needed = packages or EXTRAS[extra]
    missing = [name for name in needed if not is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ModelError(
            f"{purpose} needs {', '.join(missing)}, which {verb} not installed; pip install 'ditile[{extra}]'{instead}"
        )


def advise_torchvision() -> str:
    """Return the pip command for a torchvision that fits the installed torch. It leaves torch as it is."""
    release, _, build = importlib.metadata.version("torch").partition("+")
    _, minor, patch = re.findall(r"\d+", release)[:3]
    # torchvision 0.15 was made for torch 2.0, and each release since for the next one.
    command = f"pip install torchvision==0.{int(minor) + 15}.{patch}"
    # Builds for one version of CUDA are in an index of their own.
    if build:
        return f"{command} --index-url https://download.pytorch.org/whl/{build}"
    return command


def import_lab(module: str) -> Any:
    """Import a module of `ditile_lab` when it is first needed."""
    # The lab imports the library, so no other part of the library may import the lab.
    return importlib.import_module(f"ditile_lab.{module}")


def require_quantizer(quant_type: str, purpose: str = "") -> None:
    """Raise `ModelError` unless the package for a type of quantization is installed. `purpose` is for the message."""
    purpose = purpose or f"quant_type={quant_type}"
    if quant_type != "bitsandbytes_4bit":
        require_extra("quantize", purpose)
        return
    # bitsandbytes needs a GPU of NVIDIA's or AMD's to be of use, and is in no extra.
    if not is_installed("bitsandbytes"):
        raise ModelError(f"{purpose} needs bitsandbytes, which is not installed; pip install 'bitsandbytes'")

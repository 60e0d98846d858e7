"""The packages that ditile can do without: the extra that brings each, and the check before they are needed.

    require_extra("lora", "lora='style.safetensors'")

Options call it before ranks start and before a model is loaded, and so does every function that imports such a package.
Packages are looked for and not imported, which would take seconds for some of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from ditile.plan.errors import ModelError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "lora": ("peft",),
    "quantize": ("torchao",),
    "gguf": ("gguf",),
    "plots": ("matplotlib",),
    "video": ("av", "ftfy"),
    "vision": ("torchvision",),
    "serve": ("fastapi", "prometheus_client", "python_multipart", "sse_starlette", "starlette", "uvicorn"),
    "page": ("gradio",),
    "ray": ("ray",),
    "evaluate": ("torchmetrics", "torchvision", "torch_fidelity"),
}  # fmt: skip
"""Extra of pyproject.toml -> the packages that it brings, by the names under which they are imported."""


def is_installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def require_extra(extra: str, purpose: str, packages: Sequence[str] = (), instead: str = "") -> None:
    """Raises `ModelError` unless packages of an extra are installed.

    Args:
        extra: of `EXTRAS`.
        purpose: what needs them, for the message: an option with its value, or a command.
        packages: which of them; all by default.
        instead: what would work without them, for the message.
    """
    needed = packages or EXTRAS[extra]
    missing = [name for name in needed if not is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ModelError(
            f"{purpose} needs {', '.join(missing)}, which {verb} not installed; pip install 'ditile[{extra}]'{instead}"
        )


def require_quantizer(quant_type: str, purpose: str = "") -> None:
    """Raises `ModelError` unless the package that quantizes to a type is installed; `purpose` is for the message."""
    purpose = purpose or f"quant_type={quant_type}"
    if quant_type != "bitsandbytes_4bit":
        require_extra("quantize", purpose)
        return
    # Needs a GPU of NVIDIA's or AMD's to be of use, and is in no extra.
    if not is_installed("bitsandbytes"):
        raise ModelError(f"{purpose} needs bitsandbytes, which is not installed; pip install 'bitsandbytes'")

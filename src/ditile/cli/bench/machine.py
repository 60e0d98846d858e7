"""The facts of a machine that belong to a measurement."""

from __future__ import annotations

import os
import platform
from typing import Any

import diffusers
import torch

import ditile
from ditile.distributed import cpus


def collect_machine_facts(device: str | None) -> dict[str, Any]:
    """What was measured on: processor or GPUs, and versions.

    Args:
        device: that was asked for.
    """
    gpu = torch.cuda.is_available() and not (device or "cuda").startswith("cpu")
    count = torch.cuda.device_count() if gpu else 0
    return {
        "processor": cpus.read_cpu_name(), "cores": cpus.count_usable_cores(),
        "gpus": [torch.cuda.get_device_name(k) for k in range(count)],
        "system": f"{platform.system()} {platform.machine()}", "torch": torch.__version__,
        "diffusers": diffusers.__version__, "ditile": ditile.__version__,
    }  # fmt: skip


def read_load_average() -> float | None:
    """Processes that want a core at a time, mean of the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None

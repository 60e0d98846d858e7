"""Tools of measurements that take turns: a cache for one call, seconds of a loop, and facts of the machine."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from torch import nn

from ditile.cache.cached import IdleCacheWarning
from ditile.distributed import cpus, env
from ditile.distributed.trace import GenerationTrace
from ditile.plan.errors import ModelError
from ditile.plan.version import __version__
from ditile.runner.caching import disable_cache, enable_cache


@contextmanager
def use_cache_within(target: Any, configs: Mapping[str, Any], name: str = "") -> Iterator[None]:
    """Gives a pipeline or runner a cache within the context; no cache if the cache_config is None.

    Args:
        target: the pipeline or runner.
        configs: the keyword arguments of `enable_cache`.
        name: the name of the cache in errors.

    Raises:
        ModelError: if the cache could never leave anything out.
    """
    if configs["cache_config"] is None:
        yield
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleCacheWarning)
            enable_cache(target, **configs)
    except IdleCacheWarning as warning:
        raise ModelError(f"{name!r}: {warning}" if name else str(warning)) from warning
    try:
        yield
    finally:
        disable_cache(target)


@contextmanager
def time_denoising_loop(model: nn.Module) -> Iterator[Callable[[], list[float]]]:
    """Yields a function that returns, after a call of the pipeline, the seconds of each part of its loop.

    The parts are the calls of the transformer and the times between them. The last step of the scheduler, which a
    runner's loop has too, is not included.
    """
    trace = GenerationTrace()
    trace.on = True
    hooks = [
        model.register_forward_pre_hook(lambda *_: trace.mark_step()),
        model.register_forward_hook(lambda *_: trace.mark_step()),
        model.register_forward_pre_hook(lambda *_: env.report_progress()),
    ]
    try:
        yield lambda: trace.measure_waits()[0]
    finally:
        for hook in hooks:
            hook.remove()


def collect_machine_facts(device: str | None) -> dict[str, Any]:
    """Processor, GPUs and versions of this machine; `device` is the one that was given, if any."""
    gpu = torch.cuda.is_available() and not (device or "cuda").startswith("cpu")
    count = torch.cuda.device_count() if gpu else 0
    return {
        "processor": cpus.read_cpu_name(),
        "cores": cpus.count_usable_cores(),
        "gpus": [torch.cuda.get_device_name(k) for k in range(count)],
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "ditile": __version__,
    }


def read_load_average() -> float | None:
    """The mean number of runnable processes in the last minute; None if the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None

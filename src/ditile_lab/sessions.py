"""Common parts of measuring sessions: pipelines that take turns on the same ranks, and facts of the machine.

In a session the plain pipeline on rank 0 and a runner for each plan stay in memory and generate in turns, so that a
machine that becomes slower favours none of them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
import torch.distributed as dist
from torch import nn

from ditile.distributed import cpus, env
from ditile.distributed.backend import synchronize
from ditile.distributed.mesh import Communicators
from ditile.distributed.trace import GenerationTrace
from ditile.model.support import find_loop_model
from ditile.plan.option_classes import drop_missing
from ditile.plan.plan import Plan
from ditile.plan.version import __version__
from ditile.runner.caching import disable_cache
from ditile.runner.requests.prepare import enable_working_cache
from ditile.runner.runner import Runner, parallelize

Item = TypeVar("Item")
PLAIN = ""
"""Stands in place of a plan for the plain pipeline on one rank."""
CPUINFO = Path("/proc/cpuinfo")
SHARED_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")


class TurnPipelines:
    """The plain pipeline and a runner for each plan, which take turns on the ranks of this process group.

    By default plans share the plain pipeline's text encoders and VAE, and all of it if they divide no weights.

    Args:
        create_pipeline: (plan) -> this rank's part of the pipeline for the plan; the whole for None.
        plans: the plans, as text.
        with_plain: whether the plain pipeline has turns.
        share_plain: whether plans share parts of it; it must not have its own cache then.
        cores: the cores that the plain pipeline may use; None is all.

    Attributes:
        plain: the plain pipeline, if this rank has it.
    """

    def __init__(
        self,
        create_pipeline: Callable[[Plan | None], Any],
        plans: Iterable[str],
        device: torch.device,
        *,
        with_plain: bool = True,
        share_plain: bool = True,
        cores: Sequence[int] | None = None,
    ) -> None:
        self.plain: Any = None
        self.runners: dict[str, Runner] = {}
        self._device = device
        self._cores = cores
        self._is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        parsed_plans = [Plan.parse(text) for text in dict.fromkeys(plans)]
        sharing_plans = []
        if share_plain:
            # These leave the whole pipeline on every rank.
            sharing_plans = [plan for plan in parsed_plans if not plan.divides_weights and plan.text == "each"]
        if sharing_plans or (with_plain and self._is_first_rank):
            self.plain = create_pipeline(None).to(device)
        # Plans of the same degrees share their process groups, which are expensive to make.
        communicators = Communicators()
        for plan in parsed_plans:
            pipe = self.plain
            if plan not in sharing_plans:
                pipe = create_pipeline(plan)
                # If ranks divide the text encoders, this rank may hold only a part of them.
                if share_plain and self.plain is not None and plan.text == "each":
                    parts = {name: getattr(self.plain, name, None) for name in SHARED_PARTS}
                    pipe.register_modules(**drop_missing(parts))
            self.runners[str(plan)] = parallelize(pipe, plan, device=device, groups=communicators)

    @contextmanager
    def prepare_turn(self, plan: str, cache_arguments: Mapping[str, Any], label: str = "") -> Iterator[Any]:
        """Wait until all ranks are ready, and yield the runner or the plain pipeline; None if this rank only waits.

        Args:
            plan: the plan of the turn, or `PLAIN`.
            cache_arguments: the keyword arguments of `enable_cache`.
            label: names the cache in errors.

        Raises:
            ModelError: if the cache could never skip anything.
        """
        target = self.runners.get(plan)
        with ExitStack() as stack:
            if plan == PLAIN:
                target = self.plain if self._is_first_rank else None
                if target is not None:
                    stack.enter_context(allow_all_cores(self._cores))
                    # A runner reports its steps by itself; a plain pipeline would look like a rank that hangs.
                    model = find_loop_model(target)
                    stack.callback(model.register_forward_pre_hook(lambda *_: env.report_progress()).remove)
            if target is not None:
                stack.enter_context(use_cache_within(target, cache_arguments, label))
            # This comes after the cache is enabled, so that its seconds count on no rank.
            wait_for_all_ranks()
            yield target


def rotate(items: Sequence[Item], number: int) -> list[Item]:
    """Rotate the items of a round: each round begins with another one, since a machine may be faster at first."""
    if not items:
        return []
    first = number % len(items)
    return [*items[first:], *items[:first]]


def time_call(call: Callable[[], Item], device: torch.device) -> tuple[Item, float]:
    """Return a call's result, and its seconds until the device has finished."""
    # A GPU computes asynchronously, and earlier work must not count.
    synchronize(device)
    began = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - began


def wait_for_all_ranks() -> None:
    """Wait until all ranks of the group have called this. Unlike NCCL's barrier, it needs no GPU."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


@contextmanager
def use_cache_within(target: Any, configs: Mapping[str, Any], label: str = "") -> Iterator[None]:
    """Give a pipeline or runner a cache within the context; no cache if the cache_config is None.

    Args:
        configs: the keyword arguments of `enable_cache`.
        label: names the cache in errors.

    Raises:
        ModelError: if the cache could never skip anything.
    """
    if configs["cache_config"] is None:
        yield
        return
    # A cache that skips nothing would be measured only for its cost.
    enable_working_cache(target, configs, label)
    try:
        yield
    finally:
        disable_cache(target)


@contextmanager
def time_denoising_loop(model: nn.Module) -> Iterator[Callable[[], list[float]]]:
    """Yield a function that returns the seconds of each part of a loop, after a call of the pipeline.

    The parts are the calls of the transformer and the times between them. The last step of the scheduler, which is part
    of a runner's loop, is not included.
    """
    trace = GenerationTrace()
    # With two marks per call, the time between two calls is also a part, like in a runner's loop.
    trace.on = True
    hooks = [
        model.register_forward_pre_hook(lambda *_: trace.mark_step()),
        model.register_forward_hook(lambda *_: trace.mark_step()),
    ]
    try:
        yield lambda: trace.measure_waits()[0]
    finally:
        for hook in hooks:
            hook.remove()


def bind_to_cores(cores: Iterable[int]) -> None:
    """Restrict this process to these cores, where the system can do so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextmanager
def allow_all_cores(cores: Sequence[int] | None = None) -> Iterator[None]:
    """Let this process use any of `cores`, by default all, although `launch` has bound it to its own cores."""
    own_cores = cpus.list_usable_cores()
    if cores is None:
        cores = range(os.cpu_count() or 1)
    bind_to_cores(cores)
    try:
        yield
    finally:
        bind_to_cores(own_cores)


def read_cpu_name() -> str:
    """Return the name of the processor."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def collect_machine_facts(device: str | None) -> dict[str, Any]:
    """Collect processor, GPUs and versions of this machine; `device` is the user's choice, if any."""
    gpus = []
    # Without a GPU, or on the CPU despite one, no GPU belongs to the facts.
    if torch.cuda.is_available() and not (device or "cuda").startswith("cpu"):
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": read_cpu_name(),
        "cores": cpus.count_usable_cores(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "ditile": __version__,
    }


def read_load_average() -> float | None:
    """Return the mean number of runnable processes in the last minute; None if the system does not report it."""
    if not hasattr(os, "getloadavg"):
        return None
    return os.getloadavg()[0]

"""Chooses the backend of groups: NCCL where every rank has its own GPU, otherwise gloo; and makes gloo groups that
share a thread.

NCCL refuses two ranks on one GPU. A rank cannot see whether it shares its GPU. Some ranks see all GPUs of the machine.
Others see only their own, as number 0 (Slurm with `--gpus-per-task=1`, or a CUDA_VISIBLE_DEVICES for each). So each
rank writes into the common store which GPU it takes.

torch gives each gloo group a device of its own, whose thread wakes up a hundred times a second for as long as the group
is there. A mesh has up to ten groups, and each of them would interrupt the ranks that compute on the same cores. So
all gloo groups use the device, and the thread, of the group of all ranks.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import logging
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditile.distributed import env
from ditile.distributed.transport import connect_group
from ditile.plan.errors import PlanError

LOG = logging.getLogger("ditile")
NCCL = "cpu:gloo,cuda:nccl"
PEER_TIMEOUT = datetime.timedelta(days=30)
"""The time for which ranks wait for each other. It is long because one of them may load a model for hours; the parent
ends a run in which no rank makes progress."""


def choose_backend(store: Any, rank: int, world: int, device: torch.device) -> str:
    """Choose the backend, the same on all ranks: NCCL if every rank has a GPU of its own, otherwise gloo.

    Args:
        store: shared by all ranks; each waits for all others in this call, for at most the store's time limit.
        rank, world: this rank, and how many there are.
    """
    store = dist.PrefixStore("gpus", store)  # type: ignore[attr-defined]
    store.set(str(rank), json.dumps(_identify_gpu(device)))
    gpus = [json.loads(store.get(str(peer))) for peer in range(world)]
    # The reason against NCCL: the first rank without a GPU of its own.
    shortage = ""
    owners: dict[str, int] = {}
    for peer, gpu in enumerate(gpus):
        if gpu is None:
            shortage = shortage or f"rank {peer} has no GPU"
        elif gpu in owners:
            shortage = shortage or f"ranks {owners[gpu]} and {peer} have one GPU, {gpu}"
        else:
            owners[gpu] = peer
    if not shortage:
        if env.has_one_device_queue():
            LOG.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 of the environment: kernels stand behind messages that wait for other "
                "ranks, which costs time; unset it"
            )
        return NCCL
    # Without any GPU gloo is expected, so there is no warning.
    if rank == 0 and any(gpus):
        LOG.warning(f"{shortage}: gloo carries all messages, through the CPU; for NCCL give each rank a GPU of its own")
    return "gloo"


def _identify_gpu(device: torch.device) -> str | None:
    """Return the identity of a GPU among the GPUs of all hosts. None for a CPU."""
    if device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"


BACKEND_NAME = "gloo_on_one_loop"


def make_group_on_one_loop(
    ranks: Sequence[int],
    timeout: datetime.timedelta | None,
    backend: str | None,
    *,
    links: bool = False,
) -> dist.ProcessGroup:
    """Make a group of some ranks; all ranks must call it.

    A group with only gloo shares the device of the group of all ranks, if torch lets us read it. A group over NCCL for
    messages between stages takes few multiprocessors of the GPU.

    Args:
        ranks: in order.
        timeout: how long they wait for each other; None for torch's own limit.
        backend: None for the backend of the group of all ranks.
        links: whether it is only for messages between stages.
    """
    backend_options: dict[str, Any] = {"backend": backend}
    if links and has_nccl(backend) and dist.is_nccl_available():
        group_class: Any = dist.ProcessGroupNCCL
        options = group_class.Options()
        options.config.max_ctas = LINK_CTAS
        if timeout is not None:
            options._timeout = timeout
        backend_options["pg_options"] = options
    backend_config = backend or dist.get_backend_config(dist.group.WORLD)
    is_gloo_only = {entry.rpartition(":")[2] for entry in backend_config.split(",")} == {"gloo"}
    devices = _find_world_devices() if is_gloo_only else []
    if devices:
        # Any, because torch's type stubs do not have the private `_Options`.
        gloo_class: Any = dist.ProcessGroupGloo
        options = gloo_class._Options()
        options._devices = devices
        # torch itself gives a group this many threads.
        options._threads = 2 * len(devices)
        if timeout is not None:
            options._timeout = timeout
        backend_options = {"backend": _register_backend(), "pg_options": options}
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout, **backend_options)
    # No rank of a gloo group goes on before all have connected: a rank that left the group at once would close
    # connections that others are still making.
    if dist.get_rank() in ranks and "gloo" in dist.get_backend_config(group):
        connect_group(group, torch.device("cpu"))
    return group


def has_nccl(backend: str | None) -> bool:
    """Return whether groups of a backend use NCCL on GPUs."""
    if backend is None:
        backend = dist.get_backend_config(dist.group.WORLD)
    return "nccl" in backend


LINK_CTAS = 2
"""The number of thread blocks that NCCL may run for a message between stages.

Each takes a multiprocessor, and a posted receive keeps it until its message is there. By default NCCL runs up to 32,
enough for hundreds of GB/s; a patch of FLUX.1 at 1024 px is 7 MB in some 4 ms, which is 2 GB/s.
"""


def _find_world_devices() -> list[Any]:
    """Return gloo's devices in the group of all ranks. Empty if it has no gloo, or torch wraps it for debugging."""
    world_group: Any = dist.group.WORLD
    try:
        return list(world_group._get_backend(torch.device("cpu")).options._devices)
    except (RuntimeError, AttributeError):
        return []


@functools.cache
def _register_backend() -> str:
    """Register the backend for gloo groups with shared devices, and return its name."""

    def make_gloo_group(place: Any, options: Any) -> Any:
        return dist.ProcessGroupGloo(place.store, place.group_rank, place.group_size, options)

    dist.Backend.register_backend(BACKEND_NAME, make_gloo_group, extended_api=True, devices=["cpu", "cuda"])
    return BACKEND_NAME


def pick_device(requested: str | torch.device | None, local_rank: int) -> torch.device:
    """Pick the device of a rank: the requested one, its own GPU, a shared one, or the CPU, in this order.

    A rank that sees one GPU takes it, as number 0, whatever its number on the machine.

    Raises:
        PlanError: if torch does not have the device on this machine.
    """
    if requested is None:
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise PlanError(f"device={requested!r} is not a device; try cpu, cuda or cuda:0") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise PlanError(f"device={requested!r} asks for a GPU and torch finds none; try cpu")
    count = torch.cuda.device_count()
    if device.index is None:
        return torch.device("cuda", local_rank % count)
    if device.index >= count:
        raise PlanError(f"device={requested!r} is not among the {count} GPU(s) that torch finds here; try cuda")
    return device


def make_device_current(device: torch.device) -> None:
    """Make a GPU torch's current one. Batches of messages, pinned memory and streams name no device, and use it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory() -> None:
    """Free unreferenced memory, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def explain_no_graphs() -> str:
    """Return why this torch cannot record calls in graphs. Empty if it can."""
    if torch.version.hip is not None:
        return "cuda_graphs=True needs CUDA, and this torch is built for HIP; leave it out"
    # Since 2.13 torch undoes a capture that failed (pytorch#180395), and generators know each capture.
    if torch.__version__ < "2.13":
        return (
            f"cuda_graphs=True needs torch 2.13, and this is {torch.__version__}, which cannot undo a capture that "
            "fails; leave it out"
        )
    allocator = torch.cuda.get_allocator_backend()
    if allocator != "native":
        return f"cuda_graphs=True needs torch's own allocator of GPU memory, and this is {allocator}; leave it out"
    return ""

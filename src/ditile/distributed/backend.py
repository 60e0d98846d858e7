"""Whether every rank has a GPU of its own: NCCL refuses two ranks on one, and then gloo carries everything.

What a rank sees of its machine does not say it. Some see all GPUs, others only theirs, as number 0 (Slurm with
`--gpus-per-task=1`, or a CUDA_VISIBLE_DEVICES for each). So each says in the store where they meet which GPU it takes.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

LOG = logging.getLogger("ditile")
NCCL = "cpu:gloo,cuda:nccl"


def choose_backend(store: Any, rank: int, world: int, device: torch.device) -> str:
    """The backend for all ranks, the same on each: NCCL for GPUs if no two ranks have the same one, else gloo.

    Args:
        store: that all ranks share; each waits here for all others, as long as the store does.
        rank: this one among `world`.
        device: that this rank takes.
    """
    store = dist.PrefixStore("gpus", store)  # type: ignore[attr-defined]
    store.set(str(rank), json.dumps(_identify_gpu(device)))
    everyone = [json.loads(store.get(str(each))) for each in range(world)]
    shortage = _describe_gpu_shortage(everyone)
    if shortage is None:
        return NCCL
    if rank == 0 and any(everyone):
        LOG.warning(f"{shortage}: gloo carries all messages, through the CPU; for NCCL give each rank a GPU of its own")
    return "gloo"


def _identify_gpu(device: torch.device) -> str | None:
    """What tells a GPU from all others, on all hosts; None for a CPU."""
    if device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"


def _describe_gpu_shortage(everyone: Sequence[str | None]) -> str | None:
    """Which rank has no GPU, or none of its own; None if all have."""
    owners: dict[str, int] = {}
    for rank, gpu in enumerate(everyone):
        if gpu is None:
            return f"rank {rank} has no GPU"
        if gpu in owners:
            return f"ranks {owners[gpu]} and {rank} have one GPU, {gpu}"
        owners[gpu] = rank
    return None

"""Mesh: the ranks of a plan on named axes, and the process groups of each axis. Groups are passed, never looked up.

Axes, innermost last: (data, cfg, pipefusion, ring | distrifusion, ulysses, tensor). This version has pipefusion.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ditile import env
from ditile.errors import PlanError
from ditile.plan import Plan
from ditile.transport import Traffic

AXES = ("pipefusion",)


@dataclass(slots=True)
class Mesh:
    """This rank's place, and its groups. With one rank there are no groups.

    Attributes:
        rank: this rank among `world`.
        activations, latents, control: groups over the pipefusion axis: stage to stage; last stage to first and the
            few collectives; a CPU group for headers, votes and reports. NCCL's P2P has no tags, so they are apart.
        traffic: bytes sent.
    """

    rank: int
    world: int
    local_rank: int
    activations: dist.ProcessGroup | None = None
    latents: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def stage(self) -> int:
        """The coordinate on the pipefusion axis."""
        return self.rank


def build(plan: Plan) -> Mesh:
    """The mesh of a plan over the group that is there: torchrun's, `launch`'s or the script's own.

    Raises:
        PlanError: if the plan does not use all ranks.
    """
    place = env.torchrun()
    if not dist.is_initialized() and place is not None and place.world > 1:
        _join(place)
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan.check_world(world)
    if world == 1:
        return Mesh(0, 1, 0)
    rank = dist.get_rank()
    local = place.local_rank if place is not None else rank
    axes = DeviceMesh("cpu", torch.arange(world).reshape(plan.pipefusion), mesh_dim_names=AXES)
    ranks = dist.get_process_group_ranks(axes.get_group("pipefusion"))
    return Mesh(
        rank, world, local,
        activations=axes.get_group("pipefusion"),
        latents=dist.new_group(ranks),
        control=dist.new_group(ranks, backend="gloo"),
    )  # fmt: skip


def pick_device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """The device of a rank: as asked for, else its own GPU, else a shared one, else the CPU.

    Raises:
        PlanError: if the device is not one that torch has here.
    """
    if wanted is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        wanted = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise PlanError(f"device={wanted!r} is no device; try cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"device={wanted!r} asks for a GPU and torch finds none; try cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def _join(place: env.Torchrun) -> None:
    """Joins the group that torchrun's variables describe."""
    gpu_each = torch.cuda.is_available() and torch.cuda.device_count() > place.local_rank
    if gpu_each:
        torch.cuda.set_device(place.local_rank)
    backend = "cpu:gloo,cuda:nccl" if gpu_each else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10))

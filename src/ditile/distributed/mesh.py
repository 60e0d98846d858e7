"""Mesh: the ranks of a plan on named axes, and the process groups of each axis. Groups are passed, never looked up.

Axes, innermost last: (data, cfg, pipefusion, ring | gather | distrifusion, ulysses, tensor).

Why it is not torch's `DeviceMesh`: that makes one group for each axis. Here several groups run along one axis, one for
each purpose (two for messages down the pipeline and one for those back, because NCCL has one queue for each group; CPU
groups for decisions); ring and ulysses together are one axis; runners with different plans share their groups; and all
gloo groups share one thread (see `backend`), which needs options that `DeviceMesh` does not pass on.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ditile.distributed import backend as backends
from ditile.distributed import env
from ditile.distributed.backend import make_device_current
from ditile.distributed.private_network import make_groups
from ditile.distributed.torchrun import join_torchrun
from ditile.distributed.transport import Traffic, connect_group, gather_json
from ditile.distributed.wire import select_packings
from ditile.plan.errors import PlanError, StateError
from ditile.plan.plan import AXES, IMAGE, SEQUENCE, Plan, list_subgroups

LINKS = ("latents", "links", "even links", "odd links")
"""The purposes of groups in which stages only send messages to each other."""
EVERYONE = "everyone"
"""The purpose of the CPU group in which all ranks agree between calls."""


@dataclass(slots=True)
class Axis:
    """The ranks that differ from this rank along one or several axes only, and their group.

    Its group changes when a mesh renews its groups, so code that sends must read it each time.

    Attributes:
        name: the axes.
        ranks: the global ranks, in order, with this rank.
        index: this rank's place among them.
        group: their process group; None if there is only this rank.
    """

    name: str = ""
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


@dataclass(slots=True)
class Mesh:
    """This rank's place, and its groups. With one rank there are no groups.

    Attributes:
        rank: this rank among `world`.
        axes: name of `AXES` -> this rank's `Axis`.
        sequence: ring (or gather, or distrifusion) and ulysses as one axis, with ulysses innermost.
        pipeline_groups: along pipefusion, for what a stage sends to the next one, stage by stage in turn; see
            `select_downstream_group`.
        latents: another group, for what comes back from the last stage. All of NCCL's messages between two ranks of a
            group are one queue, in which a message down the pipeline would wait for receives posted earlier.
        control: a CPU group of the ranks of one image, for headers and decisions.
        within_calls: a CPU group of all ranks, for what they agree on within a call.
        everyone: another CPU group of all ranks, for what they agree on between calls. No error leaves messages in it.
        traffic: bytes sent.
        groups: makes and keeps its groups.
        shared: whether other meshes have the same groups.
        epoch: the epoch of `groups` in which its groups were made.
    """

    rank: int
    world: int
    axes: dict[str, Axis] = field(default_factory=lambda: {name: Axis(name) for name in AXES})
    sequence: Axis = field(default_factory=lambda: Axis("sequence"))
    image: Axis = field(default_factory=lambda: Axis("image"))
    pipeline_groups: tuple[dist.ProcessGroup, ...] = ()
    latents: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    within_calls: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    groups: Communicators = field(default_factory=lambda: Communicators())
    shared: bool = False
    epoch: int = 0

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def connect_groups(self, plan: Plan, device: torch.device) -> None:
        """Make the communicators and the connections between ranks that an image needs. All ranks must call it."""
        # NCCL would make both when they are first used: in the middle of an image, while kernels wait for messages, so
        # that ranks would wait for each other forever.
        # A plan may start several messages at once in the groups of these axes; tensor parallelism never does.
        exchanging = [self.axes[name] for name in ("data", "cfg", *SEQUENCE)]
        exchanging.append(self.sequence)
        # Stages exchange such messages in this warmup mode; in the others they have channels, which connect one by one.
        if plan.warmup_mode == "sequence":
            exchanging.append(self.axes["pipefusion"])
        if plan.vae == "rows":
            exchanging.append(self.image)
        exchanging_groups = [axis.group for axis in exchanging]
        axes = (*self.axes.values(), self.sequence, self.image)
        # Axes may share a group.
        for group in dict.fromkeys(axis.group for axis in axes):
            if group is not None:
                connect_group(group, device, pairs=group in exchanging_groups)

    def renew_groups(self, plan: Plan) -> None:
        """Replace groups that may have messages of a failed call by the groups of the current epoch.

        All ranks must call it.
        """
        renewed = _make_mesh_groups(plan, self.rank, self.groups)
        # Axes are changed in place, because other objects have them.
        for name, axis in self.axes.items():
            axis.group = renewed.axes[name].group
        self.sequence.group = renewed.sequence.group
        self.image.group = renewed.image.group
        self.pipeline_groups = renewed.pipeline_groups
        self.latents = renewed.latents
        self.control = renewed.control
        self.within_calls = renewed.within_calls
        self.epoch = renewed.epoch

    def close_groups(self) -> None:
        """Destroy the groups, and with them their threads, unless other meshes share them. All ranks must be done."""
        if not self.shared:
            self.groups.destroy_groups()

    @property
    def stage_index(self) -> int:
        """Return the coordinate on the pipefusion axis."""
        return self.axes["pipefusion"].index

    @property
    def num_stages(self) -> int:
        """Return the size of the pipefusion axis."""
        return self.axes["pipefusion"].num_ranks

    def select_downstream_group(self, stage: int) -> dist.ProcessGroup:
        """Select the group in which a stage sends to the stages after it."""
        return self.pipeline_groups[stage % len(self.pipeline_groups)]


BROKEN_WORLDS: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups of all ranks over NCCL in which a call has failed. Its receives never end, and they stay on the GPU."""


def is_world_broken() -> bool:
    """Return whether messages of a failed call are on the GPU. Work after them would wait forever."""
    return dist.is_initialized() and dist.group.WORLD in BROKEN_WORLDS


def check_world_unbroken() -> None:
    """Raise `StateError` where messages of a failed call are on the GPU."""
    if is_world_broken():
        raise StateError(
            "an earlier call raised in the middle of an image, and its messages are still under way; start the ranks "
            "again. To end a call early, use runner.stop() or pipe._interrupt"
        )


class Communicators:
    """Process groups by purpose and ranks, each made once, for the meshes of several runners.

    They have the time limit of the group of all ranks. They cost threads, and on GPUs memory. Runners that share them
    must run one at a time, in the same order on all ranks.

    Attributes:
        is_spoiled: whether a call has failed on this rank: messages may be under way that no rank will receive.
        epoch: how often the groups were given up because of such messages.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        self.is_spoiled = False
        self.epoch = 0

    def note_failed_call(self, *, has_begun: bool) -> None:
        """Note that a call has failed on this rank.

        Args:
            has_begun: whether messages of an image were under way.
        """
        if not backends.has_nccl(None):
            self.is_spoiled = True
        elif has_begun:
            assert dist.group.WORLD is not None
            BROKEN_WORLDS.add(dist.group.WORLD)

    def begin_epoch(self) -> None:
        """Destroy all groups except `EVERYONE`'s, so that meshes make new ones. All ranks must call it."""
        kept = {}
        given_up = []
        for key, group in self._groups.items():
            if key[0] == EVERYONE:
                kept[key] = group
            else:
                given_up.append(group)
        _destroy_groups(given_up)
        self._groups = kept
        self.is_spoiled = False
        self.epoch += 1

    def get_or_make_group(self, purpose: str, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        """Return the group of some ranks for a purpose. All ranks must call it, in one order."""
        key = (purpose, tuple(ranks), backend)
        if key not in self._groups:
            with make_groups():
                timeout = _read_world_timeout()
                self._groups[key] = backends.make_group_on_one_loop(ranks, timeout, backend, links=purpose in LINKS)
        return self._groups[key]

    def destroy_groups(self) -> None:
        """Destroy all groups. All ranks must be done with them."""
        _destroy_groups(self._groups.values())
        self._groups.clear()


def _destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        # torch gives ranks that are not in a group a number instead.
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


def _read_world_timeout() -> datetime.timedelta | None:
    """Return the time limit of the group of all ranks. None where the backend does not have it."""
    # A new group without a given limit gets torch's default instead of this one: 30 minutes for gloo.
    world_group: Any = dist.group.WORLD
    try:
        options = world_group._get_backend(world_group._device_types[0]).options
    except (RuntimeError, AttributeError):
        return None
    return getattr(options, "_timeout", None)


def build_mesh(plan: Plan, groups: Communicators | None = None, device: torch.device | None = None) -> Mesh:
    """Build the mesh of a plan over the existing group of all ranks: torchrun's, `launch`'s or the script's own.

    Args:
        groups: shared with other runners; by default groups of its own.
        device: this rank's, which becomes the current one before groups are made; by default the current one stays.

    Raises:
        PlanError: if the plan does not use all ranks, or ranks have different plans.
        JoinError: if torchrun's ranks cannot connect to each other.
    """
    # This refuses a wrong number of ranks before this rank waits for others that are never started.
    find_process_rank(plan)
    join_torchrun(device=device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if device is not None:
        make_device_current(device)
    if world == 1:
        return Mesh(0, 1)
    check_world_unbroken()
    rank = dist.get_rank()
    communicators = groups or Communicators()
    everyone = communicators.get_or_make_group(EVERYONE, range(world), "gloo")
    # This comes before the plan's groups are made: ranks of different plans would wait forever. Every rank raises.
    plans = []
    any_spoiled = False
    for options, is_rank_spoiled in gather_json([plan.to_dict(), communicators.is_spoiled], everyone):
        plans.append(options)
        any_spoiled = any_spoiled or is_rank_spoiled
    for peer, options in enumerate(plans):
        for name, value in options.items():
            if value != plans[0][name]:
                raise PlanError(
                    f"rank {peer} has a plan with {name}={value!r} and rank 0 one with {name}={plans[0][name]!r}; give "
                    "all ranks one plan"
                )
    if any_spoiled:
        communicators.begin_epoch()
    mesh = _make_mesh_groups(plan, rank, communicators)
    mesh.everyone = everyone
    mesh.shared = groups is not None
    return mesh


def _make_mesh_groups(plan: Plan, rank: int, communicators: Communicators) -> Mesh:
    """Make the mesh of this rank, among several, with all its groups except `everyone`."""
    axes: dict[str, Axis] = {}
    for name in AXES:
        # The only axis of a plan shares the group of all ranks under NCCL, which saves memory of the GPU. Groups of
        # gloo are cheap, and must be new in each epoch.
        if getattr(plan, name) == plan.world and backends.has_nccl(None):
            axes[name] = Axis(name, tuple(range(plan.world)), rank, dist.group.WORLD)
        else:
            axes[name] = _make_subgroup_axis(name, (name,), plan, rank, communicators)

    def merge_axes(name: str, names: Sequence[str]) -> Axis:
        """Merge several axes into one. If only one of them is used, return that one."""
        used_axes = [axes[axis_name] for axis_name in names if axes[axis_name].num_ranks > 1]
        if len(used_axes) == 1:
            return used_axes[0]
        return _make_subgroup_axis(name, names, plan, rank, communicators)

    # All ranks make their groups in this order: otherwise they would wait for each other forever.
    return Mesh(
        rank,
        plan.world,
        axes,
        sequence=merge_axes("sequence", SEQUENCE),
        image=merge_axes("image", IMAGE),
        pipeline_groups=_make_pipeline_groups(plan, rank, axes["pipefusion"], communicators),
        latents=_make_subgroup_axis("latents", ("pipefusion",), plan, rank, communicators).group,
        control=_make_subgroup_axis("control", IMAGE, plan, rank, communicators, backend="gloo").group,
        within_calls=communicators.get_or_make_group("within calls", range(plan.world), "gloo"),
        traffic=Traffic(packings=select_packings(plan)),
        groups=communicators,
        epoch=communicators.epoch,
    )


def find_local_rank() -> int:
    """Find this process's rank on its machine. In a group that the script made, return the rank in the whole group."""
    place = env.read_torchrun_place()
    if place is not None:
        return place.local_rank
    # For a run of one rank `read_torchrun_place` returns None.
    launched = env.read_launched_local_rank()
    if launched is not None:
        return launched
    return dist.get_rank() if dist.is_initialized() else 0


def find_process_rank(plan: Plan) -> int:
    """Find this process's rank, before or after it has joined a group.

    Raises:
        PlanError: if the plan does not use all ranks.
    """
    if dist.is_initialized():
        plan.check_world(dist.get_world_size())
        return dist.get_rank()
    env.check_torchrun_world(plan)
    place = env.read_torchrun_place()
    if place is None:
        plan.check_world(1)
        return 0
    return place.rank


def _make_subgroup_axis(
    name: str,
    names: Sequence[str],
    plan: Plan,
    rank: int,
    groups: Communicators,
    *,
    backend: str | None = None,
) -> Axis:
    """Make one `Axis` of this rank along some axes of the plan, with its group."""
    # torch wants every rank to make the groups of all ranks, in one order.
    own_axis = Axis(name, (rank,))
    for ranks in list_subgroups(plan, names):
        group = None
        if len(ranks) > 1:
            group = groups.get_or_make_group(name, ranks, backend)
        if rank in ranks:
            own_axis = Axis(name, ranks, ranks.index(rank), group)
    return own_axis


def _make_pipeline_groups(plan: Plan, rank: int, stages: Axis, groups: Communicators) -> tuple[dist.ProcessGroup, ...]:
    """Make the groups for messages down the pipeline: one, or two in turn."""
    if stages.group is None:
        return ()
    one_queue = has_one_queue()
    if not one_queue and not backends.has_nccl(None):
        return (stages.group,)
    # The axis's own group is not used, because groups of links take fewer multiprocessors of a GPU (`LINK_CTAS`). Where
    # a group has one queue, a stage must not send in the group in which it waits to receive. Two stages have one link.
    names = ["links"]
    if one_queue:
        names = ["even links", "odd links"][: stages.num_ranks - 1]
    pipeline_groups = []
    for name in names:
        group = _make_subgroup_axis(name, ("pipefusion",), plan, rank, groups).group
        assert group is not None
        pipeline_groups.append(group)
    return tuple(pipeline_groups)


def has_one_queue() -> bool:
    """Return whether a rank's collectives and messages in a group are one queue.

    They are one queue in NCCL's groups after `init_process_group(device_id=...)`, which makes communicators at once.
    Otherwise each pair of ranks gets a communicator of its own for messages.
    """
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def make_subgroup(
    purpose: str,
    names: Sequence[str],
    plan: Plan,
    mesh: Mesh,
    *,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Make a separate group for the ranks along some axes; None if all degrees are 1. All ranks must call it.

    Args:
        purpose: what it is for; meshes that share their groups share it.
        mesh: owns the group, and destroys it when it is closed.
        backend: None for the backend of the group of all ranks.
    """
    if all(getattr(plan, name) == 1 for name in names):
        return None
    return _make_subgroup_axis(purpose, names, plan, mesh.rank, mesh.groups, backend=backend).group

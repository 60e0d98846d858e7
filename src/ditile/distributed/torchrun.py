"""Joins and leaves torchrun's ranks, and takes decisions for all of them that depend on files of a host.

Hosts have their own profiles and folders. If each rank decided for itself, ranks of several hosts would choose
different plans and wait for each other forever. So rank 0 decides and sends the result to all ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ditile.distributed import env
from ditile.distributed.backend import PEER_TIMEOUT, choose_backend, make_device_current, pick_device
from ditile.distributed.private_network import make_groups
from ditile.distributed.start_watcher import begin_watch, explain_join_errors, open_torchrun_store
from ditile.distributed.transport import gather_json
from ditile.plan import errors
from ditile.plan.errors import DitileError, PlanError

STALL_SECONDS = 600.0
"""The least seconds after which ranks without a watcher give up on each other; a caller may give more."""


def join_torchrun(timeout: float | None = None, device: torch.device | None = None) -> None:
    """Join the ranks that torchrun started, if there are others and no group exists yet.

    Args:
        timeout: seconds without progress after which the run is ended; None for a script (see `begin_watch`).
        device: this rank's, if it is a GPU; otherwise its own GPU, if it has one.

    Raises:
        JoinError: if they cannot connect to each other.
    """
    place = env.read_torchrun_place()
    if place is None:
        return
    # The watch comes first: ranks with a watcher wait for each other as long as it lets them.
    begin_watch(timeout)
    if not dist.is_initialized():
        join_process_group(place, max(timeout or 0.0, STALL_SECONDS), device)


def join_process_group(place: env.Torchrun, timeout: float, device: torch.device | None = None) -> None:
    """Join the group that torchrun's variables describe.

    Args:
        timeout: seconds after which this rank gives up on the others, in this group and in those made within it.
        device: this rank's, if it is a GPU; otherwise its own GPU, if it has one.

    Raises:
        JoinError: if the ranks cannot connect.
    """
    if device is None or device.type != "cuda":
        device = pick_device(None, place.local_rank)
    make_device_current(device)
    limit = datetime.timedelta(seconds=timeout)
    if env.read_progress_fd() is not None:
        # The watcher ends a run that hangs, so a rank may wait as long as the watcher lets it.
        limit = PEER_TIMEOUT
    store = open_torchrun_store(place, timeout)
    with explain_join_errors(place, timeout), make_groups():
        store.set_timeout(limit)
        # torch's own prefix, so that the keys of the group are where other tools look for them.
        store = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
        backend = choose_backend(store, place.rank, place.world, device)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=limit)


def leave_process_group() -> None:
    """Leave the group when all ranks are done."""
    if dist.is_initialized():
        # A rank that left earlier would break the connections of the others.
        dist.barrier()
        dist.destroy_process_group()


def decide_on_first_rank(decide: Callable[[int], Any], timeout: float) -> Any:
    """Return, on every rank, the value of `decide(number of hosts)` on the first of torchrun's ranks.

    Args:
        decide: returns JSON types.
        timeout: as in `join_torchrun`.

    Raises:
        DitileError: what `decide` raises, on every rank; all have left the group then.
        JoinError: if they cannot connect to each other.
    """
    join_torchrun(timeout)
    if not dist.is_initialized():
        return decide(1)
    hosts = list_ranks_by_host()
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            sizes = [len(ranks) for ranks in hosts]
            if len(set(sizes)) > 1:
                listed = ", ".join(map(str, sizes))
                raise PlanError(
                    f"the hosts have {listed} ranks, and a plan is chosen for hosts of one size; name a plan"
                )
            answer = {"decided": decide(len(hosts))}
        except DitileError as error:
            answer = {"refused": [type(error).__name__, str(error)]}
    answer = gather_json(answer, dist.group.WORLD)[0]
    if "refused" in answer:
        leave_process_group()
        name, message = answer["refused"]
        raise getattr(errors, name, DitileError)(message)
    return answer["decided"]


def list_ranks_by_host() -> tuple[tuple[int, ...], ...]:
    """List the ranks of each host, as torchrun counts them: one host after the other."""
    place = env.read_torchrun_place()
    assert place is not None
    ranks: dict[int, list[int]] = {}
    # The first rank of a host stands for the host: torchrun numbers the ranks of a host without gaps.
    first_on_host = place.rank - place.local_rank
    for rank, first in enumerate(gather_json(first_on_host, dist.group.WORLD)):
        ranks.setdefault(first, []).append(rank)
    return tuple(tuple(host) for host in ranks.values())

"""Decisions that depend on files of a host (its profile, its folders): rank 0 takes them and sends them to all ranks.

If each rank decided for itself, ranks of several hosts would choose different plans and wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ditile.distributed import env
from ditile.distributed.mesh import join_torchrun, leave_process_group
from ditile.distributed.transport import gather_json
from ditile.plan import errors
from ditile.plan.errors import DitileError, PlanError


def decide_on_first_rank(decide: Callable[[int], Any], timeout: float) -> Any:
    """The return value of `decide(number of hosts)` on the first of torchrun's ranks, on every rank.

    Args:
        decide: returns JSON types.
        timeout: seconds for which the ranks wait for each other, to join and in all that follows.

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
            answer = {"decided": decide(_count_even_hosts(hosts))}
        except DitileError as error:
            answer = {"refused": [type(error).__name__, str(error)]}
    answer = gather_json(answer, dist.group.WORLD)[0]
    if "refused" in answer:
        leave_process_group()
        kind, message = answer["refused"]
        raise getattr(errors, kind, DitileError)(message)
    return answer["decided"]


def list_ranks_by_host() -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, as torchrun counts them: one host after the other."""
    place = env.read_torchrun_place()
    assert place is not None
    first_ranks = gather_json(place.rank - place.local_rank, dist.group.WORLD)
    return tuple(
        tuple(rank for rank, first in enumerate(first_ranks) if first == host) for host in dict.fromkeys(first_ranks)
    )


def _count_even_hosts(hosts: tuple[tuple[int, ...], ...]) -> int:
    """The number of hosts. Raises `PlanError` unless all have as many ranks, which the planner assumes."""
    if len({len(ranks) for ranks in hosts}) > 1:
        each = ", ".join(str(len(ranks)) for ranks in hosts)
        raise PlanError(f"the hosts have {each} ranks, and plans are found for as many on each; name a plan")
    return len(hosts)

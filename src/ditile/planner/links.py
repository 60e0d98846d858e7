"""What a rank has of the links and the cores of a machine while others use them too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ditile.plan.plan import AXES, Plan
from ditile.planner.profile import Link, Profile


def find_crossed_link(plan: Plan, profile: Profile, host: int, axis: str) -> Link:
    """The link that an axis crosses at its widest, and what each of the ranks that share it has of it.

    Args:
        plan: the plan.
        profile: the machine.
        host: ranks that fill one, one host after the other.
        axis: of the mesh.
    """
    n = getattr(plan, axis)
    inner = math.prod(getattr(plan, name) for name in AXES[AXES.index(axis) + 1 :])
    if profile.interlink is None or n == 1 or inner * n <= host:
        return profile.link
    sharing: float = min(inner, host)  # neighbours: one of each line through a host's border
    if axis == "ulysses":  # each with all, of which some are on the same host
        sharing = host * (n - max(1, host // inner)) / (n - 1)
    return replace(profile.interlink, bandwidth=profile.interlink.bandwidth / sharing)


def compute_slowdown(profile: Profile, ranks: int) -> float:
    """How many times as long work takes while so many ranks of a host do theirs."""
    busy = min(ranks, profile.devices)
    slower = (profile.together - 1) * (busy - 1) / (profile.devices - 1) if profile.devices > 1 else 0.0
    return max(1.0, ranks / profile.devices) * (1 + slower)


def get_bandwidth_share(link: Link, kind: str, n: int) -> float:
    """Share of a link's bandwidth in an exchange."""
    if kind == "tensor":
        return link.reduce
    if kind == "ring":
        return link.neighbours
    if kind in ("distrifusion", "pipefusion"):
        return link.neighbours if link.gather is None else link.gather
    crowded = n**2 / 4 / (n - 1) / link.crossing if 0 < link.socket < n else 0.0
    return min(link.collective, 1 / crowded) if crowded else link.collective


def compute_exposed_seconds(sending: float, overlap: float, compute: float) -> float:
    """Seconds of a message that computing does not hide."""
    return sending * (1 - overlap) + max(0.0, sending * overlap - compute)


class WarmupBlock(NamedTuple):
    """A block that a crew of stages computes together, in seconds.

    Attributes:
        weights: its weights on their way from the stage that owns it; 0 where every member holds them.
        before: work up to its attention, before which keys are gathered.
        keys: the gather.
        after: the rest of its work.
    """

    weights: float
    before: float
    keys: float
    after: float


def compute_warmup_seconds(blocks: Sequence[WarmupBlock], ahead: int, overlap: float) -> float:
    """Seconds of blocks whose weights leave so many blocks ahead of their use (`blocks.lending`, `blocks.crew`).

    One group carries weights and keys in the order in which they are started: a gather stands behind the weights that
    were started before it.
    """
    now = line = 0.0
    arrived: list[float] = []

    def start_weights(index: int) -> None:
        nonlocal now, line
        line = max(line, now) + blocks[index].weights
        now += (1 - overlap) * blocks[index].weights
        arrived.append(line)

    for index in range(min(ahead, len(blocks))):
        start_weights(index)
    for index, block in enumerate(blocks):
        if index + ahead < len(blocks):
            start_weights(index + ahead)
        now = max(now, arrived[index]) + block.before
        if block.keys:
            now = line = max(line, now) + block.keys
        now += block.after
    return now

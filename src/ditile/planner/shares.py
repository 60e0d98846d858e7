"""Weights by which stages and ranks of unlike devices end together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ditile.plan.plan import Plan, compute_coordinates

ALIKE = 1.02
"""Speeds that differ by a smaller factor make equal shares."""


def weigh_shares(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Return the plan with shares that let ranks of unlike speeds end together. It is unchanged where none differ.

    Args:
        plan: with equal shares.
        speeds: of each rank's device, in any unit.
    """
    token_speeds = [0.0] * (plan.token_ranks * plan.distrifusion)
    tensor_speeds = [0.0] * plan.tensor
    places = []
    for rank in range(plan.world):
        place = compute_coordinates(plan, rank)
        token_place = plan.find_token_place(place)
        places.append((place["pipefusion"], token_place, place["tensor"]))
        token_speeds[token_place] += speeds[rank]
        tensor_speeds[place["tensor"]] += speeds[rank]
    stage_speeds = [float("inf")] * plan.pipefusion
    for rank, (stage, token_place, tensor_place) in enumerate(places):
        # A stage is done when its last rank is.
        token_share = token_speeds[token_place] / sum(token_speeds)
        tensor_share = tensor_speeds[tensor_place] / sum(tensor_speeds)
        share = token_share * tensor_share
        stage_speeds[stage] = min(stage_speeds[stage], speeds[rank] / share)
    return dataclasses.replace(
        plan,
        stage_weights=_round_weights(stage_speeds),
        token_weights=_round_weights(token_speeds),
        tensor_weights=_round_weights(tensor_speeds),
    )


def weigh_ends(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Return the plan with weights for decode and text on ranks of unlike speeds.

    They make the ranks end together, if the plan divides these parts.

    Args:
        plan: made by `weigh_shares` or by the user; it is unchanged where its other weights say the same.
        speeds: of each rank's device, in any unit.
    """
    plan = dataclasses.replace(plan, rank_weights=None)
    if not plan.divides_ends:
        return plan
    num_ranks = plan.world // plan.data
    # The weights serve all replicas, so the slowest rank at each place decides.
    weights = _round_weights([min(speeds[rank : plan.world : num_ranks]) for rank in range(num_ranks)])
    if weights == _round_weights(plan.list_rank_weights()):
        return plan
    return dataclasses.replace(plan, rank_weights=weights or (1.0,) * num_ranks)


def _round_weights(speeds: Sequence[float]) -> tuple[float, ...] | None:
    """Return speeds as multiples of the lowest one, in two decimals. None where they are alike."""
    lowest = min(speeds)
    if max(speeds) < ALIKE * lowest:
        return None
    return tuple(round(speed / lowest, 2) for speed in speeds)

"""A profile fitted to calls that were measured: what curves of single kernels, and loops of exchanges, do not say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ditile.planner.profile import Curve, Profile

EXPECTED = 0.1
"""What it weighs that bytes take as long in a call as in a loop: calls are off by a twentieth, that by a half."""


class SharedCall(NamedTuple):
    """A call that all ranks make together.

    Attributes:
        took: seconds.
        known: those of its work, without its exchanges.
        sending: those of its exchanges' bytes, at the profile's rate.
        exchanges: how many there are.
    """

    took: float
    known: float
    sending: float
    exchanges: float


def fit_kernel_costs(profile: Profile, measured: Sequence[tuple[float, float, float]]) -> Profile:
    """The profile by which it comes closest to calls that were measured.

    What a kernel costs besides its work is `kernel_s`; and all rates have one factor, for a call finds caches colder
    than a kernel that runs over and over.

    Args:
        profile: with curves.
        measured: of each call its seconds in the transformer, those of its work on the curves alone, its kernels.
    """
    terms = torch.tensor([[known / took, kernels / took] for took, known, kernels in measured], dtype=torch.float64)
    slower, kernel_s = _solve_least_squares(terms, torch.ones(len(terms), dtype=terms.dtype))
    return dataclasses.replace(
        profile, kernel_s=kernel_s, matmul=_slow_down_curve(profile.matmul, slower),
        attention=_slow_down_curve(profile.attention, slower),
        pointwise={name: _slow_down_curve(curve, slower) for name, curve in profile.pointwise.items()},
    )  # fmt: skip


def fit_collectives(profile: Profile, exchanged: Sequence[SharedCall], summed: Sequence[SharedCall]) -> Profile:
    """The profile whose collectives start as slowly, and move bytes as slowly, as in calls that ranks make together.

    In a call ranks meet at every exchange, one of them later than the other; in a loop of exchanges they are in step.

    Args:
        profile: with everything else.
        exchanged: calls with all-to-alls; `call_s` and `collective` are fitted to them.
        summed: calls with all-reduces; `sum_s` and `reduce`.
    """
    link = profile.link
    if exchanged:
        slower, start = _fit_exchanges(exchanged)
        link = dataclasses.replace(link, call_s=start, collective=link.collective / slower)
    if summed:
        slower, start = _fit_exchanges(summed)
        link = dataclasses.replace(link, sum_s=start, reduce=link.reduce / slower)
    return dataclasses.replace(profile, link=link)


def _fit_exchanges(calls: Sequence[SharedCall]) -> tuple[float, float]:
    """How many times as long bytes take as in a loop, and the seconds that an exchange takes besides.

    Two sizes hardly tell the two apart where calls differ by a few per cent from turn to turn, so what they leave open
    goes to the start of an exchange: bytes are expected at the loop's rate.
    """
    terms = [[call.sending / call.took, call.exchanges / call.took] for call in calls]
    wanted = [1 - call.known / call.took for call in calls]
    terms, wanted = [*terms, [EXPECTED, 0.0]], [*wanted, EXPECTED]
    return _solve_least_squares(torch.tensor(terms, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))


def _solve_least_squares(terms: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """The two numbers, the first not below 1 and the second not below 0, by which sums of terms come closest."""
    slower, start = torch.linalg.lstsq(terms, wanted[:, None], driver="gelsd").solution.flatten().tolist()
    if start < 0:
        slower, start = float((terms[:, 0] * wanted).sum() / terms[:, 0].square().sum()), 0.0
    if slower < 1:
        slower, rest = 1.0, wanted - terms[:, 0]
        start = max(0.0, float((terms[:, 1] * rest).sum() / terms[:, 1].square().sum()))
    return slower, start


def _slow_down_curve(curve: Curve, slower: float) -> Curve:
    def divide_rates(row: Any) -> Any:
        return tuple(divide_rates(rate) for rate in row) if isinstance(row, tuple) else row / slower

    return dataclasses.replace(curve, rates=divide_rates(curve.rates))

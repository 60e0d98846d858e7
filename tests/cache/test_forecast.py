"""Forecasts on sequences whose continuation is known. A failure would mean that cached steps drift where they need not.

Bounds are relative to the largest value in play, in float32: sums of a few terms are exact to about 1e-6 of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ditile.cache.forecast import DMD, FoCa, Forecaster, Reuse, TaylorSeer, compute_gram_matrix

SHAPE = (2, 3, 5)
MAKERS: dict[str, Callable[..., Forecaster]] = {
    "reuse": lambda dtype=None: Reuse(dtype),
    "taylor1": lambda dtype=None: TaylorSeer(1, dtype),
    "taylor2": lambda dtype=None: TaylorSeer(2, dtype),
    "foca": lambda dtype=None: FoCa(dtype),
    "dmd": lambda dtype=None: DMD(store_dtype=dtype),
}
LINES = {name: make for name, make in MAKERS.items() if name != "reuse"}

increasing = st.lists(st.integers(1, 6), min_size=1, max_size=8).map(lambda gaps: list(itertools.accumulate(gaps)))


def polynomial(coefficients: Tensor, step: int) -> Tensor:
    """Coefficients `[degree + 1, ...]`, in float64."""
    return sum(c * (step / 10) ** k for k, c in enumerate(coefficients.double()))  # type: ignore[return-value]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fed(
    one: Forecaster, truth: Callable[[int], Tensor], steps: list[int], dtype: torch.dtype = torch.float32
) -> Forecaster:
    for step in steps:
        one.add_computed_step(step, truth(step).to(dtype))
    return one


def close(found: Tensor, wanted: Tensor, scale: float, bound: float = 3e-6) -> bool:
    return float((found.double() - wanted.double()).abs().max()) <= bound * scale


@settings(deadline=None)
@given(st.integers(0, 3), increasing, st.integers(1, 6), st.integers(0, 99))
def test_taylorseer_continues_a_polynomial_of_its_degree(order: int, steps: list[int], ahead: int, seed: int) -> None:
    """Whatever the gaps: with k + 1 computed steps, one of degree k and at most `order`."""
    coefficients = random(min(order, len(steps) - 1) + 1, *SHAPE, seed=seed)
    one = fed(TaylorSeer(order), lambda step: polynomial(coefficients, step), steps)
    wanted = polynomial(coefficients, steps[-1] + ahead)
    amplified = (1 + ahead) ** order * 4**order  # of the rounding of the values, by extrapolation
    assert close(one.forecast_value(steps[-1] + ahead), wanted, amplified * float(coefficients.abs().max()) * 10)


@pytest.mark.parametrize("name", LINES)
@settings(deadline=None)
@given(increasing, st.integers(1, 9), st.integers(0, 99))
def test_a_line_is_continued_whatever_the_gaps(name: str, steps: list[int], ahead: int, seed: int) -> None:
    """Regression: forecasts that do not divide by the gap overshoot after one (28, 30, 32 became 33.8, 43.8, 56)."""
    assume(len(steps) > 1)
    coefficients = random(2, *SHAPE, seed=seed)
    one = fed(LINES[name](), lambda step: polynomial(coefficients, step), steps)
    wanted = polynomial(coefficients, steps[-1] + ahead)
    loose = 3e-4 if name == "dmd" else 3e-6  # the eigenvalue 1 is double, and found to the root of the rounding
    assert close(
        one.forecast_value(steps[-1] + ahead), wanted, 20 * (1 + ahead) * float(coefficients.abs().max()), loose
    )


def test_a_reach_ends_a_line_at_its_share_of_the_last_gap() -> None:
    """A failure means that a line through the first steps of a picture carries it off, or that it ends too early."""
    one = fed(TaylorSeer(1, reach=0.5), lambda t: torch.tensor([10.0 + 2 * t]), [0, 4])
    assert [one.forecast_value(t).item() for t in (5, 6, 7, 30)] == pytest.approx([20.0, 22.0, 22.0, 22.0])
    far, near = TaylorSeer(2, reach=1.0), TaylorSeer(2)
    for each in (far, near):
        fed(each, lambda t: torch.tensor([float(t * t)]), [0, 1, 3])
    assert [far.forecast_value(t).item() for t in (4, 5, 9)] == pytest.approx([16.0, 25.0, 25.0])
    assert near.forecast_value(9).item() == pytest.approx(81.0)
    assert fed(TaylorSeer(1, reach=0.0), lambda t: torch.tensor([2.0 * t]), [0, 1]).forecast_value(5).item() == 2.0


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None)
@given(increasing, st.integers(0, 99))
def test_a_computed_step_is_what_it_was(name: str, steps: list[int], seed: int) -> None:
    """With nothing ahead a forecast is the last value, for any sequence."""
    one = fed(MAKERS[name](), lambda step: random(*SHAPE, seed=seed * 100 + step), steps)
    assert close(one.forecast_value(steps[-1]), random(*SHAPE, seed=seed * 100 + steps[-1]), 10.0)


@pytest.mark.parametrize("name", MAKERS)
def test_asking_changes_nothing(name: str) -> None:
    """A forecast depends on computed steps alone, so that ranks which ask at different steps agree."""
    asked, quiet = MAKERS[name](), MAKERS[name]()
    for step in (0, 1, 2, 3, 7, 11, 15, 19):
        value = random(*SHAPE, seed=step)
        for one in (asked, quiet):
            one.add_computed_step(step, value)
        asked.forecast_value(step + 1)
        asked.forecast_value(step + 3)
        assert asked.forecast_value(step + 2).equal(quiet.forecast_value(step + 2))


def test_foca_lies_between_the_line_and_the_parabola() -> None:
    """Curvature counts, and half of it at the most where the gap is long. On paper: 1 + w / (2 (1 + w)) of p d2."""
    one = fed(FoCa(), lambda t: torch.tensor([float(t * t)], dtype=torch.float64), [0, 2, 4], torch.float64)
    for ahead in (1, 2, 6, 100):
        line, parabola = 16 + 6.0 * ahead, float((4 + ahead) ** 2)
        ratio = ahead / 2
        assert one.forecast_value(4 + ahead).item() == pytest.approx(line + 2 * ahead * (1 + ratio / (2 * (1 + ratio))))
        assert line < one.forecast_value(4 + ahead).item() < parabola


RATES: list[tuple[complex, ...]] = [
    (0.9,), (1.0, 0.7), (1.0, 0.9, 0.5), (0.95 * complex(math.cos(0.4), math.sin(0.4)),), (-0.8, 1.05),
]  # fmt: skip
SPACED = [(0, 1, 4), (2, 1, 6), (1, 3, 5), (0, 2, 9)]


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_dmd_continues_sums_of_exponentials(rates: tuple[complex, ...]) -> None:
    """Each with a direction of its own; complex ones with their conjugates. Ahead by gaps and parts of one."""
    directions = torch.complex(random(len(rates), *SHAPE, seed=3).double(), random(len(rates), *SHAPE, seed=4).double())

    def truth(step: int) -> Tensor:
        return sum((d * rate**step).real for d, rate in zip(directions, rates, strict=True))  # type: ignore[return-value]

    for first, gap, count in SPACED:
        if gap > 1 and complex(rates[0]).real < 0:  # a rate below 0 is not seen through gaps of several steps
            continue
        steps = [first + gap * k for k in range(count)]
        one = fed(DMD(), truth, steps)
        for ahead in (1, 2, 5):
            assert close(one.forecast_value(steps[-1] + ahead), truth(steps[-1] + ahead), 10.0, 1e-4)


def test_dmd_survives_what_cannot_be_fitted() -> None:
    """Zero, infinite or huge snapshots: the last one is returned, not a NaN of our own making."""
    for bad in (0.0, math.inf, math.nan, 1e-38, 1e38):
        one = fed(DMD(), lambda step, bad=bad: torch.full(SHAPE, bad), [0, 1, 2, 3, 4])
        assert one.forecast_value(6).allclose(torch.full(SHAPE, bad), equal_nan=True)


def test_dmd_sums_over_the_ranks_that_hold_parts() -> None:
    """Two ranks with half of the tokens each forecast what one rank with all of them does."""
    directions = random(2, 1, 8, 4)

    def truth(step: int) -> Tensor:
        return directions[0] + directions[1] * 0.8**step

    whole = fed(DMD(), truth, [0, 1, 2, 3])
    grams = [compute_gram_matrix([truth(step).chunk(2, dim=1)[rank] for step in range(4)]) for rank in (0, 1)]
    halves = [
        fed(DMD(total=lambda own: sum(grams)), lambda step, rank=rank: truth(step).chunk(2, dim=1)[rank], [0, 1, 2, 3])  # type: ignore[misc, arg-type, return-value]
        for rank in (0, 1)
    ]
    assert close(torch.cat([half.forecast_value(6) for half in halves], dim=1), whole.forecast_value(6), 10.0)


@pytest.mark.parametrize("name", MAKERS)
def test_types(name: str) -> None:
    """A forecast has the type of the values; snapshots have that of the store; both round a line to their last bit."""
    coefficients = random(2, *SHAPE)
    tensors = {"reuse": 1, "taylor1": 2, "taylor2": 3, "foca": 3, "dmd": 5}[name]
    for value, store in itertools.product((torch.float32, torch.bfloat16), (None, torch.bfloat16, torch.float32)):
        one = fed(MAKERS[name](store), lambda step: polynomial(coefficients, step), [0, 2, 4, 6, 8], value)
        found, kept = one.forecast_value(10), store or value
        assert found.dtype is value
        assert one.memory_bytes == tensors * math.prod(SHAPE) * kept.itemsize
        if name in ("taylor1", "foca"):
            eps = max(torch.finfo(value).eps, torch.finfo(kept).eps)
            assert close(found, polynomial(coefficients, 10), 6 * float(coefficients.abs().max()), 2 * eps)

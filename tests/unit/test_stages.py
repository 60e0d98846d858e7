"""The cut of blocks into stages: by hand, or with the costliest stage as cheap as it can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditile.blocks.stages import cut


def worst(costs: list[float], stages: list[range]) -> float:
    return max(sum(costs[block] for block in stage) for stage in stages)


def best_of_all(costs: list[float], stages: int) -> float:
    """Tries every cut."""
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(worst(costs, [range(a, b) for a, b in itertools.pairwise((0, *ends, len(costs)))]) for ends in every)


def fits(costs: list[float], stages: int, most: float) -> bool:
    """Whether filling one stage after the other up to `most` needs no more than `stages`."""
    used, room = 1, most
    for cost in costs:
        if cost > room:
            used, room = used + 1, most
        room -= cost
    return used <= stages


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_balanced_is_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    """Against brute force. A failure means that a stage is slower than it must be, and so is every picture."""
    stages = data.draw(st.integers(1, len(costs)))
    found = cut(costs, stages)
    assert [block for stage in found for block in stage] == list(range(len(costs)))
    assert len(found) == stages and all(found)
    assert worst(costs, found) == best_of_all(costs, stages)


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8, 57])
def test_flux(stages: int) -> None:
    """19 double blocks at 1.2 and 38 single ones at 1: no cut into as many stages has a cheaper costliest stage."""
    costs = [1.2] * 19 + [1.0] * 38
    found = cut(costs, stages)
    assert [block for stage in found for block in stage] == list(range(57))
    cheapest = worst(costs, found)
    assert fits(costs, stages, cheapest + 1e-6)
    assert not fits(costs, stages, cheapest - 1e-6)


def test_flux_over_eight_by_hand() -> None:
    """60.8 in all, 7.6 for each of 8 at best. 6 double blocks are 7.2, 7 would be 8.4, and 8 single ones are 8."""
    costs = [1.2] * 19 + [1.0] * 38
    assert worst(costs, cut(costs, 8)) == pytest.approx(8.0)


def test_by_hand() -> None:
    """The numbers given are the numbers of blocks."""
    assert cut([1.0] * 6, 3, (1, 2, 3)) == [range(1), range(1, 3), range(3, 6)]


def test_extremes() -> None:
    """One stage has all blocks; as many stages as blocks have one each."""
    assert cut([1.0, 5.0, 1.0], 1) == [range(3)]
    assert cut([1.0, 5.0, 1.0], 3) == [range(1), range(1, 2), range(2, 3)]


def test_slower_devices_get_fewer_blocks() -> None:
    """A failure means that the pipeline goes at the pace of its slowest device."""
    assert cut([1.0] * 12, 3, speeds=[1.0, 1.0, 0.5]) == [range(5), range(5, 10), range(10, 12)]
    assert cut([1.0] * 9, 3, speeds=[1.0, 1.0, 1.0]) == cut([1.0] * 9, 3)

"""Step masks. A failure would mean that a preset leaves a hole that ruins pictures at some number of steps."""

from __future__ import annotations

import math

import pytest

from ditile.cache.step_mask import build_preset_mask, check_step_mask, resolve_step_mask, steps_mask
from ditile.plan.errors import ModelError

PUBLISHED = {
    "slow": "1111111101110011100110010001",
    "medium": "1111110110001100011000110001",
    "fast": "1111110100010000100000100001",
    "ultra": "1111001000001000000100000001",
}
FIRST = {"slow": 8, "medium": 6, "fast": 6, "ultra": 4}  # steps that compute in a row, of 28


def text(mask: tuple[int, ...] | list[int]) -> str:
    return "".join(map(str, mask))


def longest_hole(mask: tuple[int, ...]) -> int:
    return max(map(len, text(mask).split("1")))


@pytest.mark.parametrize("name", PUBLISHED)
def test_28_steps_are_as_published(name: str) -> None:
    assert text(steps_mask(mask_policy=name, total_steps=28)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_keep_their_shape_at_any_count(name: str) -> None:
    """Regression: cutting 28 steps to 20 from behind left a hole of 15 steps in ultra, and of 11 in fast."""
    published = PUBLISHED[name]
    hole = longest_hole(tuple(map(int, published)))
    for steps in range(1, 101):
        mask = build_preset_mask(name, steps)
        assert len(mask) == steps and set(mask) <= {0, 1}
        assert mask[0] == mask[-1] == 1
        first = text(mask).partition("0")[0]
        assert len(first) >= 0.85 * FIRST[name] * steps / 28 - 1
        assert longest_hole(mask) <= math.ceil(hole * steps / 28)
        assert longest_hole(mask) <= hole  # more steps are spread, not stretched
        assert abs(sum(mask) - published.count("1") * steps / 28) <= 3


def test_bins_interleave_and_the_last_step_computes() -> None:
    """The published example: ten computed steps and eighteen cached ones, of which the last computes."""
    mask = steps_mask(compute_bins=[6, 1, 1, 1, 1], cache_bins=[1, 2, 5, 5, 5])
    assert text(mask) == "1111110100100000100000100001"
    assert text(steps_mask([2, 1], [3])) == "110001"
    assert text(steps_mask([2, 1], [3], total_steps=4)) == "1101"
    assert steps_mask([2, 1], [3], total_steps=1) == [1]


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({}, "give bins, or one of slow, medium, fast, ultra"),
        ({"mask_policy": "fast"}, "total_steps=28"),
        ({"mask_policy": "fats", "total_steps": 28}, "did you mean fast"),
        ({"compute_bins": [1]}, "bins are missing"),
        ({"compute_bins": [1], "cache_bins": [1, 2]}, "do not interleave"),
        ({"compute_bins": [1], "cache_bins": [1], "total_steps": 3}, "cover 2 steps and total_steps=3"),
    ],
)
def test_what_is_no_mask(kwargs: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        steps_mask(**kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_mask_of_a_generation() -> None:
    assert resolve_step_mask(None, 28) is None
    assert resolve_step_mask("slow", 28) == build_preset_mask("slow", 28)
    assert resolve_step_mask((1, 1, 0, 1), 3) == (1, 1, 0)
    with pytest.raises(ModelError, match="has 2 steps and the generation 5"):
        resolve_step_mask((1, 0), 5)


def test_masks_on_a_command_line() -> None:
    assert check_step_mask("ultra") == "ultra"
    assert check_step_mask("6,1,1,1,1/1,2,5,5,5") == tuple(steps_mask([6, 1, 1, 1, 1], [1, 2, 5, 5, 5]))
    for wrong in ("ultr", "1,2", "1,x/2", "1/", "1/2,3"):
        with pytest.raises(ModelError):
            check_step_mask(wrong)

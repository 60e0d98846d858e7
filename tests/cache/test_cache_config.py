"""Configs of the cache. A failure would mean that what a user asked for is read as something else, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ditile.cache.config import (
    DBCacheConfig,
    DBPruneConfig,
    FoCaCalibratorConfig,
    ParamsModifier,
    TaylorSeerCalibratorConfig,
    merge_configs,
)
from ditile.cache.step_mask import build_preset_mask, resolve_step_mask, steps_mask
from ditile.plan.errors import ModelError

REFUSED: list[tuple[type, str, Any, str]] = [
    (DBCacheConfig, "Fn_compute_block", 1, "did you mean Fn_compute_blocks?"),
    (DBCacheConfig, "Fn_compute_blocks", -1, "or equal to 0; try Fn_compute_blocks=8"),
    (DBCacheConfig, "steps_computation_mask", [1, 2], "give a 1 or 0 for each step"),
    (DBPruneConfig, "non_prune_block_ids", [1, -1], "[16, 17]"),
    (ParamsModifier, "cache_config", {"Fn_compute_blocks": 1}, "instance of BlockCacheConfig"),
]
"""One row for each check, and each hint: (config, field, value, hint)."""


def refuses(make: Callable[..., Any], field: str, value: Any, hint: str) -> None:
    """Raises unless an error of one line names the field, the value of a field that is known, and what would work."""
    with pytest.raises(ModelError) as caught:
        make(**{field: value})
    text = str(caught.value)
    assert field in text
    assert hint in text and "\n" not in text
    assert "did you mean" in hint or repr(value) in text


@pytest.mark.parametrize(("kind", "field", "value", "hint"), REFUSED)
def test_what_is_refused(kind: type, field: str, value: Any, hint: str) -> None:
    """When it is made and when it is changed."""
    refuses(kind, field, value, hint)
    if kind is not ParamsModifier:
        refuses(kind().reset, field, value, hint)


def test_a_modifier_changes_what_was_given_to_it() -> None:
    """Even where it names the default: the published FLUX example gives one list eight first blocks and 0.08."""
    base = DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=0.2, max_warmup_steps=4)
    modifier = DBCacheConfig().reset(residual_diff_threshold=0.16)
    assert merge_configs(base, modifier) == base.reset(residual_diff_threshold=0.16)
    assert merge_configs(base, DBCacheConfig()) == base
    assert merge_configs(base, None) is base and merge_configs(None, modifier) is modifier
    assert merge_configs(None, None) is None
    back = DBCacheConfig().reset(Fn_compute_blocks=8, residual_diff_threshold=0.08, max_warmup_steps=8)
    assert merge_configs(base, back) == DBCacheConfig()


def test_the_narrower_kind_wins() -> None:
    prune, plain = DBPruneConfig(non_prune_block_ids=(3,)), DBCacheConfig(max_warmup_steps=4)
    wanted = DBPruneConfig(non_prune_block_ids=(3,), max_warmup_steps=4)
    assert merge_configs(prune, plain) == wanted == merge_configs(plain, prune)
    taylor, foca = TaylorSeerCalibratorConfig(taylorseer_order=2), FoCaCalibratorConfig()
    assert merge_configs(taylor, foca) is foca
    image_only = TaylorSeerCalibratorConfig(enable_encoder_calibrator=False)
    assert merge_configs(taylor, image_only) == taylor.reset(enable_encoder_calibrator=False)


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
def test_presets_keep_their_shape_at_any_count(name: str) -> None:
    """Regression: cutting 28 steps to 20 from behind left a hole of 15 steps in ultra, and of 11 in fast."""
    published = PUBLISHED[name]
    assert text(build_preset_mask(name, 28)) == published
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
        ({"mask_policy": "fats", "total_steps": 28}, "did you mean fast"),
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

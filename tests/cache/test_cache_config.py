"""Configs of the cache. A failure would mean that what a user asked for is read as something else, or not at all."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    ParamsModifier,
    TaylorSeerCalibratorConfig,
    format_cache_config,
    merge_configs,
)
from ditile.cache.step_mask import build_preset_mask, check_step_mask, resolve_step_mask, steps_mask
from ditile.plan.errors import ModelError

KINDS = [
    DBCacheConfig, DBPruneConfig, TaylorSeerCalibratorConfig, FoCaCalibratorConfig, DMDCalibratorConfig,
]  # fmt: skip

DEFAULTS: dict[type, dict[str, Any]] = {
    DBCacheConfig: {
        "Fn_compute_blocks": 8, "Bn_compute_blocks": 0, "residual_diff_threshold": 0.08, "max_warmup_steps": 8,
        "warmup_interval": 1, "max_cached_steps": -1, "max_continuous_cached_steps": -1, "enable_separate_cfg": None,
        "max_accumulated_residual_diff_threshold": None, "cfg_compute_first": False, "cfg_diff_compute_separate": True,
        "num_inference_steps": None, "steps_computation_mask": None, "steps_computation_policy": "dynamic",
    },
    DBPruneConfig: {
        "enable_dynamic_prune_threshold": False, "dynamic_prune_threshold_relax_ratio": 1.25,
        "max_dynamic_prune_threshold": None, "highest_threshold": 0.16, "non_prune_block_ids": (),
    },
    TaylorSeerCalibratorConfig: {"taylorseer_order": 1},
    DMDCalibratorConfig: {"dmd_history": 6, "dmd_rank": None, "dmd_ridge": 1e-8},
    Calibration: {"enable_calibrator": True, "enable_encoder_calibrator": True},
}  # fmt: skip
"""Those that cache-dit documents."""


@pytest.mark.parametrize("kind", DEFAULTS)
def test_documented_defaults(kind: type) -> None:
    assert {name: getattr(kind(), name) for name in DEFAULTS[kind]} == DEFAULTS[kind]


REFUSED: list[tuple[type, str, Any, str]] = [
    (DBCacheConfig, "Fn_compute_block", 1, "did you mean Fn_compute_blocks?"),
    (DBCacheConfig, "taylorseer_order", 1, "is not known"),
    (DBCacheConfig, "Fn_compute_blocks", -1, "or equal to 0; try Fn_compute_blocks=8"),
    (DBCacheConfig, "residual_diff_threshold", "0.1", "try residual_diff_threshold=0.08"),
    (DBCacheConfig, "steps_computation_mask", [1, 2], "give a 1 or 0 for each step"),
    (DBCacheConfig, "steps_computation_policy", "lazy", "should be 'dynamic' or 'static'"),
    (DBPruneConfig, "non_prune_block_ids", [1, -1], "[16, 17]"),
    (TaylorSeerCalibratorConfig, "taylorseer_order", -1, "try taylorseer_order=1"),
    (DMDCalibratorConfig, "dmd_ridge", None, "try dmd_ridge=1e-08"),
    (ParamsModifier, "cache_config", {"Fn_compute_blocks": 1}, "instance of BlockCacheConfig"),
]
"""One row for each check, and each hint: (config, field, value, hint)."""


def refuses(make: Callable[..., Any], field: str, value: Any, hint: str) -> None:
    """Raises unless an error of one line names the field, the value of a field that is known, and what would work."""
    with pytest.raises(ModelError) as caught:
        make(**{field: value})
    text = str(caught.value)
    assert field in text or value == "fats"
    assert hint in text and "\n" not in text
    assert "did you mean" in hint or hint == "is not known" or repr(value) in text


@pytest.mark.parametrize(("kind", "field", "value", "hint"), REFUSED)
def test_what_is_refused(kind: type, field: str, value: Any, hint: str) -> None:
    """When it is made and when it is changed."""
    refuses(kind, field, value, hint)
    if kind is not ParamsModifier:
        refuses(kind().reset, field, value, hint)


def test_reset_is_a_changed_copy() -> None:
    first = DBCacheConfig(Fn_compute_blocks=1)
    second = first.reset(max_warmup_steps=4)
    assert (first.max_warmup_steps, second.max_warmup_steps, second.Fn_compute_blocks) == (8, 4, 1)
    assert DBCacheConfig().reset(max_warmup_steps=4) == DBCacheConfig(max_warmup_steps=4)
    assert first.reset() == first


@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_values(kind: type) -> None:
    """Equal, hashable, and the same behind a pipe to another rank: what was given is remembered too."""
    first, default = next(iter(kind().values().items()))  # type: ignore[attr-defined]
    one = kind(**{first: default})
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert other == one == kind() and hash(other) == hash(one)
        assert other.given == one.given != kind().given  # type: ignore[attr-defined]


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


STRIFY: list[tuple[str, dict[str, Any], Calibration | None]] = [
    ("DBCache_F1B0_W8I1M0MC3_R0.08", {"Fn_compute_blocks": 1, "max_continuous_cached_steps": 3}, None),
    ("DBCache_F8B0_W8I1M0MC0_R0.08_T1O2E0.5", {}, TaylorSeerCalibratorConfig(taylorseer_order=2, taylorseer_reach=0.5)),
    ("DBPrune_F8B0_W8I1M5MC0_R0.08_DMDH6", {"max_cached_steps": 5}, DMDCalibratorConfig()),
    (
        "DBCache_F8B0_W8I1M0MC0_R0.08_SCMfast_static",
        {"steps_computation_mask": "fast", "steps_computation_policy": "static"},
        None,
    ),
]


@pytest.mark.parametrize(("wanted", "values", "calibrator"), STRIFY)
def test_strify(wanted: str, values: dict[str, Any], calibrator: Calibration | None) -> None:
    cache = (DBPruneConfig if wanted.startswith("DBPrune") else DBCacheConfig)(**values)
    assert format_cache_config(cache, calibrator) == wanted
    assert calibrator is not None or str(cache) == wanted


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

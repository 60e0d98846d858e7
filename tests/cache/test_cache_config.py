"""Configs of the cache. A failure would mean that what a user asked for is read as something else, or not at all."""

from __future__ import annotations

import copy
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

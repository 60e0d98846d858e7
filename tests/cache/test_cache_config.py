"""Configs of the cache. A failure would mean that what a user asked for is read as something else, or not at all."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
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
    choose_stored_value,
    format_cache_config,
    merge_configs,
)
from ditile.cache.step_mask import steps_mask
from ditile.errors import ModelError

KINDS = [
    DBCacheConfig, DBPruneConfig, TaylorSeerCalibratorConfig, FoCaCalibratorConfig, DMDCalibratorConfig,
]  # fmt: skip


def test_documented_defaults() -> None:
    cache, prune, dmd = DBCacheConfig(), DBPruneConfig(), DMDCalibratorConfig()
    assert (cache.Fn_compute_blocks, cache.Bn_compute_blocks, cache.residual_diff_threshold) == (8, 0, 0.08)
    assert (cache.max_warmup_steps, cache.warmup_interval) == (8, 1)
    assert (cache.max_cached_steps, cache.max_continuous_cached_steps) == (-1, -1)
    assert cache.max_accumulated_residual_diff_threshold is None and cache.enable_separate_cfg is None
    assert (cache.cfg_compute_first, cache.cfg_diff_compute_separate) == (False, True)
    assert (cache.num_inference_steps, cache.steps_computation_mask, cache.steps_computation_policy) == (
        None, None, "dynamic",
    )  # fmt: skip
    assert (prune.enable_dynamic_prune_threshold, prune.dynamic_prune_threshold_relax_ratio) == (False, 1.25)
    assert prune.max_dynamic_prune_threshold is None and prune.highest_threshold == 0.16
    assert prune.non_prune_block_ids == ()
    assert TaylorSeerCalibratorConfig().taylorseer_order == 1
    assert (dmd.dmd_history, dmd.dmd_rank, dmd.dmd_ridge) == (6, None, 1e-8)
    assert all(kind().enable_calibrator and kind().enable_encoder_calibrator for kind in KINDS[2:])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (DBCacheConfig, {"Fn_compute_block": 1}, "did you mean Fn_compute_blocks?"),
        (DBCacheConfig, {"enable_sperate_cfg": True}, "did you mean enable_separate_cfg?"),
        (DBCacheConfig, {"taylorseer_order": 1}, "is not known"),
        (DBCacheConfig, {"Fn_compute_blocks": -1}, "Fn_compute_blocks=-1 is not a whole number of at least 0"),
        (DBCacheConfig, {"Bn_compute_blocks": -1}, "Bn_compute_blocks=-1"),
        (DBCacheConfig, {"max_warmup_steps": 1.5}, "max_warmup_steps=1.5"),
        (DBCacheConfig, {"max_warmup_steps": True}, "max_warmup_steps=True"),
        (DBCacheConfig, {"warmup_interval": 0}, "warmup_interval=0"),
        (DBCacheConfig, {"max_cached_steps": -2}, "max_cached_steps=-2"),
        (DBCacheConfig, {"residual_diff_threshold": -0.1}, "try residual_diff_threshold=0.08"),
        (DBCacheConfig, {"residual_diff_threshold": float("nan")}, "residual_diff_threshold=nan"),
        (DBCacheConfig, {"residual_diff_threshold": "0.1"}, "residual_diff_threshold='0.1'"),
        (DBCacheConfig, {"max_accumulated_residual_diff_threshold": -1}, "max_accumulated_residual_diff_threshold=-1"),
        (DBCacheConfig, {"num_inference_steps": 0}, "num_inference_steps=0"),
        (DBCacheConfig, {"steps_computation_mask": "fats"}, "did you mean fast?"),
        (DBCacheConfig, {"steps_computation_mask": [1, 2]}, r"steps_computation_mask=\[1, 2\] is no mask"),
        (DBCacheConfig, {"steps_computation_mask": []}, "is no mask"),
        (DBCacheConfig, {"steps_computation_mask": 3}, "is no mask"),
        (DBCacheConfig, {"steps_computation_policy": "lazy"}, "try one of dynamic, static"),
        (DBCacheConfig, {"enable_separate_cfg": "yes"}, "enable_separate_cfg='yes'"),
        (DBCacheConfig, {"couple": "pixel"}, "try one of row, image, batch"),
        (DBCacheConfig, {"store": "nothing"}, "try one of residual, hidden"),
        (DBCacheConfig, {"store_dtype": "int8"}, "try one of None, bfloat16, float16, float32"),
        (DBPruneConfig, {"non_prune_block_ids": [1, -1]}, "non_prune_block_ids"),
        (DBPruneConfig, {"non_prune_block_ids": 3}, "non_prune_block_ids=3"),
        (DBPruneConfig, {"max_dynamic_prune_threshold": -1}, "max_dynamic_prune_threshold=-1"),
        (DBPruneConfig, {"warmup_interval": 0}, "warmup_interval=0"),
        (TaylorSeerCalibratorConfig, {"taylorseer_order": -1}, "taylorseer_order=-1"),
        (TaylorSeerCalibratorConfig, {"order": 1}, "is not known"),
        (TaylorSeerCalibratorConfig, {"calibrator_type": "foca"}, "try one of taylorseer"),
        (FoCaCalibratorConfig, {"calibrator_cache_type": "both"}, "try one of residual, hidden_states"),
        (DMDCalibratorConfig, {"dmd_history": 1}, "dmd_history=1"),
        (DMDCalibratorConfig, {"dmd_ridge": None}, "dmd_ridge=None"),
        (ParamsModifier, {"cache_conf": DBCacheConfig()}, "did you mean cache_config?"),
        (ParamsModifier, {"cache_config": {"Fn_compute_blocks": 1}}, "give a DBCacheConfig"),
        (ParamsModifier, {"calibrator_config": "taylorseer"}, "give a TaylorSeerCalibratorConfig"),
    ],
)
def test_what_is_refused(kind: type, values: dict[str, Any], says: str) -> None:
    """One line that says what would work, when it is made and when it is changed."""
    with pytest.raises(ModelError, match=says) as caught:
        kind(**values)
    assert "\n" not in str(caught.value)
    if kind is not ParamsModifier:
        with pytest.raises(ModelError, match=says):
            kind().reset(**values)


def test_reset_is_a_changed_copy() -> None:
    first = DBCacheConfig(Fn_compute_blocks=1)
    second = first.reset(max_warmup_steps=4)
    assert (first.max_warmup_steps, second.max_warmup_steps, second.Fn_compute_blocks) == (8, 4, 1)
    assert DBCacheConfig().reset(max_warmup_steps=4) == DBCacheConfig(max_warmup_steps=4)
    assert first.reset() == first


@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_values(kind: type) -> None:
    """Equal, hashable, and the same behind a pipe to another rank: what was given is remembered too."""
    one = kind(**{next(iter(kind.__dataclass_fields__)): kind().values()[next(iter(kind.__dataclass_fields__))]})  # type: ignore[attr-defined]
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert other == one == kind() and hash(other) == hash(one)
        assert other.given == one.given != kind().given  # type: ignore[attr-defined]


def test_masks_and_blocks_become_tuples() -> None:
    """Lists are what `steps_mask` and `range` give; a config is hashable all the same."""
    mask = steps_mask(mask_policy="fast", total_steps=28)
    assert DBCacheConfig(steps_computation_mask=mask).steps_computation_mask == tuple(mask)
    assert DBPruneConfig(non_prune_block_ids=list(range(16, 24))).non_prune_block_ids == tuple(range(16, 24))
    assert hash(DBPruneConfig(steps_computation_mask=mask, non_prune_block_ids=[1]))


def test_a_modifier_changes_what_was_given_to_it() -> None:
    base = DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=0.2, max_warmup_steps=4)
    modifier = DBCacheConfig().reset(residual_diff_threshold=0.16)
    assert merge_configs(base, modifier) == base.reset(residual_diff_threshold=0.16)
    assert merge_configs(base, DBCacheConfig()) == base
    assert (
        merge_configs(base, None) is base
        and merge_configs(None, modifier) is modifier
        and merge_configs(None, None) is None
    )


def test_a_modifier_may_name_the_default() -> None:
    """The published FLUX example gives one list eight first blocks and 0.08, which are the defaults."""
    base = DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=0.2)
    back = DBCacheConfig().reset(Fn_compute_blocks=8, residual_diff_threshold=0.08)
    assert merge_configs(base, back) == DBCacheConfig()


def test_the_narrower_kind_wins() -> None:
    prune, plain = DBPruneConfig(non_prune_block_ids=(3,)), DBCacheConfig(max_warmup_steps=4)
    wanted = DBPruneConfig(non_prune_block_ids=(3,), max_warmup_steps=4)
    assert merge_configs(prune, plain) == wanted == merge_configs(plain, prune)
    taylor, foca = TaylorSeerCalibratorConfig(taylorseer_order=2), FoCaCalibratorConfig()
    assert merge_configs(taylor, foca) is foca
    assert merge_configs(taylor, TaylorSeerCalibratorConfig(enable_encoder_calibrator=False)) == taylor.reset(
        enable_encoder_calibrator=False
    )


def test_a_modifier_over_a_pipeline() -> None:
    modifier = ParamsModifier(
        cache_config=DBCacheConfig().reset(max_warmup_steps=2, max_cached_steps=20),
        calibrator_config=TaylorSeerCalibratorConfig(taylorseer_order=2),
    )
    cache, calibrator = modifier.over(DBCacheConfig(Fn_compute_blocks=1), None)
    assert cache == DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2, max_cached_steps=20)
    assert calibrator == TaylorSeerCalibratorConfig(taylorseer_order=2)
    assert ParamsModifier().over(cache, calibrator) == (cache, calibrator)


@pytest.mark.parametrize(
    ("cache", "calibrator", "wanted"),
    [
        (DBCacheConfig(Fn_compute_blocks=1, max_continuous_cached_steps=3), None, "DBCache_F1B0_W8I1M0MC3_R0.08"),
        (DBCacheConfig(), TaylorSeerCalibratorConfig(), "DBCache_F8B0_W8I1M0MC0_R0.08_T1O1"),
        (DBCacheConfig(residual_diff_threshold=0.2), FoCaCalibratorConfig(), "DBCache_F8B0_W8I1M0MC0_R0.2_FoCa"),
        (DBPruneConfig(max_cached_steps=5), DMDCalibratorConfig(), "DBPrune_F8B0_W8I1M5MC0_R0.08_DMDH6"),
        (DBCacheConfig(steps_computation_mask=[1, 0, 1]), None, "DBCache_F8B0_W8I1M0MC0_R0.08_SCM101_dynamic"),
        (
            DBCacheConfig(steps_computation_mask="fast", steps_computation_policy="static"),
            None,
            "DBCache_F8B0_W8I1M0MC0_R0.08_SCMfast_static",
        ),
    ],
)
def test_strify(cache: DBCacheConfig, calibrator: Calibration | None, wanted: str) -> None:
    assert format_cache_config(cache, calibrator) == wanted
    assert calibrator is not None or str(cache) == wanted


def test_what_is_kept() -> None:
    hidden = TaylorSeerCalibratorConfig(calibrator_cache_type="hidden_states")
    assert (
        choose_stored_value(DBCacheConfig(), None)
        == choose_stored_value(DBCacheConfig(), FoCaCalibratorConfig())
        == "residual"
    )
    assert (
        choose_stored_value(DBCacheConfig(), hidden)
        == choose_stored_value(DBCacheConfig(store="hidden"), None)
        == "hidden"
    )


def test_configs_and_masks_need_no_torch() -> None:
    code = "import sys, ditile.cache.config, ditile.cache.step_mask; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0

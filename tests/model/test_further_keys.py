"""Models that are refused, as their keys hold more than is known; tests/zoo/test_families.py proves the others."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
from torch import nn

import ditile
from ditile import Plan
from ditile.model.anatomies import compute_source_hash, find_anatomy
from ditile.plan.errors import ModelError
from ditile_lab.study.derive import derive_anatomy
from tests import tiny
from tests.tiny import quiet
from tests.zoo import ZOO
from tests.zoo.derive_table import record_calls

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_call_of_another_mode_is_refused() -> None:
    """Without its cache the model computes text and image anew in each step, in attention calls of other kinds."""
    entry = ZOO["qwen-image-2.1"]
    runner = ditile.parallelize(quiet(entry.make()), Plan(patches=3, warmup=1), keep_weights=True)
    with pytest.raises(ModelError, match="is called with no mode, and known are kv_cache_mode=extract"):
        runner(**entry.call(), use_kv_cache=False)


def test_experts_that_choose_among_all_tokens_are_refused() -> None:
    """The table has no row for them either, though the forwards of model and block are those of a model without."""
    transformer, calls = record_calls(ZOO["nucleus-moe"].make(), ZOO["nucleus-moe"])
    assert find_anatomy(transformer) is None
    with pytest.raises(ModelError, match=r"transformer_blocks\.0 computes a token from others, and not by torch"):
        derive_anatomy(transformer, list(calls.values()))
    before = compute_source_hash(transformer, ["transformer_blocks"])
    for block in transformer.transformer_blocks:  # type: ignore[union-attr]
        block.img_mlp = nn.Identity()
    assert compute_source_hash(transformer, ["transformer_blocks"]) != before


class FluxTransformer2DModel(diffusers.FluxTransformer2DModel):
    """Of the name of a row, with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_row_is_of_the_forwards_that_it_was_derived_from() -> None:
    """A failure means that a model is divided by what holds for another one of its name."""
    transformer = tiny.flux().transformer
    assert find_anatomy(transformer) is not None
    transformer.__class__ = FluxTransformer2DModel
    assert find_anatomy(transformer) is None

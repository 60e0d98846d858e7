"""Attention whose keys hold more than the tokens that are divided, and calls that keep keys for later ones."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import ditile
from ditile import Plan
from ditile.model.anatomies import compute_source_hash, find_anatomy
from ditile.model.hooks.kv_store import GenerationMemory
from ditile.plan.errors import ModelError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.derive import derive_anatomy
from ditile_lab.study.prove import TOLERANCE, prove_anatomy
from tests import tiny
from tests.tiny import quiet
from tests.zoo import ZOO
from tests.zoo.derive_table import record_calls

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "attention", "modes"),
    [
        ("prx", {"+N"}, {}),
        ("qwen-image-2.1", {"+N"}, {"kv_cache_mode=extract": True, "kv_cache_mode=cached": False}),
        ("flux-2-klein-kv", {"T+N"}, {"kv_cache_mode=extract": True, "kv_cache_mode=cached": False}),
    ],
)
def test_further_keys_are_derived_and_proven(name: str, attention: set[str], modes: dict[str, bool]) -> None:
    """Where they are among the keys of tokens, which calls keep them; then every step is that of the whole model."""
    transformer, calls = record_calls(ZOO[name].make(), ZOO[name])
    anatomy = derive_anatomy(transformer, list(calls.values()))
    assert {kind for each in anatomy.lists.values() for kinds in each.attention.values() for kind in kinds} == attention
    assert anatomy.modes == modes
    branches = [[calls["call"]], [calls["call"], calls["other_prompt"]]]
    assert max(prove_anatomy(transformer, some, build_single_runner) for some in branches) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen-image-2.1-edit", "flux-2-klein-kv"])
def test_patches_of_a_call_that_reads_a_cache(name: str) -> None:
    """Bit-identical where no key is stale; where some are, different, and the user's model is as it was."""
    entry = ZOO[name]
    pipe = quiet(entry.make())
    want = draw(pipe, entry.call())
    for warmup, same in ((9, True), (1, False)):
        runner = ditile.parallelize(pipe, Plan(patches=3, warmup=warmup), keep_weights=True)
        assert torch.equal(draw(runner, entry.call()), want) == same
        runner.restore()
    assert torch.equal(draw(pipe, entry.call()), want)


def draw(pipe: Any, call: dict[str, Any]) -> Tensor:
    """The latents of a call."""
    drawn: Tensor = pipe(**call, return_dict=False)[0]
    return drawn


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


def test_one_dictionary_for_several_blocks() -> None:
    """A model may fill a dictionary anew for each block; what was cut of it for the block before does not serve."""
    memory, made = GenerationMemory(), iter(range(100))
    source = {"cache": object()}
    assert [memory.get_cached_slice("x", source, lambda: next(made)) for _ in range(2)] == [0, 0]
    source["cache"] = object()
    assert memory.get_cached_slice("x", source, lambda: next(made)) == 1

"""How tensor parallelism cuts a model is derived, and a wrong table is found by the proof; all in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from peft import LoraConfig
from torch import nn

from ditile.model.anatomies import find_anatomy, find_derived_cuts
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.plan.errors import PlanError
from ditile_lab.study.tensor_cuts import derive_tensor_cuts, prove_tensor_cuts
from tests.zoo import ZOO
from tests.zoo.derive_table import record_calls

pytestmark = pytest.mark.filterwarnings("ignore")
Table = dict[str, Any]


def record_call(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The transformer of a family, tiny, and the arguments of a call of it."""
    transformer, calls = record_calls(ZOO[name].make(), ZOO[name])
    return transformer, calls["call"]


def cut_values_unevenly(table: Table) -> Table:
    """As if two things lay side by side in the values."""
    path = next(path for path in table if path.endswith("to_v"))
    return {**table, path: ["colwise", 1, 3]}


def cut_one_the_wrong_way(table: Table) -> Table:
    path = next(path for path in table if path.endswith("to_k"))
    return {**table, path: ["rowwise"]}


def leave_norms_whole(table: Table) -> Table:
    return {path: style for path, style in table.items() if style[0] != "rms_norm"}


def gather_one_of_two(table: Table) -> Table:
    """The first Linear of a feed-forward is whole on every rank, and the second has a half of its inputs."""
    path = next(path for path in table if path.endswith("ffn.net.0.proj"))
    return {**table, path: ["gathered"]}


def cut_packed_as_one(table: Table) -> Table:
    """Of queries, keys and values in one projection, the first rank has the queries and half of the keys."""
    return {path: style if style[0] == "rms_norm" else style[:1] for path, style in table.items()}


def leave_rotary_tables_whole(table: Table) -> Table:
    return {path: style for path, style in table.items() if ":" not in path}


def swap_rotary_heads(table: Table) -> Table:
    return {path: ["heads", 1, *style[2:]] if ":" in path else style for path, style in table.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("wan-2.1", cut_values_unevenly),
        ("wan-2.1", cut_one_the_wrong_way),
        ("wan-2.1", leave_norms_whole),
        ("wan-2.1", gather_one_of_two),
        ("prx", cut_packed_as_one),
        ("ltx", leave_rotary_tables_whole),
        ("ltx", swap_rotary_heads),
    ],
)
def test_the_proof_finds_a_wrong_table(name: str, change: Callable[[Table], Table]) -> None:
    """Two ranks of the derived table make what one makes, and of a changed one not. A failure: wrong pictures."""
    transformer, call = record_call(name)
    table = dict(find_derived_cuts(transformer))
    assert table != change(table)
    assert prove_tensor_cuts(transformer, table, call)
    assert not prove_tensor_cuts(transformer, change(table), call)


@pytest.mark.parametrize("name", ["prx", "ltx", "lumina-2"])
def test_what_is_derived_is_what_ships(name: str) -> None:
    """Packed projections, rotary tables over all heads, and fewer heads of keys; the model is afterwards whole."""
    transformer, call = record_call(name)
    anatomy = find_anatomy(transformer)
    assert anatomy is not None and anatomy.tensor
    before = {name: p.clone() for name, p in transformer.named_parameters()}
    assert derive_tensor_cuts(transformer, anatomy, call).tensor == anatomy.tensor
    assert all(torch.equal(before[name], p) for name, p in transformer.named_parameters())


def test_loras_of_all_that_is_cut_are_cut() -> None:
    """Those of modulations too, whose outputs every rank gets from all."""
    transformer, call = record_call("qwen-image")
    names = ["img_mod.1", "to_q", "to_out.0", "net.2"]
    transformer.add_adapter(LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    table = find_derived_cuts(transformer)
    assert table["transformer_blocks.*.img_mod.1"] == ["gathered"]
    assert prove_tensor_cuts(transformer, table, call)


def test_a_model_with_an_odd_number_of_heads_is_proven_by_more_ranks() -> None:
    """A failure: what runs with tensor=3 has no table, because tensor=2 does not divide it."""
    transformer, call = record_call("pixart-sigma")
    config = {**transformer.config, "num_attention_heads": 3, "attention_head_dim": 8, "cross_attention_dim": 24}
    odd = type(transformer).from_config(config).eval()
    anatomy = find_anatomy(odd)
    assert anatomy is not None
    table = derive_tensor_cuts(odd, replace(anatomy, tensor={}), call).tensor
    assert table == anatomy.tensor
    with pytest.raises(PlanError, match="tensor=2 does not divide the 3 heads of transformer_blocks.0.attn1; try 1, 3"):
        cut(odd, table)


def cut(model: nn.Module, table: Mapping[str, Any], ranks: int = 2) -> TensorCuts:
    return TensorCuts.match_tensor_table(model, table, 0, ranks)


@pytest.mark.parametrize(("kind", "across"), [("rms_norm_across_heads", True), ("rms_norm", False)])
def test_a_norm_is_cut_where_it_is_across_heads(kind: str, across: bool) -> None:
    """A config may have a norm of each head in its place, which every rank has whole."""
    model = nn.ModuleDict({"a": Attention(16, heads=2, kv_heads=2, dim_head=8, qk_norm=kind)})
    table = {"a.to_q": ["colwise"], "a.to_k": ["colwise"], "a.to_v": ["colwise"], "a.norm_q": ["rms_norm", "a.to_q"]}
    table |= {"a.norm_k": ["rms_norm", "a.to_k"], "a.to_out.0": ["rowwise", "a.to_q"]}
    assert ("a.norm_q" in cut(model, table).styles) == across

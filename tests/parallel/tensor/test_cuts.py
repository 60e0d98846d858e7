"""What tensor parallelism refuses, what its tables mean, and how they are derived and proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from peft import LoraConfig
from torch import nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.anatomies import find_anatomy, find_derived_cuts
from ditile.parallel.tensor.cuts import TensorCut, TensorCuts
from ditile.parallel.tensor.sharding import find_tensor_table, shard_weights
from ditile.plan.errors import ModelError, PlanError
from ditile_lab.study.tensor_cuts import derive_tensor_cuts, prove_tensor_cuts
from tests import tiny
from tests.zoo import ZOO
from tests.zoo.derive_table import record_calls

FF = {"net.0.proj": "colwise", "net.2": "rowwise"}


def cut(model: Any, ranks: int = 2, table: Any = None) -> None:
    """This process has no group: what is not refused before that fails with another error."""
    table = table or find_tensor_table(model, find_derived_cuts(model))
    shard_weights(model, table, Axis("tensor", tuple(range(ranks))), Traffic())


def test_gated_and_packed_projections_are_cut_block_by_block() -> None:
    """A failure: a rank has a value without its gate, or hidden features of the wrong half."""
    gated = TensorCuts.match_tensor_table(FeedForward(8, mult=2, activation_fn="swiglu"), FF, 1, 2)
    assert gated.select_shard("net.0.proj.weight", (32, 8)) == TensorCut(0, (slice(8, 16), slice(24, 32)))
    assert gated.select_shard("net.0.proj.bias", (32,)) == TensorCut(0, (slice(8, 16), slice(24, 32)))
    plain = TensorCuts.match_tensor_table(FeedForward(8, mult=2, activation_fn="gelu-approximate"), FF, 1, 2)
    assert plain.select_shard("net.0.proj.weight", (16, 8)) == TensorCut(0, (slice(8, 16),))
    assert plain.select_shard("net.2.weight", (8, 16)) == TensorCut(1, (slice(8, 16),))
    assert plain.select_shard("net.2.bias", (8,)) is None
    assert plain.select_shard("elsewhere.weight", (8, 16)) is None
    packed = TensorCuts.match_tensor_table(nn.Sequential(nn.Linear(10, 4)), {"0": PackedRowwiseParallel([1, 4])}, 0, 2)
    assert packed.select_shard("0.weight", (4, 10)) == TensorCut(1, (slice(0, 1), slice(2, 6)))


def quantized(model: Any) -> None:
    class Four(nn.Linear):
        """As quantization libraries do it."""

    model.transformer_blocks[1].ff.net[2] = Four(128, 32)


def adapter(model: Any) -> None:
    processor = nn.Linear(2, 2)  # as an IP-adapter, it has weights
    model.transformer_blocks[0].attn.processor = processor


def fused(model: Any) -> None:
    model.fuse_qkv_projections()


def casted(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (casted, "the forward of transformer_blocks.0.attn.to_q is replaced by a hook.* set it after parallelize"),
        (quantized, "transformer_blocks.1.ff.net.2 is a Four, and tensor parallelism cuts plain Linears"),
        (adapter, "transformer_blocks.0.attn has weights in its processor Linear.* unload the IP-adapter"),
        (fused, r"transformer_blocks.0.attn has fused projections.* call pipe.transformer.unfuse_qkv_projections\(\)"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_untouched(edit: Callable[[Any], None], message: str) -> None:
    """A failure: the picture would be silently wrong, or the model half cut."""
    model = tiny.flux().transformer
    edit(model)
    before = {name: (p, p.shape) for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match=message):
        cut(model)
    assert all(before[name] == (p, p.shape) for name, p in model.named_parameters())
    assert model.transformer_blocks[0].attn.heads == 4


@pytest.mark.nightly
@pytest.mark.parametrize("make", [tiny.flux, tiny.sd3, tiny.pixart])
def test_projections_that_were_fused_and_unfused_are_cut(make: Callable[[], Any]) -> None:
    """The right call is named, and helps. A failure means that a model stays refused, as some keep a flag for ever."""
    model = make().transformer
    model.fuse_qkv_projections()
    table = find_tensor_table(model, find_derived_cuts(model))
    with pytest.raises(ModelError, match=r"fused projections.* call pipe.transformer.unfuse_qkv_projections\(\)"):
        TensorCuts.match_tensor_table(model, table, 0, 2)
    model.unfuse_qkv_projections()
    assert TensorCuts.match_tensor_table(model, table, 0, 2).styles


def test_heads_that_do_not_divide_are_refused_with_degrees_that_do() -> None:
    """The degrees in the message are legal for heads and hidden features both."""
    for ranks in (3, 8):
        message = f"tensor={ranks} does not divide the 4 heads of transformer_blocks.0.attn; try 1, 2, 4"
        with pytest.raises(PlanError, match=message):
            cut(tiny.flux().transformer, ranks)


def test_tables_that_do_not_fit_are_refused() -> None:
    """A failure: a typing error in a table cuts less than was meant."""
    model = FeedForward(8, activation_fn="gelu")
    for table, message in (
        ({"net.0.proj": "columns"}, "net.0.proj cannot be cut as 'columns'; known are colwise, rowwise, rms_norm"),
        ({"net.0.proj": PackedColwiseParallel()}, "net.0.proj cannot be cut as .*with blocks"),
        ({"net.0.proj": PackedColwiseParallel([1, 2])}, r"the 32 features of net.0.proj have no blocks in proportion"),
        ({"net.0": "colwise"}, "net.0 is a GELU, and tensor parallelism cuts plain Linears"),
        ({"net.2": "rms_norm"}, "net.2 is a Linear, and rms_norm is for torch's or diffusers' RMSNorm"),
        ({"ff.*": "colwise"}, r"the tensor table of FeedForward names no module that is there: ff\.\*"),
    ):
        with pytest.raises(ModelError, match=message):
            cut(model, 2, table)


def test_a_norm_across_heads_must_be_in_the_table() -> None:
    """Without weights it would silently be a norm over this rank's heads."""
    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=1, num_attention_heads=4, attention_head_dim=12, ffn_dim=64)
    table = {"blocks.*.attn1.to_q": "colwise"}
    with pytest.raises(
        ModelError, match=r"attn1\.norm_q normalises across heads; the tensor table must name it as rms_norm"
    ):
        cut(model, 2, table)


def test_a_model_without_a_table_is_refused_and_one_without_streams_in_the_sequence_scheme() -> None:
    """The message says what would work."""
    model = nn.Linear(2, 2)
    for lack in ("needs its number of heads as an attribute", r"what may be missing is the width of a head .*head_dim"):
        with pytest.raises(ModelError, match=rf"Linear has no tensor table.*{lack}.*give its class a _tp_plan"):
            find_tensor_table(model)
        model.heads = 2  # type: ignore[assignment]
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="no table of its token streams for split_scheme=sequence; use row"):
        shard_weights(model, {"": "colwise"}, Axis("tensor", (0, 1)), Traffic(), sequence={})


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


def swap_rotary_heads(table: Table) -> Table:
    return {path: ["heads", 1, *style[2:]] if ":" in path else style for path, style in table.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("wan-2.1", cut_values_unevenly),
        ("wan-2.1", cut_one_the_wrong_way),
        ("wan-2.1", leave_norms_whole),
        ("wan-2.1", gather_one_of_two),
        ("prx", cut_packed_as_one),
        ("ltx", lambda table: {path: style for path, style in table.items() if ":" not in path}),
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["prx", "ltx", "lumina-2"])
def test_what_is_derived_is_what_ships(name: str) -> None:
    """Packed projections, rotary tables over all heads, and fewer heads of keys; the model is afterwards whole."""
    transformer, call = record_call(name)
    anatomy = find_anatomy(transformer)
    assert anatomy is not None and anatomy.tensor
    before = {name: p.clone() for name, p in transformer.named_parameters()}
    assert derive_tensor_cuts(transformer, anatomy, call).tensor == anatomy.tensor
    assert all(torch.equal(before[name], p) for name, p in transformer.named_parameters())


@pytest.mark.filterwarnings("ignore")
def test_loras_of_all_that_is_cut_are_cut() -> None:
    """Those of modulations too, whose outputs every rank gets from all."""
    transformer, call = record_call("qwen-image")
    names = ["img_mod.1", "to_q", "to_out.0", "net.2"]
    transformer.add_adapter(LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    table = find_derived_cuts(transformer)
    assert table["transformer_blocks.*.img_mod.1"] == ["gathered"]
    assert prove_tensor_cuts(transformer, table, call)


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_an_odd_number_of_heads_is_proven_by_more_ranks() -> None:
    """A failure: what runs with tensor=3 has no table, because tensor=2 does not divide it."""
    transformer, call = record_call("pixart-sigma")
    config = {**transformer.config, "num_attention_heads": 3, "attention_head_dim": 8, "cross_attention_dim": 24}
    odd = type(transformer).from_config(config).eval()
    anatomy = find_anatomy(odd)
    assert anatomy is not None
    table = derive_tensor_cuts(odd, replace(anatomy, tensor={}), call).tensor
    assert {name: cut[0] for name, cut in table.items()} == anatomy.tensor
    with pytest.raises(PlanError, match="tensor=2 does not divide the 3 heads of transformer_blocks.0.attn1; try 1, 3"):
        match_cuts(odd, table)


def match_cuts(model: nn.Module, table: Mapping[str, Any], ranks: int = 2) -> TensorCuts:
    return TensorCuts.match_tensor_table(model, table, 0, ranks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "across"), [("rms_norm_across_heads", True), ("rms_norm", False)])
def test_a_norm_is_cut_where_it_is_across_heads(kind: str, across: bool) -> None:
    """A config may have a norm of each head in its place, which every rank has whole."""
    model = nn.ModuleDict({"a": Attention(16, heads=2, kv_heads=2, dim_head=8, qk_norm=kind)})
    table = {"a.to_q": ["colwise"], "a.to_k": ["colwise"], "a.to_v": ["colwise"], "a.norm_q": ["rms_norm", "a.to_q"]}
    table |= {"a.norm_k": ["rms_norm", "a.to_k"], "a.to_out.0": ["rowwise", "a.to_q"]}
    assert ("a.norm_q" in match_cuts(model, table).styles) == across

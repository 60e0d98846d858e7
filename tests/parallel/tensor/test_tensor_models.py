"""Tensor parallelism beyond the tables of the families: norms across heads, diffusers' own plans, shares of a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.anatomies import find_derived_cuts
from ditile.parallel.tensor.sharding import find_tensor_table, shard_weights
from ditile.plan.errors import DitileError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.tensor.tensors import forward, inputs, with_heads
from tests.pool import Pool
from tests.zoo import ZOO

_WAN = {
    "to_q": "colwise", "to_k": "colwise", "to_v": "colwise", "to_out.0": "rowwise", "norm_q": "rms_norm",
    "norm_k": "rms_norm",
}  # fmt: skip
WAN = {f"blocks.*.{attention}.{name}": style for attention in ("attn1", "attn2") for name, style in _WAN.items()}
WAN |= {"blocks.*.ffn.net.0.proj": "colwise", "blocks.*.ffn.net.2": "rowwise"}


def wan() -> tuple[nn.Module, dict[str, Any]]:
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=64, num_layers=2,
    )  # fmt: skip
    call = {"hidden_states": torch.randn(2, 4, 2, 6, 8), "encoder_hidden_states": torch.randn(2, 7, 16)}
    return tiny.randomise(model), call | {"timestep": torch.tensor([500, 500])}


def test_one_rank_is_the_plain_model() -> None:
    """The null case edits nothing."""
    model, call = with_heads("sd3"), inputs("sd3")
    before, weights = forward(model, call), model.state_dict()
    cut = shard_weights(model, find_tensor_table(model, find_derived_cuts(model)), Axis("tensor"), Traffic())
    assert cut.select_shard("transformer_blocks.0.ff.net.2.weight", (48, 192)) is None
    assert torch.equal(forward(model, call), before) and model.state_dict().keys() == weights.keys()


def refused_untouched(options: dict[str, Any], message: str) -> bool:
    """Whether a refused pipeline of two transformers has all its weights."""
    pipe = ZOO["wan-2.2"].make()
    before = [parameter for model in (pipe.transformer, pipe.transformer_2) for parameter in model.parameters()]
    with pytest.raises(DitileError, match=message):
        parallelize(pipe, Plan(**options))
    after = [parameter for model in (pipe.transformer, pipe.transformer_2) for parameter in model.parameters()]
    return len(before) == len(after) and all(one is two for one, two in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipefusion": 2, "tensor": 2, "split_scheme": "sequence"}, "no table of its token streams.*use row"),
        ({"tensor": 4}, "tensor=4 does not divide the 2 heads of blocks.0.attn1; try 1, 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_all_its_weights(pool: Pool, options: dict[str, Any], message: str) -> None:
    """A failure: after the refusal a stage has lost the blocks of others, or one of two transformers is cut."""
    assert all(pool.run(refused_untouched, 4, options, message))

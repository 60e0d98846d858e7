"""Bytes that tensor parallelism sends: counted in a transformer call, and equal to a formula worked out here by hand.

p image tokens, t text tokens, h channels, B rows, L blocks, fp32. In a ring an all-reduce of X bytes sends
2 (n-1) / n X, a reduce-scatter or a gather half of it: 4 (n-1) / n p h L in a plain DiT, and the same in both schemes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel

from ditile.distributed.transport import Traffic
from ditile.model.refinements import PIXART_TENSOR_PLAN
from ditile.parallel.tensor.sharding import shard_weights
from tests import tiny
from tests.parallel.tensor.tensors import axis, forward, inputs, sharded, with_heads
from tests.pool import Pool

B, P, T, H = 2, 63, 5, 32
FLOAT = 4

SENT = {
    "dit": 3 * 4 * 64,  # self attention and feed-forward; 8 x 8 tokens
    "pixart": 4 * 6 * P,  # cross attention too
    "sd3": 4 * 4 * P + 3 * 4 * T + 2 * 2 * P,  # no text behind the last block; two have attention to the image alone
    "flux": 2 * 4 * (P + T) + 3 * 2 * (P + T),  # 2 double blocks, 3 single ones
}
"""Multiples of (n-1) / n B h."""
SUMS = {"dit": 3 * 2, "pixart": 4 * 3, "sd3": 3 * 4 + 2 + 2, "flux": 2 * 4 + 3}
"""Row-parallel Linears that run."""


def counted(family: str, scheme: str) -> tuple[int, int]:
    traffic = Traffic()
    if family == "dit":
        model: Any = DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, num_layers=3, sample_size=16, norm_num_groups=8
        )
        call = {"hidden_states": torch.randn(B, 4, 16, 16), "timestep": torch.tensor([500] * B)}
        table = {name: style for name, style in PIXART_TENSOR_PLAN.items() if "attn2" not in name}
        shard_weights(tiny.randomise(model), table, axis(), traffic)
        forward(model, call | {"class_labels": torch.tensor([1] * B), "return_dict": False})
    else:
        model = with_heads(family, 4)
        with sharded(model, scheme, traffic):
            forward(model, inputs(family))
    return traffic.bytes["tensor"], traffic.calls["tensor"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("family", "scheme"), [("dit", "row"), *((f, s) for f in ("pixart", "sd3", "flux") for s in ("row", "sequence"))]
)
def test_counted_is_the_formula(pool: Pool, family: str, scheme: str, ranks: int) -> None:
    """A failure: a sum that is made twice or not at all, or a gather that could have served two Linears."""
    sent, calls = SENT[family], SUMS[family]
    if scheme == "sequence":
        calls *= 2
    if (family, scheme) == ("sd3", "sequence"):  # the last block reads the text and returns none
        sent, calls = sent + T, calls + 1
    wanted = sent * B * H * FLOAT * (ranks - 1) // ranks, calls
    if (family, scheme) == ("flux", "sequence"):
        assert wanted[1] == 2 * 8 + 3 * 2
    assert pool.run(counted, ranks, family, scheme) == [wanted] * ranks

"""Tensor parallel equals the plain model on every rank, in both schemes; sequence/test_tokens.py has its pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ditile.plan.errors import StateError
from tests import tiny
from tests.parallel.tensor.tensors import SCHEMES, error, forward, inputs, sharded, with_heads
from tests.pool import Pool
from tests.zoo import ZOO

TOLERANCE = 1e-5  # sums over ranks are in another order than sums within a matrix product


def draw_with_adapter(name: str, scheme: str) -> None:
    """On a rank: the picture, with the scale that a pipeline sets now, too; and what is there when it is undone."""
    pipe, entry = ZOO[name].make(), ZOO[name]
    scales = [0.3] * 2 if name.startswith("flux") else 0.3
    processor = next(iter(pipe.transformer.attn_processors.values()))
    before = processor.scale
    plain = [torch.as_tensor(pipe(**entry.call())[0])]
    whole = {key: x.clone() for key, x in pipe.transformer.state_dict().items()}
    with sharded(pipe.transformer, scheme):
        shares = {key: x.shape for key, x in pipe.transformer.state_dict().items() if "_ip" in key and "to_" in key}
        assert shares and all(2 * shape[0] == len(whole[key]) for key, shape in shares.items())
        drawn = [torch.as_tensor(pipe(**entry.call())[0])]
        pipe.set_ip_adapter_scale(scales)
        drawn.append(torch.as_tensor(pipe(**entry.call())[0]))
    assert processor.scale != before
    plain.append(torch.as_tensor(pipe(**entry.call())[0]))
    assert all(torch.equal(x, whole[key]) for key, x in pipe.transformer.state_dict().items())
    assert max(map(error, drawn, plain)) < TOLERANCE < error(*plain)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["flux-ip-adapter", "stable-diffusion-3-ip-adapter"])
def test_ip_adapters(pool: Pool, name: str, scheme: str) -> None:
    """A failure: what an adapter adds is of this rank's heads alone, or a scale that is set later does not count."""
    pool.run(draw_with_adapter, 2, name, scheme)


def divided_forward(family: str, heads: int, changes: dict[str, Any]) -> list[tuple[float, Tensor]]:
    transformer, call, pairs = with_heads(family, heads, **changes), inputs(family), []
    plain = forward(transformer, call)
    for scheme in SCHEMES:
        with sharded(transformer, scheme):
            out = forward(transformer, call)
        pairs.append((error(out, plain), out))
    return pairs


@pytest.mark.parametrize(
    ("family", "heads", "ranks", "changes"),
    [
        ("flux", 6, 3, {}),
        ("pixart", 6, 3, {}),
        ("sd3", 6, 3, {}),
        ("pixart", 4, 4, {"activation_fn": "geglu"}),  # value and gate are one Linear
        ("sd3", 4, 2, {"dual_attention_layers": [], "qk_norm": None}),
        ("flux", 8, 8, {"guidance_embeds": False}),  # five tokens of text: three ranks have none
    ],
)
def test_a_transformer_predicts_the_same(
    pool: Pool, family: str, heads: int, ranks: int, changes: dict[str, Any]
) -> None:
    """A failure: heads or hidden features of another rank are read, or uneven shares of tokens are mixed up."""
    results = pool.run(divided_forward, ranks, family, heads, changes)
    for scheme in range(len(SCHEMES)):
        assert max(result[scheme][0] for result in results) < TOLERANCE
        assert all(torch.equal(result[scheme][1], results[0][scheme][1]) for result in results), "ranks differ"


def refused_and_half() -> tuple[list[str], torch.dtype, float]:
    transformer, call, pairs = with_heads("pixart", 4), inputs("pixart"), []
    with sharded(transformer, "sequence"):
        for wrong in (lambda: sharded(transformer, "row").__enter__(), _chunked(transformer, call)):
            with pytest.raises(StateError) as caught:
                wrong()
            pairs.append(str(caught.value))
    transformer.transformer_blocks[0].set_chunk_feed_forward(None)
    plain = forward(transformer, call)
    with sharded(transformer.to(torch.bfloat16), "sequence"):
        out = forward(transformer, _half(call))
    return pairs, out.dtype, error(out.float(), plain)


def _chunked(transformer: Any, call: dict[str, Any]) -> Any:
    def run() -> None:
        transformer.transformer_blocks[0].set_chunk_feed_forward(1, dim=1)
        forward(transformer, call)

    return run


def _half(call: dict[str, Any]) -> dict[str, Any]:
    return {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


def test_wrong_use_is_refused_and_bf16_stays_bf16(pool: Pool) -> None:
    """A failure: a model is cut twice, chunks of tokens are taken for shares, or a sum changes the dtype."""
    for (twice, chunks), dtype, difference in pool.run(refused_and_half, 2):
        assert "has only a share of its weights already" in twice
        assert "transformer_blocks.0.ff was given 1 tokens of image, and this rank's share of 63 is 3" in chunks
        assert dtype == torch.bfloat16 and difference < 0.1


def cast_shares(family: str) -> list[float]:
    def casting(pipe: Any) -> Any:
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        return pipe(**tiny.arguments(family)).images

    plain, pairs = casting(tiny.FAMILIES[family]()), []
    for scheme in SCHEMES:
        pipe = tiny.FAMILIES[family]()
        with sharded(pipe.transformer, scheme):
            pairs.append(error(casting(pipe), plain))
    return pairs


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["flux", "sd3", "pixart"])
def test_shares_that_are_cast_for_each_use(pool: Pool, family: str) -> None:
    """A failure: what a refusal of a model that is cast before advises does not work."""
    for differences in pool.run(cast_shares, 2, family):
        assert max(differences) < TOLERANCE

"""Tokens of models of several kinds split over ranks: what one process gives, on every rank and at any length.

`zoo/test_families.py` has every family on two ranks.

Sums are made in another order along ring, and matrices have other shapes: 1e-5 relative in fp32, not bitwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as backends
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.sequence.planned import denoising
from tests.parallel.sequence.test_tokens import counted_kernel
from tests.pool import Pool, on_ranks
from tests.runner.cases import close
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

TWO = [{"ulysses": 2}, {"ring": 2}, {"gather": 2}]
FOUR = [{"ulysses": 4}, {"ring": 4}, {"gather": 4}, {"ulysses": 2, "ring": 2}]


def pictures(pipe: Any, call: dict[str, Any], plans: list[dict[str, Any]]) -> list[Tensor]:
    """Plain, under each plan, and plain again."""

    def run(run_pipe: Any) -> Tensor:
        result = run_pipe(**call, generator=torch.Generator().manual_seed(3))
        results: Tensor = result.frames if hasattr(result, "frames") else result.images
        return results

    results = [run(pipe)]
    for plan in plans:
        runner = parallelize(pipe, Plan(**plan), keep_weights=True, trust_code=True)
        results.append(run(runner))
        runner.restore()
    return [*results, run(pipe)]


def bare(name: str, size: tuple[int, int, int], plans: list[dict[str, Any]]) -> list[Tensor]:
    return pictures(*denoising(name, *size), plans)


def check(answers: list[list[Tensor]], plans: list[dict[str, Any]], what: str) -> None:
    for rank, (wanted, *results, after) in enumerate(answers):
        assert torch.equal(after, wanted), f"{what}: the model is another one than before"
        for plan, got, first in zip(plans, results, answers[0][1:], strict=False):
            close(got, wanted, f"{what} {plan} rank {rank}")
            assert torch.equal(got, first), f"{what} {plan}: ranks 0 and {rank} differ"


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ["qwen", "wan", "flux2"])
def test_more_ranks(pool: Pool, name: str, ranks: int) -> None:
    """35 tokens of image, 7 of text and 3 or 4 heads over 3 and 4 ranks: nothing divides."""
    plans = [{"ulysses": 3}, {"ring": 3}, {"gather": 3}] if ranks == 3 else FOUR
    check(pool.run(bare, ranks, name, (5, 7, 7), plans), plans, name)


def grouped_heads(plans: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor, int]]:
    """Krea 2, whose four heads of queries share two of keys: the image and the bytes of its first axis."""
    torch.set_default_dtype(torch.float64)
    try:
        entry = ZOO["krea-2"]
        pipe = entry.make()
        plain = next(iter(list_tensors(pipe(**entry.call()))))
        drawn = []
        for plan in plans:
            runner = parallelize(pipe, Plan(**plan), keep_weights=True)
            image = next(iter(list_tensors(runner(**entry.call()))))
            drawn.append((image, plain, runner.mesh.traffic.bytes[next(iter(plan))]))
            runner.restore()
    finally:
        torch.set_default_dtype(torch.float32)
    return drawn


@pytest.mark.filterwarnings("ignore")
def test_keys_that_a_layer_repeats_travel_once(pool: Pool) -> None:
    """Of a token a rank of two sends the other two heads of queries and one of keys and of values, and gets two of the
    output; or four of keys and values go out. A failure means that copies of a key travel, or another group's key."""
    plans = [{"ulysses": 2}, {"ring": 2}, {"gather": 2}, {"distrifusion": 2, "warmup": 99}]
    for drawn in pool.run(grouped_heads, 2, plans):
        for plan, (image, plain, _) in zip(plans, drawn, strict=True):
            close(image, plain, f"{plan}")
        ulysses, _, gather, _ = (size for _, _, size in drawn)
        assert 4 * ulysses == pytest.approx(6 * gather, rel=0.1), "parts differ by a token"


PIXART = {name: value for name, value in tiny.arguments("pixart").items() if name != "generator"}


class ThreeDimensions(AttnProcessor2_0):  # type: ignore[misc]
    """A user's, which has rows and heads in one dimension, as older ones had."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **_: Any) -> Tensor:
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        made = attn.to_q(hidden_states), attn.to_k(keys), attn.to_v(keys)
        q, k, v = (attn.head_to_batch_dim(x) for x in made)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out = attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(out)))
        results: Tensor = out / attn.rescale_output_factor
        return results


def three_dimensions() -> list[Tensor]:
    pipe = tiny.pixart()
    for block in pipe.transformer.transformer_blocks:
        block.attn1.set_processor(ThreeDimensions())
    return pictures(pipe, PIXART, TWO)


def test_attention_in_three_dimensions(pool: Pool) -> None:
    """A failure means that heads are taken for tokens, so that every rank sees its own tokens alone."""
    check(pool.run(three_dimensions, 2), TWO, "heads among rows")


@on_ranks(2)
def test_the_users_backend_stays() -> None:
    """Self attention is handed over, cross attention is not. A failure means that either has another kernel."""
    pipe, call = denoising("wan", 5, 7, 7)
    active = backends._active_backend
    pipe.transformer.set_attention_backend("_native_math")
    backends.set_active_backend(active)  # diffusers sets that of the process too, which other tests use
    with counted_kernel() as calls:
        pipe(**call)
        plain = calls[0]
        parallelize(pipe, Plan(ulysses=2))(**call)
    assert plain == calls[0] - plain > 0


@pytest.mark.parametrize(
    ("name", "size", "plan", "words"),
    [
        ("wan", (6, 7, 9), {"ulysses": 2, "uaa": False}, ("does not divide", "3 heads", "uaa")),
        # A timestep for each token, which its pipeline never gives it.
        ("chronoedit", (5, 7, 9), {"ulysses": 2}, ("temb with the shape (2, 35, 6, 36)", "data, cfg or tensor")),
        ("ltx", (5, 7, 9), {"ulysses": 2, "uaa": False}, ("35 tokens", "not divided", "uaa")),
        ("wan", (1, 2, 9), {"patches": 3, "pipefusion": 2}, ("2 ", "patches=3")),
        ("wan", (1, 1, 9), {"ring": 2}, ("fewer tokens than the 2 ranks", "larger image")),
    ],
)
@on_ranks(2)
def test_refusals(name: str, size: tuple[int, int, int], plan: dict[str, Any], words: tuple[str, ...]) -> None:
    """A failure means a picture that is silently wrong, or an error that leaves the user to guess."""
    pipe, call = denoising(name, *size)
    with pytest.raises((PlanError, ModelError)) as caught:
        parallelize(pipe, Plan(**plan))(**call)
    message = f"{type(caught.value).__name__}: {caught.value}"
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("size", [(3, 3, 8), (5, 7, 18), (5, 7, 1)], ids=str)
def test_lengths_that_are_alike(pool: Pool, size: tuple[int, int, int]) -> None:
    """As much text as image, half of it, one token. A failure means that tokens are told apart by their number."""
    for name in ("flux2", "wan", "qwen"):
        check(pool.run(bare, 2, name, size, TWO), TWO, f"{name} {size}")

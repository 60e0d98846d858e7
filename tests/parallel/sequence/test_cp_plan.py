"""Plans as tables: diffusers' `_cp_plan`, or a user's, gives what one process gives, on every rank and at any length.

Sums are made in another order along ring, and matrices have other shapes: 1e-5 relative in fp32, not bitwise.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.errors import ModelError, PlanError
from ditile.models.registry import find_cp_plans, list_families
from ditile.parallel.sequence.cp_plan import ContextParallelEntry, ContextParallelSplits
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.sequence.planned import MAKE, PIXART_PLAN, PLANS, denoising, wan_pipeline
from tests.parallel.sequence.test_tokens import close
from tests.pool import Pool

TWO = [{"ulysses": 2}, {"ring": 2}]
FOUR = [{"ulysses": 4}, {"ring": 4}, {"ulysses": 2, "ring": 2}]


def pictures(pipe: Any, call: dict[str, Any], plans: list[dict[str, Any]], table: Any) -> list[Tensor]:
    """Plain, under each plan, and plain again."""

    def run(run_pipe: Any) -> Tensor:
        result = run_pipe(**call, generator=torch.Generator().manual_seed(3))
        results: Tensor = result.frames if hasattr(result, "frames") else result.images
        return results

    results = [run(pipe)]
    for plan in plans:
        runner = parallelize(pipe, Plan(**plan), cp_plan=table)
        results.append(run(runner))
        runner.restore()
    return [*results, run(pipe)]


def bare(name: str, size: tuple[int, int, int], plans: list[dict[str, Any]]) -> list[Tensor]:
    return pictures(*denoising(name, *size), plans, PLANS.get(name))


def check(answers: list[list[Tensor]], plans: list[dict[str, Any]], what: str) -> None:
    for rank, (wanted, *results, after) in enumerate(answers):
        assert torch.equal(after, wanted), f"{what}: the model is another one than before"
        for plan, got, first in zip(plans, results, answers[0][1:], strict=False):
            close(got, wanted, f"{what} {plan} rank {rank}")
            assert torch.equal(got, first), f"{what} {plan}: ranks 0 and {rank} differ"


@pytest.mark.parametrize("name", list(MAKE))
def test_two_ranks(pool: Pool, name: str) -> None:
    """A failure in one model means that a tensor of its table is cut or gathered in the wrong place, or that its masked
    or cross attention sees other keys; in all, that lengths are not what they are thought to be."""
    check(pool.run(bare, 2, name, (5, 7, 7), TWO), TWO, name)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ["qwen", "wan", "flux2"])
def test_more_ranks(pool: Pool, name: str, ranks: int) -> None:
    """35 tokens of image, 7 of text and 3 or 4 heads over 3 and 4 ranks: nothing divides."""
    plans = [{"ulysses": 3}, {"ring": 3}] if ranks == 3 else FOUR
    check(pool.run(bare, ranks, name, (5, 7, 7), plans), plans, name)


@pytest.mark.parametrize("name", ["qwen", "wan"])
def test_769_tokens(pool: Pool, name: str) -> None:
    """769 is a prime: a failure means that tokens are padded or dropped."""
    check(pool.run(bare, 2, name, (1, 769, 5), TWO[:1]), TWO[:1], name)


def whole_wan() -> list[Tensor]:
    return pictures(*wan_pipeline(), TWO, None)


def test_a_pipeline_of_two_transformers(pool: Pool) -> None:
    """A failure means that the second transformer of Wan 2.2 is not divided, or its history is not."""
    check(pool.run(whole_wan, 2), TWO, "Wan 2.2")


def guided_wan(plans: list[dict[str, Any]]) -> list[Tensor]:
    pipe, call = wan_pipeline()
    pipe.transformer_2 = None
    pipe.register_to_config(boundary_ratio=None)
    return pictures(pipe, call, plans, None)


def test_with_cfg(pool: Pool) -> None:
    """A failure means that the halves of guidance share out each other's tokens."""
    plans = [{"cfg": 2, "ulysses": 2}, {"cfg": 2, "ring": 2}]
    check(pool.run(guided_wan, 4, plans), plans, "Wan, cfg")


def own_table() -> list[Tensor]:
    return pictures(tiny.pixart(), PIXART, TWO, PIXART_PLAN)


PIXART = {name: value for name, value in tiny.arguments("pixart").items() if name != "generator"}


def test_a_users_table(pool: Pool) -> None:
    """PixArt's own processors, cross attention to whole text and batched guidance: a failure means that attention
    outside diffusers' dispatch is not reached, and every rank sees its own tokens alone."""
    check(pool.run(own_table, 2), TWO, "PixArt with a table")


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
    return pictures(pipe, PIXART, TWO, PIXART_PLAN)


def test_attention_in_three_dimensions(pool: Pool) -> None:
    """A failure means that heads are taken for tokens, so that every rank sees its own tokens alone."""
    check(pool.run(three_dimensions, 2), TWO, "heads among rows")


def users_backend() -> tuple[int, int]:
    """How often the backend that the user set is asked, in one call of one transformer, plain and divided."""
    calls, stock = [0], registry._backends[AttentionBackendName._NATIVE_MATH]

    @functools.wraps(stock)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return stock(*args, **kwargs)

    pipe, call = denoising("wan", 5, 7, 7)
    active = registry._active_backend
    pipe.transformer.set_attention_backend("_native_math")
    registry.set_active_backend(active)  # diffusers sets that of the process too, which other tests use
    registry._backends[AttentionBackendName._NATIVE_MATH] = counted
    try:
        pipe(**call)
        plain = calls[0]
        parallelize(pipe, Plan(ulysses=2))(**call)
    finally:
        registry._backends[AttentionBackendName._NATIVE_MATH] = stock
    return plain, calls[0] - plain


def test_the_users_backend_stays(pool: Pool) -> None:
    """Self attention is handed over, cross attention is not. A failure means that either has another kernel."""
    for plain, divided in pool.run(users_backend, 2):
        assert plain == divided > 0


@pytest.mark.parametrize("name", ["qwen", "ltx", "lumina2"])
def test_masks_matter(name: str) -> None:
    """A failure means that the tests above would pass with a mask that is dropped."""
    pipe, call = denoising(name, 5, 7, 7)
    wanted = pipe(**call).images
    mask = next(key for key in call["inputs"] if "mask" in key)
    call["inputs"][mask] = torch.ones_like(call["inputs"][mask])
    assert float((pipe(**call).images - wanted).abs().max() / wanted.abs().max()) > 1e-3


def test_the_rungs() -> None:
    """A failure means that `ditile models` hides what would run, or that a table is preferred to a ModelSpec."""
    rungs = {family.transformer: family.rung for family in list_families()}
    assert rungs["QwenImageTransformer2DModel"] == rungs["WanTransformer3DModel"] == "ulysses, ring, caches"
    assert rungs["FluxTransformer2DModel"] == "PipeFusion"
    assert find_cp_plans(tiny.flux(), None) == {} and set(find_cp_plans(wan_pipeline()[0], None)) == {
        "transformer",
        "transformer_2",
    }
    assert set(find_cp_plans(tiny.flux(), {"": {}})) == {"transformer"}


def refused(name: str, size: tuple[int, int, int], plan: dict[str, Any], table: Any) -> str:
    pipe, call = denoising(name, *size)
    with pytest.raises((PlanError, ModelError)) as caught:
        parallelize(pipe, Plan(**plan), cp_plan=table)(**call)
    return f"{type(caught.value).__name__}: {caught.value}"


INPUT = ContextParallelInput(split_dim=1, expected_dims=3)
TEXT_FORGOTTEN = {
    "": {"hidden_states": INPUT, "img_ids": ContextParallelInput(split_dim=1, expected_dims=3)},
    "proj_out": PLANS["lumina2"]["norm_out"],
}
LONE = {"layers.0": {"hidden_states": INPUT}}
UNKNOWN = {"layers.0": {"x": INPUT}, "norm_out": PLANS["lumina2"]["norm_out"]}


@pytest.mark.parametrize(
    ("name", "size", "plan", "table", "words"),
    [
        ("wan", (5, 7, 9), {"pipefusion": 2}, None, ("pipefusion=2", "ulysses=2")),
        ("wan", (5, 7, 9), {"tensor": 2}, None, ("tensor=2", "ulysses=2")),
        ("wan", (5, 7, 9), {"ulysses": 2, "async_ulysses": True}, None, ("async_ulysses=True",)),
        ("lumina2", (5, 7, 9), {"ulysses": 2}, None, ("no ModelSpec", "cp_plan")),
        ("lumina2", (5, 7, 9), {"ulysses": 2}, LONE, ("gathers no output",)),
        ("lumina2", (5, 7, 9), {"ulysses": 2}, {}, ("empty",)),
        ("lumina2", (5, 7, 9), {"ulysses": 2}, {"nowhere": {"x": INPUT}}, ("'nowhere'",)),
        ("lumina2", (5, 7, 9), {"ulysses": 2}, UNKNOWN, ("'x'",)),
        ("wan", (5, 7, 9), {"ulysses": 2, "uaa": False}, None, ("does not divide", "3 heads", "uaa")),
        ("ltx", (5, 7, 9), {"ulysses": 2, "uaa": False}, None, ("35 tokens", "do not divide", "uaa")),
        ("qwen", (5, 7, 1), {"ring": 2}, None, ("1 token(s)", "2 ranks")),
        ("flux2", (3, 3, 8), {"ring": 2}, None, ("cannot be told apart",)),
        ("wan", (5, 7, 18), {"ring": 2}, None, ("18 tokens on every rank",)),
        ("flux2", (4, 4, 6), {"ring": 2}, TEXT_FORGOTTEN, ("14 tokens here, as many as 8 of 16", "split it too")),
    ],
)  # fmt: skip
def test_refusals(
    pool: Pool, name: str, size: tuple[int, int, int], plan: dict[str, Any], table: Any, words: tuple[str, ...]
) -> None:
    """A failure means a picture that is silently wrong, or an error that leaves the user to guess."""
    for message in pool.run(refused, 2, name, size, plan, table):
        assert all(word in message for word in words), message
        assert "\n" not in message


def test_a_joint_sequence_that_is_split_as_one() -> None:
    """Its mask, or its positions: of two ranks the first has half of all, and not half of the image and half of the
    text. A failure means that a mask lies on other keys than its own."""
    splits = ContextParallelSplits(Axis("sequence", (0, 1), 0, object()), Traffic(), uneven=True)  # type: ignore[arg-type]
    splits.begin_call({})
    for length in (16, 6):
        splits.split_tensor(torch.empty(1, length), ContextParallelEntry(1, None, False), "x")
    assert splits.find_tokens(11) is not None, "image and text"
    splits.split_tensor(torch.empty(1, 22), ContextParallelEntry(1, None, False), "mask")
    with pytest.raises(PlanError, match="sequences of 22 and 22 tokens cannot be told apart.*each by itself"):
        splits.find_tokens(11)

"""One product for q, k and v, and for a linear layer with its GELU: what they give, of weights that stay their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.fused import fuse_projections
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.runner.cases import MAKE, run

WIDTH, TOKENS = 32, 24
CPU = torch.device("cpu")


class Products(TorchFunctionMode):
    """Notes how wide each product is."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.widths.append(len(args[1]))
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def attention() -> Any:
    torch.manual_seed(0)
    return Attention(WIDTH, heads=4, dim_head=8, bias=True, added_kv_proj_dim=WIDTH, context_pre_only=False).eval()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with torch.no_grad(), ExitStack() as stack:
        yield stack


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH)


def projected(attention: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """In the order in which a processor of two streams asks."""
    image, text = (attention.to_q, attention.to_k, attention.to_v), ("add_q_proj", "add_k_proj", "add_v_proj")
    return [made for i, name in zip(image, text, strict=True) for made in (i(x), getattr(attention, name)(y))]


def same(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


def test_each_stream_takes_one_product_and_both_are_undone(attention: Any, stack: ExitStack) -> None:
    x, y = tokens(), tokens()
    expected, names = projected(attention, x, y), list(attention.state_dict())
    fuse_projections(stack, [("attn", attention)], CPU)
    with Products() as products:
        same(projected(attention, x, y), expected)
        same(projected(attention, y, x), projected(attention, y, x))
    assert products.widths == [3 * WIDTH] * 6
    assert list(attention.state_dict()) == names
    stack.close()
    with Products() as products:
        same(projected(attention, x, y), expected)
    assert products.widths == [WIDTH] * 6


def changed_in_place(attention: Any) -> None:
    attention.to_k.weight.data += 1.0


def moved(attention: Any) -> None:
    attention.to_k.weight.data = attention.to_k.weight.data + 1.0


def replaced(attention: Any) -> None:
    attention.to_v.weight = nn.Parameter(attention.to_v.weight.data * 2)


@pytest.mark.parametrize("change", [changed_in_place, moved, replaced])
def test_a_weight_that_changes_meanwhile_is_the_one_that_counts(
    attention: Any, stack: ExitStack, change: Callable[[Any], None]
) -> None:
    x, y = tokens(), tokens()
    fuse_projections(stack, [("attn", attention)], CPU)
    before = projected(attention, x, y)
    change(attention)
    after = projected(attention, x, y)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    stack.close()
    same(after, projected(attention, x, y))


class Wrapped(nn.Linear):
    """As an adapter or a quantizer makes them."""


def other_class(attention: Any) -> None:
    attention.to_q = Wrapped(WIDTH, WIDTH)


def hooked(attention: Any) -> None:
    attention.to_v.register_forward_hook(lambda module, args, out: out + 1)


@pytest.mark.parametrize("change", [other_class, hooked, lambda attention: attention.to_v.to("meta")])
def test_layers_that_are_not_plain_are_left_alone(
    attention: Any, stack: ExitStack, change: Callable[[Any], None]
) -> None:
    change(attention)
    before = [dict(vars(linear)) for linear in (attention.to_q, attention.to_k, attention.to_v)]
    fuse_projections(stack, [("attn", attention)], CPU)
    assert [dict(vars(linear)) for linear in (attention.to_q, attention.to_k, attention.to_v)] == before
    assert "forward" in vars(attention.add_q_proj), "the other stream is as it was"


@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_a_runner_makes_them_at_once(name: str) -> None:
    """A failure means that nobody uses it."""
    pipe = MAKE[name]()
    runner = parallelize(pipe, Plan(patches=2, warmup=0))
    layers = [layer for hook in build_block_hooks(pipe.transformer).chain for _, layer in hook.list_attentions()]
    own = {id(getattr(layer, part).weight) for layer in layers for part in ("to_q", "to_k", "to_v")}
    for drawn, wanted in ((pipe, own), (runner, set())):
        with Products() as products:
            run(drawn, name)
        assert own & {id(weight) for weight in products.weights} == wanted

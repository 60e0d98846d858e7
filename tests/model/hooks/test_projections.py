"""One product for q, k and v: what three give, of weights that stay parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.fused import fuse_linear_gelu, fuse_projections
from ditile.model.hooks.generation import Generation
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


def test_weights_are_laid_once_and_held_once(attention: Any, stack: ExitStack) -> None:
    triple = (attention.to_q, attention.to_k, attention.to_v)
    fuse_projections(stack, [("attn", attention)], CPU)
    before = [linear.weight.data_ptr() for linear in triple]
    assert [at - before[0] for at in before] == [0, 4 * WIDTH**2, 8 * WIDTH**2]
    assert attention.to_q.weight.untyped_storage().nbytes() == 12 * WIDTH**2
    stack.close()
    fuse_projections(stack, [("attn", attention)], CPU)
    assert [linear.weight.data_ptr() for linear in triple] == before


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


def elsewhere(attention: Any) -> None:
    attention.to_v.to("meta")


@pytest.mark.parametrize("change", [other_class, hooked, elsewhere])
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


class Fused(TorchDispatchMode):
    """Counts fused products and GELUs of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused = self.apart = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused += func.name() == "mkldnn::_linear_pointwise"
        self.apart += func.name().startswith("aten::gelu")
        return func(*args, **(kwargs or {}))


class Single(nn.Module):
    """As the single blocks of FLUX and HunyuanVideo have it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_mlp, self.act_mlp = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act_mlp(self.proj_mlp(x))
        return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: FeedForward(WIDTH, activation_fn="gelu-approximate"),
    "erf": lambda: FeedForward(WIDTH, activation_fn="gelu"),
    "no bias": lambda: FeedForward(WIDTH, activation_fn="gelu-approximate", bias=False),
    "single": Single,
}

ALWAYS, NEVER = Generation(may_round=True), Generation()


def counted(block: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    with Fused() as actual:
        out = block(x)
    return out, (actual.fused, actual.apart)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("kind", BLOCKS)
def test_they_are_one_where_they_may(stack: ExitStack, kind: str) -> None:
    torch.manual_seed(0)
    block, x = BLOCKS[kind](), torch.randn(2, 9, WIDTH)
    wanted = block(x)
    with ExitStack() as inner:
        fuse_linear_gelu(inner, block, CPU, NEVER)
        out, kernels = counted(block, x)
        assert kernels == (0, 1)
        assert torch.equal(out, wanted), "in a step that must be exact the picture is that of one rank, bit for bit"
    with ExitStack() as inner:
        fuse_linear_gelu(inner, block, CPU, ALWAYS)
        out, kernels = counted(block, x)
        assert kernels == (1, 0)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(block(x), wanted), "nothing is left of it"
    assert counted(block, x)[1] == (0, 1)


def hooked_layers(block: Any) -> None:
    block.proj_mlp.register_forward_hook(lambda *_: None)


def of_a_subclass(block: Any) -> None:
    class Adapted(nn.Linear):
        pass

    block.proj_mlp = Adapted(WIDTH, 4 * WIDTH)


def in_half(block: Any) -> None:
    block.bfloat16()


def trained(block: Any) -> None:
    torch.set_grad_enabled(True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("change", [hooked_layers, of_a_subclass, in_half, trained])
def test_others_stay_two(stack: ExitStack, change: Callable[[Any], None]) -> None:
    block = Single()
    change(block)
    x = torch.randn(2, 9, WIDTH, dtype=next(block.parameters()).dtype)
    fuse_linear_gelu(stack, block, CPU, ALWAYS)
    assert counted(block, x)[1] == (0, 1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_a_layer_that_is_wrapped_in_mid_run_stays_two(stack: ExitStack) -> None:
    """As peft wraps it when a callback loads a LoRA. A failure: GELU is applied twice."""

    class Wrapped(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 1.0

    block: Any = Single()
    x = torch.randn(2, 9, WIDTH)
    wanted = nn.functional.gelu(block.proj_mlp(x) + 1.0, approximate="tanh")
    fuse_linear_gelu(stack, block, CPU, ALWAYS)
    block.proj_mlp = Wrapped(block.proj_mlp)
    assert torch.equal(block(x), wanted)


def not_built(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def not_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(torch.backends.mkldnn), "enabled", False)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("without", [not_built, not_wanted])
def test_without_onednn_both_stay(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, without: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """A failure: on a Mac, whose torch has no such kernel, every stale step ends in an error."""
    block = Single()
    without(monkeypatch)
    fuse_linear_gelu(stack, block, CPU, ALWAYS)
    assert counted(block, torch.randn(2, 9, WIDTH))[1] == (0, 1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(
    ("plan", "fused"),
    [(Plan(patches=2, warmup=1), True), (Plan(patches=2, warmup=8), False), (Plan(warmup=0), False)],
    ids=str,
)
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_a_runner_fuses_what_attends_to_stale_keys(name: str, plan: Plan, fused: bool) -> None:
    """A failure means that nobody uses it, or that a picture which is to be exact was made with it."""
    runner = parallelize(MAKE[name](), plan)
    with Fused() as actual:
        run(runner, name)
    assert bool(actual.fused) == fused
    assert actual.apart, "the first step"

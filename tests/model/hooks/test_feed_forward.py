"""A linear layer and its GELU as one kernel: when, on which layers, and that numbers differ by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers.models.attention import FeedForward
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.model.hooks.fused import fuse_linear_gelu
from ditile.model.hooks.generation import Generation
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.runner.cases import MAKE, run

CPU, WIDTH = torch.device("cpu"), 32
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


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


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with torch.no_grad(), ExitStack() as stack:
        yield stack


ALWAYS, NEVER = Generation(may_round=True), Generation()


def counted(block: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    with Fused() as actual:
        out = block(x)
    return out, (actual.fused, actual.apart)


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


def hooked(block: Any) -> None:
    block.proj_mlp.register_forward_hook(lambda *_: None)


def of_a_subclass(block: Any) -> None:
    class Adapted(nn.Linear):
        pass

    block.proj_mlp = Adapted(WIDTH, 4 * WIDTH)


def in_half(block: Any) -> None:
    block.bfloat16()


def trained(block: Any) -> None:
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("change", [hooked, of_a_subclass, in_half, trained])
def test_others_stay_two(stack: ExitStack, change: Callable[[Any], None]) -> None:
    block = Single()
    change(block)
    x = torch.randn(2, 9, WIDTH, dtype=next(block.parameters()).dtype)
    fuse_linear_gelu(stack, block, CPU, ALWAYS)
    assert counted(block, x)[1] == (0, 1)


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


@pytest.mark.parametrize("without", [not_built, not_wanted])
def test_without_onednn_both_stay(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, without: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """A failure: on a Mac, whose torch has no such kernel, every stale step ends in an error."""
    block = Single()
    without(monkeypatch)
    fuse_linear_gelu(stack, block, CPU, ALWAYS)
    assert counted(block, torch.randn(2, 9, WIDTH))[1] == (0, 1)


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

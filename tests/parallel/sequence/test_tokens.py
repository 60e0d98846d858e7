"""Shared-out tokens equal one process: any axis or two, overlapped, any length and any number of heads, every rank.

Sums or keys come in another order along ring and gather, and matrices have other shapes: 1e-5 relative in fp32, not
bitwise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry
from torch import Tensor

from ditile.parallel.sequence.ulysses import OverlappedUlysses, UlyssesExchange
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, close, divided, draw_plain, run

TOLERANCE = 1e-5
ASYNC = {"async_ulysses": True}
NAMES = [f"{what} {name}" for what in ("project", "exchange") for name in "qkv"]


def plain_and_divided(name: str, plans: list[dict[str, Any]], call: dict[str, Any]) -> list[Tensor]:
    pipe = MAKE[name]()
    found = [draw_plain(name, **call)]
    for plan in plans:
        with divided(pipe, **plan) as runner:
            found.append(run(runner, name, **call))
    return found


def check(pool: Pool, name: str, ranks: int, plans: list[dict[str, Any]], **call: Any) -> None:
    answers = pool.run(plain_and_divided, ranks, name, plans, call)
    for rank, (wanted, *found) in enumerate(answers):
        for plan, got, first in zip(plans, found, answers[0][1:], strict=True):
            close(got, wanted, f"{name} {plan} rank {rank}")
            assert torch.equal(got, first), f"{name} {plan}: ranks 0 and {rank} have other pictures"


@pytest.mark.nightly
@pytest.mark.parametrize("name", MAKE)
def test_two_ranks(pool: Pool, name: str) -> None:
    """A failure in one family means that its table puts a token where it is not; in all, that an exchange is wrong."""
    plans = [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "async_ulysses": True}, {"distrifusion": 2, "warmup": 99}]
    plans += [{"tensor": 2}, {"gather": 2}, {"tensor": 2, "split_scheme": "sequence"}]
    # Of one family the blocks are the same: the other ways to call it meet one axis of tokens and one of weights.
    check(pool, name, 2, plans if name in ("flux true cfg", "pixart sigma", "sd3.5 medium") else plans[::4])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("flux", 3), ("flux", 4), ("flux", 8), *((name, n) for name in ("pixart sigma", "sd3.5 medium") for n in (3, 4))],
)
def test_any_number(pool: Pool, name: str, ranks: int) -> None:
    """Four heads over three and eight ranks, 140 image tokens, text of 7: nothing divides."""
    plans: list[dict[str, Any]] = [{"ulysses": ranks}, {"ring": ranks}, {"gather": ranks}]
    plans += [{"distrifusion": ranks, "warmup": 99}]
    if ranks == 4:
        plans += [{"ulysses": 2, "ring": 2}, {"ulysses": 2, "ring": 2, "async_ulysses": True}]
        plans += [{"ulysses": 2, "distrifusion": 2, "warmup": 99}, {"ulysses": 2, "gather": 2}]
        plans += [{"ulysses": 2, "tensor": 2}, {"gather": 2, "tensor": 2}]
        plans += [{"ring": 2, "tensor": 2, "split_scheme": "sequence"}]
        plans += [{"pipefusion": 2, "tensor": 2, "patches": 3, "warmup": 99}]
        plans += [{"pipefusion": 2, "tensor": 2, "patches": 3, "warmup": 99, "split_scheme": "sequence"}]
    check(pool, name, ranks, plans, height=40, width=56, max_sequence_length=7)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3", "sd3.5 medium"])
@on_ranks(2)
def test_projections_travel_while_the_next_is_made(name: str) -> None:
    """v first, whose exchange begins before the norms and rotary embeddings of k and q.

    A failure means that asynchronous Ulysses waits for an exchange before it computes what could hide it.
    """
    plan = {"ulysses": 2, "async_ulysses": True}
    with divided(MAKE[name](), **plan) as runner:
        runner.trace = True
        run(runner, name)
        events = runner._parts.trace.list_events()
        of_kind = [[event for event in events if event.kind == name] for name in NAMES]
        layers = [dict(zip(NAMES, layer, strict=True)) for layer in zip(*of_kind, strict=True)]
        assert len(layers) >= 8
        for layer in layers:
            for earlier, later in ("vk", "kq", "vq"):
                assert layer[f"exchange {earlier}"].start <= layer[f"project {later}"].start
                assert layer[f"exchange {earlier}"].end >= layer[f"project {later}"].end


def draw_overlapped_and_together(name: str, plan: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Pictures where q, k and v travel one by one, and where the same q, k and v travel together."""
    call: dict[str, Any] = {"height": 40, "width": 56}
    with divided(MAKE[name](), **plan) as runner:
        one_by_one = run(runner, name, **call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OverlappedUlysses, "exchange_overlapped", UlyssesExchange.exchange_overlapped)
            return one_by_one, run(runner, name, **call)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_the_order_in_which_they_travel_changes_no_bit(pool: Pool, name: str) -> None:
    """A failure means that v arrives as q, or that ranks have other heads of it."""
    for ranks in (2, 3):  # of four heads
        for one_by_one, together in pool.run(draw_overlapped_and_together, ranks, name, {"ulysses": ranks} | ASYNC):
            assert torch.equal(one_by_one, together)


def uneven_refused(plan: dict[str, Any], call: dict[str, Any]) -> str:
    with divided(MAKE["flux"](), **plan) as runner, pytest.raises(PlanError) as caught:
        run(runner, "flux", **call)
    return str(caught.value)


def test_uaa(pool: Pool) -> None:
    """Off, it forbids what does not divide, and says what would; on or off, what divides is what it is without.

    A failure means that the flag is read by nobody.
    """
    even = {"height": 32, "width": 32, "max_sequence_length": 8}
    check(pool, "flux", 2, [{"ulysses": 2, "uaa": uaa} for uaa in (True, False, None)], **even)
    check(pool, "flux", 2, [{"ulysses": 2, "uaa": True}], height=40, width=56, max_sequence_length=7)
    for plan in ({"ulysses": 2, "uaa": False}, {"ring": 2, "uaa": False}):
        for message in pool.run(uneven_refused, 2, plan, even | {"max_sequence_length": 7}):
            assert "7 tokens are not divided" in message and "leave uaa out" in message and "\n" not in message


@contextmanager
def counted_kernel() -> Iterator[list[int]]:
    """How often the kernel `_native_math` was asked."""
    calls, stock = [0], registry._backends[AttentionBackendName._NATIVE_MATH]

    @functools.wraps(stock)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, AttentionBackendName._NATIVE_MATH, counted)
        yield calls


def kernels(name: str) -> tuple[int, Tensor, Tensor, str]:
    """How often the kernel that was chosen was asked, the picture, the plain one; what is said of an unknown one."""
    pipe = MAKE[name]()
    wanted = run(pipe, name)
    with counted_kernel() as calls:
        got = run(parallelize(pipe, Plan(ulysses=2), attention="_native_math"), name)
    with pytest.raises(ModelError) as caught:
        parallelize(pipe, Plan(ulysses=2), attention="quick")
    return calls[0], got, wanted, str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_the_kernel_that_was_chosen(pool: Pool, name: str) -> None:
    """A failure means that a family keeps to its own kernel, whatever is asked for."""
    for calls, got, wanted, message in pool.run(kernels, 2, name):
        assert calls > 4
        close(got, wanted, name)
        assert "'quick'" in message and "native" in message and "\n" not in message


@on_ranks(2)
def test_fused_projections_cannot_travel_apart() -> None:
    """A failure means that FLUX is projected by weights that were fused away from, or in one piece unsaid."""
    pipe = MAKE["flux"]()
    pipe.transformer.fuse_qkv_projections()
    with divided(pipe, ulysses=2, async_ulysses=True) as runner, pytest.raises(ModelError) as caught:
        run(runner, "flux")
    message = str(caught.value)
    assert "call pipe.transformer.unfuse_qkv_projections()" in message and "\n" not in message

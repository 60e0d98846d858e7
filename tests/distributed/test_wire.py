"""Messages in eight bits a number: how exact one is, what a plan sends, and that all ranks draw one picture of it.

A model's numbers are not Gaussian's: a few channels are far larger than the others. So messages of that kind are tested
too, and the errors of int8 stay within what `distributed.wire` says of any numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.transport import Traffic, start_gather
from ditile.distributed.wire import VectorPacking, select_packings
from ditile.plan import cost
from ditile.plan.plan import Plan
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, divided, draw_plain, run

MOST_ERROR = {"fp8": 0.03, "int8": 0.01}
"""Relative errors of a message."""
SIZES = (7, 32, 72, 128, 3072)


def measure_error(got: Tensor, wanted: Tensor) -> float:
    """The length of the difference as a share of the length of what was sent."""
    return float(torch.linalg.vector_norm((got - wanted).double()) / torch.linalg.vector_norm(wanted.double()))


def make_messages(size: int) -> dict[str, Tensor]:
    """Messages `[3, 5, size]`: tokens alike, some far larger, with a few large channels, and with one channel alone."""
    random = torch.Generator().manual_seed(size)
    gaussian = torch.randn(3, 5, size, generator=random)
    channels = torch.ones(size)
    channels[:: max(size // 3, 1)] = 40
    alone = torch.zeros(3, 5, size)
    alone[..., 0] = gaussian[..., 0]
    unlike = gaussian * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    return {"gaussian": gaussian, "unlike tokens": unlike, "large channels": gaussian * channels, "alone": alone}


@pytest.mark.parametrize("wire_dtype", MOST_ERROR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_message_is_nearly_what_was_sent(wire_dtype: str, dtype: torch.dtype) -> None:
    """A failure means that scales are of too many numbers, or are rounded down, so that the largest code overflows."""
    packing = VectorPacking(wire_dtype)
    for size in SIZES:
        for name, message in make_messages(size).items():
            sent = message.to(dtype)
            packed = packing.pack_vectors(sent)
            got = packing.unpack_vectors(packed, size, dtype)
            assert packed.shape == packing.pack_shape(sent.shape) and got.dtype == dtype and got.shape == sent.shape
            tokens = measure_error(got, sent), max(map(measure_error, got.flatten(0, 1), sent.flatten(0, 1)))
            assert tokens[0] < MOST_ERROR[wire_dtype], (name, size, tokens)
            assert (got.signbit() == sent.signbit())[got != 0].all()


@pytest.mark.parametrize("wire_dtype", MOST_ERROR)
def test_numbers_that_have_no_code(wire_dtype: str) -> None:
    """A failure means that zeros become NaN, or that NaN, by which a rehearsal and a check know a patch, is lost."""
    packing, sent = VectorPacking(wire_dtype), torch.zeros(3, 32)
    sent[1, 3], sent[2, 30] = math.nan, math.inf
    got = packing.unpack_vectors(packing.pack_vectors(sent), 32, sent.dtype)
    assert torch.equal(got[0], sent[0]) and got[1, 3].isnan() and got[2, 30].isnan()
    nothing = torch.empty(2, 0, 32)
    assert packing.unpack_vectors(packing.pack_vectors(nothing), 32, nothing.dtype).shape == nothing.shape


class Sent(NamedTuple):
    """Of a plan on a rank: bytes by kind, counted and by formula; messages by kind; the picture and the plain one."""

    counted: dict[str, int]
    by_formula: dict[str, int]
    messages: dict[str, int]
    picture: Tensor
    plain: Tensor


def draw_plans(name: str, plans: list[str]) -> list[Sent]:
    pipe, call, drawn = MAKE[name](), {"height": 40, "width": 56}, []
    plain = draw_plain(name, **call)
    for text in plans:
        with divided(pipe, **Plan.parse(text).to_dict()) as runner:
            picture, job, traffic = run(runner, name, **call), runner.job(), runner.mesh.traffic
            assert job is not None
            counted, messages = ({k: n for k, n in d.items() if k != "control"} for d in (traffic.bytes, traffic.calls))
            drawn.append(Sent(counted, cost.count_traffic_bytes(job, runner.mesh.rank), messages, picture, plain))
    return drawn


PLANS = {
    2: ["pipefusion=2 patches=3", "ulysses=2", "ulysses=2 async_ulysses=true", "ring=2", "gather=2",
        "distrifusion=2", "pipefusion=2 warmup_mode=sequence"],
    4: ["pipefusion=4 warmup_mode=sequence", "pipefusion=2 patches=3 ulysses=2", "pipefusion=2 patches=3 ring=2",
        "pipefusion=2 tensor=2 patches=2 split_scheme=sequence", "ulysses=4", "ring=4", "ulysses=2 ring=2",
        "ulysses=2 gather=2", "distrifusion=2 ulysses=2"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), [("flux", 2), ("flux", 4), ("pixart sigma", 2), ("sd3.5 medium", 4)])
def test_plans_send_what_the_formula_says_and_all_ranks_draw_one_picture(pool: Pool, name: str, ranks: int) -> None:
    """A failure means that a kind of message is not packed, or one is that must be exact, or ranks unpack unlike."""
    plans = [f"{plan}{wire}" for plan in PLANS[ranks] for wire in ("", " wire_dtype=int8", " wire_dtype=fp8")]
    of_ranks = pool.run(draw_plans, ranks, name, plans)
    for rank, of_plans in enumerate(of_ranks):
        for index, (text, sent) in enumerate(zip(plans, of_plans, strict=True)):
            where = f"{name}, {text}, rank {rank}"
            assert {kind: size for kind, size in sent.counted.items() if size} == sent.by_formula, where
            assert torch.equal(sent.picture, of_ranks[0][index].picture), where
            exact, wire = of_plans[index - index % 3], Plan.parse(text).wire_dtype
            assert sent.messages == exact.messages, where
            if wire is None:
                continue
            packed = {kind for kind in sent.counted if sent.counted[kind] < exact.counted[kind]}
            assert packed == {kind for kind in exact.by_formula if kind in cost.PACKED_KINDS}, where
            assert measure_error(sent.picture, exact.picture) < 0.1, where
            assert not torch.equal(sent.picture, exact.picture), where


@on_ranks(2)
def test_what_must_be_exact_is_sent_as_it_is() -> None:
    """A failure means that predictions, or other kinds that steps are made of, are rounded."""
    wire_dtype = "int8"
    traffic = Traffic(packings=select_packings(Plan(ring=2, wire_dtype=wire_dtype)))
    own, group = torch.randn(2, 32, generator=torch.Generator().manual_seed(dist.get_rank())), dist.group.WORLD
    kinds = ("prediction", "keys")
    exact, packed = [start_gather(own, [(2, 32)] * 2, group, traffic, kind).wait_for_tensors() for kind in kinds]
    for rank, (one, other) in enumerate(zip(exact, packed, strict=True)):
        assert torch.equal(one, torch.randn(2, 32, generator=torch.Generator().manual_seed(rank)))
        assert 0 < measure_error(other, one) < MOST_ERROR["int8"]

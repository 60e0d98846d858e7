"""What ring and DistriFusion do while messages are under way, in what order, and how precisely ring merges its blocks.

One rank, in this process: a transport that writes down what is started and waited for stands for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions
from ditile.model.hooks.kv_store import AgeChecks
from ditile.parallel.sequence import distrifusion, ring
from ditile.parallel.sequence.distrifusion import DistriFusionKeys
from ditile.parallel.sequence.ring import RingKeys
from ditile.plan.schedule import MicroStep, PatchSchedule

OWN = 1
GROUP: Any = object()


class Sent:
    """Messages that were started; waiting for them is written down."""

    def __init__(self, log: list[str], name: Any, received: list[Tensor]) -> None:
        self._log, self._name, self.received = log, name, received
        log.append(f"start {name}")

    def wait_for_tensors(self) -> list[Tensor]:
        self.wait_for_works()
        return self.received

    def wait_for_works(self) -> None:
        self._log.append(f"wait {self._name}")

    def list_received(self) -> list[Tensor]:
        return self.received


class Exactly:
    """Attention in fp64, given in the dtype of the queries, and the log-sum-exp in fp32, as kernels give it."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.seen = log, [torch.empty(0)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scale: float | None = None) -> Tensor:
        return self.attend_with_lse(q, k, v, mask=mask, scale=scale)[0]

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        self._log.append("attend")
        self.seen.append(k.clone())
        out, lse = attention(q, k, v)
        return out.to(q.dtype), lse.float()


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64: `[B, S, N, H]`, and the log-sum-exp `[B, S, N]`."""
    scores = torch.einsum("bqnh,bknh->bnqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v.double()), scores.logsumexp(-1).transpose(1, 2)


def tokens_of(lengths: Sequence[int]) -> LayerTokens:
    """Image tokens alone, so many on each rank."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    runs = tuple((range(start, start + count),) for start, count in zip(starts, lengths, strict=True))
    return LayerTokens(runs, OWN, sum(lengths), range(sum(lengths)), 0, False)


def round_the_ring(patch: pytest.MonkeyPatch, q: Tensor, blocks: Sequence[Tensor]) -> tuple[Tensor, list[str]]:
    """What one rank of a ring makes of its queries, the keys and values of all ranks given, and what it did."""
    log: list[str] = []
    size, lengths = len(blocks), [block.shape[2] for block in blocks]
    started = iter(range(1, size))

    def start_shift(x: Tensor, shape: Sequence[int], *_: Any) -> Sent:
        turn = next(started)
        assert torch.equal(x, blocks[(OWN - turn + 1) % size]), "passes on what has come last"
        coming = blocks[(OWN - turn) % size]
        assert coming.shape == tuple(shape)
        return Sent(log, turn, [coming])

    patch.setattr(ring, "start_shift", start_shift)
    keys = RingKeys(Axis("ring", tuple(range(size)), OWN, GROUP), Exactly(log), Traffic(), lambda *_: None)
    return keys.attend_to_keys(q, *blocks[OWN], tokens_of(lengths), AttentionOptions()), log


def test_a_block_of_the_ring_is_attended_to_while_the_next_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a rank computes nothing while it waits for keys, or attends to a block twice."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=random, dtype=torch.float64)
    blocks = [torch.randn(2, 2, n, 3, 8, generator=random, dtype=torch.float64) for n in (5, 4, 4)]
    out, log = round_the_ring(monkeypatch, q, blocks)
    assert log == ["start 1", "attend", "wait 1", "start 2", "attend", "wait 2", "attend"]
    wanted, _ = attention(q, *torch.cat(blocks, 2))
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


def test_blocks_in_bf16_are_merged_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of a block are all alike, so that what is merged is exact, and only the result is rounded: once.

    A failure means that ring is coarser than attention on one rank, the more so the more ranks there are.
    """
    random = torch.Generator().manual_seed(0)
    q = torch.randn(1, 64, 4, 16, generator=random).bfloat16()
    blocks = []
    for _ in range(8):
        k, value = torch.randn(1, 6, 4, 16, generator=random), torch.randn(1, 1, 4, 16, generator=random)
        blocks.append(torch.stack([k, value.expand_as(k)]).bfloat16())
    out, _ = round_the_ring(monkeypatch, q, blocks)
    wanted, _ = attention(q, *torch.cat(blocks, 2))
    assert out.dtype == torch.bfloat16
    half = wanted.abs() * 2**-8  # of the distance between neighbours, at most
    assert ((out.double() - wanted).abs() <= half + 1e-6).all()


def test_distrifusion_waits_for_a_layer_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, a synchronous step and three stale ones. Keys that come have the number of the step they left in.

    A failure means that a rank waits for keys in the step that sends them, so that nothing hides their way; or that it
    attends to keys of another age.
    """
    log: list[str] = []
    lengths, steps = (3, 2, 2), 4
    generation = Generation(PatchSchedule(stages=1, patches=1, steps=steps, warmup=1, distrifusion=3))

    def start_exchange(sends: Any, receives: Any, like: Tensor, *_: Any) -> Sent:
        step = float(generation.micro_step.step)
        assert [rank for rank, _ in sends] == [rank for rank, _ in receives] == [0, 2]
        return Sent(log, f"{at} of {generation.micro_step.step}", [torch.full(shape, step) for _, shape in receives])

    monkeypatch.setattr(distrifusion, "start_exchange", start_exchange)
    axis, kernel = Axis("distrifusion", (0, 1, 2), OWN, GROUP), Exactly(log)
    layers = {
        name: DistriFusionKeys(generation, name, axis, kernel, Traffic(), check=AgeChecks()) for name in ("a", "b")
    }
    for step in range(steps):
        generation.enter_micro_step(MicroStep(step, None))
        fresh = torch.full((1, 2, 1, 1), float(step))
        for at, keys in layers.items():  # noqa: B007 (what is sent has its name)
            keys.attend_to_keys(fresh, fresh, fresh, tokens_of(lengths), AttentionOptions())
            before = float(max(0, step - 1))
            assert kernel.seen[-1].flatten().tolist() == [before] * 3 + [step] * 2 + [before] * 2
    assert log == [
        *("start a of 0", "wait a of 0", "attend", "start b of 0", "wait b of 0", "attend"),
        *("start a of 1", "attend", "start b of 1", "attend"),
        *("wait a of 1", "start a of 2", "attend", "wait b of 1", "start b of 2", "attend"),
        *("wait a of 2", "attend", "wait b of 2", "attend"),
    ]

"""One attention layer over ranks equals it on one: grouped-query heads, masks of every shape, a scale, odd lengths.

The sums of softmax are made in another order along ring: 1e-5 relative in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ditile.distributed.mesh import Axis, build_mesh
from ditile.distributed.transport import Traffic
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import expand_mask
from ditile.model.hooks.protocols import HeadExchange
from ditile.parallel.attention.core import AttentionCore, FreshKeys
from ditile.parallel.attention.kernel import NATIVE
from ditile.parallel.sequence.masks import GatheredKeyMaskSource
from ditile.parallel.sequence.ring import AxisGather, RingKeys, merge_attention
from ditile.parallel.sequence.ulysses import UlyssesExchange
from ditile.plan.errors import ModelError
from ditile.plan.layout import pick_even_chunk
from ditile.plan.plan import Plan
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, close, different, divided, run

LENGTH, BATCH, SIZE = 23, 2, 8
MASKS = ("none", "flat", "boolean", "additive", "by head", "whole blocks", "expanded", "pairs")


def mask_of(kind: str, heads: int) -> Tensor | None:
    seen = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.6
    seen[:, -1] = True
    if kind == "none":
        return None
    if kind == "flat":
        return seen
    if kind == "whole blocks":  # all that the first of two or three ranks has
        seen[1, :12] = False
    if kind == "pairs":
        return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & seen[:, None, None] | torch.eye(
            LENGTH, dtype=torch.bool
        )
    if kind == "expanded":
        return seen[:, None, None].expand(-1, 1, LENGTH, -1)
    if kind in ("boolean", "whole blocks"):
        return seen[:, None, None]
    least = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)[:, None, None]
    return least if kind == "additive" else least + 0.1 * torch.arange(heads)[None, :, None, None]


def attended(plan: dict[str, int], heads: int, groups: int) -> list[tuple[Tensor, Tensor]]:
    """On a rank: what it made of its tokens, and what one process makes of them, with each mask."""
    mesh = build_mesh(Plan(**plan))
    ranks, own = mesh.sequence.num_ranks, mesh.sequence.index
    runs = tuple((pick_even_chunk(range(LENGTH), ranks, rank),) for rank in range(ranks))
    tokens = LayerTokens(runs, own, LENGTH, range(LENGTH), 0, False)
    exchange: Any = (
        UlyssesExchange(mesh["ulysses"], mesh.traffic, lambda *_: None)
        if mesh["ulysses"].num_ranks > 1
        else HeadExchange()
    )
    keys: Any = FreshKeys(NATIVE)
    if mesh["ring"].num_ranks > 1:
        keys = RingKeys(mesh["ring"], NATIVE, mesh.traffic, lambda *_: None)
    if mesh["gather"].num_ranks > 1:
        keys = FreshKeys(NATIVE, AxisGather(mesh["gather"], mesh.traffic, lambda *_: None))
    random = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, LENGTH, heads, SIZE, generator=random)
    k, v = torch.randn(2, BATCH, LENGTH, groups, SIZE, generator=random)
    mine = slice(runs[own][0].start, runs[own][0].stop)
    results = []
    for kind in MASKS:
        whole = mask_of(kind, heads)
        core = AttentionCore(lambda: None, exchange, keys, gathered(mesh), turn=torch.tensor(0))  # type: ignore[arg-type, return-value]
        # One that tells queries apart is given whole.
        mask = whole if whole is None or kind == "pairs" else whole[..., mine]
        own_qkv = (q[:, mine], k[:, mine], v[:, mine])
        got = core.attend_to_tokens(*own_qkv, mask, scale=0.3, tokens=tokens)
        wanted = NATIVE(q, k, v, mask=None if whole is None else expand_mask(whole, BATCH), scale=0.3)
        results.append((got, wanted[:, mine]))
        sent = dict(mesh.traffic.calls)
        assert torch.equal(core.attend_to_tokens(*own_qkv, whole, scale=0.3, tokens=tokens), got), (
            "one of all keys is cut"
        )
        assert mesh.traffic.calls.get("masks") == sent.get("masks"), "without a message"
    return results


def gathered(mesh: Any) -> GatheredKeyMaskSource:
    return GatheredKeyMaskSource(mesh.sequence, mesh["ulysses"], mesh.traffic)


PLANS = [
    {"ulysses": 2}, {"ring": 2}, {"gather": 2}, {"ulysses": 3}, {"ulysses": 2, "ring": 2}, {"ulysses": 2, "gather": 2},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_heads_and_masks(pool: Pool, plan: dict[str, int]) -> None:
    """A failure means that a query head meets the keys of another group, that a mask lies on other keys than its own,
    or that a block without a key that is attended to poisons the others."""
    for heads, groups in ((4, 4), (4, 1), (6, 3), (3, 1)):
        answers = pool.run(attended, math.prod(plan.values()), plan, heads, groups)
        for rank, results in enumerate(answers):
            for kind, (got, wanted) in zip(MASKS, results, strict=True):
                close(got, wanted, f"{plan} {heads}/{groups} heads, mask {kind}, rank {rank}")


@on_ranks(2)
def test_a_mask_travels_once() -> None:
    """A failure means a message per layer and step for what never changes, or a mask that is kept when it does."""
    mesh = build_mesh(Plan(ulysses=2))
    masks, calls = gathered(mesh), []
    runs = (range(3),), (range(3, 5),)
    tokens = LayerTokens(runs, mesh.rank, 5, range(5), 0, False)
    first, second = (torch.ones(1, 1, 1, len(runs[mesh.rank][0]), dtype=torch.bool) for _ in range(2))
    for mask in (first, first, second, first):
        masks.gather_key_mask(mask, 1, tokens, 4)
        calls.append(mesh.traffic.calls["masks"])
    assert calls == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        *((shape, "tells queries apart") for shape in ((2, 1, 5, 5), (5, 5), (2, 5, 5), (1, 1, 5, 10))),
        *(((1, n), f"mask of {n} keys came with 5 keys of 10 on this rank; give one of all") for n in (1, 4, 6, 46)),
    ],
)
def test_masks_that_cannot_be_cut(shape: tuple[int, ...], says: str) -> None:
    """A failure means that a mask of the queries at hand is cut as if it were one of all of them, or that ranks send
    each other messages that do not fit: an error of torch's, or a hang."""
    masks = GatheredKeyMaskSource(Axis("sequence", (0, 1), 0, object()), Axis(), Traffic())  # type: ignore[arg-type]
    tokens = LayerTokens(((range(5),), (range(5, 10),)), 0, 10, range(10), 0, False)
    with pytest.raises(ModelError, match=says):
        masks.gather_key_mask(torch.ones(shape, dtype=torch.bool), 2 if shape[0] == 2 else 1, tokens, 4)


def masked_words(plans: list[dict[str, int]]) -> None:
    """FLUX that leaves out half of its 12 text tokens, in a picture of 48 tokens."""
    mask = torch.ones(1, 1, 1, 60, dtype=torch.bool)
    mask[..., 6:12] = False
    pipe, call = MAKE["flux"](), {"joint_attention_kwargs": {"attention_mask": mask}}
    plain = run(pipe, "flux", **call)
    different(plain, run(pipe, "flux"), "the mask")
    for plan in plans:
        if "tensor" in plan:  # this rank has all queries, which such a mask may tell apart
            call["joint_attention_kwargs"]["attention_mask"] = mask.expand(1, 1, 60, 60).clone()
        with divided(pipe, **plan) as runner:
            close(run(runner, "flux", **call), plain, plan)


@pytest.mark.parametrize("plans", [[{"ulysses": 2}, {"ring": 2}, {"tensor": 2}], [{"ulysses": 3}]], ids=str)
def test_a_mask_of_the_whole_sequence(pool: Pool, plans: list[dict[str, int]]) -> None:
    """As a user gives it. A failure means that every rank takes it for one of its own keys."""
    pool.run(masked_words, Plan(**plans[0]).world, plans)


def test_merging_nothing_changes_nothing() -> None:
    """A failure means that a block without any key that is attended to makes NaN of the rest."""
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for one, other in (((out, lse), nothing), (nothing, (out, lse))):
        merged, merged_lse = merge_attention(one, other)
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge_attention(nothing, nothing)
    assert torch.equal(merged, nothing[0]) and torch.equal(merged_lse, nothing[1])

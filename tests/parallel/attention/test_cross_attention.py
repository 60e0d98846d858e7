"""Attention to a padded text: what the stock processor gives, over the keys alone that some row attends to."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.nn import functional

from ditile.model.refinements import PixArtCrossAttention

LENGTH, WIDTH = 200, 32


def rows(*seen: list[int]) -> Tensor:
    """`[B, 1, L]`: each row attends to these keys alone."""
    mask = torch.full((len(seen), 1, LENGTH), -10000.0)
    for row, keys in zip(mask, seen, strict=True):
        row[0, keys] = 0
    return mask


MASKS = {
    "short prompts": (rows([0], [0, 1, 2]), 64, True),
    "a key at the end of a unit": (rows([63], [0]), 64, True),
    "a key beyond it": (rows([64], [0]), 128, True),
    "holes": (rows([3, 100], [5]), 128, True),
    "a row that sees nothing": (rows([], [0]), LENGTH, True),
    "all keys": (rows(list(range(LENGTH)), list(range(LENGTH))), LENGTH, False),
    "a whole unit": (rows(list(range(64)), list(range(64))), 64, False),
    "a key that counts for little": (rows([0], [0]) + 5e3 * (torch.arange(LENGTH) == 150), 192, True),
}


def once() -> Callable[[Hashable, Callable[[], Any]], Any]:
    known: dict[Hashable, Any] = {}

    def constant(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = make()
        return known[key]

    return constant


@pytest.mark.parametrize("case", MASKS)
def test_it_is_the_stock_processor(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit in fp32. A failure means that a key was left out that counts, or that sums are ordered otherwise."""
    mask, length, _ = MASKS[case]
    torch.manual_seed(0)
    attention = Attention(query_dim=WIDTH, cross_attention_dim=WIDTH, heads=4, dim_head=8)
    x, text = torch.randn(2, 96, WIDTH), torch.randn(2, LENGTH, WIDTH)
    wanted = attention(x, encoder_hidden_states=text, attention_mask=mask)
    lengths, stock = [], functional.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, *rest: Any, **also: Any) -> Tensor:
        lengths.append(k.shape[2])
        return stock(q, k, *rest, **also)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    attention.set_processor(PixArtCrossAttention(once()))
    for _ in range(2):
        assert torch.equal(attention(x, encoder_hidden_states=text, attention_mask=mask), wanted)
    assert lengths == [length, length]

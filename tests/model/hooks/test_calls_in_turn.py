"""A layer that attends several times in each call: its calls are told apart by their turn."""

from __future__ import annotations

import pytest
import torch

from ditile.model.hooks.attention_hooks import CallsInTurn
from ditile.plan.errors import StateError


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
def test_turns_of_a_call(turns: int) -> None:
    """A failure means that a layer that attends once more, or once less, reads the keys of another call of it."""
    layer, x = CallsInTurn("blocks.0.attn", [None, None], 2), torch.zeros(1, 2, 1, 4)
    for _ in range(turns):
        layer.attend(x, x, x)
    if turns in (0, 2):
        layer.end_block()
    else:
        with pytest.raises(StateError, match=f"blocks.0.attn attended {turns} times in a call and 2 times"):
            layer.end_block()
    layer.attend(x, x, x)
    layer.attend(x, x, x)
    layer.end_block()


@pytest.mark.parametrize("turns", [1, 2])
def test_turns_of_adapters_are_the_same_in_all_calls(turns: int) -> None:
    """There may be none of them, but not now and then. A failure: keys of a picture are read as another's."""
    layer, x = CallsInTurn("blocks.0.attn", [None, None], 1), torch.zeros(1, 2, 1, 4)
    for _ in range(2):
        for _ in range(turns):
            layer.attend(x, x, x)
        layer.end_block()
    for _ in range(3 - turns):
        layer.attend(x, x, x)
    with pytest.raises(StateError, match=f"attended {3 - turns} times in a call and {turns} times"):
        layer.end_block()

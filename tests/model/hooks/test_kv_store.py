"""What survives a step: keys and values in the order of the sequence, with the step that wrote each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditile.model.hooks.kv_store import GenerationMemory, KeyStore
from ditile.plan.errors import StateError

TOKENS = 8


def keys(tokens: list[float], batch: int = 1) -> Tensor:
    """One head of size 1: `[B, S, 1, 1]`."""
    return torch.tensor(tokens, dtype=torch.float64).view(1, -1, 1, 1).expand(batch, -1, 1, 1).contiguous()


def test_a_segment_goes_over_its_stale_self() -> None:
    """A whole step, then both segments, one of them in two runs. Values go with their keys.

    A failure means that attention reads a token at the wrong place, or takes stale keys for fresh ones.
    """
    store = KeyStore(TOKENS, 2)
    store.write_keys(keys(list(range(TOKENS))), -keys(list(range(TOKENS))), [range(TOKENS)])
    store.mark_written(3)
    assert store.segment_ages(3) == (0, 0)
    assert store.segment_ages(4) == (1, 1)
    fresh = keys([10.0, 11.0, 16.0, 17.0])
    k, v = store.write_keys(fresh, -fresh, [range(2), range(6, 8)])
    store.mark_written(4, 0)
    assert k.flatten().tolist() == [10, 11, 2, 3, 4, 5, 16, 17]
    assert torch.equal(v, -k)
    assert store.segment_ages(4) == (0, 1)


def test_without_warmup_the_rest_is_zero() -> None:
    """The first patch of the first step attends to zeros behind it, and their age is unknown."""
    store = KeyStore(TOKENS, 2)
    k, _ = store.write_keys(keys([5.0] * 4), keys([5.0] * 4), [range(4)])
    store.mark_written(0, 0)
    assert k.flatten().tolist() == [5.0] * 4 + [0.0] * 4
    assert store.segment_ages(0) == (0, None)
    assert store.buffer_bytes == 2 * TOKENS * 8


def test_another_batch_is_refused() -> None:
    """Stale keys belong to rows. A failure means that a picture would read another one's keys."""
    store = KeyStore(TOKENS, 2)
    store.write_keys(keys([0.0] * TOKENS, batch=2), keys([0.0] * TOKENS, batch=2), [range(TOKENS)])
    with pytest.raises(StateError, match="from 2 to 1 rows"):
        store.write_keys(keys([0.0] * 4), keys([0.0] * 4), [range(4)])


def test_what_is_kept_does_not_follow_its_source() -> None:
    """The caller's tensors may be written over afterwards."""
    store, source = KeyStore(TOKENS, 1), keys([1.0] * TOKENS)
    k, _ = store.write_keys(source, source, [range(TOKENS)])
    source.zero_()
    assert k.flatten().tolist() == [1.0] * TOKENS


def test_stores_belong_to_branch_and_layer() -> None:
    """A failure means that guidance reads the keys of the other prompt."""
    memory = GenerationMemory()
    made = [memory.get_key_store(b, name, TOKENS, 2) for b in (0, 1) for name in ("a", "b")]
    assert len(set(map(id, made))) == 4
    assert memory.get_key_store(1, "a", TOKENS, 2) is made[2]
    assert memory.key_bytes == 0
    made[0].write_keys(keys([0.0] * TOKENS), keys([0.0] * TOKENS), [range(TOKENS)])
    assert memory.key_bytes == 2 * TOKENS * 8


def test_slices_follow_their_source() -> None:
    """A part is cut anew if it is of another tensor, even of the same values, or of a dictionary filled anew."""
    memory, made = GenerationMemory(), iter(range(100))
    first, second, cache = torch.zeros(2), torch.zeros(2), {"cache": object()}
    sources = (first, first, second, first, cache, cache)
    actual = [memory.get_cached_slice("x", source, lambda: next(made)) for source in sources]
    assert actual == [0, 0, 1, 2, 3, 3]
    cache["cache"] = object()
    assert memory.get_cached_slice("x", cache, lambda: next(made)) == 4


@pytest.mark.parametrize("rows", [1, 2])
def test_masks_of_micro_batches_of_one_row(rows: int) -> None:
    """Two rows of a batch, one after the other; at first a mask was there for both, or none.

    A failure means that a row attends to what is padding in another one's text.
    """
    store, own = KeyStore(TOKENS, 2), torch.tensor([[[[True] * TOKENS]], [[[True] * 6 + [False] * 2]]])
    if rows == 1:
        store.write_mask(own[:1], [range(TOKENS)])
    for row in range(2):
        got = store.write_mask(own[row : row + 1], [range(TOKENS)], range(row, row + 1), 2)
        assert torch.equal(got, own[row : row + 1])
    assert torch.equal(store.write_mask(own[..., :4], [range(4)]), own)

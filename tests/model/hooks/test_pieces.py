"""Which elements belong to a patch or a piece: of latents, tokens and masks, and of calls in turn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ditile.model.hooks.attention_hooks import CallsInTurn, MaskOfRealPairs
from ditile.model.hooks.pieces import Piece, RehearsedPrediction
from ditile.model.hooks.token_arguments import take_runs, write_runs
from ditile.plan.errors import ModelError, StateError
from ditile.plan.layout import Grid

NAN = float("nan")
PACKED, GRID, VIDEO = (2, 12, 4), (2, 4, 6, 8), (1, 4, 3, 6, 8)


def mark(shape: tuple[int, ...], dim: int, run: slice) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.movedim(dim, 0)[run] = True
    return mask


def mark_flat(shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """A run of the flattened frames, rows and columns of a video, which is not a run along any one of them."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.flatten(2)[..., start:stop] = True
    return mask


@pytest.mark.parametrize(
    ("mask", "is_run"),
    [
        (mark(PACKED, 1, slice(3, 7)), True),
        (mark(GRID, 2, slice(0, 2)), True),
        (mark(VIDEO, 2, slice(1, 3)), True),
        (mark(GRID, 3, slice(2, 8)), True),
        (mark_flat(VIDEO, 40, 90), False),
        (torch.ones(GRID, dtype=torch.bool), True),
        (torch.zeros(GRID, dtype=torch.bool), False),
    ],
)
def test_a_piece_takes_and_puts_what_is_marked(mask: Tensor, is_run: bool) -> None:
    piece, x = Piece.from_mask(mask), torch.randn(mask.shape)
    assert (piece.run is not None) == is_run and piece.is_empty == (not mask.any())
    taken = piece.take(x)
    assert taken.shape == torch.Size(piece.shape(x))
    assert torch.equal(taken.flatten(), x[mask].view(x.shape[0], -1).flatten()) or is_run
    for target in (torch.zeros(mask.shape), torch.zeros(mask.shape).transpose(0, -1).contiguous().transpose(0, -1)):
        piece.put(target, taken)
        assert torch.equal(target, torch.where(mask, x, 0.0))


def test_a_statistic_of_the_whole_is_nan_only_where_all_of_it_is() -> None:
    """A failure: guidance that is rescaled by the spread of a prediction would make every patch that of all tokens."""
    x = torch.randn(2, 12, 4)
    x[:, 3:7] = NAN
    prediction = x.as_subclass(RehearsedPrediction)
    rescaled = (prediction - prediction.mean()) / prediction.std(dim=[1, 2], keepdim=True)
    assert torch.equal(torch.isnan(rescaled), torch.isnan(x))
    by_token = prediction / prediction.norm(dim=-1, keepdim=True)
    assert torch.equal(torch.isnan(by_token), torch.isnan(x))
    assert torch.isnan(prediction[:, 3:7].mean())
    assert not torch.isnan(prediction.sum()) and torch.isnan(prediction[:, 3].sum(dim=-1)).all()


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.data())
def test_rows_of_frames_are_written_where_they_were_taken(
    frames: int, rows: int, width: int, data: st.DataObject
) -> None:
    grid = Grid(rows, width, frames)
    start = data.draw(st.integers(0, rows - 1))
    text = range(grid.num_tokens, grid.num_tokens + 3)
    runs = (*grid.locate_rows(start, data.draw(st.integers(start + 1, rows))), text)
    x = torch.randn(2, grid.num_tokens + 3, 5)
    whole = torch.zeros_like(x)
    write_runs(whole, take_runs(x, runs, 1), runs, 1)
    at = torch.tensor([token for run in runs for token in run])
    assert torch.equal(whole[:, at], x[:, at]) and whole.count_nonzero() == x[:, at].count_nonzero()


class Noted:
    """Attention that keeps the mask it was given."""

    overlaps = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        self.mask = mask
        return q


def test_only_a_boolean_mask_of_pairs_is_one_of_keys() -> None:
    """A failure means that padded keys, to which an additive mask of ones and zeros attends, are left out."""
    core, q, real = Noted(), torch.zeros(1, 3, 1, 2), torch.tensor([True, True, False])
    pairs = real[None, None, None] & real[None, None, :, None]
    MaskOfRealPairs(core).attend(q, q, q, mask=pairs)
    assert core.mask is not None and core.mask.equal(real[None, None, None])
    with pytest.raises(ModelError, match="tells queries apart"):
        MaskOfRealPairs(core).attend(q, q, q, mask=pairs.float())


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

"""Which elements of latents belong to a patch, in any layout, and what NaN says of what a pipeline computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditile.model.hooks.pieces import Piece, RehearsedPrediction, list_predictions
from ditile.plan.errors import ModelError

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


def test_rows_that_are_not_alike_have_places_of_their_own() -> None:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 1], mask[1, 4] = True, True
    piece, x = Piece.from_mask(mask), torch.arange(12.0).view(2, 6)
    assert not piece.has_rows and piece.take(x).tolist() == [1.0, 10.0]


def test_what_has_a_value_for_each_token_is_cut_along_runs_alone() -> None:
    noise = torch.randn(2, 12)
    assert torch.equal(Piece.from_mask(mark(PACKED, 1, slice(3, 7))).take_prefix(noise), noise[:, 3:7])
    with pytest.raises(ModelError, match="a value for each token"):
        Piece.from_mask(mark_flat(VIDEO, 40, 90)).take_prefix(noise)


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


def test_predictions_are_found_in_what_a_model_returns() -> None:
    one, rows = torch.randn(2, 3), [torch.randn(3), torch.randn(3)]
    assert [x.shape for x in list_predictions((one, rows, None))] == [(2, 3), (2, 3)]
    assert list_predictions({"sample": one})[0] is one and list_predictions(one)[0] is one

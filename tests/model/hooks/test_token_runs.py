"""Runs of tokens are taken and written with one copy for the same rows of every frame."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ditile.model.hooks.token_arguments import Frames, group_runs, take_runs, write_runs
from ditile.plan.layout import Grid

RUNS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda at: range(at[0], at[0] + at[1])), min_size=1
)


@given(RUNS)
def test_runs_are_taken_one_after_the_other(runs: list[range]) -> None:
    x = torch.arange(2 * 40).view(2, 40)
    want = torch.cat([x[:, run.start : run.stop] for run in runs], dim=1)
    assert torch.equal(take_runs(x, runs, 1), want)


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


@pytest.mark.parametrize("frames", [2, 3, 21])
def test_the_same_rows_of_every_frame_are_one_copy(frames: int) -> None:
    """A failure costs a GPU's host as many copies as a video has frames, in every layer."""
    assert group_runs(Grid(5, 4, frames).locate_rows(1, 3)) == (Frames(range(4, 12), frames, 20),)


def test_runs_that_overlap_or_go_back_stay_apart() -> None:
    for runs in ((range(1), range(1)), (range(5, 7), range(2, 4)), (range(4), range(2, 6))):
        assert len(group_runs(runs)) == 2

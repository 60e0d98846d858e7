"""Which rows each rank has and needs: a wrong row is a seam in the picture, a wrong size a hang."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditile.parallel.vae.halo import ImageRows, RowWindow, plan_halo_exchange
from ditile.plan.errors import ModelError

CONV, DOWN, UP = RowWindow(3, 1, 1, 1), RowWindow(3, 2, 0, 1), RowWindow(3, 1, 1, 1, scale=2)


@st.composite
def windows(draw: st.DrawFn) -> RowWindow:
    kernel = draw(st.integers(1, 6))
    before, after = (draw(st.integers(0, kernel - 1)) for _ in range(2))
    return RowWindow(kernel, draw(st.integers(1, 3)), before, after, draw(st.integers(1, 3)))


@st.composite
def cut_pictures(draw: st.DrawFn) -> ImageRows:
    cuts = draw(st.lists(st.integers(0, 40), min_size=0, max_size=7))
    return ImageRows((0, *sorted(min(cut, 30) for cut in cuts), draw(st.integers(30, 40))))


def applied(values: list[int], window: RowWindow) -> list[tuple[int, ...]]:
    """The operation on a column of numbers: each output row is the tuple of what it is made of."""
    repeated = [value for value in values for _ in range(window.scale)]
    padded = [0] * window.before + repeated + [0] * window.after
    starts = range(0, len(padded) - window.kernel + 1, window.stride)
    return [tuple(padded[start : start + window.kernel]) for start in starts]


@pytest.mark.parametrize(
    ("height", "ranks", "window", "made"),
    [
        (8, 2, CONV, (0, 4, 8)),
        (7, 3, CONV, (0, 2, 5, 7)),
        (8, 3, DOWN, (0, 2, 3, 4)),  # cuts at 3 and 5: row 5 is the middle of output row 2, which begins at row 4
        (37, 2, DOWN, (0, 9, 18)),  # the last row of an odd height is dropped, as the undivided encoder does
        (3, 4, UP, (0, 2, 4, 4, 6)),  # fewer rows than ranks
    ],
)
def test_rows_by_hand(height: int, ranks: int, window: RowWindow, made: tuple[int, ...]) -> None:
    """Worked out on paper. A failure changes who owns which rows."""
    assert window.divide_output_rows(ImageRows.split_by_weights(height, (1.0,) * ranks)).cuts == made


def test_a_convolution_needs_a_row_of_each_neighbour() -> None:
    """A failure means that more travels than the rows next to a cut, or fewer."""
    part = plan_halo_exchange(ImageRows.split_by_weights(12, (1.0,) * 3), CONV, 1)
    assert (part.own, part.out, part.inner) == (range(4, 8), range(4, 8), range(5, 7))
    assert part.above == ((0, range(3, 4)),) and part.below == ((2, range(8, 9)),)
    assert part.sends == ((0, range(4, 5)), (2, range(7, 8)))


def test_up_sampling_needs_a_row_before_it_is_doubled() -> None:
    """A failure means that rows travel doubled."""
    part = plan_halo_exchange(ImageRows.split_by_weights(12, (1.0,) * 3), UP, 1)
    assert (part.out, part.inner) == (range(8, 16), range(9, 15))
    assert part.above == ((0, range(3, 4)),) and part.below == ((2, range(8, 9)),)


def test_a_wide_window_takes_rows_of_more_than_one_neighbour() -> None:
    """A failure means that a strip lower than the halo is computed from zeros, or hangs."""
    part = plan_halo_exchange(ImageRows.split_by_weights(4, (1.0,) * 4), RowWindow(7, 1, 3, 3), 2)
    assert part.above == ((0, range(1)), (1, range(1, 2))) and part.below == ((3, range(3, 4)),)
    assert part.inner == range(2, 2)


@settings(deadline=None)
@given(cut_pictures(), windows())
def test_strips_make_the_picture(rows: ImageRows, window: RowWindow) -> None:
    """From the rows that it has and receives each rank makes its output rows, and together they are all of them."""
    values = list(range(1, rows.image_height + 1))
    wanted = applied(values, window)
    made = []
    for rank in range(len(rows.rows_per_rank)):
        part = plan_halo_exchange(rows, window, rank)
        seen = [row for _, run in part.above for row in run] + list(part.own)
        seen += [row for _, run in part.below for row in run]
        assert seen == sorted(set(seen))
        for row in part.out:
            source = window.find_input_rows(range(row, row + 1), rows.image_height)
            assert set(source) <= set(seen)
            assert (row in part.inner) == (set(source) <= set(part.own))
            reach = [at // window.scale for at in window.compute_input_reach(range(row, row + 1))]
            made.append(tuple(values[at] if 0 <= at < rows.image_height else 0 for at in reach))
    assert made == wanted


@settings(deadline=None)
@given(cut_pictures(), windows())
def test_what_one_sends_another_receives(rows: ImageRows, window: RowWindow) -> None:
    """A failure means a message that nobody waits for, or a wait for a message that nobody sends."""
    ranks = range(len(rows.rows_per_rank))
    parts = [plan_halo_exchange(rows, window, rank) for rank in ranks]
    sent = {(rank, peer, run) for rank in ranks for peer, run in parts[rank].sends}
    received = {(peer, rank, run) for rank in ranks for peer, run in (*parts[rank].above, *parts[rank].below)}
    assert sent == received and all(sender != receiver for sender, receiver, _ in sent)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from([CONV, DOWN, UP]))
def test_neighbours_suffice(height: int, ranks: int, window: RowWindow) -> None:
    """With two rows each, the convolutions of an autoencoder talk to two neighbours at most, one message each way."""
    height += 2 * ranks
    for rank in range(ranks):
        part = plan_halo_exchange(ImageRows.split_by_weights(height, (1.0,) * ranks), window, rank)
        assert len(part.above) <= 1 and len(part.below) <= 1 and len(part.sends) <= 2


@given(st.integers(0, 300), st.integers(1, 16))
def test_even_is_even(height: int, ranks: int) -> None:
    """A failure means that one rank has more to do, or to hold, than it must."""
    sizes = ImageRows.split_by_weights(height, (1.0,) * ranks).rows_per_rank
    assert sum(sizes) == height and max(sizes) - min(sizes) <= 1


def test_a_picture_may_be_too_low() -> None:
    """A failure means an error of a kernel, deep inside, on some ranks only."""
    with pytest.raises(ModelError, match="an image of height 1 is too low"):
        plan_halo_exchange(ImageRows.split_by_weights(1, (1.0,) * 2), DOWN, 0)

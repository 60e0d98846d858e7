"""How an image is cut into patches: every rank must compute the same, and no token may be lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditile.layout import Grid, Joint, Layout, cut_rows


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    patches = draw(st.integers(1, 8))
    grid = Grid(draw(st.integers(patches, 40)), draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 7])))
    joint: Joint = draw(st.sampled_from(["none", "text_first", "image_first"]))
    return Layout.of(grid, patches, 0 if joint == "none" else draw(st.integers(1, 300)), joint)


@pytest.mark.parametrize(
    ("rows", "patches", "text_rows", "wanted"),
    [
        (8, 1, 0, [8]),
        (8, 2, 0, [4, 4]),
        (8, 3, 0, [3, 3, 2]),  # 8/3 rounds to 3
        (7, 3, 0, [2, 3, 2]),  # 7/3 rounds to 2
        (8, 8, 0, [1] * 8),
        (8, 2, 2, [3, 5]),  # 10 rows of work: 5 each, of which 2 are text
        (8, 3, 2, [1, 4, 3]),  # 10/3 each: 1.33 rows of image beside the text
        (8, 4, 2, [1, 3, 2, 2]),  # 2.5 each: half a row of image beside the text, and none is too few
        (64, 4, 8, [10, 18, 18, 18]),  # FLUX, 1024 pixels, 512 tokens of text
        (4, 4, 100, [1, 1, 1, 1]),
    ],
)
def test_rows_by_hand(rows: int, patches: int, text_rows: float, wanted: list[int]) -> None:
    """Worked out on paper. A failure changes every picture that is drawn with patches."""
    assert cut_rows(rows, patches, text_rows) == wanted


@settings(deadline=None)
@given(layouts())
def test_patches_partition_the_image(layout: Layout) -> None:
    """No row is lost, doubled or empty; tokens and latents are cut at the same rows."""
    grid, patches = layout.grid, range(layout.patches)
    assert sum(layout.rows(p) for p in patches) == grid.rows
    assert min(layout.rows(p) for p in patches) >= 1
    tokens = [token for p in patches for token in range(layout.tokens(p).start, layout.tokens(p).stop)]
    assert tokens == list(range(layout.image))
    units = [unit for p in patches for unit in range(layout.latents(p).start, layout.latents(p).stop)]
    assert units == list(range(grid.rows * grid.units_per_row))


@settings(deadline=None)
@given(layouts())
def test_patches_are_balanced(layout: Layout) -> None:
    """Patches behind the first differ by one row at most, and the first, with its text, from them by no more than that
    or by what it cannot help: it must have a row, however long the text, and leave one to each other patch.
    """
    others = [layout.rows(p) for p in range(1, layout.patches)]
    if not others:
        return
    assert max(others) - min(others) <= 1
    assert others == sorted(others, reverse=True)
    work = layout.rows(0) + layout.text / layout.grid.tokens_per_row
    share = (layout.grid.rows + layout.text / layout.grid.tokens_per_row) / layout.patches
    assert abs(work - share) <= 0.5 + 1e-9 or layout.rows(0) == 1 or max(others) == 1
    if layout.text == 0:
        assert max(others) - 1 <= layout.rows(0) <= max(others) + 1


@settings(deadline=None)
@given(layouts())
def test_text_rides_with_the_first_patch(layout: Layout) -> None:
    """The messages of a step add up to the image, and to the text once where there is joint attention."""
    text = layout.text if layout.joint != "none" else 0
    assert sum(layout.message(p) for p in range(layout.patches)) == layout.image + text
    joint = layout.joint != "none"
    carries = [layout.carries_text(p) for p in range(layout.patches)]
    assert carries == [joint, *[False] * (layout.patches - 1)]
    assert layout.carries_text(None) == joint


def test_text_makes_the_first_patch_smaller() -> None:
    """1024 pixels and 512 tokens of text: the first patch has 10 rows of 64 and the text, which is 8 rows more."""
    layout = Layout.of(Grid(64, 64, 64), 4, 512, "text_first")
    assert [layout.message(p) for p in range(4)] == [18 * 64] * 4
    assert [layout.rows(p) for p in range(4)] == [10, 18, 18, 18]

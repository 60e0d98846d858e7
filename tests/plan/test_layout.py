"""How an image is cut into patches: every rank must compute the same, and no token may be lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditile.plan.errors import PlanError
from ditile.plan.layout import (
    Grid,
    Joint,
    Layout,
    Split,
    TokenShard,
    balance_patch_rows,
    merge_ranges,
    pick_even_chunk,
    pick_weighted_chunk,
)
from ditile.plan.shape import count_images


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    patches = draw(st.integers(1, 8))
    grid = Grid(draw(st.integers(patches, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 5)))
    joint: Joint = draw(st.sampled_from(["none", "text_first", "image_first"]))
    return Layout.cut_into_patches(grid, patches, 0 if joint == "none" else draw(st.integers(1, 300)), joint)


@pytest.mark.parametrize(
    ("rows", "patches", "text_rows", "wanted"),
    [
        (8, 3, 0, [3, 3, 2]),  # 8/3 rounds to 3
        (7, 3, 0, [2, 3, 2]),  # 7/3 rounds to 2
        (8, 2, 2, [3, 5]),  # 10 rows of work: 5 each, of which 2 are text
        (8, 4, 2, [1, 3, 2, 2]),  # 2.5 each: half a row of image beside the text, and none is too few
        (64, 4, 8, [10, 18, 18, 18]),  # FLUX, 1024 pixels, 512 tokens of text
        (4, 4, 100, [1, 1, 1, 1]),
    ],
)
def test_rows_by_hand(rows: int, patches: int, text_rows: float, wanted: list[int]) -> None:
    """Worked out on paper. A failure changes every picture that is drawn with patches."""
    assert balance_patch_rows(rows, patches, text_rows) == wanted


@settings(deadline=None)
@given(layouts())
def test_patches_partition_the_image(layout: Layout) -> None:
    """No row is lost, doubled or empty."""
    grid, patches = layout.grid, range(layout.num_patches)
    assert sum(layout.count_rows(p) for p in patches) == grid.rows
    assert min(layout.count_rows(p) for p in patches) >= 1
    tokens = [token for p in patches for run in layout.locate_tokens(p) for token in run]
    assert sorted(tokens) == list(range(layout.image_tokens))
    assert grid.frames > 1 or tokens == sorted(tokens)


def test_a_patch_of_a_video_has_the_same_rows_of_every_frame() -> None:
    """By hand: two frames of three rows of four tokens."""
    layout = Layout.cut_into_patches(Grid(3, 4, frames=2), 2, 0, "none")
    assert layout.cuts == (0, 2, 3) and layout.image_tokens == 24
    assert layout.locate_tokens(0) == (range(8), range(12, 20))
    assert layout.locate_tokens(1) == (range(8, 12), range(20, 24))
    first, second = Split(ring=2).shard_tokens(layout, 1)
    assert (first.image, second.image) == ((range(8, 12),), (range(20, 24),))
    (whole,) = Split().shard_tokens(layout, None)
    assert whole.image == (range(24),)


@settings(deadline=None)
@given(layouts())
def test_patches_are_balanced(layout: Layout) -> None:
    """Patches behind the first differ by one row at most, and the first, with its text, from them by no more than that
    or by what it cannot help: it must have a row, however long the text, and leave one to each other patch.
    """
    others = [layout.count_rows(p) for p in range(1, layout.num_patches)]
    if not others:
        return
    assert max(others) - min(others) <= 1
    assert others == sorted(others, reverse=True)
    text_rows = layout.text / (layout.grid.tokens_per_row * layout.grid.frames)
    work = layout.count_rows(0) + text_rows
    share = (layout.grid.rows + text_rows) / layout.num_patches
    assert abs(work - share) <= 0.5 + 1e-9 or layout.count_rows(0) == 1 or max(others) == 1
    if layout.text == 0:
        assert max(others) - 1 <= layout.count_rows(0) <= max(others) + 1


def count_message_tokens(layout: Layout, patch: int) -> int:
    """Tokens that a stage sends to the next one for a patch."""
    image = layout.count_rows(patch) * layout.grid.tokens_per_row * layout.grid.frames
    return image + (layout.text if layout.carries_text(patch) else 0)


@settings(deadline=None)
@given(layouts())
def test_text_rides_with_the_first_patch(layout: Layout) -> None:
    """The messages of a step add up to the image, and to the text once where there is joint attention."""
    text = layout.text if layout.joint != "none" else 0
    assert sum(count_message_tokens(layout, p) for p in range(layout.num_patches)) == layout.image_tokens + text
    joint = layout.joint != "none"
    carries = [layout.carries_text(p) for p in range(layout.num_patches)]
    assert carries == [joint, *[False] * (layout.num_patches - 1)]
    assert layout.carries_text(None) == joint


# How ranks share out a patch


@st.composite
def splits(draw: st.DrawFn) -> tuple[Layout, Split]:
    """A layout and as many ranks as every patch of it has tokens for."""
    layout = draw(layouts())
    fewest = min(layout.count_rows(p) for p in range(layout.num_patches)) * layout.grid.tokens_per_row
    if draw(st.booleans()):
        whole = Layout.cut_into_patches(layout.grid, 1, layout.text, layout.joint)
        distrifusion = draw(st.integers(1, min(8, layout.grid.rows)))
        return whole, Split(1, distrifusion, draw(st.integers(1, min(4, layout.grid.tokens_per_row))))
    ring = draw(st.integers(1, min(4, fewest)))
    return layout, Split(ring, 1, draw(st.integers(1, min(4, fewest // ring))))


def places(layout: Layout, parts: Iterable[TokenShard]) -> list[int]:
    """Where the tokens of ranks are in the sequence of joint attention, in their order."""
    return [token for part in parts for run in layout.locate_in_sequence(part, joint=True) for token in run]


@given(st.integers(0, 100), st.integers(0, 300), st.integers(1, 20))
def test_shares_are_even_and_all(start: int, length: int, ranks: int) -> None:
    """A failure means that a rank expects another length than the one that sends it."""
    run = range(start, start + length)
    shares = [pick_even_chunk(run, ranks, rank) for rank in range(ranks)]
    assert [item for each in shares for item in each] == list(run)
    sizes = [len(each) for each in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 100), st.integers(0, 300), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_weighted_shares_are_in_proportion_and_all(start: int, length: int, weights: list[float]) -> None:
    """A failure means that a slow rank has as much to do as a fast one, or that a token is computed twice."""
    run, given_weights = range(start, start + length), tuple(weights)
    shares = [pick_weighted_chunk(run, given_weights, rank) for rank in range(len(weights))]
    assert [item for each in shares for item in each] == list(run)
    if length >= len(weights):
        assert all(shares)
    # Each end is rounded, and moved by one for each rank that would have no item.
    for share, weight in zip(shares, weights, strict=True):
        assert abs(len(share) - length * weight / sum(weights)) <= 1 + len(weights)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=8))
def test_joined_runs_are_the_same_items(pairs: list[tuple[int, int]]) -> None:
    """A failure means that keys are written to other places than they came from."""
    runs = [range(start, start + length) for start, length in pairs]
    merged = merge_ranges(runs)
    assert [item for run in merged for item in run] == [item for run in runs for item in run]
    assert all(merged) and all(a.stop != b.start for a, b in itertools.pairwise(merged))


@settings(deadline=None)
@given(splits())
def test_every_token_is_on_one_rank(split: tuple[Layout, Split]) -> None:
    """Of the image, and of the text; with DistriFusion every patch has a text of its own. In steps and in patches.

    A failure means a token that is lost, or computed and stored by two.
    """
    layout, how = split
    for patch in (None, *range(layout.num_patches)):
        parts = how.shard_tokens(layout, patch)
        assert len(parts) == how.num_ranks
        image = [token for part in parts for run in part.image for token in run]
        wanted_runs = (range(layout.image_tokens),) if patch is None else layout.locate_tokens(patch)
        assert sorted(image) == [token for run in wanted_runs for token in run]
        text = [token for part in parts for token in part.text]
        wanted = list(range(layout.text if layout.carries_text(patch) else 0))
        assert sorted(text) == sorted(wanted * how.distrifusion)


@settings(deadline=None)
@given(splits())
def test_a_whole_step_is_its_patches_one_after_the_other(split: tuple[Layout, Split]) -> None:
    """On every rank, or as the model has them on a rank alone: so the messages of a synchronous step, cut into patches,
    are those of an asynchronous one.

    A failure means that keys of a synchronous step are kept in another order than those of its patches (xDiT's
    hybrid), or that a sender and a receiver disagree on a size.
    """
    layout, how = split
    of_patches = [how.shard_tokens(layout, patch) for patch in range(layout.num_patches)]
    for rank, part in enumerate(how.shard_tokens(layout, None)):
        mine = [parts[rank] for parts in of_patches]
        assert part.text == mine[0].text and not any(p.text for p in mine[1:])
        image = [token for run in part.image for token in run]
        in_patches = [token for p in mine for run in p.image for token in run]
        assert image == (in_patches if how.num_ranks > 1 else sorted(in_patches))
        assert part.image_tokens == sum(p.image_tokens for p in mine)
    for patch, parts in enumerate(of_patches):
        sent = sum(part.count_tokens() for part in parts)
        again = layout.text * (how.distrifusion - 1) if layout.carries_text(patch) else 0
        assert sent - again == count_message_tokens(layout, patch)


@settings(deadline=None)
@given(splits())
def test_runs_fill_the_sequence(split: tuple[Layout, Split]) -> None:
    """Text and image where the family has them. A failure means that a store has holes, or text lies in the image."""
    layout, how = split
    text = layout.text if layout.joint != "none" else 0
    if how.distrifusion == 1 and layout.joint != "none":
        assert sorted(places(layout, how.shard_tokens(layout, None))) == list(range(layout.image_tokens + text))
    for part in how.shard_tokens(layout, None):
        assert layout.locate_in_sequence(part, joint=False) == part.image
        if layout.joint == "none":
            continue
        runs = layout.locate_in_sequence(part, joint=True)
        text_first = layout.joint == "text_first"
        of_text = [run for run in runs if (run.start < text if text_first else run.start >= layout.image_tokens)]
        assert sum(map(len, of_text)) == len(part.text)
        assert sum(map(len, runs)) == part.count_tokens()
        if of_text:
            assert runs.index(of_text[0]) == (0 if text_first else len(runs) - 1)


def test_too_many_ranks_for_a_patch() -> None:
    """Ten tokens for twelve ranks. A failure means a rank without tokens, which no kernel takes."""
    layout = Layout.cut_into_patches(Grid(4, 5), 2, 3, "text_first")
    with pytest.raises(PlanError, match="fewer tokens than the 12 ranks"):
        Split(3, 1, 4).shard_tokens(layout, 1)


def test_patches_are_cut_around_references() -> None:
    """Rows 4 to 8 come out nowhere: patch 0, in front of the image's, of which the first has the text."""
    layout = Layout.cut_around_references(Grid(9, 2), 3, 2, "text_first", range(4, 9), even=False)
    assert [layout.locate_tokens(patch) for patch in range(3)] == [(range(8, 18),), (range(4),), (range(4, 8),)]
    assert [layout.count_rows(patch) for patch in range(layout.num_patches)] == [5, 2, 2]
    assert [layout.carries_text(patch) for patch in (None, 0, 1, 2)] == [True, False, True, False]
    even = Layout.cut_around_references(Grid(8, 2), 4, 0, "none", (0, 1, 6, 7), even=True)
    assert [even.locate_tokens(patch) for patch in range(4)] == [
        (range(4),), (range(12, 16),), (range(4, 8),), (range(8, 12),)
    ]  # fmt: skip
    assert even.cut_alike(Grid(9, 2), 0, 1).locate_tokens(1) == (range(14, 18),)
    with pytest.raises(PlanError, match="patches=4: 1 of them are for the references, and the other 3 exceed"):
        Layout.cut_around_references(Grid(5, 2), 4, 0, "none", range(3), even=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("call", "images"),
    [
        ({"prompt": "a ring"}, 1),
        ({"prompt": ["a ring", "a disk"], "num_images_per_prompt": 3}, 6),
        ({"prompt": ["a song"], "num_waveforms_per_prompt": 2}, 2),
        ({"prompt": "a film", "num_videos_per_prompt": 2, "num_frames": 81}, 2),
        ({"prompt": None, "prompt_embeds": torch.zeros(2, 5, 8), "num_images_per_prompt": 2}, 4),
        ({"prompt_embeds_t5": torch.zeros(3, 5, 8)}, 3),
        ({"prompt_embeds_llama3": torch.zeros(2, 3, 5, 8), "prompt_embeds_t5": torch.zeros(3, 5, 8)}, 3),
        ({"batch_size": 5}, 5),
        ({"class_labels": [1, 2, 3]}, 3),
        ({"class_labels": 7, "batch_size": 2}, 2),
        ({"image": torch.zeros(3, 8, 8), "batch_size": 8}, 1),
        ({"image": torch.zeros(2, 3, 8, 8), "num_images_per_prompt": 2}, 4),
        ({"latents": torch.zeros(2, 5, 8)}, 2),
        ({"labels": [1, 2]}, 2),
        ({"image_size": (64, 64), "conditioning_scale": [0.5, 0.5]}, 1),
        ({}, 1),
    ],
)
def test_images_of_a_call(call: dict[str, Any], images: int) -> None:
    """A failure means that a plan shares out another number of images than the pipeline makes."""
    assert count_images(call) == images

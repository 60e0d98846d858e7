"""The clips, their captions, and the checker that says whether a video shows its caption."""

import random

import numpy as np
import pytest
import torch

from ditile_lab.quality.caption_check import SHAPES, compute_signed_distance, make_pixel_grid
from training.motion_check import CLIP_ITEMS, Video, judge_clip, score_clips
from training.motions import draw_clips, jitter_clips, make_clip_tensors, sample_motion_caption

CPU = torch.device("cpu")


def captions(count: int, seed: int = 0, held_out: bool | None = None) -> list[str]:
    rng = random.Random(seed)
    return [sample_motion_caption(rng, held_out=held_out) for _ in range(count)]


def drawn(some: list[str], frames: int = 9, side: int = 64) -> Video:
    torch.manual_seed(0)
    video = draw_clips(jitter_clips(make_clip_tensors(some, CPU)), frames, side)
    return ((video + 1) * 127.5).round().clamp(0, 255).numpy().astype(np.uint8)


@pytest.mark.parametrize(("frames", "side"), [(9, 64), (5, 96)])
def test_true_clips_are_all_right(frames: int, side: int) -> None:
    """If this fails the checker (or the renderer) is wrong at this size, and no accuracy it reports means anything."""
    some = captions(30, seed=side)
    assert score_clips(list(drawn(some, frames, side)), some) == dict.fromkeys(CLIP_ITEMS, 100.0)


def test_other_captions_are_not_all_right() -> None:
    """A checker that passes clips of other captions would flatter the model."""
    some = captions(40, seed=1)
    result = score_clips(list(drawn(some)), some[1:] + some[:1])
    assert result["all_right"] == 0 and max(result[item] for item in ("shape", "start", "end", "motion")) < 20


def test_motion_is_judged() -> None:
    """Backwards, or as one picture, everything is right but where things move."""
    moving = [caption for caption in captions(40, seed=2) if "stays" not in caption]
    videos = drawn(moving)
    places = {"start", "end", "motion", "all_right"}
    still = {"end", "motion", "all_right"}
    for wrong, changed in ((videos[:, ::-1], places), (np.repeat(videos[:, :1], 9, 1), still)):
        result = score_clips(list(wrong), moving)
        assert result == {item: 0.0 if item in changed else 100.0 for item in CLIP_ITEMS}


@pytest.mark.parametrize(
    ("caption", "wrong"),
    [
        ("a large red ring stays in the center on a gray background", {"shape"}),
        ("a large red circle stays on the left on a gray background", {"start", "end"}),
        ("a large red circle stays in the center on a black background", {"background"}),
    ],
)
def test_what_is_wrong(caption: str, wrong: set[str]) -> None:
    verdict = judge_clip(drawn(["a large red circle stays in the center on a gray background"])[0], caption)
    assert {item for item in CLIP_ITEMS if not getattr(verdict, item)} == wrong | {"all_right"}


@pytest.mark.parametrize("shape", SHAPES)
def test_training_draws_the_outlines_that_are_checked(shape: str) -> None:
    """Training draws on its own device. A failure would mean that a model learns other shapes than are asked for."""
    video = draw_clips(
        make_clip_tensors([f"a large red {shape} stays in the center on a black background"], CPU), 1, 64
    )
    x, y = make_pixel_grid(64, 64)
    cover = np.clip(0.5 - compute_signed_distance(shape, x - 0.5, y - 0.5, 0.24) * 64, 0, 1)
    red = (video[0, 0, ..., 0].numpy() + 1) * 127.5
    assert np.abs(red - (30 + cover * (215 - 30))).max() < 0.01

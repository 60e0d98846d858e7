"""The scenes, their captions, and the checker that says whether a picture shows its caption."""

from __future__ import annotations

import random
from importlib import resources

import numpy as np
import pytest
import torch

from ditile_lab.quality.caption_check import SHAPES, Scene, compute_signed_distance, make_pixel_grid, parse_caption
from training.caption_scores import VERDICT_ITEMS, compute_item_shares, score_images
from training.motion_check import CLIP_ITEMS, Video, judge_clip, score_clips
from training.motions import draw_clips, jitter_clips, make_clip_tensors, sample_motion_caption
from training.scenes import describe_scene, is_held_out, name_thing, render_scene, sample_scene

SIZES = ((128, 128), (128, 192), (192, 128), (256, 256))


def scenes(count: int, seed: int = 0, held_out: bool | None = None) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng, held_out=held_out) for _ in range(count)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_true_pictures_are_all_right(height: int, width: int) -> None:
    """If this fails the checker (or the renderer) is wrong at this size, and no accuracy it reports means anything."""
    some = scenes(10, seed=height + width)
    result = score_images([render_scene(s, height, width) for s in some], [describe_scene(s) for s in some])
    assert result == dict.fromkeys(VERDICT_ITEMS, 100.0)


def test_other_captions_are_not_all_right() -> None:
    """A checker that passes pictures of other captions would flatter the models."""
    some = scenes(40, seed=1)
    captions = [describe_scene(s) for s in some]
    result = score_images([render_scene(s, 64, 64) for s in some], captions[1:] + captions[:1])
    assert result["all_right"] <= 5
    assert result["position"] < 30
    assert result["shape"] < 30


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ("a large red circle on the left on a white background", "size"),
        ("a small red circle on the right on a white background", "position"),
        ("a small red square on the left on a white background", "shape"),
        ("a small red circle on the left on a white striped background", "texture"),
    ],
)
def test_each_item_is_judged_by_itself(asked: str, wrong: str) -> None:
    """One wrong attribute must be found, and (colour apart, without which a thing is lost) only that one."""
    shares = compute_item_shares(
        render_scene(parse_caption("a small red circle on the left on a white background"), 96, 128), asked
    )
    assert shares[wrong] == 0
    assert shares["all_right"] == (wrong == "texture")
    if wrong != "color":
        others = set(VERDICT_ITEMS) - {wrong, "all_right"}
        assert all(shares[item] == 1 for item in others)


def test_captions_are_parsed_back() -> None:
    """parse is the inverse of Scene.caption, up to the jitter."""
    for scene in scenes(300, seed=2):
        again = parse_caption(describe_scene(scene))
        assert describe_scene(again) == describe_scene(scene)
        assert [name_thing(t) for t in again.things] == [name_thing(t) for t in scene.things]
        assert (again.where, again.background, again.texture) == (scene.where, scene.background, scene.texture)
        for a, b in zip(again.things, scene.things, strict=True):
            assert max(abs(a.x - b.x), abs(a.y - b.y)) <= 0.02


def test_training_never_sees_the_held_out_captions() -> None:
    """The bundled list is made of captions that the training sampler skips, without repeats."""
    captions = (resources.files("ditile") / "model" / "assets" / "captions.txt").read_text().splitlines()
    assert len(captions) == len(set(captions)) == 200
    assert all(is_held_out(caption) and describe_scene(parse_caption(caption)) == caption for caption in captions)
    assert not any(is_held_out(describe_scene(s)) for s in scenes(500, seed=3, held_out=False))


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


def test_clips_of_other_captions_are_not_all_right() -> None:
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

"""The scenes, their captions, and the checker that says whether a picture shows its caption."""

import random
from importlib import resources

import pytest

from ditile_lab.quality.caption_check import Scene, parse_caption
from training.caption_scores import VERDICT_ITEMS, compute_item_shares, score_images
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

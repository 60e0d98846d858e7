"""The parts of `training/` that a GPU runs, on the CPU; and the scenes, clips and captions that models learn."""

from __future__ import annotations

import argparse
import random
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ditile
from ditile.model.known import ASSETS
from ditile_lab.quality.caption_check import SHAPES, Scene, compute_signed_distance, make_pixel_grid, parse_caption
from training.budget import Step, capture, train_steps
from training.caption_scores import VERDICT_ITEMS, compute_item_shares, score_images
from training.motion_check import CLIP_ITEMS, Video, judge_clip, score_clips
from training.motions import draw_clips, jitter_clips, make_clip_tensors, sample_motion_caption
from training.optim import MasterOptimiser, orthogonalise
from training.scenes import describe_scene, is_held_out, name_thing, render_scene, sample_scene
from training.turbo import SIGMAS, PairMaker, PairPool, TurboTrainer
from training.video_latents import load_group_basis
from training.wan import WanTrainer, make_caption_table
from training.wan_vae import VaeTrainer

CAPTIONS = ["a large red circle moves from left to right on a gray background"] * 3
CPU = torch.device("cpu")
WAN = ASSETS / "shapes-wan"


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8)])
def test_orthogonal_factors(shape: tuple[int, ...]) -> None:
    """Muon's steps have singular values near 1 and the singular vectors of the gradient."""
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    found = orthogonalise(matrices)
    assert torch.linalg.svdvals(found).min() > 0.5 and torch.linalg.svdvals(found).max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert ((found * (left @ right)).sum((1, 2)) / (found.norm(dim=(1, 2)) * 8**0.5) > 0.97).all()


def test_a_gradient_that_is_not_finite_changes_nothing_but_decays() -> None:
    """A failure would mean that one bad batch ends a training."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimiser = MasterOptimiser(layer, lr=0.1, hidden=lambda name, p: p.ndim == 2)
    before = [p.detach().clone() for p in layer.parameters()]
    optimiser.update([torch.full_like(p, torch.inf) for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    optimiser.update([torch.ones_like(p) for p in layer.parameters()])
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    kept, state = [p.detach().clone() for p in layer.parameters()], optimiser.state_dict()
    again = MasterOptimiser(nn.Linear(4, 4), lr=0.1, hidden=lambda name, p: p.ndim == 2)
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(kept, again.work, strict=True))


def test_shapes_wan_trains_on_from_what_is_bundled(tmp_path: Path) -> None:
    """A failure means other latents, text or padding than the bundled model was trained with, or a file that fails."""
    torch.manual_seed(0)
    basis, table = load_group_basis(CPU), make_caption_table(WAN, CAPTIONS, CPU)
    wan = WanTrainer(WAN / "transformer", table, basis, lr=0.0, batch=4)
    vae = VaeTrainer(WAN / "vae", CAPTIONS, basis, batch=1)
    args = argparse.Namespace(device=CPU, eager=False)
    step = capture(Step(name="clip", run=lambda: wan.train_on(9)), args)
    count = train_steps([step], wan.optimiser, seconds=0.01, hold=0.5, save=lambda: wan.save(tmp_path / "transformer"))
    assert count >= 1 and wan.train_on(9) < 0.12 and wan.train_on(1) < 0.12
    assert WanTrainer(tmp_path / "transformer", table, basis, lr=0.0, batch=2).train_on(1) < 0.2
    for half, train in (("decoder", vae.train_decoder), ("encoder", vae.train_encoder)):
        vae.make_optimiser(half, lr=0.0)
        assert train() < 0.005


def test_shapes_flux_turbo_trains_on_from_what_is_bundled(tmp_path: Path) -> None:
    """The student's error is that of a trained one, far below its teacher's without guidance, and a published student
    is the next maker of states. A failure would mean other sigmas, text or targets than the model was trained with."""
    torch.manual_seed(0)
    scheduler = ditile.load("shapes-flux-turbo").scheduler
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])  # those of `FluxPipeline`
    assert scheduler.sigmas.tolist() == pytest.approx(SIGMAS)
    student = TurboTrainer(ASSETS / "shapes-flux-turbo" / "transformer", lr=0.0)
    teacher = TurboTrainer(ASSETS / "shapes-flux" / "transformer", lr=0.0)
    maker = PairMaker(seed=1)
    student.publish(tmp_path)
    maker.renew_student(tmp_path)
    assert maker.student is not maker.teacher
    (tmp_path / "pool").mkdir()
    torch.save(maker.make_shard(2), tmp_path / "pool" / "1-00000.pt")
    pool = PairPool(folder=tmp_path / "pool", rng=random.Random(0))
    pool.read_new_shards()
    assert pool.may_draw(1.0)
    pairs, intervals = pool.draw_batch(8)
    assert not pool.may_draw(1.0) and intervals.tolist() == [0, 1, 2, 3] * 2
    own, others = student.train_on(pairs, intervals, 1.0), teacher.train_on(pairs, intervals, 1.0)
    assert own.mean() < 0.6 * others.mean() and own[intervals > 0].max() < 0.1


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
    assert result["all_right"] <= 5 and max(result["position"], result["shape"]) < 30


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

"""The parts of `training/` that a GPU runs, on the CPU: the optimiser, and a step of each half of shapes-wan."""

import argparse
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import ditile
from ditile.model.known import ASSETS
from training.budget import Step, capture, train_steps
from training.optim import MasterOptimiser, orthogonalise
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
    """A step's loss is that of a trained model, and what is saved loads. A failure would mean other latents, text or
    padding than the bundled model was trained with."""
    torch.manual_seed(0)
    basis, table = load_group_basis(CPU), make_caption_table(WAN, CAPTIONS, CPU)
    wan, vae = (
        WanTrainer(WAN / "transformer", table, basis, lr=0.0, batch=4),
        VaeTrainer(WAN / "vae", CAPTIONS, basis, batch=1),
    )
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
    student, teacher = (
        TurboTrainer(ASSETS / name / "transformer", lr=0.0) for name in ("shapes-flux-turbo", "shapes-flux")
    )
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

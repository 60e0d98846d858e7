"""CFG parallel and data parallel: whoever computes a branch or an image, every rank gets the plain pipeline's pictures.

Fewer rows make matrices of other shapes, which may be multiplied in another order: 1e-10 relative in fp64, in which a
tiny model's amplification of rounding cannot hide a wrong row. A call that keeps all its rows (the two calls of true
CFG, one image under data) is bitwise.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import EulerAncestralDiscreteScheduler
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from ditile.model.hooks.batch_rows import slice_batch_arguments
from ditile.parallel.batch.shares import BatchSlice
from ditile.plan.errors import ModelError, PlanError
from tests.pool import Pool, on_ranks, share
from tests.runner import cases
from tests.runner.cases import MAKE, call_of, divided, run, same

TOLERANCE = 1e-10
close = functools.partial(cases.close, tolerance=TOLERANCE)
FOUR: dict[str, Any] = {"prompt": ["a red circle", "the blue ring on the left"], "num_images_per_prompt": 2}
GUIDED = [name for name in MAKE if name not in ("flux", "flux embedded guidance")]
Job = tuple[dict[str, Any], dict[str, Any]]


def made(name: str) -> Any:
    """A pipeline of `MAKE` in fp64."""
    return MAKE[name]().to(torch.float64)


def drawn_whole(pipe: Any, name: str, call: dict[str, Any]) -> tuple[Any, Tensor]:
    torch.manual_seed(3)
    return run(pipe, name, **call), torch.get_rng_state()


def pictures(name: str, jobs: list[Job], ancestral: bool = False) -> list[tuple[Any, Any]]:
    """On a rank: what the plain pipeline draws, and what it draws under a plan, with the random state that is left."""
    pipe, results = made(name), []
    for plan, call in jobs:
        if ancestral:
            pipe.scheduler = EulerAncestralDiscreteScheduler(beta_end=0.004)
        wanted = share(f"double {name} {call} {ancestral}", drawn_whole, pipe, name, call)
        torch.manual_seed(3 + dist.get_rank())
        with divided(pipe, **plan) as runner:
            results.append((wanted, (run(runner, name, **call), torch.get_rng_state())))
            assert str(runner).count("\n") > dist.get_world_size()
    return results


def check(
    pool: Pool, name: str, ranks: int, jobs: list[Job], *, bitwise: bool = False, ancestral: bool = False
) -> None:
    """Every rank has the plain pipeline's pictures and random state, and the same as all others."""
    answers = pool.run(pictures, ranks, name, jobs, ancestral)
    for rank, of_rank in enumerate(answers):
        for (plan, _), (wanted, got), (_, first) in zip(jobs, of_rank, answers[0], strict=True):
            what = f"{name} {plan} rank {rank}"
            close(got[0], wanted[0], what)
            same(got[1], wanted[1], f"{what}: random state")
            same(got[0], wanted[0] if bitwise else first[0], what)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MAKE)
def test_every_family(pool: Pool, name: str) -> None:
    """A failure in one family means that an argument of its forward is split that has no rows, or is not and has."""
    plans = [{"data": 2}, {"cfg": 2}] if name in GUIDED else [{"data": 2}]
    check(pool, name, 2, [(plan, FOUR) for plan in plans])
    check(pool, name, 2, [(plans[-1], {})], bitwise=name in ("flux", "flux embedded guidance", "flux true cfg"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux true cfg", "pixart sigma"])
def test_any_number_of_images_on_any_number_of_replicas(pool: Pool, name: str) -> None:
    """4, 2 and 1 images on 3 replicas. xDiT draws the same images on every replica.

    A failure means that so do we, that images are lost or double, that noise depends on the replica, or that a replica
    without images waits for ever.
    """
    seeds = FOUR | {"seeds": [5, 6, 7, 8]}
    calls: list[dict[str, Any]] = [FOUR, seeds, FOUR | {"generator": None}, {"num_images_per_prompt": 2}, {}]
    check(pool, name, 3, [({"data": 3}, call) for call in calls])
    check(pool, "pixart sigma", 3, [({"data": 3}, call) for call in calls[:4]], ancestral=True)


FULL = {"pipefusion": 2, "patches": 3, "warmup": 99}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux true cfg", "sd3.5 medium"])
def test_with_other_axes(pool: Pool, name: str) -> None:
    """A failure means that the halves exchange something else than one rank's prediction."""
    plans: list[dict[str, Any]] = [{"data": 2}, {"ulysses": 2}, {"tensor": 2}, FULL]
    check(pool, name, 4, [(plan | {"cfg": 2}, FOUR) for plan in plans])
    check(pool, name, 4, [(FULL | {"data": 2}, FOUR), (FULL | {"data": 2}, {})])


def stale(name: str, plans: list[dict[str, Any]], call: dict[str, Any]) -> list[tuple[Tensor, int]]:
    pipe, results = made(name), []
    for plan in plans:
        with divided(pipe, **plan) as runner:
            results.append((run(runner, name, **call), runner.report.key_bytes if runner.report else 0))
    return results


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux true cfg", "pixart sigma"])
def test_stale_keys(pool: Pool, name: str) -> None:
    """PipeFusion's stale schedule on each half, or replica, is the stale schedule alone, with half of the keys each.

    A failure means that the other half's patches are not the latest, or that a stage sends or expects messages of calls
    that are not its own.
    """
    base = [FULL | {"warmup": 1}, FULL | {"warmup": 0, "patches": 2}]
    exact = pool.run(stale, 1, name, [{}], FOUR)[0][0][0]
    alone = pool.run(stale, 2, name, base, FOUR)
    assert float((alone[0][0][0] - exact).abs().max() / exact.abs().max()) > 1e-3
    for axis in ("cfg", "data"):
        for rank, results in enumerate(pool.run(stale, 4, name, [plan | {axis: 2} for plan in base], FOUR)):
            for plan, (got, keys), (wanted, whole) in zip(base, results, alone[rank % 2], strict=True):
                close(got, wanted, f"{name} {plan} {axis} rank {rank}")
                assert 2 * keys == whole, f"{name} {plan} {axis} rank {rank}: {keys} bytes of keys"
    idle = pool.run(stale, 4, name, [plan | {"data": 2} for plan in base], {})
    one = pool.run(stale, 2, name, base, {})[0]
    for results in idle:
        for (got, _), (wanted, _) in zip(results, one, strict=True):
            same(got, wanted, f"{name}, one image on two replicas")


# Pictures


@pytest.mark.parametrize("images", [1, 3])
@on_ranks(2)
def test_pictures_come_in_order(images: int) -> None:
    """A failure means that replicas decode each other's images, or that pictures are lost or swapped."""
    kinds = ["np", "pt", "latent"]
    pipe, name = made("sd3"), "sd3"
    call = {"prompt": ["a red circle"] * images, "seeds": list(range(images))}
    batches: list[int] = []
    decoder = pipe.vae.decoder
    # On no module, as each replica decodes all images where something is on the VAE.
    handle = register_module_forward_pre_hook(
        lambda module, args: batches.append(len(args[0])) if module is decoder else None
    )
    for kind in kinds:
        wanted = run(pipe, name, **call, output_type=kind)
        batches.clear()
        with divided(pipe, data=2) as runner:
            got = runner(**call_of(name, **call, output_type=kind))
            first = runner(**call_of(name, **call, output_type=kind), output="first")
            sent = dict(runner.report.sent) if runner.report else {}
        mine = [2, 1][dist.get_rank()] if images == 3 else 1
        assert batches == ([] if kind == "latent" else [mine, mine]), "each replica decodes its own"
        close(np.stack(got.images), np.stack(wanted), f"{kind}, rank {dist.get_rank()}", tolerance=1e-6)  # np is fp32
        assert (first is None) == (dist.get_rank() != 0)
        if first is not None:
            close(np.stack(first.images), np.stack(wanted), f"{kind}, the first rank alone", tolerance=1e-6)
            assert "pictures" not in sent
    handle.remove()


# Callbacks and interrupts


def watched(name: str, plan: dict[str, Any]) -> None:
    pipe = made(name)

    def observed(driver: Any) -> list[Any]:
        seen: list[Any] = []

        def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append(tensors["latents"].clone())
            return {"latents": tensors["latents"] * 0.5} if step == 1 else {}

        return [run(driver, name, callback_on_step_end=callback, **FOUR), *seen]

    wanted = observed(pipe)
    with divided(pipe, **plan) as runner:
        got = observed(runner) if plan["data"] == 1 or dist.get_rank() == 0 else [run(runner, name, **FOUR)]
    for step, (one, other) in enumerate(zip(got, wanted, strict=False)):
        close(one, other, f"{plan} rank {dist.get_rank()}, what the callback sees {step}")


def test_callbacks_see_all_images(pool: Pool) -> None:
    """A failure means that a callback sees rows that another replica computes, or changes them on some ranks only."""
    pool.run(watched, 2, "sd3", {"data": 2, "cfg": 1})
    pool.run(watched, 2, "flux true cfg", {"data": 1, "cfg": 2})
    pool.run(watched, 4, "flux true cfg", FULL | {"data": 2})


# Saying no


@pytest.mark.parametrize(("name", "plan"), [("flux", {"data": 2}), ("flux true cfg", {"cfg": 2})])
@on_ranks(2)
def test_a_prediction_may_have_another_dtype_than_latents(name: str, plan: dict[str, Any]) -> None:
    """One image under autocast. A failure means noise or NaN where a rank takes bytes of one dtype for another."""
    pipe = MAKE[name]()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = run(pipe, name)
        with divided(pipe, **plan) as runner:
            got = run(runner, name)
    assert got.dtype == wanted.dtype == torch.bfloat16
    same(got.float(), wanted.float(), f"{name} {plan} rank {dist.get_rank()}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "flux true cfg", "pixart sigma", "sd3"])
@on_ranks(2)
def test_guidance_that_is_off(name: str) -> None:
    """xDiT crashes at guidance of 1 or less. A failure means that so do we, or that half of the ranks do nothing."""
    pipe = made(name)
    off: dict[str, Any] = {"true_cfg_scale": 1.0} if name == "flux true cfg" else {"guidance_scale": 1.0}
    if name == "flux":
        off = {}
    wanted = run(pipe, name, **off)
    with divided(pipe, cfg=2) as runner:
        with pytest.raises(PlanError, match=r"cfg=2 divides the branches .* no second one at .*_scale=1.0; give"):
            run(runner, name, **off)
        if name != "flux":
            run(runner, name)
    with divided(pipe, data=2) as runner:
        same(run(runner, name, **off), wanted, "guidance off")


def test_rows() -> None:
    """A failure means that a split takes rows of other branches or images, or cuts what has no rows."""
    assert BatchSlice.from_batch_size(6, 2) == BatchSlice(range(3), range(2), 3, 2)
    with pytest.raises(ModelError, match=r"5 row\(s\) for 2 image\(s\)"):
        BatchSlice.from_batch_size(5, 2)
    rows = BatchSlice(range(1, 3), range(1, 2), 3, 2)  # branches 1 and 2, image 1, of 3 branches and 2 images
    batch = torch.arange(6.0)[:, None]
    assert rows.select_batch(batch).flatten().tolist() == [3, 5]
    call = {
        "x": batch, "ids": batch, "t": torch.tensor(1.0), "none": None, "five": torch.zeros(5),
        "nested": {"a": batch, "b": [batch, (batch, "text")]},
    }  # fmt: skip
    split = slice_batch_arguments(call, rows.batch_size, rows.select_batch, ("ids",))
    assert split["x"].tolist() == split["nested"]["a"].tolist() == split["nested"]["b"][1][0].tolist() == [[3], [5]]
    assert split["ids"] is batch and split["none"] is None and len(split["five"]) == 5
    whole = torch.zeros(6, 1)
    rows.write_slice(whole, torch.tensor([[7.0], [8.0]]))
    assert whole.flatten().tolist() == [0, 0, 0, 7, 0, 8]

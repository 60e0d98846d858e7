"""Tokens of reference pictures as patches of their own, computed in some steps: FLUX Kontext, tiny, with one picture.

What is exact: `warmup` as long as the run draws the plain picture, any number of stages draws that of one, and on one
rank a picture with frozen references is that of a plain pipeline whose attention freezes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest
from diffusers.models.transformers import transformer_flux
from torch import Tensor

from ditile import Plan
from ditile.model.hooks.kv_store import AgeChecks
from ditile.plan.schedule import PatchSchedule
from ditile.runner.runner import build_single_runner, parallelize
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import TRUE_CFG, different, same
from tests.zoo.entry import picture

IMAGE, REFERENCE, TEXT = 6 * 8, 4 * 4, 12
LAYERS = 5
LONG = 6
FLOAT = 1e-5


def make_pipe() -> Any:
    return tiny.quiet(diffusers.FluxKontextPipeline(**tiny.flux().components))


def make_call(**changes: Any) -> dict[str, Any]:
    size = {"height": 24, "width": 32, "max_area": 24 * 32, "_auto_resize": False}
    return tiny.arguments("flux", **size, image=picture(16, 16), num_inference_steps=LONG) | changes


def draw(pipe: Any, plan: dict[str, Any], build: Callable[..., Any] = build_single_runner, **changes: Any) -> Tensor:
    runner = build(pipe, Plan(**plan))
    try:
        return runner(**make_call(**changes)).images
    finally:
        runner.restore()


def draw_plans(plans: list[dict[str, Any]], changes: dict[str, Any]) -> list[Tensor]:
    def build(pipe: Any, plan: Plan) -> Any:
        return parallelize(pipe, plan, keep_weights=True)

    pipe = make_pipe()
    return [draw(pipe, plan, build, **changes) for plan in plans]


@contextmanager
def frozen_references(calls: int) -> Iterator[None]:
    """Attention, by hand, whose keys and values of the reference stay those of the first step."""
    attend, first, turn = transformer_flux.dispatch_attention_fn, dict[int, tuple[Tensor, Tensor]](), [0]

    def attend_frozen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        layer, step = turn[0] % (LAYERS * calls), turn[0] // (LAYERS * calls)
        turn[0] += 1
        reference = slice(TEXT + IMAGE, None)
        if step == 0:
            first[layer] = k[:, reference].clone(), v[:, reference].clone()
        else:
            k, v = k.clone(), v.clone()
            k[:, reference], v[:, reference] = first[layer]
        return attend(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_flux, "dispatch_attention_fn", attend_frozen)
        yield


@pytest.mark.parametrize("guidance", [{}, TRUE_CFG])
def test_frozen_references_are_those_of_an_independent_simulation(guidance: dict[str, Any]) -> None:
    """A failure means that keys of references are not those of the first step, or that something else is stale."""
    pipe = make_pipe()
    with frozen_references(1 + bool(guidance)):
        wanted = pipe(**make_call(**guidance)).images
    actual = draw(pipe, {"references": 0, "patches": 2}, **guidance)
    assert (actual - wanted).abs().max() <= FLOAT * wanted.abs().max()
    different(pipe(**make_call(**guidance)).images, wanted, "freezing had no effect")


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_stages_is_one_stage(pool: Pool, ranks: int) -> None:
    """With every step synchronous, and with stale keys: bit for bit on every rank."""
    plans = [{"references": k, "patches": 4, "warmup": w} for k, w in ((0, LONG), (0, 1), (1, 1), (2, 1), (3, 0))]
    alone = draw_plans(plans, TRUE_CFG)
    same(alone[0], make_pipe()(**make_call(**TRUE_CFG)).images)
    different(alone[1], alone[2], "references=0 computed them in each step")
    for got in pool.run(draw_plans, ranks, [plan | {"pipefusion": ranks} for plan in plans], TRUE_CFG):
        same(got, alone)


@pytest.mark.parametrize("more", [{"ring": 2}, {"pipefusion": 2, "ulysses": 2}, {"pipefusion": 2, "cfg": 2}])
def test_other_axes_draw_the_same(pool: Pool, more: dict[str, Any]) -> None:
    """Sums in another order: to 1e-5."""
    plan = {"references": 0, "patches": 3}
    [alone] = draw_plans([plan], TRUE_CFG)
    for [got] in pool.run(draw_plans, Plan(**more).world, [plan | more], TRUE_CFG):
        assert (got - alone).abs().max() <= FLOAT * alone.abs().max()


def test_distrifusion_leaves_out_each_ranks_share(pool: Pool) -> None:
    """Exact where each step is synchronous; ages are asserted; a picture unlike that of fresh references."""
    plans = [{"references": k, "warmup": w, "distrifusion": 2} for k, w in ((0, LONG), (2, LONG), (0, 1), (1, 1))]
    plain = make_pipe()(**make_call(**TRUE_CFG)).images
    for got in pool.run(draw_plans, 2, plans, TRUE_CFG):
        for whole in got[:2]:
            assert (whole - plain).abs().max() <= FLOAT * plain.abs().max()
        different(got[2], got[3], "references=0 computed them in each step")
        assert (got[2] - plain).abs().max() < plain.abs().max() / 4


@pytest.mark.parametrize("references", [0, 1, 3])
def test_calls_and_ages_are_those_of_the_schedule(references: int) -> None:
    """A block is called once for each patch of a step that computes it; each attention reads keys of the right age."""
    pipe, checks, calls = make_pipe(), AgeChecks(), list[int]()
    runner = parallelize(pipe, Plan(references=references, patches=3), checks=checks, trust_code=True)
    last = pipe.transformer.single_transformer_blocks[2].norm
    handle = last.register_forward_hook(lambda module, args, out: calls.append(args[0].shape[1]))
    runner(**make_call())
    handle.remove()
    runner.restore()
    fresh = [step for step in range(1, LONG) if references and step % references == 0]
    reads = 3 * len(fresh) + 2 * (LONG - 1 - len(fresh))
    assert checks.passed == LAYERS * reads
    assert runner.report.reference_tokens == REFERENCE and runner.report.reference_steps == [0, *fresh]
    sizes = TEXT + IMAGE + REFERENCE
    dummies = 2
    in_steps = [sizes] + [
        sizes - REFERENCE * (step not in fresh) + dummies * (1 + (step in fresh)) for step in range(1, LONG)
    ]
    assert sum(calls) == sum(in_steps)


def send_bytes(plan: dict[str, Any], kind: str) -> int:
    runner = parallelize(make_pipe(), Plan(**plan), keep_weights=True)
    runner(**make_call())
    return int(runner.report.sent.get(kind, 0))


@pytest.mark.parametrize("references", [0, 2])
def test_no_message_brings_references_that_are_left_out(pool: Pool, references: int) -> None:
    """A stage sends each step the tokens of the image and the text, and those of references in some; a rank of
    DistriFusion the keys of its share of the image, and of the references where these are computed."""
    schedule = PatchSchedule(2, 3, LONG, 1, references=references, num_references=1)
    fresh = list(map(schedule.computes_references, range(LONG)))
    tokens = LONG * (TEXT + IMAGE) + sum(fresh) * REFERENCE
    sent = pool.run(send_bytes, 2, {"pipefusion": 2, "references": references}, "activations")
    assert sent == [tokens * tiny.WIDTH * 4, 0]
    # The last step's keys are read by nobody.
    tokens = (LONG - 1) * IMAGE // 2 + sum(fresh[:-1]) * REFERENCE // 2
    sent = pool.run(send_bytes, 2, {"distrifusion": 2, "references": references}, "distrifusion")
    assert sent == [2 * LAYERS * tokens * tiny.WIDTH * 4] * 2

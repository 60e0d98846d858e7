"""Gating of guidance: equal to a loop by hand, on batches of two and on two calls, and on ranks to one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import ditile
from ditile.cache.methods.gating import CAPTION_FIRST
from ditile.model.hooks.overrides import override_attribute
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.cache.test_easycache import left_out, make, model_of
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, different, same

STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
GATED = list(range(6, STEPS))
CONFIG = ditile.GuidanceGateConfig(gate=0.5)
BY_ROWS = ["unet", "sana", "mochi", "pixart-sigma", "hunyuan-dit", "stable-diffusion-3", "lumina-next"]
BY_CALLS = ["wan-2.1", "qwen-image", "chroma"]


@contextmanager
def by_hand(pipe: Any, *, calls: bool, caption_first: bool = False) -> Iterator[list[int]]:
    """The pipeline with a model that computes both branches, and from the gate on returns the kept difference."""
    model, counted, kept = model_of(pipe), [0], {}
    forward = model.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)[0]
        step, branch = divmod(counted[0], 2) if calls else (counted[0], 0)
        counted[0] += 1
        if calls and branch == 0:
            kept["cond"] = out
            return (out,)
        without, cond = (out, kept["cond"]) if calls else out.chunk(2)
        if caption_first:
            without, cond = cond, without
        if step < GATED[0]:
            kept["difference"] = cond - without
            return (out,)
        without = cond - kept["difference"]
        if calls:
            return (without,)
        return (torch.cat([cond, without] if caption_first else [without, cond]),)

    with ExitStack() as stack:
        override_attribute(stack, model, "forward", called)
        yield counted


@pytest.mark.parametrize("name", [*BY_ROWS, *BY_CALLS])
def test_gated_guidance_is_the_kept_difference(name: str) -> None:
    """A failure at a gate of 1: the cache changes the image. Elsewhere: another difference, other rows, or another
    branch is left out."""
    pipe, call = make(name)
    plain = pipe(**call)[0]
    ditile.enable_cache(pipe, CONFIG.reset(gate=1))
    same(pipe(**make(name)[1])[0], plain, name)
    ditile.disable_cache(pipe)
    with by_hand(pipe, calls=name in BY_CALLS, caption_first=name == "lumina-next"):
        wanted = torch.as_tensor(pipe(**make(name)[1])[0])
    different(wanted, plain, "there is guidance")
    ditile.enable_cache(pipe, CONFIG)
    got = torch.as_tensor(pipe(**make(name)[1])[0])
    assert float((got - wanted).abs().max() / wanted.std()) < 1e-4
    assert left_out(pipe) == [[], GATED]
    ditile.disable_cache(pipe)
    same(pipe(**make(name)[1])[0], plain, "the cache was taken off")


@pytest.mark.parametrize(("name", "rows"), [("pixart-sigma", [2] * 6 + [1] * 6), ("wan-2.1", [1] * 18)])
def test_half_of_the_work_is_done_after_the_gate(name: str, rows: list[int]) -> None:
    """A failure: rows or calls are computed of which nothing is used."""
    pipe, call = make(name)
    model, seen = model_of(pipe), []
    forward = model.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(args[0] if args else kwargs["hidden_states"]))
        return forward(*args, **kwargs)

    with ExitStack() as stack:
        override_attribute(stack, model, "forward", called)
        ditile.enable_cache(pipe, CONFIG)
        pipe(**call)
        assert seen == rows
        ditile.disable_cache(pipe)


def draw(name: str, plan: str | None, images: int) -> tuple[Tensor, list[list[int]]]:
    """Latents in float64, and the steps left out."""
    pipe = MAKE[name]()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, torch.float64)
    ditile.enable_cache(pipe, CONFIG)
    call = call_of(name, num_inference_steps=STEPS, num_images_per_prompt=images)
    runner = pipe if plan is None else parallelize(pipe, Plan.parse(plan))
    return runner(**call).images, left_out(pipe)


EXACT = [("flux true cfg", "ulysses=2"), ("flux true cfg", "ring=2"), ("pixart sigma", "tensor=2"),
         ("pixart sigma", "ulysses=2"), ("pixart sigma", "data=2"), ("flux true cfg", "data=2"),
         ("sd3.5 medium", "ulysses=2")]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), EXACT)
def test_ranks_equal_one_process(pool: Pool, name: str, plan: str) -> None:
    """A failure: a rank computed other rows than it returned, or ranks gated in other steps."""
    wanted, steps = draw(name, None, 2)
    assert steps == [[], GATED]
    for rank, (latents, own) in enumerate(pool.run(draw, 2, name, plan, 2)):
        assert float((latents - wanted).abs().max() / wanted.std()) < 1e-6, f"rank {rank}"
        assert own == steps


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("cfg=2", "gate=0.5 leaves one half of cfg=2 without work"),
        ("pipefusion=2 patches=2", "gate=0.5 changes how many rows a call has"),
        ("distrifusion=2", "gate=0.5 changes how many rows a call has"),
    ],
)
def test_plans_that_cannot_gate_refuse(pool: Pool, plan: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        pool.run(draw, 2, "pixart sigma", plan, 1)


PREDICTION_HALVES = re.compile(r"(\w+), (\w+) = (?:\w+\.chunk\(2\)|torch\.split\(\s*\w+, len\(\w+\) // 2)")


def test_halves_are_those_of_each_pipeline() -> None:
    """diffusers says in its sources which half has the caption. A failure: guidance of a pipeline would be reversed."""
    folder = Path(diffusers.__file__).parent / "pipelines"
    counts = [0, 0]
    for file in folder.rglob("pipeline_*.py"):
        text = file.read_text()
        names = re.findall(r"^class (\w+Pipeline)\(", text, re.MULTILINE)
        for first, second in PREDICTION_HALVES.findall(text):
            if ("uncond" in first) == ("uncond" in second):
                continue
            is_caption_first = "uncond" in second
            counts[is_caption_first] += 1
            for name in names:
                assert name.startswith(CAPTION_FIRST) == is_caption_first, (name, first, second)
    assert counts[0] > 50 and counts[1] > 4

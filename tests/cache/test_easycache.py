"""EasyCache and gated guidance: equal to the authors' loops written out here, and on ranks to one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

import ditile
from ditile.cache.methods.gating import CAPTION_FIRST
from ditile.model.hooks.overrides import override_attribute
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.cache.pictures import skipped
from tests.pool import CaseError, Pool
from tests.runner.cases import MAKE, call_of, different, make_double, same
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
STEPS = 12
CONFIG = ditile.EasyCacheConfig(threshold=0.4, retention_steps=3)
ZOO_NAMES = ["sana", "mochi", "flux", "pixart-sigma", "qwen-image", "wan-2.1", "hunyuan-dit", "z-image"]


def make(name: str) -> tuple[Any, dict[str, Any]]:
    if name == "unet":
        pipe = tiny.stable_diffusion()
        # PNDM makes a step more than it is asked for.
        pipe.scheduler = DDIMScheduler(beta_end=0.004, clip_sample=False)
        generator = torch.Generator().manual_seed(0)
        size = {"height": 32, "width": 24, "output_type": "latent"}
        return pipe, size | {"prompt": "a red circle", "num_inference_steps": STEPS, "generator": generator}
    entry = ZOO[name]
    return entry.make(), entry.call() | {"num_inference_steps": STEPS}


def model_of(pipe: Any) -> Any:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


class Authors:
    """The authors' forward of a branch: what they call k, the accumulated error, and the cached difference."""

    def __init__(self, forward: Callable[..., Any], threshold: float, first: int) -> None:
        self.forward, self.threshold, self.first = forward, threshold, first
        self.step, self.error, self.rate = -1, 0.0, None
        self.previous_input = self.previous_output = self.computed_input = self.cache = None
        self.skipped: list[int] = []

    def decide(self, x: Tensor) -> bool:
        self.step += 1
        computes = True
        if self.first <= self.step < STEPS - 1 and self.rate is not None:
            change = (x - self.previous_input).abs().mean() / self.previous_output.abs().mean()
            self.error += float(self.rate * change)
            computes = not self.error < self.threshold
        if computes:
            self.error = 0.0
        self.previous_input = x.clone()
        return computes

    def run(self, x: Tensor, computes: bool, call: Callable[[], Any]) -> Any:
        if not computes:
            self.skipped.append(self.step)
            return x + self.cache
        out = call()
        if self.previous_output is not None:
            moved = (x - self.computed_input).abs().mean()
            self.rate = (out - self.previous_output).abs().mean() / moved
        self.computed_input, self.previous_output, self.cache = x.clone(), out.clone(), out - x
        return out


@contextmanager
def by_authors(pipe: Any, branches: int, config: Any) -> Iterator[list[Authors]]:
    """The pipeline with that in the place of its model, whose calls take turns."""
    model, calls = model_of(pipe), [0]
    forward = model.forward
    loops = [Authors(forward, config.threshold, config.retention_steps) for _ in range(branches)]
    decision = [True]

    def called(*args: Any, **kwargs: Any) -> Any:
        branch = calls[0] % branches
        calls[0] += 1
        x = args[0] if args else kwargs.get("hidden_states", kwargs.get("sample"))
        if branch == 0:
            decision[0] = loops[0].decide(x)
        else:
            loops[branch].step += 1
        return (loops[branch].run(x, decision[0], lambda: forward(*args, **kwargs)[0]),)

    with ExitStack() as stack:
        override_attribute(stack, model, "forward", called)
        yield loops


@pytest.mark.parametrize("name", ["unet", *ZOO_NAMES])
def test_calls_are_left_out_and_none_at_the_limit(name: str) -> None:
    """A failure at the limit: a cache that computes everything changes the image."""
    pipe, call = make(name)
    plain = pipe(**call)[0]
    ditile.enable_cache(pipe, CONFIG.reset(threshold=0))
    same(pipe(**make(name)[1])[0], plain, name)
    assert not any(skipped(pipe))
    ditile.enable_cache(pipe, CONFIG.reset(threshold=1000.0))
    different(pipe(**make(name)[1])[0], plain)
    assert skipped(pipe) and all(steps == list(range(3, STEPS - 1)) for steps in skipped(pipe))
    ditile.disable_cache(pipe)
    same(pipe(**make(name)[1])[0], plain, "the cache was taken off")


@pytest.mark.parametrize(("name", "branches"), [("unet", 1), ("flux", 2), ("wan-2.1", 2), ("qwen-image", 2)])
def test_decisions_and_images_are_the_authors(name: str, branches: int) -> None:
    """A failure: another k, another sum, or another difference that is added."""
    for threshold in (0.4, 0.2, 0.8, 0.1, 1.6, 3.0):
        config = CONFIG.reset(threshold=threshold)
        pipe, call = make(name)
        with by_authors(pipe, branches, config) as loops:
            wanted = torch.as_tensor(pipe(**call)[0])
        if 0 < len(loops[0].skipped) < STEPS - 4:
            break
    else:
        pytest.fail("no threshold tells the steps apart")
    ditile.enable_cache(pipe, config)
    got = torch.as_tensor(pipe(**make(name)[1])[0])
    assert skipped(pipe) == [loop.skipped for loop in loops]
    assert float((got - wanted).abs().max() / wanted.std()) < 1e-4


def draw(name: str, plan: str | None, threshold: float) -> tuple[Tensor, list[list[int]], int]:
    """Latents in float64, the steps left out, and the bytes by which a rank agreed with others."""
    pipe = MAKE[name]()
    make_double(pipe)
    ditile.enable_cache(pipe, CONFIG.reset(threshold=threshold))
    call = call_of(name, num_inference_steps=STEPS, num_images_per_prompt=2)
    if plan is None:
        return pipe(**call).images, skipped(pipe), 0
    runner = parallelize(pipe, Plan.parse(plan), keep_weights=True)
    latents = runner(**call).images
    return latents, skipped(pipe), runner.mesh.traffic.bytes.get("decisions", 0)


EXACT = [("flux", "ulysses=2"), ("flux", "ring=2"), ("flux", "tensor=2"), ("flux true cfg", "cfg=2"),
         ("pixart sigma", "cfg=2"), ("pixart sigma", "ulysses=2 cfg=2")]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), EXACT)
def test_ranks_leave_out_what_one_process_does(pool: Pool, name: str, plan: str) -> None:
    """A failure: ranks decided apart, or a forecast was made of what had not arrived."""
    for threshold in (0.4, 0.8, 1.6, 3.2, 6.4):
        wanted, steps, _ = draw(name, None, threshold)
        if 0 < len(steps[0]) < STEPS - 1 - 3:
            break
    else:
        pytest.fail("no threshold tells the steps apart")
    world = Plan.parse(plan).world
    for rank, (latents, own, sent) in enumerate(pool.run(draw, world, name, plan, threshold)):
        assert float((latents - wanted).abs().max() / wanted.std()) < 1e-6, f"rank {rank}"
        assert own == steps
        # A number of 8 bytes to each other rank, in each step that is measured.
        assert sent == 8 * (world - 1) * (STEPS - 1 - 3)


GATED = list(range(6, STEPS))
GATE = ditile.GuidanceGateConfig(gate=0.5)
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
    ditile.enable_cache(pipe, GATE.reset(gate=1))
    same(pipe(**make(name)[1])[0], plain, name)
    ditile.disable_cache(pipe)
    with by_hand(pipe, calls=name in BY_CALLS, caption_first=name == "lumina-next"):
        wanted = torch.as_tensor(pipe(**make(name)[1])[0])
    different(wanted, plain, "there is guidance")
    ditile.enable_cache(pipe, GATE)
    got = torch.as_tensor(pipe(**make(name)[1])[0])
    assert float((got - wanted).abs().max() / wanted.std()) < 1e-4
    assert skipped(pipe) == [[], GATED]
    ditile.disable_cache(pipe)
    same(pipe(**make(name)[1])[0], plain, "the cache was taken off")


def draw_gated(name: str, plan: str | None, images: int) -> tuple[Tensor, list[list[int]]]:
    """Latents in float64, and the steps left out."""
    pipe = MAKE[name]()
    make_double(pipe)
    ditile.enable_cache(pipe, GATE)
    call = call_of(name, num_inference_steps=STEPS, num_images_per_prompt=images)
    runner = pipe if plan is None else parallelize(pipe, Plan.parse(plan))
    return runner(**call).images, skipped(pipe)


GATED_AXES = [("flux true cfg", "ulysses=2"), ("flux true cfg", "ring=2"), ("pixart sigma", "tensor=2"),
         ("pixart sigma", "ulysses=2"), ("pixart sigma", "data=2"), ("flux true cfg", "data=2"),
         ("sd3.5 medium", "ulysses=2")]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), GATED_AXES)
def test_ranks_equal_one_process(pool: Pool, name: str, plan: str) -> None:
    """A failure: a rank computed other rows than it returned, or ranks gated in other steps."""
    wanted, steps = draw_gated(name, None, 2)
    assert steps == [[], GATED]
    for rank, (latents, own) in enumerate(pool.run(draw_gated, 2, name, plan, 2)):
        assert float((latents - wanted).abs().max() / wanted.std()) < 1e-6, f"rank {rank}"
        assert own == steps


@pytest.mark.parametrize(
    ("draws", "plan", "how", "message"),
    [
        (draw_gated, "cfg=2", 1, "gate=0.5 leaves one half of cfg=2 without work"),
        (draw_gated, "pipefusion=2 patches=2", 1, "gate=0.5 changes how many rows a call has"),
        (draw, "distrifusion=2 warmup=1", 0.4, "decides in each step.*use a schedule"),
    ],
)
def test_plans_that_cannot_do_it_refuse(pool: Pool, draws: Any, plan: str, how: float, message: str) -> None:
    """Gating needs both branches and all rows; EasyCache decides what stages must know before."""
    with pytest.raises(CaseError, match=message):
        pool.run(draws, 2, "pixart sigma", plan, how)


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

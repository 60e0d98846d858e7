"""EasyCache and gated guidance: equal to the authors' loops written out here. `test_methods` has their ranks."""

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
from tests import tiny
from tests.cache.pictures import skipped
from tests.runner.cases import different, same
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
STEPS = 12
CONFIG = ditile.EasyCacheConfig(threshold=0.4, retention_steps=3)


def make(name: str, steps: int = STEPS) -> tuple[Any, dict[str, Any]]:
    if name == "unet":
        pipe = tiny.stable_diffusion()
        # PNDM makes a step more than it is asked for.
        pipe.scheduler = DDIMScheduler(beta_end=0.004, clip_sample=False)
        generator = torch.Generator().manual_seed(0)
        size = {"height": 32, "width": 24, "output_type": "latent"}
        return pipe, size | {"prompt": "a red circle", "num_inference_steps": steps, "generator": generator}
    entry = ZOO[name]
    return entry.make(), entry.call() | {"num_inference_steps": steps}


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
    """A failure at a gate of 1: the image changes. Elsewhere: other rows, or another difference or branch."""
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

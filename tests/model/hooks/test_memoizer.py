"""What is computed in front of the blocks is computed once where it does not depend on the latents, and only there."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ditile.model.hooks.generation import Generation
from ditile.model.remembered_outputs import OutputMemoizer
from ditile.plan.anatomy import Anatomy
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile.runner.runner import parallelize
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu
from tests.zoo import ZOO

PATCHES = 3


def count_calls(calls: Counter[str], module: nn.Module, name: str) -> None:
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return forward(*args, **kwargs)

    module.forward = counted  # type: ignore[method-assign]


def calls_of(name: str, plan: dict[str, Any], steps: int) -> Counter[str]:
    """How often the layers of refiners and embedders were called on a rank, in a picture of so many steps."""
    pipe, calls = ZOO[name].make(), Counter[str]()
    for path, module in pipe.transformer.named_modules():
        if path.count(".") <= 1 and not path.startswith("layers"):
            count_calls(calls, module, path)
    parallelize(pipe, Plan(**plan), device="cpu", trust_code=True)(**ZOO[name].call() | {"num_inference_steps": steps})
    return calls


@pytest.mark.parametrize(
    ("name", "branches", "once"),
    [("z-image", 1, ["t_embedder", "cap_embedder", "context_refiner.0"]), ("lumina-2", 2, ["context_refiner.0"])],
)
def test_refiners_of_the_text_are_computed_once_in_a_step(
    pool: Pool, name: str, branches: int, once: list[str]
) -> None:
    """The last of three steps. What refines the latents is computed for each patch, and on the first stage alone.

    A failure means that each patch pays for the text, or that a patch sees the latents of another one's turn.
    """
    for plan in ({"patches": PATCHES, "warmup": 1}, {"pipefusion": 2, "patches": PATCHES, "warmup": 1}):
        ranks = plan.get("pipefusion", 1)
        pairs = zip(*(pool.run(calls_of, ranks, name, plan, steps) for steps in (3, 2)), strict=True)
        for stage, (more, fewer) in enumerate(pairs):
            step = more - fewer
            assert [step[each] for each in once] == [branches] * len(once)
            assert step["noise_refiner.0"] == (0 if stage else PATCHES * branches)


def count_linear_calls(name: str, layer: str, steps: int, recorded: bool) -> int:
    """How often a linear layer is computed in a call of so many steps, and whether it is played is not counted."""
    pipe = ZOO[name].make()
    counted = pipe.transformer.get_submodule(layer)
    calls = 0
    forward = nn.Linear.forward

    def count(module: nn.Linear, x: Tensor) -> Tensor:
        nonlocal calls
        calls += module is counted
        return forward(module, x)

    # Not on the instance: what is around the forward of a module may count its calls, so it is never remembered.
    with record_on_cpu(), mock.patch.object(nn.Linear, "forward", count):
        runner = parallelize(pipe, Plan(patches=PATCHES, warmup=1), device="cpu", cuda_graphs=recorded, trust_code=True)
        runner(**ZOO[name].call() | {"num_inference_steps": steps})
    return calls


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("qwen-image", "transformer_blocks.0.img_mod.1"),
        ("wan-2.1", "blocks.0.attn2.to_k"),
        ("flux", "transformer_blocks.0.norm1.linear"),
    ],
)
def test_blocks_compute_once_in_a_step_what_does_not_see_the_image(name: str, layer: str, recorded: bool) -> None:
    """The third of four steps, which is the one that is recorded: later ones are played.

    A failure means that each patch reads the weights of each modulation, a third of all in Qwen-Image.
    """
    steps = count_linear_calls(name, layer, 3, recorded) - count_linear_calls(name, layer, 2, recorded)
    branches = count_linear_calls(name, layer, 1, recorded)
    assert steps == branches


class Typed(nn.Linear):
    """Is given latents for their type alone."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, time: Tensor, latents: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(time.to(latents.dtype))


class Passed(Typed):
    """Returns the latents without a look at them."""

    def forward(self, time: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(time, latents), latents


class Front(nn.Module):
    """What a model computes in front of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("text", "time", "image", "lost", "written"):
            setattr(self, name, nn.Linear(2, 2))
        self.typed = Typed()
        self.passed = Passed()

    def forward(self, latents: Tensor, text: Tensor, time: Tensor) -> dict[str, Tensor]:
        """`[B, 2]` each."""
        out = {"text": self.text(text), "time": self.time(time * 2), "image": self.image(latents)}
        # Some operations lose what is not a number.
        out["lost"] = self.lost(torch.nan_to_num(latents))
        out["written"] = self.written(text).add_(1)
        out["typed"] = self.typed(time * 3, latents)
        _, out["passed"] = self.passed(time * 4, latents)
        return {name: value.clone() for name, value in out.items()}


@pytest.fixture
def run() -> Iterator[tuple[Callable[..., dict[str, Tensor]], Counter[str], Generation]]:
    """A surveyed model, all of whose modules but one are in its row, and how often they were called since."""
    model, calls, now = Front(), Counter[str](), Generation(PatchSchedule(stages=1, patches=2, steps=4, warmup=1))
    for name, module in model.named_children():
        count_calls(calls, module, name)
    # What loses NaN on its way is in no row: its numbers differ from patch to patch.
    row = Anatomy({}, "none", per_step=tuple(name for name, _ in model.named_children() if name != "lost"))
    memo = OutputMemoizer(model, row, now)
    with torch.no_grad(), ExitStack() as stack:
        memo.install_hooks(stack)
        now.is_surveyed = True
        poisoned = torch.full((1, 2), torch.nan), torch.ones(1, 2), torch.ones(1, 2)
        memo.survey_call(functools.partial(model, *poisoned), lambda: False)
        now.is_surveyed = False
        calls.clear()
        yield model, calls, now


def test_what_depends_on_the_latents_is_computed_for_each_patch(run: Any) -> None:
    """Modules and steps: one that is given the same counts for the call, one with a time of its own for a step.

    A failure means that a patch is given what was made of the latents before its turn.
    """
    model, calls, now = run
    text, plain = torch.ones(1, 2), Front()
    plain.load_state_dict(model.state_dict())
    for step in range(1, 3):
        time = torch.full((1, 2), float(step))
        for patch in range(2):
            now.enter_micro_step(MicroStep(step, patch))
            latents = torch.randn(1, 2)
            wanted = plain(latents, text, time)
            assert all(torch.equal(out, wanted[name]) for name, out in model(latents, text, time).items())
    assert calls == {"text": 1, "time": 2, "image": 4, "lost": 4, "written": 4, "typed": 2, "passed": 4}


def test_the_text_is_computed_again_where_it_was_changed(run: Any) -> None:
    """A failure means that a prompt that is replaced in its place between steps is not seen."""
    model, calls, now = run
    text = torch.ones(1, 2)
    for step in range(1, 4):
        now.enter_micro_step(MicroStep(step, 0))
        text.mul_(2) if step == 3 else None
        model(torch.randn(1, 2), text, text)
    assert calls["text"] == 2

"""What is computed in front of the blocks is computed once where it does not depend on the latents."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from ditile.plan.plan import Plan
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

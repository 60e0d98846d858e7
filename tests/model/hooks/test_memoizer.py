"""What does not depend on the latents is computed once in a step, and not by each patch."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import Tensor, nn

from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.recorded_calls import record_on_cpu
from tests.zoo import ZOO

PATCHES = 3


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

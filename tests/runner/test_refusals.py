"""What a patch pipeline cannot honour: before a step, on every rank, an error says what is wrong and what works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import NucleusMoEImageTransformer2DModel, PixArtSigmaPAGPipeline
from peft import LoraConfig, get_peft_model
from torch import nn

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import CaseError, Pool, on_ranks
from tests.runner.cases import MAKE, divided, run, same

STALE = {"patches": 3, "warmup": 1}


def _instead(make: Callable[[], Any], wrap: Callable[[Any], nn.Module]) -> Callable[[], Any]:
    def made() -> Any:
        pipe = make()
        pipe.transformer = wrap(pipe.transformer)
        return pipe

    return made


def _unknown(_: Any) -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "joint_attention_dim": 8}
    made: nn.Module = NucleusMoEImageTransformer2DModel(
        **sizes, in_channels=4, axes_dims_rope=(2, 2, 4), mlp_ratio=12.0, moe_enabled=False
    )
    return made


def _perturbed() -> Any:
    parts = {name: part for name, part in tiny.pixart().components.items() if part is not None}
    return PixArtSigmaPAGPipeline(**parts, pag_applied_layers=["blocks.1"])


PIPELINES: dict[str, tuple[Callable[[], Any], str]] = {
    "perturbed": (_perturbed, "PixArtSigmaPAGPipeline puts an attention of its own.*use data or tensor"),
    "U-Net": (tiny.stable_diffusion, "UNet2DConditionModel is not in the table.*data and cfg work without one"),
    "unknown": (_instead(tiny.pixart, _unknown),
                "NucleusMoEImageTransformer2DModel does not fit .*PixArtSigmaPipeline could.* give it its own model"),
    "peft": (_instead(tiny.pixart, lambda model: get_peft_model(model, LoraConfig(target_modules=["to_q"]))),
             r"PeftModel wraps a PixArtTransformer2DModel.*get_base_model\(\)"),
}  # fmt: skip
"""Pipelines that cannot be divided, and what is said of them."""


def refused(what: str) -> None:
    make, says = PIPELINES[what]
    pipe = make()
    blocks = None if what == "U-Net" else list(pipe.transformer.state_dict())
    with pytest.raises(ModelError, match=says):
        parallelize(pipe, Plan(pipefusion=dist.get_world_size(), patches=3))
    assert blocks is None or list(pipe.transformer.state_dict()) == blocks, "something was cut"


@pytest.mark.parametrize("ranks", [1, 2])
def test_pipelines_that_cannot_be_divided(pool: Pool, ranks: int) -> None:
    """A failure means a wrong picture in silence, or a pipeline that was refused and is damaged all the same."""
    for what in PIPELINES:
        pool.run(refused, ranks, what)


ARGUMENTS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("sd3", {"skip_guidance_layers": [1]}, ModelError, "skip_guidance_layers .*use data and cfg alone"),
    ("sd3", {"ip_adapter_image_embeds": 1}, ModelError, "leave ip_adapter_image_embeds out"),
    ("sd3", {"height": 16}, PlanError, "patches"),
    ("flux", {"hieght": 32}, ModelError, "hieght"),
    ("flux", {"control_image": 1}, ModelError, "control_image"),
    ("flux", {"output_on": "frist"}, ModelError, "^output_on='frist' .*try 'all' or 'first'"),
]
"""A call, and how it is refused."""


@pytest.mark.parametrize("name", ["sd3", "flux"])
@on_ranks(2)
def test_arguments_that_cannot_be_honoured(name: str) -> None:
    """A failure means a wrong picture in silence, or a runner that a refusal has spoiled."""
    with divided(MAKE[name](), pipefusion=2, **STALE | {"patches": 5}) as runner:
        wanted = run(runner, name)
        for _, changes, error, says in (row for row in ARGUMENTS if row[0] == name):
            with pytest.raises(error, match=says):
                run(runner, name, **changes)
            same(run(runner, name), wanted, f"{name}, after {changes}")


def mixed() -> None:
    pipe = tiny.pixart()
    with divided(pipe, pipefusion=2, patches=2) as runner, torch.autocast("cpu", torch.bfloat16):
        run(runner, "pixart sigma")


def test_stages_that_change_the_dtype(pool: Pool) -> None:
    """A failure means that the next stage takes half of a message for the whole."""
    with pytest.raises(CaseError, match="blocks returned torch.float32, .* expects torch.bfloat16.*autocast"):
        pool.run(mixed, 2)

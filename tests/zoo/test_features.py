"""Calls in which a prompt or the blocks change, and rows of masks, of pipelines of many families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ditile
from ditile import Plan
from ditile.model.anatomies import find_anatomy
from ditile.plan.errors import StateError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import ensure_anatomies, forget_anatomy
from tests.pool import on_ranks
from tests.zoo.own import OWN
from tests.zoo.rows import ENOUGH, EVERY, compare_drawings, list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
STAGES = {"pipefusion": 2, "warmup": ENOUGH}


def draw(pipe: Any, plan: Mapping[str, Any], call: Mapping[str, Any]) -> list[Tensor]:
    runner = ditile.parallelize(pipe, Plan(**plan), keep_weights=True)
    try:
        return list_tensors(runner(**call))
    finally:
        runner.restore()


def near(got: list[Tensor], want: list[Tensor], tolerance: float, what: Any = "") -> None:
    """Raises with what is wrong."""
    problem = compare_drawings(got, want, tolerance)
    assert not problem, f"{what}: {problem}"


@on_ranks(2)
def test_a_prompt_that_a_callback_replaces() -> None:
    """From the second step on. A failure means that the end of the new prompt is dropped in silence."""
    entry = EVERY["cogvideox"]
    pipe = entry.make()

    def lengthen(_: Any, step: int, __: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embeds = tensors["prompt_embeds"]
        return {"prompt_embeds": torch.cat([embeds, embeds[:, :3]], dim=1)} if step == 0 else {}

    def call() -> dict[str, Any]:
        changes = {"callback_on_step_end": lengthen, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
        return entry.call() | changes

    want = list_tensors(pipe(**call()))
    for plan in ({"ulysses": 2}, {"ring": 2}):
        near(draw(pipe, plan, call()), want, 1e-5, plan)


@pytest.mark.parametrize("name", OWN)
def test_random_state(name: str) -> None:
    """A failure means that a picture without a generator depends on whether its model was looked at before."""
    pipe = OWN[name].make()
    forget_anatomy(pipe.transformer)
    before = torch.get_rng_state()
    ensure_anatomies(pipe, build_single_runner)
    assert find_anatomy(pipe.transformer) is not None and torch.equal(torch.get_rng_state(), before)


class ForgetfulList(nn.ModuleList):
    """Blocks of which the second is left out when that is wished."""

    is_forgetful = False

    def __iter__(self) -> Iterator[nn.Module]:
        blocks = list(super().__iter__())
        return iter(blocks[:1] + blocks[2:] if self.is_forgetful else blocks)


@on_ranks(2)
def test_a_block_that_is_left_out() -> None:
    """From the second step on. A failure means a wrong picture in silence: a stage leaves out what others compute."""
    entry = EVERY["wan-2.1"]
    pipe = entry.make()
    blocks = pipe.transformer.blocks = ForgetfulList(pipe.transformer.blocks)

    def forget(_: Any, __: int, ___: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks.is_forgetful = True
        return tensors

    runner = ditile.parallelize(pipe, Plan(**STAGES), keep_weights=True, trust_code=True)
    with pytest.raises(StateError, match="ran 3 blocks at.*same blocks in every call"):
        runner(**entry.call() | {"callback_on_step_end": forget})


@on_ranks(2)
def test_rows_of_masks() -> None:
    """A failure means that a micro-batch is given the mask of another's prompts."""
    entry = EVERY["qwen-image"]
    want = list_tensors(entry.make()(**entry.padded_prompt()))
    got = draw(entry.make(), {**STAGES, "warmup_mode": "pipelined"}, entry.padded_prompt())
    near(got, want, 1e-5)

"""Keys of warmup modes, and calls in which a prompt or the blocks change, of pipelines of many families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ditile
from ditile import Plan
from ditile.model.anatomies import find_anatomy
from ditile.plan.errors import PlanError, StateError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import ensure_anatomies, forget_anatomy
from tests.pool import on_ranks
from tests.zoo.own import OWN
from tests.zoo.rows import ENOUGH, EVERY, compare_drawings, list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
STAGES = {"pipefusion": 2, "warmup": ENOUGH}
PATCHES = {"qwen-image": 20, "wan-2.1": 64}
"""More than the tokens of an entry's call, and not more than those of its larger one."""
MODES: dict[str, float] = {"serial": 0.0, "sequence": 1e-5, "pipelined": 1e-5}
"""How far a picture may be from the plain one: ranks of `sequence`, and micro-batches, add up in another order."""


def draw(pipe: Any, plan: Mapping[str, Any], call: Mapping[str, Any]) -> tuple[list[Tensor], str]:
    """Tensors, and the table of ranks before they were drawn."""
    runner = ditile.parallelize(pipe, Plan(**plan), keep_weights=True)
    try:
        return list_tensors(runner(**call)), str(runner)
    finally:
        runner.restore()


def near(got: list[Tensor], want: list[Tensor], tolerance: float, what: Any = "") -> None:
    """Raises with what is wrong."""
    problem = compare_drawings(got, want, tolerance)
    assert not problem, f"{what}: {problem}"


@pytest.mark.parametrize(
    ("name", "mode", "variant"),
    [
        ("wan-2.1", "sequence", "call"),
        ("stable-audio-3", "sequence", "call"),
        ("qwen-image", "sequence", "padded_prompt"),
    ],
)
@on_ranks(2)
def test_stale_keys_of_warmup_modes(name: str, mode: str, variant: str) -> None:
    """After the first step they are those of a serial step. A failure means that a stage keeps keys or masks of another
    form than those that its layers make."""
    make_call, pipe, plan = getattr(EVERY[name], variant), EVERY[name].make(), {**STAGES, "warmup": 1}
    want, _ = draw(pipe, plan, make_call())
    near(draw(pipe, {**plan, "warmup_mode": mode}, make_call())[0], want, MODES[mode])


@pytest.mark.parametrize("name", PATCHES)
@on_ranks(2)
def test_a_call_after_a_refusal(name: str) -> None:
    """A failure means that a server must start its ranks again because somebody asked for a picture too small."""
    entry = EVERY[name]
    assert entry.larger is not None
    pipe = entry.make()
    want = list_tensors(pipe(**entry.larger()))
    runner = ditile.parallelize(pipe, Plan(**STAGES, patches=PATCHES[name]), keep_weights=True)
    with pytest.raises(PlanError, match=f"patches={PATCHES[name]} exceeds"):
        runner(**entry.call())
    near(list_tensors(runner(**entry.larger())), want, 0.0)


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
        near(draw(pipe, plan, call())[0], want, 1e-5, plan)


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
    """From the second step on. A failure means a wrong picture in silence: stages meet at a block that one of them does
    not reach."""
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
    got, _ = draw(entry.make(), {**STAGES, "warmup_mode": "pipelined"}, entry.padded_prompt())
    near(got, want, MODES["pipelined"])

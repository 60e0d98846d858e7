"""What a rank draws in each warmup mode, and with a LoRA: see `test_features.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

import ditile
from ditile import Plan
from ditile.plan.errors import PlanError, StateError
from tests.zoo.rows import ENOUGH, EVERY, compare_drawings, list_tensors

STAGES = {"pipefusion": 2, "warmup": ENOUGH}
PATCHES = {"qwen-image": 20, "wan-2.1": 64}
"""More than the tokens of an entry's call, and not more than those of its larger one."""
NUMBERS = {"output_type": "np", "return_dict": True}
MODES: dict[str, float] = {"serial": 0.0, "sequence": 1e-5, "pipelined": 1e-5}
"""How far a picture may be from the plain one: ranks of `sequence`, and micro-batches, add up in another order."""


def draw(pipe: Any, plan: Mapping[str, Any], call: Mapping[str, Any]) -> tuple[list[Tensor], str]:
    """Tensors, and the table of ranks before they were drawn."""
    runner = ditile.parallelize(pipe, Plan(**plan), keep_weights=True)
    try:
        return list_tensors(runner(**call)), str(runner)
    finally:
        runner.restore()


def draw_in_every_mode(name: str) -> list[str]:
    """What is wrong."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    pipe, problems = entry.make(), []
    calls: list[Callable[[], dict[str, Any]]] = [entry.call, *filter(None, [entry.two_images])]
    for number, call in enumerate(calls, 1):
        want = list_tensors(pipe(**call()))
        for mode, tolerance in MODES.items():
            got, table = draw(pipe, {**STAGES, "warmup_mode": mode}, call())
            if problem := compare_drawings(got, want, tolerance):
                problems.append(f"{mode}, {number} images: {problem}")
            if "stage 1" not in table or "0-" not in table:
                problems.append(f"{mode}: {table}")
    return problems


def draw_stale_in_mode(name: str, mode: str, variant: str = "call") -> list[str]:
    """What is wrong after the first step, when keys are stale: in every mode they are those of a serial step."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    make_call, pipe, plan = getattr(entry, variant), entry.make(), {**STAGES, "warmup": 1}
    want, _ = draw(pipe, plan, make_call())
    problem = compare_drawings(draw(pipe, {**plan, "warmup_mode": mode}, make_call())[0], want, MODES[mode])
    return [problem] if problem else []


def draw_with_lora(name: str) -> list[str]:
    """What is wrong."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    pipe = entry.make()
    plain = list_tensors(pipe(**entry.call()))
    torch.manual_seed(0)
    pipe.transformer.add_adapter(LoraConfig(target_modules=["to_q", "to_v"], init_lora_weights=False, r=2))
    want = list_tensors(pipe(**entry.call()))
    problems = [] if compare_drawings(want, plain, 1e-3) else ["the LoRA changes nothing"]
    for plan, tolerance in ((STAGES, 0.0), ({"ulysses": 2}, 1e-5)):
        if problem := compare_drawings(draw(pipe, plan, entry.call())[0], want, tolerance):
            problems.append(f"{plan}: {problem}")
    return problems


def draw_by_rows(name: str) -> list[str]:
    """What is wrong with pictures and videos that two ranks decode."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    pipe = entry.make()
    want, got = (
        list_tensors(result.frames if "frames" in result else result.images)
        for result in (
            pipe(**entry.call() | NUMBERS),
            ditile.parallelize(pipe, Plan(**STAGES, vae="rows"))(**entry.call() | NUMBERS),
        )
    )
    problem = compare_drawings(got, want, 1e-5)
    return [problem] if problem else []


def draw_after_a_refusal(name: str) -> list[str]:
    """What is wrong with a call after one that has fewer tokens than patches."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    assert entry.larger is not None
    pipe, problems = entry.make(), []
    want = list_tensors(pipe(**entry.larger()))
    runner = ditile.parallelize(pipe, Plan(**STAGES, patches=PATCHES[name]), keep_weights=True)
    try:
        runner(**entry.call())
        problems.append("not refused")
    except PlanError as error:
        if f"patches={PATCHES[name]} exceeds" not in str(error):
            problems.append(str(error))
    if problem := compare_drawings(list_tensors(runner(**entry.larger())), want, 0.0):
        problems.append(problem)
    return problems


def draw_with_a_longer_prompt(name: str) -> list[str]:
    """What is wrong with pictures whose prompt is another one from the second step on."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    pipe, problems = entry.make(), []

    def lengthen(_: Any, step: int, __: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embeds = tensors["prompt_embeds"]
        return {"prompt_embeds": torch.cat([embeds, embeds[:, :3]], dim=1)} if step == 0 else {}

    def call() -> dict[str, Any]:
        changes = {"callback_on_step_end": lengthen, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
        return entry.call() | changes

    want = list_tensors(pipe(**call()))
    for plan in ({"ulysses": 2}, {"ring": 2}):
        if problem := compare_drawings(draw(pipe, plan, call())[0], want, 1e-5):
            problems.append(f"{plan}: {problem}")
    return problems


class ForgetfulList(nn.ModuleList):
    """Blocks of which the second is left out when that is wished."""

    is_forgetful = False

    def __iter__(self) -> Iterator[nn.Module]:
        blocks = list(super().__iter__())
        return iter(blocks[:1] + blocks[2:] if self.is_forgetful else blocks)


def leave_out_a_block(name: str) -> str:
    """What is said of a forward that leaves out a block from the second step on."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    pipe = entry.make()
    blocks = pipe.transformer.blocks = ForgetfulList(pipe.transformer.blocks)

    def forget(_: Any, __: int, ___: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks.is_forgetful = True
        return tensors

    runner = ditile.parallelize(pipe, Plan(**STAGES), keep_weights=True, trust_code=True)
    try:
        runner(**entry.call() | {"callback_on_step_end": forget})
    except StateError as error:
        return str(error)
    return "nothing"


def draw_padded_micro_batches(name: str) -> list[str]:
    """What is wrong with micro-batches of two prompts of unlike length."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    want = list_tensors(entry.make()(**entry.padded_prompt()))
    got, _ = draw(entry.make(), {**STAGES, "warmup_mode": "pipelined"}, entry.padded_prompt())
    problem = compare_drawings(got, want, MODES["pipelined"])
    return [problem] if problem else []

"""Ranks that are called unlike, or whose pipelines are unlike, all say so before a step, whatever the argument is."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig
from PIL import Image

from ditile.model.fingerprint import fingerprint
from ditile.plan.errors import ModelError, PlanError, StateError
from ditile.plan.plan import Plan
from ditile.runner.digest import describe_call
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import on_ranks
from tests.runner.cases import divided, run, same


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class OwnProcessor(FluxAttnProcessor):
    """A user's, which may attend to anything."""


@dataclasses.dataclass
class Settings:
    """A user's, as guiders have them."""

    scale: float
    table: torch.Tensor


def _values() -> list[Any]:
    """Values of which no two mean the same picture."""
    picture = Image.new("RGB", (4, 4))
    other = picture.copy()
    other.putpixel((3, 3), (0, 0, 1))
    latents = _draw(1, 8, 4)
    return [
        None, True, 2, 2.5, "2", [2], [2, 2], ["a", "b"], ["a, b"], {"a": 2}, {"a": 3}, {"b": 2}, {2, 3},
        latents, latents.flip(1), latents.view(1, 4, 8), latents.double(), latents.nextafter(latents + 1), -latents,
        latents.bfloat16(), [latents], {"a": latents}, {"a": [latents + 1]}, torch.zeros(2), torch.zeros(2) - 0.0,
        torch.zeros(2).neg(), torch.tensor(1.0), torch.tensor(1), torch.tensor(True), torch.empty(0),
        np.zeros(3), np.zeros(3, np.float32), np.array(["a"]), np.array(["b"]), np.ones(3), picture, other,
        picture.convert("L"), [picture, other], [other, picture], Settings(1.0, latents), Settings(1.0, latents + 1),
        torch.Generator(), [torch.Generator()], [torch.Generator()] * 2, "x" * 1000, "y" * 1000, list(range(500)),
        list(range(1, 501)),
    ]  # fmt: skip


def test_what_differs_is_described_unlike() -> None:
    """A failure means that two ranks draw a picture of neither: what they were given differs and is not noticed."""
    described = [repr(fingerprint(value, "numbers")) for value in _values()]
    twins = {(i, k) for i, one in enumerate(described) for k in range(i) if one == described[k]}
    zeros = next(i for i, value in enumerate(_values()) if isinstance(value, torch.Tensor) and value.numel() == 2)
    assert twins == {(zeros + 1, zeros)}, "0 and 0 - 0 alone are one"
    assert all(len(text) <= 310 for text in described)


def test_what_is_alike_is_described_alike() -> None:
    """A failure means that a call which worked is refused: by strides, containers or numpy's numbers."""
    latents = _draw(6, 4)
    alike: list[tuple[Any, Any]] = [
        (latents, latents.t().contiguous().t()),
        (latents[1:], latents[1:].clone()),
        (latents.requires_grad_(), latents.detach()),
        ((1, "a"), [1, "a"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.float64(0.5), 0.5),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (float("nan"), float("nan")),
    ]
    for one, other in alike:
        assert fingerprint(one, "numbers") == fingerprint(other, "numbers"), (one, other)
    assert describe_call({"a": None, "callback_on_step_end": print, "callback_steps": 2}) == {}


def test_a_checksum_sees_each_bit_and_place() -> None:
    """A failure means that a difference in some places of a tensor is not seen."""
    octets = torch.zeros(2**22 + 13, dtype=torch.uint8)
    described = {fingerprint(octets, "numbers")}
    for place in (0, 7, 4096, 2**22, 2**22 + 12):
        for bit in (1, 128):
            octets[place] = bit
            described.add(fingerprint(octets, "numbers"))
        octets[place] = 0
    assert len(described) == 11
    signs = _draw(64).double()
    flipped = [signs.clone() for _ in range(3)]
    flipped[0][[3, 5]] *= -1
    flipped[1][[3, 6]] *= -1
    flipped[2][[3, 5]] = signs[[5, 3]]
    assert len({fingerprint(each, "numbers") for each in (signs, -signs, *flipped)}) == 5


def _with_generators(kind: str, count: int) -> Any:
    made = [torch.Generator().manual_seed(seed) for seed in range(count)]
    return made if kind == "list" else made[0] if count else None


POOLED = {"pooled_prompt_embeds": _draw(1, 32)}
UNLIKE: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "latents": (lambda rank: {"latents": _draw(1, 16, 16, seed=rank)}, r"latents=.float32 tensor \[1, 16, 16\] #"),
    "embeddings": (
        lambda rank: {"prompt": None, "prompt_embeds": _draw(1, 6, 32, seed=rank)} | POOLED,
        "rank 1 was called with prompt_embeds=.*and rank 0 with ",
    ),
    "scale": (lambda rank: {"joint_attention_kwargs": {"scale": 0.5 + rank}}, 'joint_attention_kwargs={"scale": 1.5}'),
    "none on rank 0": (lambda rank: {"generator": _with_generators("one", rank)}, 'generator="generator on cpu" and'),
    "a list on one": (lambda rank: {"generator": _with_generators("list" if rank else "one", 1)}, r'=\["generator on'),
    "lists": (lambda rank: {"prompt": ["a", "a"], "generator": _with_generators("list", 2 - rank)}, "generator="),
    "steps": (lambda rank: {"num_inference_steps": 4 - rank}, "with num_inference_steps=3 and rank 0 with 4"),
    "a refusal": (lambda rank: {"ip_adapter_image": 1} if rank else {}, "leave ip_adapter_image out"),
    "output": (lambda rank: {"output": "first" if rank else "all"}, 'output_on="first" and rank 0 with "all"'),
    "no such argument": (lambda rank: {"hieght": 8} if rank else {}, "unexpected keyword argument .hieght"),
}  # fmt: skip
"""What a rank is called with, and what all say."""


@contextlib.contextmanager
def _scale_lora(pipe: Any, scale: float) -> Iterator[None]:
    pipe.set_adapters("one", scale)
    yield
    pipe.set_adapters("one", 1.0)


def _set_processor(pipe: Any, rank: int) -> contextlib.AbstractContextManager[Any]:
    if rank == 0:  # another stage has the block
        return contextlib.nullcontext()
    return mock.patch.object(pipe.transformer.single_transformer_blocks[2].attn, "processor", OwnProcessor())


def _replace(pipe: Any, name: str, part: Any) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(pipe, name, part)


STATES: dict[str, tuple[Callable[[Any, int], contextlib.AbstractContextManager[Any]], str]] = {
    "scheduler": (
        lambda pipe, rank: _replace(pipe, "scheduler", FlowMatchEulerDiscreteScheduler(shift=1.0 + rank)),
        "scheduler.shift=2.0 and rank 0 with 1.0",
    ),
    "autocast": (
        lambda pipe, rank: torch.autocast("cpu", torch.bfloat16, enabled=rank == 1),
        "autocast=torch.bfloat16 and rank 0 with off",
    ),
    "dtype": (
        lambda pipe, rank: _replace(pipe, "vae", copy.deepcopy(pipe.vae).to([torch.float32, torch.bfloat16][rank])),
        "vae.dtype=torch.bfloat16 and rank 0 with torch.float32",
    ),
    "LoRA scale": (
        lambda pipe, rank: _scale_lora(pipe, 0.5 + rank),
        "LoRA one in transformer=scale 1.5, on and rank 0 with scale 0.5, on",
    ),
    "processor": (_set_processor, "single_transformer_blocks.2.attn.*OwnProcessor"),
}
"""How the pipeline of rank 1 is made unlike, and what all ranks say."""


@pytest.mark.parametrize("plan", [{"ulysses": 2}, {"pipefusion": 2, "patches": 2, "warmup": 1}])
@on_ranks(2)
def test_ranks_that_are_called_unlike(plan: dict[str, Any]) -> None:
    """A failure means a picture of neither call, or a process that gloo aborts, in place of one line."""
    pipe, rank = tiny.flux(), dist.get_rank()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "one")
    pipe.transformer.set_adapter("one")
    with divided(pipe, trusts=False, **plan) as runner:
        wanted = run(runner, "flux")
        calls = {what: (contextlib.nullcontext(), changes(rank), says) for what, (changes, says) in UNLIKE.items()}
        calls |= {what: (edit(pipe, rank), {}, says) for what, (edit, says) in STATES.items()}
        for what, (edited, changes, says) in calls.items():
            with edited, pytest.raises((StateError, ModelError), match=says) as caught:
                run(runner, "flux", **changes)
            assert len(str(caught.value)) < 500 and "\n" not in str(caught.value), what
        same(run(runner, "flux"), wanted, "after all refusals")
        runner.trace = rank == 0
        run(runner, "flux", output_type="latent")
        with pytest.raises(StateError, match="no trace was recorded on rank 1"):
            runner.write_trace("nowhere")


@on_ranks(2)
def test_ranks_with_different_plans() -> None:
    """A failure means that ranks wait for each other in different groups."""
    with pytest.raises(PlanError, match="rank 1 has a plan with ring=2 and rank 0 one with ring=1"):
        parallelize(tiny.flux(), Plan(ring=2) if dist.get_rank() else Plan(ulysses=2))


@pytest.mark.parametrize("plan", [{"pipefusion": 2}, {"tensor": 2, "split_scheme": "sequence"}])
@on_ranks(2)
def test_the_pipeline_in_place_of_the_runner(plan: dict[str, Any]) -> None:
    """A failure means an AttributeError from a block without weights, for users who call what they always called."""
    pipe = tiny.flux()
    wanted = run(pipe, "flux")
    runner = parallelize(pipe, Plan(**plan), keep_weights=True)
    copied = type(pipe)(**pipe.components)
    for one in (pipe, copied):
        with pytest.raises(StateError, match="2DModel has a part of its weights.* call the runner"):
            run(one, "flux")
    got = run(runner, "flux")
    runner.restore()
    same(run(pipe, "flux"), wanted, "restored")
    assert got.shape == wanted.shape

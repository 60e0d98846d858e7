"""Wrong anatomies fail the proof, and what cannot be divided is refused in one line before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ditile import Plan
from ditile.model.anatomies import find_anatomy, forget_anatomy, remember_anatomy
from ditile.plan.anatomy import LOCAL, TOKENS, Anatomy, ListAnatomy
from ditile.plan.errors import DitileError, ModelError, PlanError, StateError
from ditile.runner.runner import build_single_runner, parallelize
from ditile_lab.study.prove import TOLERANCE, prove_pipeline
from tests.zoo import ZOO
from tests.zoo.derive_table import prove_calls, record_calls
from tests.zoo.own import OWN, FrameBlock, FrameTransformer, own

pytestmark = pytest.mark.filterwarnings("ignore")
FLIPPED = {"text_first": "image_first", "image_first": "text_first", "none": "none"}


def change_lists(anatomy: Anatomy, change: Callable[[ListAnatomy], ListAnatomy]) -> Anatomy:
    return replace(anatomy, lists={name: change(each) for name, each in anatomy.lists.items()})


def leave_table_whole(anatomy: Anatomy) -> Anatomy:
    """No argument is cut with the tokens."""

    def change(each: ListAnatomy) -> ListAnatomy:
        changed = {
            name: tuple("".join("." if letter in TOKENS else letter for letter in word) for word in kinds)
            for name, kinds in each.arguments.items()
        }
        return replace(each, arguments=changed)

    return change_lists(anatomy, change)


def flip_text(anatomy: Anatomy) -> Anatomy:
    """The text is on the other side of the image."""
    flipped = change_lists(anatomy, lambda each: replace(each, joint=FLIPPED[each.joint]))  # type: ignore[arg-type]
    return replace(flipped, joint=FLIPPED[anatomy.joint])  # type: ignore[arg-type]


def leave_attention_local(anatomy: Anatomy) -> Anatomy:
    """The first attention of the first list sees the tokens at hand alone."""
    name, first = next(iter(anatomy.lists.items()))
    path = next(path for path, kinds in first.attention.items() if kinds[0] != LOCAL)
    local = replace(first, attention={**first.attention, path: (LOCAL, *first.attention[path][1:])})
    return replace(anatomy, lists={**anatomy.lists, name: local})


def guess_batch(anatomy: Anatomy) -> Anatomy:
    """What has rows besides the latents, has none."""
    first, *others = anatomy.inputs
    changed = {name: tuple(word.replace("B", "C") for word in anatomy.inputs[name]) for name in others}
    return replace(anatomy, inputs={first: anatomy.inputs[first], **changed})


MUTANTS = {
    "flux": (leave_table_whole, flip_text, leave_attention_local, guess_batch),
    "qwen-image": (leave_table_whole, flip_text, leave_attention_local, guess_batch),
    "wan-2.1": (leave_table_whole, leave_attention_local, guess_batch),
}
CASES = [
    pytest.param(name, mutate, id=f"{name}, {mutate.__name__}") for name, all_ in MUTANTS.items() for mutate in all_
]


@pytest.fixture
def forgotten() -> Iterator[list[nn.Module]]:
    """Transformers whose anatomies are forgotten after the test."""
    made: list[nn.Module] = []
    yield made
    for transformer in made:
        forget_anatomy(transformer)


@pytest.mark.parametrize(("name", "mutate"), CASES)
def test_a_wrong_anatomy_fails_the_proof(
    forgotten: list[nn.Module], name: str, mutate: Callable[[Anatomy], Anatomy]
) -> None:
    """It differs by far more than rounding, or runs into an error. Otherwise a wrong fact could ship."""
    transformer, calls = record_calls(ZOO[name].make(), ZOO[name])
    anatomy = find_anatomy(transformer)
    assert anatomy is not None and prove_calls(transformer, calls) <= TOLERANCE
    forgotten.append(transformer)
    remember_anatomy(transformer, mutate(anatomy))
    try:
        difference = prove_calls(transformer, calls)
    except (DitileError, RuntimeError, ValueError, IndexError, TypeError):
        return
    assert difference > 100 * TOLERANCE


def refuse(pipe: Any, plan: Plan, error: type[DitileError], says: str, **call: Any) -> None:
    with pytest.raises(error, match=says) as caught:
        runner = parallelize(pipe, plan, keep_weights=True)
        try:
            runner(**call)
        finally:
            runner.restore()
    assert "\n" not in str(caught.value)


class ConvolutionBlock(FrameBlock):
    """Mixes neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Any, text: Any, frames: Any, temb: Any, shift: Any = None) -> Any:
        return super().forward(x + self.mix(x.mT).mT, text, frames, temb, shift)


class ConvolutionTransformer(FrameTransformer):
    """A transformer whose blocks have a convolution over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.frame_blocks = nn.ModuleList(ConvolutionBlock() for _ in range(2))


def test_a_transformer_that_cannot_be_derived_is_refused() -> None:
    says = "ConvolutionTransformer: frame_blocks.0.mix is a convolution over tokens"
    refuse(own(ConvolutionTransformer()), Plan(patches=2), ModelError, says, **OWN["own-frames"].call())


def test_an_argument_that_was_not_probed_is_refused_by_its_name() -> None:
    entry = OWN["own-frames"]
    call = entry.call() | {"shift": torch.ones(1, 1, 32)}
    refuse(entry.make(), Plan(patches=2), ModelError, "frame_blocks.0 is given shift with", **call)


@pytest.mark.parametrize("name", ["own-frames", "own-text-first", "wan-2.1", "flux"])
def test_fewer_tokens_than_patches_are_refused(name: str) -> None:
    entry = (ZOO | OWN)[name]
    refuse(entry.make(), Plan(patches=500), PlanError, "patches=500 exceeds the .* try 1 to ", **entry.call())


def test_what_was_derived_is_that_of_a_class_as_it_is_set(forgotten: list[nn.Module]) -> None:
    """A failure means that a model is divided by what was derived from one that was made otherwise."""
    transformer = OWN["own-frames"].make().transformer
    forgotten.append(transformer)
    anatomy = Anatomy({}, "none")
    remember_anatomy(transformer, anatomy)
    assert find_anatomy(transformer) == anatomy
    next(module for module in transformer.modules() if module is not transformer).kind = "other"  # type: ignore[assignment]
    assert find_anatomy(transformer) is None


def test_a_pipeline_is_proven_as_verify_does(forgotten: list[nn.Module]) -> None:
    """A failure means that a wrong anatomy, as a user may write one, passes `ditile verify`."""
    pipe = ZOO["flux"].make()
    anatomy = find_anatomy(pipe.transformer)
    assert anatomy is not None and prove_pipeline(pipe, build_single_runner) <= TOLERANCE
    forgotten.append(pipe.transformer)
    remember_anatomy(pipe.transformer, flip_text(anatomy))
    try:
        difference = prove_pipeline(pipe, build_single_runner)
    except StateError:
        return
    assert difference > 100 * TOLERANCE

"""Configs that differ in one number are cut, or it is said why not; and wrong anatomies fail their proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ditile import Plan
from ditile.model.anatomies import find_anatomy
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.sharding import find_tensor_table
from ditile.plan.anatomy import LOCAL, Anatomy
from ditile.plan.errors import DitileError, ModelError, PlanError
from ditile.runner.runner import parallelize
from ditile_lab.study.capture import Call, capture_call
from ditile_lab.study.prove import TOLERANCE, forget_anatomy, remember_anatomy
from ditile_lab.study.tensor_cuts import prove_tensor_cuts
from tests import tiny
from tests.zoo import ZOO
from tests.zoo.derive_table import prove_calls, record_calls
from tests.zoo.holes import HOLES
from tests.zoo.own import OWN

pytestmark = pytest.mark.filterwarnings("ignore")
COUNTED = ("ratio", "heads", "head_dim", "ff", "intermediate_size", "mult", "layers", "dim")
"""In the names of numbers of a config that say how many heads, features or blocks there are."""


def make_changed(name: str, changes: Mapping[str, Any]) -> tuple[nn.Module, Call]:
    """The transformer of an entry with another config, tiny and random, and a call of it by its pipeline."""
    entry = ZOO[name]
    pipe = entry.make()
    path = entry.transformers[0]
    transformer = getattr(pipe, path)
    config = {key: value for key, value in transformer.config.items() if not key.startswith("_")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        changed = tiny.randomise(type(transformer)(**{**config, **changes}), seed=1, gain=1.0)
    setattr(pipe, path, changed)
    call = capture_call(pipe, changed, entry.call())
    return changed, call.before or call


def list_changes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configs that differ in one number, and in the axes of rotary tables where these follow the size of a head."""
    for key, value in config.items():
        if key.startswith("_") or isinstance(value, bool) or not any(word in key for word in COUNTED):
            continue
        numbers = [2 * value, value + 1] if isinstance(value, int) else []
        numbers += [value / 2, value * 1.5] if isinstance(value, float) else []
        for number in numbers:
            yield {key: number}
            if key == "attention_head_dim" and number == 2 * value:
                lists = {name: each for name, each in config.items() if isinstance(each, list | tuple) and each}
                axes = {name: each for name, each in lists.items() if all(isinstance(axis, int) for axis in each)}
                rotary = {name: each for name, each in axes.items() if sum(each) == value}
                yield {key: number, **{name: tuple(2 * axis for axis in each) for name, each in rotary.items()}}


@pytest.mark.parametrize("name", ZOO)
def test_every_config_is_cut_or_refused_with_numbers(name: str) -> None:
    """A failure names the change: two ranks make something else, or what could be cut is refused."""
    transformer = getattr(ZOO[name].make(), ZOO[name].transformers[0])
    if find_anatomy(transformer) is None or not hasattr(transformer, "config"):
        pytest.skip("nothing is known of it")
    if (name, "tensor") in HOLES:
        pytest.skip("it is not cut by any config")
    wrong = []
    for changes in list_changes(transformer.config):
        try:
            changed, call = make_changed(name, changes)
            changed(**call)
        except Exception:  # a number that the class itself, or the pipeline, does not take
            continue
        try:
            anatomy = find_anatomy(changed)
            assert anatomy is not None
            table = find_tensor_table(changed, anatomy.tensor)
            TensorCuts.match_tensor_table(changed, table, 0, 2)
        except PlanError:
            continue
        except ModelError as error:
            # EasyAnimate's first blocks have text of their own, as many as another number says.
            if "blocks of another kind" not in str(error):
                wrong.append(f"{changes}: {error}")
            continue
        if not prove_tensor_cuts(changed, table, call):
            wrong.append(f"{changes}: two ranks make something else")
    assert not wrong, "\n".join(wrong)


FLIPPED: dict[str, Any] = {"text_first": "image_first", "image_first": "text_first", "none": "none"}


def flip_text(anatomy: Anatomy) -> Anatomy:
    """The text is on the other side of the image."""
    lists = {name: replace(each, joint=FLIPPED[each.joint]) for name, each in anatomy.lists.items()}
    return replace(anatomy, lists=lists, joint=FLIPPED[anatomy.joint])


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
    "flux": (flip_text, leave_attention_local, guess_batch),
    "wan-2.1": (leave_attention_local, guess_batch),
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


def test_an_argument_that_was_not_probed_is_refused_by_its_name() -> None:
    entry = OWN["own-frames"]
    call = entry.call() | {"shift": torch.ones(1, 1, 32)}
    refuse(entry.make(), Plan(patches=2), ModelError, "frame_blocks.0 is given shift with", **call)


@pytest.mark.parametrize("name", ["own-frames", "flux"])
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

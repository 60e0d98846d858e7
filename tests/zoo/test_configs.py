"""Configs that differ from those of the collection in one number: tensor parallelism cuts each, or says why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ditile.model.anatomies import find_anatomy
from ditile.model.capture import Call, capture_call
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.sharding import find_tensor_table
from ditile.plan.errors import ModelError, PlanError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import TOLERANCE, prove_anatomy
from ditile_lab.study.tensor_cuts import prove_tensor_cuts
from tests import tiny
from tests.zoo import ZOO
from tests.zoo.holes import HOLES

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


def find_table(transformer: nn.Module) -> Mapping[str, Any]:
    anatomy = find_anatomy(transformer)
    assert anatomy is not None
    return find_tensor_table(transformer, anatomy.tensor)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flux-2", {"mlp_ratio": 1.5}),
        ("flux-2", {"mlp_ratio": 4.0}),
        ("prx", {"mlp_ratio": 4.5}),
        ("krea-2", {"num_key_value_heads": 4}),
        ("wan-2.1", {"ffn_dim": 40}),
        ("hunyuan-video", {"attention_head_dim": 20, "rope_axes_dim": (4, 8, 8)}),
    ],
)
def test_two_ranks_of_another_config_make_what_one_makes(name: str, changes: dict[str, Any]) -> None:
    """Features side by side in other proportions, other heads of keys, other hidden features. A failure: a user's size
    of a model is refused, or drawn wrongly."""
    transformer, call = make_changed(name, changes)
    assert prove_tensor_cuts(transformer, find_table(transformer), call)


@pytest.mark.parametrize("name", ["lumina-2", "krea-2"])
def test_one_head_of_keys_is_refused_by_its_number(name: str) -> None:
    """A failure: the reason is a norm, which is of one head as it is of all."""
    key = "num_kv_heads" if name == "lumina-2" else "num_key_value_heads"
    transformer, _ = make_changed(name, {key: 1})
    with pytest.raises(PlanError, match="tensor=2 does not divide the 1 heads of .*; use pipefusion, ulysses or ring"):
        TensorCuts.match_tensor_table(transformer, find_table(transformer), 0, 2)


def test_blocks_of_another_kind_are_refused() -> None:
    """Text without projections of its own in the later blocks. A failure: half of the heads would be added to all."""
    transformer, call = make_changed("easy-animate", {"mmdit_layers": 2})
    says = r"transformer_blocks.2.attn1 has no add_\w+, and transformer_blocks.0.attn1 has, .* use ulysses or ring"
    with pytest.raises(ModelError, match=says):
        TensorCuts.match_tensor_table(transformer, find_table(transformer), 0, 2)
    assert prove_anatomy(transformer, [call], build_single_runner) <= TOLERANCE


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
                axes = {name: each for name, each in config.items() if isinstance(each, list | tuple)}
                rotary = {name: each for name, each in axes.items() if each and sum_numbers(each) == value}
                yield {key: number, **{name: tuple(2 * axis for axis in each) for name, each in rotary.items()}}


def sum_numbers(values: Any) -> int:
    return sum(values) if all(isinstance(value, int) for value in values) else 0


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
            table = find_table(changed)
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

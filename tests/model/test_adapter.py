"""BlockAdapter: which lists it means, what is wrong in one line; cache/test_cache_dit_scripts.py runs its snippets."""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from ditile.model.adapter import BlockAdapter, ForwardPattern, PatchFunctor, TransformerBlockLists, resolve_adapter
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError
from tests.families import EVERY

P0, P1, P2, P3, P4, P5 = ForwardPattern


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, context: Tensor) -> Tensor:
        return hidden_states + self.linear(hidden_states + context)


class Vague(Block):
    """Its source does not say what it returns."""

    def forward(self, img: Tensor, txt: Tensor) -> Any:
        return self.both(img, txt)

    def both(self, img: Tensor, txt: Tensor) -> tuple[Tensor, Tensor]:
        return img, txt


class User(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.blocks = nn.ModuleList(Block() for _ in range(depth + 1))

    def forward(self, hidden_states: Tensor, context: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, context)
        for block in self.blocks:
            hidden_states = block(hidden_states, context)
        return hidden_states


def resolve(adapter: BlockAdapter, stack: ExitStack | None = None) -> list[TransformerBlockLists]:
    return resolve_adapter(adapter, stack or ExitStack())


def names(adapter: BlockAdapter) -> list[list[str]]:
    return [[each.name for each in adapted.lists] for adapted in resolve(adapter)]


def test_lists_are_given_by_name_nested_or_left_to_be_found() -> None:
    model = EVERY["HunyuanVideoTransformer3DModel"].on_meta()
    both = [["transformer_blocks", "single_transformer_blocks"]]
    lists = [model.transformer_blocks, model.single_transformer_blocks]
    assert names(BlockAdapter(transformer=model)) == both
    assert names(BlockAdapter(transformer=model, blocks=[lists], forward_pattern=[[P0, P0]])) == both
    assert names(BlockAdapter(transformer=model, blocks=lists, forward_pattern=P0)) == both
    assert names(BlockAdapter(transformer=[model], blocks_name=both[0])) == both
    assert names(BlockAdapter(transformer=model, blocks_name="transformer_blocks")) == [["transformer_blocks"]]
    assert names(BlockAdapter(transformer=model, blocks=list(model.transformer_blocks))) == [["transformer_blocks"]]
    assert names(BlockAdapter(transformer=model, dummy_blocks_names=["transformer_blocks"])) == [both[0][1:]]
    pair = [model, EVERY["HunyuanVideoTransformer3DModel"].on_meta()]
    nested = [[each.transformer_blocks, each.single_transformer_blocks] for each in pair]
    two = resolve(BlockAdapter(transformer=pair, blocks=nested, params_modifiers=[["a", "b"], ["c", "d"]]))
    assert [each.params_modifiers for each in two] == [["a", "b"], ["c", "d"]]
    (one,) = resolve(BlockAdapter(transformer=model, blocks=lists, params_modifiers="a"))
    assert one.params_modifiers == ["a", "a"]


def test_a_transformer_of_the_user_is_searched() -> None:
    model = User()
    assert names(BlockAdapter(transformer=model, auto=True)) == [["blocks"]]
    assert names(BlockAdapter(transformer=model, auto=True, blocks_policy="min", forward_pattern=P2)) == [["layers"]]
    assert names(BlockAdapter(transformer=model, auto=True, allow_prefixes=["lay"])) == [["layers"]]
    assert names(BlockAdapter(transformer=model, auto=True, dummy_blocks_names=["blocks"])) == [["layers"]]
    assert names(BlockAdapter(pipe=SimpleNamespace(transformer=model), auto=True)) == [["blocks"]]
    suffixes: dict[str, Any] = {"check_suffixes": True, "check_prefixes": False}
    assert names(BlockAdapter(transformer=User(Vague), auto=True, allow_suffixes=["Block"], **suffixes)) == [["blocks"]]
    for wrong in ({"allow_prefixes": ["joint"]}, {"forward_pattern": P1}, {"allow_suffixes": ["Flux"], **suffixes}):
        with pytest.raises(ModelError, match=r"auto=True finds no list of User .*layers, blocks"):
            resolve(BlockAdapter(transformer=model, auto=True, **wrong))


def test_a_wrong_pattern_is_corrected_refused_or_trusted() -> None:
    model = EVERY["FluxTransformer2DModel"].on_meta()
    given: dict[str, Any] = {"transformer": model, "blocks": model.transformer_blocks}
    right = Flow(("text", "image"))
    with pytest.warns(UserWarning, match=re.escape("Pattern_0 (hidden_states, encoder_hidden_states -> hidden_states")):
        (adapted,) = resolve(BlockAdapter(**given, forward_pattern=P0))
    assert adapted.lists[0].flow == right
    with pytest.raises(ModelError, match="give ForwardPattern.Pattern_1, or check_forward_pattern=False"):
        resolve(BlockAdapter(**given, forward_pattern=P0, check_forward_pattern=True))
    (adapted,) = resolve(BlockAdapter(**given, forward_pattern=P0, check_forward_pattern=False))
    assert adapted.lists[0].flow == Flow(("image", "text"))
    with pytest.raises(ModelError, match="or check_num_outputs=False"):
        resolve(BlockAdapter(**given, forward_pattern=P2, check_forward_pattern=False, check_num_outputs=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(BlockAdapter(**given, forward_pattern=P1, check_forward_pattern=True, check_num_outputs=True))
        model = EVERY["WanTransformer3DModel"].on_meta()
        resolve(BlockAdapter(transformer=model, blocks=model.blocks, forward_pattern=P3))  # the same for a cache


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither pipe nor transformer"),
        ({"transformer": User(), "blocks": User().layers}, "Block in blocks is not in a ModuleList of User"),
        ({"transformer": User(), "blocks_name": "stages"}, "User has no ModuleList 'stages'; it has layers, blocks"),
        ({"transformer": User(), "pipe": SimpleNamespace(transformer=User())}, "is not that of its SimpleNamespace"),
    ],
)
def test_wrong_adapters_are_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        resolve(BlockAdapter(**fields))
    assert "\n" not in str(caught.value)


class Patch(PatchFunctor):
    def apply(self, transformer: nn.Module) -> nn.Module:
        transformer.added, transformer.layers[0].training = 1, "changed"
        return transformer


class Copy(PatchFunctor):
    def apply(self, transformer: nn.Module) -> nn.Module:
        return User()


def test_a_functor_edits_the_instance_and_is_undone() -> None:
    model = User()
    with ExitStack() as stack:
        with pytest.raises(ModelError, match="no ModuleList 'stages'"):
            resolve(BlockAdapter(transformer=model, patch_functor=Patch(), blocks_name="stages"), stack)
        assert (model.added, model.layers[0].training) == (1, "changed")
    assert not hasattr(model, "added") and model.layers[0].training is True
    with pytest.raises(ModelError, match="Copy.apply returned another module"):
        resolve(BlockAdapter(transformer=model, patch_functor=Copy()))

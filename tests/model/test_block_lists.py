"""The table of block lists against the real classes: their sources, and what their blocks do in a forward that runs."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from ditile.model.block_lists import find_block_lists, map_pipeline_components, supported_pipelines
from ditile.model.block_table import BlockList, find_diffusers_class, find_table_entry, read_transformer_table
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError
from ditile_lab.study.flows import discover_block_lists
from tests.families import EVERY, Family

TRANSFORMER_TABLE = read_transformer_table()
SPECS = {"FluxTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"}
LISTED = sorted(name for name in EVERY if name in SPECS or not TRANSFORMER_TABLE[name].refusal)
REFUSED = sorted(name for name, row in TRANSFORMER_TABLE.items() if row.refusal)
RUN = sorted(name for name in LISTED if EVERY[name].inputs)

NOT_FOUND = {
    "HiDreamImageTransformer2DModel": "its blocks return what another module returns",
    "Cosmos3OmniTransformer": "its first parameter is the text",
    "LongCatAudioDiTTransformer": "its parameter for text is called cond",
    "SanaWMTransformer3DModel": "its parameter for text is called y",
    "MotifVideoTransformer3DModel": "its last blocks are called in a loop of their own",
}
"""Where what is discovered in the source is not what the table says."""


CHANGED = {
    "BriaFiboTransformer2DModel": "each block is given other features of the text",
    "ConsisIDTransformer3DModel": "faces are added between blocks, where there are some",
    "HiDreamImageTransformer2DModel": "each block is given more text, which is dropped again",
    "WanVACETransformer3DModel": "controls are added between blocks",
}
"""Where what a block returns is not what the next one gets."""


def test_every_row_has_a_tiny_transformer() -> None:
    assert set(EVERY) == {*TRANSFORMER_TABLE, *SPECS}
    assert len(RUN) >= 50


@pytest.mark.parametrize("name", LISTED)
def test_discovery_finds_the_same(name: str) -> None:
    """A failure means that the table is wrong, or that diffusers has changed."""
    model = EVERY[name].on_meta()
    try:
        same = discover_block_lists(model) == find_block_lists(model)
    except ModelError as error:
        assert "forward_pattern" in str(error)
        same = False
    assert same == (name not in NOT_FOUND), NOT_FOUND.get(name)


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for float32
@pytest.mark.parametrize("name", RUN)
def test_blocks_do_what_their_flow_says(name: str) -> None:
    """Each block runs once, in order; it returns what the flow says, and the next block of the list is given that."""
    family = EVERY[name]
    model = family.make()
    lists = find_block_lists(model)
    seen = run(model, lists, family)
    assert [block for block, _, _ in seen] == [block for each in lists for block in each.blocks]
    for each in lists:
        calls = [call for call in seen if call[0] in each.blocks]
        for _, _, output in calls:
            assert streams(output, each.flow).keys() == set(each.flow.returns)
        handed_on = all(
            equal(streams(before[2], each.flow)[stream], given(after[1], each.flow)[stream])
            for before, after in zip(calls, calls[1:], strict=False)
            for stream in each.flow.returns
        )
        assert handed_on or name in CHANGED, name


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_skipped_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name}: .*run it without a cache"):
        find_block_lists(EVERY[name].on_meta())


def test_blocks_that_decode_are_left_out() -> None:
    model = EVERY["MotifVideoTransformer3DModel"].on_meta()
    assert [len(each.blocks) for each in find_block_lists(model)] == [2, 2]
    assert len(model.single_transformer_blocks) == 4


class FluxTransformer2DModelOfMine(nn.Module):
    """Its name begins like that of a known class; it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Plain() for _ in range(3))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states)
        return hidden_states


class Subclass(FluxTransformer2DModel):
    """It is a FLUX, whatever its name."""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.linear(hidden_states)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, context: Tensor, gate: float = 1.0) -> tuple[Tensor, Tensor]:
        x = x + gate * self.linear(x)
        return context, x


class User(nn.Module):
    """A transformer as somebody may write it: a refiner, double blocks, and single ones."""

    def __init__(self, block: type[nn.Module] = Both) -> None:
        super().__init__()
        self.single = nn.ModuleList(Plain() for _ in range(3))
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.text_layers = nn.ModuleList(Plain() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden_states: Tensor, text: Tensor) -> Tensor:
        for layer in self.text_layers:
            text = layer(text)
        for index, layer in enumerate(self.layers):
            text, hidden_states = layer(hidden_states, text, float(index))
        for layer in self.single:
            hidden_states = layer(hidden_states)
        return hidden_states


def test_a_class_is_known_by_its_bases_and_not_by_its_name() -> None:
    assert find_table_entry(WanTransformer3DModel) is TRANSFORMER_TABLE["WanTransformer3DModel"]
    assert find_table_entry(FluxTransformer2DModelOfMine) is None
    assert [each.flow for each in find_block_lists(FluxTransformer2DModelOfMine())] == [Flow(text=None)]
    assert find_table_entry(type("WanTransformer3DModel", (nn.Module,), {})) is None
    lists = find_block_lists(Subclass(**EVERY["FluxTransformer2DModel"].config))
    assert [each.name for each in lists] == ["transformer_blocks", "single_transformer_blocks"]


def test_lists_of_an_unknown_transformer_are_found_in_order() -> None:
    model = User()
    double, single = find_block_lists(model)
    assert double == BlockList("layers", tuple(model.layers), Flow(("text", "image"), "x", "context"))
    assert single == BlockList("single", tuple(model.single), Flow(("image",), "hidden_states", None))


def test_every_pipeline_with_a_transformer_is_supported_or_known_not_to_be() -> None:
    count, names = supported_pipelines()
    assert count == len(names) == len(set(names)) > 130
    assert {"FluxPipeline", "WanPipeline", "QwenImageEditPipeline", "AmusedPipeline", "ShapEPipeline"} <= set(names)
    assert not {"LattePipeline", "AnyFlowFARPipeline", "StableDiffusionPipeline"} & set(names)
    classes = {name for name in dir(diffusers) if "Transformer" in name and find_diffusers_class(name)}
    with_one = {name for name, models in map_pipeline_components().items() if models & classes}
    assert with_one - set(names) == {name for name in UNSUPPORTED if hasattr(diffusers, name)}


UNSUPPORTED = {"AnyFlowFARPipeline", "LattePipeline", "RFD4ProteinaPipeline"}


def run(model: nn.Module, lists: list[BlockList], family: Family) -> list[tuple[nn.Module, dict[str, Any], Any]]:
    """Each call of a block in a forward: the block, its arguments by name, and what it returned."""
    seen: list[tuple[nn.Module, dict[str, Any], Any]] = []

    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((block, inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments, output))

    for each in lists:
        for block in each.blocks:
            block.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        family.call(model)
    return seen


def streams(output: Any, flow: Flow) -> dict[str, Any]:
    """What a block returned, by stream."""
    outputs = output if isinstance(output, tuple) else (output,)
    return dict(zip(flow.returns, outputs, strict=True))


def given(arguments: dict[str, Any], flow: Flow) -> dict[str, Any]:
    """What a block is given, by stream."""
    return {"image": arguments[flow.image], "text": arguments.get(flow.text or "")}


def equal(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))

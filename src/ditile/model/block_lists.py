"""The lists of a transformer's blocks and their flow. Where the table lacks the class, the lab reads its source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import diffusers
from torch import nn

from ditile.model.block_table import (
    BlockList,
    TransformerEntry,
    find_table_entry,
    read_transformer_table,
    unwrap_module,
)
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError
from ditile.plan.extras import import_lab
from ditile.plan.option_classes import checked


def find_block_lists(transformer: nn.Module) -> list[BlockList]:
    """Return the lists of a transformer's blocks, in order of execution.

    Raises:
        ModelError: if its blocks must not be skipped, or its lists or the flow of its blocks are not known.
    """
    return look_up_block_lists(transformer) or import_lab("study.flows").discover_block_lists(transformer)


def look_up_block_lists(transformer: nn.Module) -> list[BlockList]:
    """Return the lists of a transformer from the table; empty if the table lacks its class.

    Raises:
        ModelError: if its blocks must not be skipped.
    """
    model = unwrap_module(transformer)
    entry = find_table_entry(type(model))
    if entry is None:
        return []
    if entry.refusal:
        raise ModelError(
            f"{type(model).__name__}: {entry.refusal}, so its blocks cannot be left out; run it without a cache"
        )
    lists = []
    for name, flow in entry.lists.items():
        blocks = tuple(get_module_list(model, name))
        # An attribute of the model says how many of the last blocks are called on another stream.
        if name in entry.apart:
            blocks = blocks[: len(blocks) - int(getattr(model, entry.apart[name]))]
        if blocks:
            lists.append(BlockList(name, blocks, flow))
    return lists


def find_list_flow(transformer: nn.Module, name: str, blocks: Iterable[nn.Module]) -> Flow | None:
    """Return the flow of a list's blocks, by table or source; None if it differs from block to block, or is unknown."""
    model = unwrap_module(transformer)
    for block_list in look_up_block_lists(model):
        if block_list.name == name:
            return block_list.flow
    flow: Flow | None = import_lab("study.flows").read_list_flow(model, name, blocks)
    return flow


def find_model_entry(transformer: nn.Module) -> TransformerEntry:
    """Return the row of a transformer in the table; an empty row if it has none."""
    return find_table_entry(type(unwrap_module(transformer))) or TransformerEntry()


@checked()
def supported_pipelines() -> tuple[int, list[str]]:
    """Count and name the diffusers pipelines with known lists in their transformer."""
    known = {name for name, row in read_transformer_table().items() if not row.refusal}
    names = sorted(name for name, models in map_pipeline_components().items() if models & known)
    return len(names), names


def map_pipeline_components() -> dict[str, set[str]]:
    """Map each diffusers pipeline to the possible class names of its components."""
    components = {}
    for name in dir(diffusers):
        if not name.endswith("Pipeline"):
            continue
        cls = getattr(diffusers, name)
        if isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline):
            parameters = inspect.signature(cls.__init__).parameters.values()
            annotations = " ".join(str(parameter.annotation) for parameter in parameters)
            components[name] = set(re.findall(r"\w+", annotations))
    return components


def get_module_list(model: nn.Module, name: str) -> nn.ModuleList:
    """Return the list with a given path. Raises `ModelError` if there is none."""
    module = model
    for part in name.split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    if not isinstance(module, nn.ModuleList):
        lists = ", ".join(name for name, child in model.named_children() if isinstance(child, nn.ModuleList))
        raise ModelError(f"{type(model).__name__} has no ModuleList {name!r}; it has {lists or 'none'}")
    return module

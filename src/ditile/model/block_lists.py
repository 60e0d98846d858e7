"""The lists of a transformer's blocks and their flow: from the table, or its source.

Where the source (see `source.py`) leaves something open, a `BlockAdapter` with a `forward_pattern` says it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

import diffusers
from torch import nn

from ditile.model.block_table import BlockList, TransformerEntry, find_table_entry, read_transformer_table
from ditile.model.source import (
    BlockCall,
    find_token_parameters,
    infer_block_flow,
    list_forward_parameters,
    read_block_calls,
    unwrap_module,
)
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import checked

_PREPARES = re.compile(r"refiner|(^|_)(text|txt|context|caption|prompt)(_|$)")
"""Names of lists that prepare tokens once, ahead of the chain."""


def find_block_lists(transformer: nn.Module) -> list[BlockList]:
    """Return the lists of a transformer's blocks, in order of execution.

    Raises:
        ModelError: if its blocks must not be skipped, or no list, or no flow of its blocks, is known.
    """
    return look_up_block_lists(transformer) or discover_block_lists(transformer)


def look_up_block_lists(transformer: nn.Module) -> list[BlockList]:
    """Return the lists of a transformer in the table; empty if the table does not know it.

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
        # The last blocks of a list may be called on another stream.
        if name in entry.apart:
            blocks = blocks[: len(blocks) - int(getattr(model, entry.apart[name]))]
        if blocks:
            lists.append(BlockList(name, blocks, flow))
    return lists


def find_list_flow(transformer: nn.Module, name: str, blocks: Iterable[nn.Module]) -> Flow | None:
    """Return the flow of a list's blocks, by table or source; None if they differ, or it is unknown."""
    model = unwrap_module(transformer)
    for block_list in look_up_block_lists(model):
        if block_list.name == name:
            return block_list.flow
    return _infer_common_flow(blocks, read_block_calls(model).get(name))


def _infer_common_flow(blocks: Iterable[nn.Module], call: BlockCall | None) -> Flow | None:
    """Infer the common flow of a list's blocks from their sources; None if they differ."""
    classes = {type(unwrap_module(block)): block for block in blocks}
    flows = set()
    for block in classes.values():
        flows.add(infer_block_flow(block, call))
    if len(flows) != 1:
        return None
    return flows.pop()


def find_model_entry(transformer: nn.Module) -> TransformerEntry:
    """Return the row of a transformer in the table; an empty row if it has none."""
    return find_table_entry(type(unwrap_module(transformer))) or TransformerEntry()


def discover_block_lists(transformer: nn.Module) -> list[BlockList]:
    """Discover the lists of blocks of a transformer from its source.

    Raises:
        ModelError: if there is none, two are called in turns, or no flow of their blocks is known.
    """
    model = unwrap_module(transformer)
    block_lists = []
    for candidate in find_candidate_lists(model):
        block_lists.append(_build_discovered_list(model, *candidate))
    if not block_lists:
        raise ModelError(
            f"{type(model).__name__} has no ModuleList that its forward runs its tokens through; name one with "
            "BlockAdapter(transformer=..., blocks=..., forward_pattern=...)"
        )
    return block_lists


def find_candidate_lists(transformer: nn.Module) -> Iterator[tuple[str, nn.ModuleList, BlockCall | None]]:
    """Yield the lists that may form a transformer's chain, in order of execution, with their calls."""
    calls = read_block_calls(transformer)
    lists: dict[str, nn.ModuleList] = {}
    for name, child in transformer.named_children():
        if isinstance(child, nn.ModuleList) and _has_custom_blocks(child):
            lists[name] = child
    called = [name for name in calls if name in lists]
    # If no call can be read, the order of the attributes is used.
    for name in called or lists:
        if not _only_prepares_tokens(name, lists[name], calls.get(name)):
            yield name, lists[name], calls.get(name)


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


def _build_discovered_list(model: nn.Module, name: str, blocks: nn.ModuleList, call: BlockCall | None) -> BlockList:
    """Build a list with the common flow of its blocks."""
    if call is not None and not call.alone:
        raise ModelError(
            f"{type(model).__name__} calls the blocks of {name} and of another list in turns, so none can be left out; "
            "run it without a cache"
        )
    flow = _infer_common_flow(blocks, call)
    if flow is None:
        classes = ", ".join(sorted({type(unwrap_module(block)).__name__ for block in blocks}))
        raise ModelError(
            f"{type(model).__name__}.{name}: the source of {classes} does not say in which order its blocks return "
            "image and text; say it with BlockAdapter(transformer=..., blocks=..., forward_pattern=ForwardPattern....)"
        )
    return BlockList(name, tuple(blocks), flow)


def _has_custom_blocks(modules: nn.ModuleList) -> bool:
    """Return whether the modules of a list are more than PyTorch's own layers."""
    classes = {type(unwrap_module(module)): module for module in modules}
    for cls, module in classes.items():
        if cls.__module__.startswith("torch.") or cls.forward is nn.Module.forward:
            return False
        if not list_forward_parameters(module):
            return False
    return bool(classes)


def _only_prepares_tokens(name: str, blocks: nn.ModuleList, call: BlockCall | None) -> bool:
    """Return whether a list only prepares tokens for the lists after it, or does not pass on its own tokens."""
    if _PREPARES.search(name):
        return True
    if call is None or not call.results:
        return False
    parameters = list_forward_parameters(blocks[0])
    image, _ = find_token_parameters(parameters)
    tokens = call.bind_arguments(parameters).get(image, "")
    return tokens == "encoder_hidden_states" or _PREPARES.search(tokens) is not None or tokens not in call.results

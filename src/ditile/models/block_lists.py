"""Which lists hold a transformer's blocks, and how these pass tokens on: by its `ModelSpec`, by the table, or found.

What is found is read off the sources (`source.py`). Where these leave something open, a `BlockAdapter` with a
`forward_pattern` says it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping

import diffusers
from torch import nn

from ditile.errors import ModelError
from ditile.models.block_table import TABLE, Row, class_of, row_of
from ditile.models.registry import specs
from ditile.models.source import TEXTS, Call, calls_of, flow_of, image_of, inner, parameters_of
from ditile.plan.spec import BlockList, Flow, ModelSpec

_PREPARES = re.compile(r"refiner|(^|_)(text|txt|context|caption|prompt)(_|$)")
"""Lists with such a name prepare tokens once, ahead of the chain."""


def block_lists(transformer: nn.Module) -> list[BlockList]:
    """The lists of a transformer's blocks, in order of execution.

    Raises:
        ModelError: if its blocks may not be left out, no list is found, or it cannot be told how blocks pass tokens on.
    """
    return known_lists(transformer) or discovered(transformer)


def known_lists(transformer: nn.Module) -> list[BlockList]:
    """The lists that a `ModelSpec` or the table has of a transformer; empty if neither knows it.

    Raises:
        ModelError: if its blocks may not be left out.
    """
    model = inner(transformer)
    for cls in type(model).__mro__:
        if cls in specs():
            return _of_spec(model, specs()[cls])
    row = row_of(type(model))
    return _of_row(model, row) if row is not None else []


def flow_in_list(transformer: nn.Module, name: str, blocks: Iterable[nn.Module]) -> Flow | None:
    """How blocks of a list pass tokens on, as table or source have it; None if they differ, or it cannot be told."""
    model = inner(transformer)
    for each in known_lists(model):
        if each.name == name:
            return each.flow
    return _read(blocks, calls_of(model).get(name))


def _read(blocks: Iterable[nn.Module], call: Call | None) -> Flow | None:
    """What the sources say of the blocks of a list."""
    flows = {flow_of(block, call) for block in {type(inner(block)): block for block in blocks}.values()}
    return flows.pop() if len(flows) == 1 else None


def row_of_model(transformer: nn.Module) -> Row:
    """What the table says of a transformer besides its lists; an empty row if it is not in it."""
    return row_of(type(inner(transformer))) or Row()


def discovered(transformer: nn.Module) -> list[BlockList]:
    """The lists of blocks of a transformer that no table knows, as its source has them.

    Raises:
        ModelError: if there is none, two are called in turns, or it cannot be told how blocks pass tokens on.
    """
    model = inner(transformer)
    found = [_told(model, *candidate) for candidate in candidates(model)]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no ModuleList that its forward runs its tokens through; name one with "
            "BlockAdapter(transformer=..., blocks=..., forward_pattern=...)"
        )
    return found


def candidates(transformer: nn.Module) -> Iterator[tuple[str, nn.ModuleList, Call | None]]:
    """The lists of a transformer that can hold its chain of blocks, in order of execution, and how they are called."""
    calls = calls_of(transformer)
    children = transformer.named_children()
    lists = {name: child for name, child in children if isinstance(child, nn.ModuleList) and _holds_blocks(child)}
    for name in [name for name in calls if name in lists] or list(lists):
        if not _prepares(name, lists[name], calls.get(name)):
            yield name, lists[name], calls.get(name)


def supported_pipelines() -> tuple[int, list[str]]:
    """The diffusers pipelines whose transformer has known lists: how many they are, and their names."""
    known = {cls.__name__ for cls in specs()} | {name for name, row in TABLE.items() if not row.refusal}
    names = sorted(name for name, models in transformers_of_pipelines().items() if models & known)
    return len(names), names


def transformers_of_pipelines() -> dict[str, set[str]]:
    """Each diffusers pipeline, and the names of the classes that its components may have."""
    found = {}
    for name in dir(diffusers):
        cls = getattr(diffusers, name) if name.endswith("Pipeline") else None
        if isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline):
            annotations = [p.annotation for p in inspect.signature(cls.__init__).parameters.values()]
            found[name] = {
                word for a in annotations for word in re.findall(r"\w+", a if isinstance(a, str) else str(a))
            }
    return found


def pipelines_of(transformer: str) -> tuple[str, ...]:
    """The diffusers pipelines that call a transformer of that class name."""
    return tuple(name for name, models in transformers_of_pipelines().items() if transformer in models)


def _of_spec(model: nn.Module, spec: ModelSpec) -> list[BlockList]:
    lists = []
    for name, io in spec.blocks.items():
        blocks = list_at(model, name)
        parameters = parameters_of(blocks[0]) if len(blocks) else []
        image = image_of(parameters)
        text = next((text for text in TEXTS if text in parameters and text != image), None)
        lists.append(BlockList(name, tuple(blocks), Flow(io.returns, image, text)))
    return lists


def _of_row(model: nn.Module, row: Row) -> list[BlockList]:
    if row.refusal:
        raise ModelError(
            f"{type(model).__name__}: {row.refusal}, so its blocks cannot be left out; run it without a cache"
        )
    lists = []
    for name, flow in row.lists.items():
        blocks = list_at(model, name)
        apart = int(getattr(model, row.apart[name])) if name in row.apart else 0
        lists.append(BlockList(name, tuple(blocks)[: len(blocks) - apart], flow))
    return [each for each in lists if len(each.blocks)]


def list_at(model: nn.Module, name: str) -> nn.ModuleList:
    """The list of that name.

    Raises:
        ModelError: if there is none.
    """
    found = model
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not isinstance(found, nn.ModuleList):
        lists = ", ".join(name for name, child in model.named_children() if isinstance(child, nn.ModuleList))
        raise ModelError(f"{type(model).__name__} has no ModuleList {name!r}; it has {lists or 'none'}")
    return found


def _told(model: nn.Module, name: str, blocks: nn.ModuleList, call: Call | None) -> BlockList:
    """A list with the flow that its blocks agree on."""
    if call is not None and not call.alone:
        raise ModelError(
            f"{type(model).__name__} calls the blocks of {name} and of another list in turns, so none can be left out; "
            "run it without a cache"
        )
    flow = _read(blocks, call)
    if flow is None:
        classes = ", ".join(sorted({type(inner(block)).__name__ for block in blocks}))
        raise ModelError(
            f"{type(model).__name__}.{name}: the source of {classes} does not say in which order its blocks return "
            "image and text; say it with BlockAdapter(transformer=..., blocks=..., forward_pattern=ForwardPattern....)"
        )
    return BlockList(name, tuple(blocks), flow)


def _holds_blocks(modules: nn.ModuleList) -> bool:
    """Whether a list holds modules that are more than PyTorch's own layers."""
    kinds = {type(inner(module)): module for module in modules}
    own = all(not cls.__module__.startswith("torch.") and cls.forward is not nn.Module.forward for cls in kinds)
    return bool(kinds) and own and all(parameters_of(module) for module in kinds.values())


def _prepares(name: str, blocks: nn.ModuleList, call: Call | None) -> bool:
    """Whether a list only prepares tokens for those behind it, or does not hand on what it is given."""
    if _PREPARES.search(name):
        return True
    if call is None or not call.results:
        return False
    parameters = parameters_of(blocks[0])
    tokens = call.arguments(parameters).get(image_of(parameters), "")
    return tokens == "encoder_hidden_states" or _PREPARES.search(tokens) is not None or tokens not in call.results


def known() -> Mapping[type[nn.Module], Row]:
    """Every class of the table that the installed diffusers has."""
    return {cls: row for name, row in TABLE.items() if (cls := class_of(name)) is not None}

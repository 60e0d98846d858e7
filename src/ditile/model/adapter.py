"""BlockAdapter, a user's description of a transformer's blocks, and ForwardPattern; both have cache-dit's names.

Missing blocks and patterns are found in the table or the source; a given pattern is compared with them.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Literal

from torch import nn

from ditile.model.block_lists import find_block_lists, find_list_flow, get_module_list, look_up_block_lists
from ditile.model.block_table import (
    BlockList,
    find_table_entry,
    find_token_parameters,
    list_forward_parameters,
    unwrap_module,
)
from ditile.model.pipeline_calls import list_pipeline_parts
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError
from ditile.plan.extras import import_lab
from ditile.plan.option_classes import check_values

PREFIXES = ("transformer", "single", "double", "joint", "visual", "blocks", "layers")
SUFFIXES = ("TransformerBlock", "Block", "Layer")


class PatchFunctor(ABC):
    """Edits a transformer before its blocks are examined; no family of diffusers needs one.

    Attributes that it sets on instances are restored when the cache is removed.
    """

    @abstractmethod
    def apply(self, transformer: nn.Module) -> nn.Module:
        """Edit the given transformer and return it."""


@dataclass(slots=True)
class BlockAdapter:
    """The blocks of one transformer, or of several that a pipeline calls in turn (then with a list per transformer).

    Attributes:
        pipe: the pipeline; None if only a transformer is given. Several transformers need it: its steps are counted.
        transformer: the transformer or transformers; None means the pipeline's own.
        blocks: the list or lists of blocks, in order of execution; None finds them.
        blocks_name: the names of the lists, instead of the lists.
        unique_blocks_name: accepted and not used: a list is identified by transformer and name.
        dummy_blocks_names: lists that are left out of the chain.
        forward_pattern: how the blocks pass tokens on: one for all lists, or one for each; None reads the source.
        check_forward_pattern: the reaction if the source contradicts the pattern: None warns and follows the source,
            True is an error, False trusts the pattern.
        check_num_outputs: True is an error if blocks return a number of streams other than the pattern's.
        params_modifiers: changed settings of the cache: one entry for all lists, or one for each.
        patch_functor: edits each transformer before anything else is done.
        has_separate_cfg: whether guidance is a second call of the transformer; None finds out from the calls.
        auto: whether to search for one list, by the fields that follow.
        allow_prefixes: allowed prefixes of the list's name.
        check_prefixes: whether the name must have one of these prefixes.
        allow_suffixes: allowed suffixes of the class name of the list's blocks.
        check_suffixes: whether the class name must have one of these suffixes.
        blocks_policy: "max" takes the longest list that fits, "min" the shortest.
        skip_post_init: whether the fields are checked only when the adapter is used.
    """

    pipe: Any = None
    transformer: Any = None
    blocks: Any = None
    blocks_name: Any = None
    unique_blocks_name: Any = None
    dummy_blocks_names: Sequence[str] | None = None
    forward_pattern: Any = None
    check_forward_pattern: bool | None = None
    check_num_outputs: bool | None = None
    params_modifiers: Any = None
    patch_functor: PatchFunctor | None = None
    has_separate_cfg: bool | None = None
    auto: bool = False
    allow_prefixes: Sequence[str] = PREFIXES
    check_prefixes: bool = True
    allow_suffixes: Sequence[str] = SUFFIXES
    check_suffixes: bool = False
    blocks_policy: Literal["max", "min"] = "max"
    skip_post_init: bool = False

    def __post_init__(self) -> None:
        if not self.skip_post_init:
            validate_adapter(self)


@dataclass(frozen=True, slots=True)
class TransformerBlockLists:
    """A transformer and the lists of its chain.

    Attributes:
        transformer: the transformer itself, without the modules that torch.compile or peft wrapped around it.
        lists: its lists, in order of execution.
        params_modifiers, has_separate_cfg: as in `BlockAdapter`; the modifiers are one for each list, or none.
    """

    transformer: nn.Module
    lists: list[BlockList]
    params_modifiers: list[Any] = field(default_factory=list)
    has_separate_cfg: bool | None = None


NamedBlocks = tuple[str, Sequence[nn.Module]]
"""The name of a list, and its blocks or some of them."""


def validate_adapter(adapter: BlockAdapter) -> None:
    """Refuse unknown or contradictory fields.

    Raises:
        ModelError: with the field, its value, and a remedy.
    """
    check_values(BlockAdapter, {name: getattr(adapter, name) for name in BlockAdapter.__slots__})
    if adapter.pipe is None and adapter.transformer is None:
        raise ModelError("BlockAdapter has neither pipe nor transformer; give one of them")
    for pattern in _flatten_nested(adapter.forward_pattern):
        if pattern is not None and not isinstance(pattern, ForwardPattern):
            names = ", ".join(ForwardPattern.__members__)
            raise ModelError(f"forward_pattern={pattern!r} is unknown; ForwardPattern has {names}")
    if adapter.blocks is not None and adapter.auto:
        raise ModelError("BlockAdapter has blocks and auto=True, which looks for blocks; give one of them")


def resolve_adapter(adapter: BlockAdapter, stack: ExitStack) -> list[TransformerBlockLists]:
    """Return an adapter's lists for each of its transformers.

    Closing the stack reverts the edits of its functor.

    Raises:
        ModelError: if a field does not fit the pipeline, a transformer or its blocks.
    """
    validate_adapter(adapter)
    # An adapter without transformers has those of its pipeline.
    given = adapter.transformer
    if isinstance(given, nn.Module):
        given = [given]
    transformers = list(map(unwrap_module, given or find_transformers(adapter.pipe)))
    if given is not None and adapter.pipe is not None:
        called = list(map(unwrap_module, find_transformers(adapter.pipe)))
        for transformer in transformers:
            if transformer not in called:
                raise ModelError(
                    f"the {type(transformer).__name__} of BlockAdapter is not that of its "
                    f"{type(adapter.pipe).__name__}; give pipe.transformer, or leave out pipe"
                )
    count = len(transformers)
    blocks_or_names = adapter.blocks
    if blocks_or_names is None:
        blocks_or_names = adapter.blocks_name
    # All fields are split before a functor may edit the first transformer.
    blocks = _split_adapter_field("blocks", blocks_or_names, count)
    patterns = _split_adapter_field("forward_pattern", adapter.forward_pattern, count)
    modifiers = _split_adapter_field("params_modifiers", adapter.params_modifiers, count)
    resolved = []
    for index, transformer in enumerate(transformers):
        own_patterns = patterns[index] or [None]
        own_modifiers = modifiers[index] or []
        _apply_functor(transformer, adapter.patch_functor, stack)
        resolved.append(_resolve_transformer(adapter, transformer, blocks[index], own_patterns, own_modifiers))
    return resolved


def find_pipeline_block_lists(pipe: Any) -> list[TransformerBlockLists]:
    """Return the lists of a pipeline's transformers, or of a given transformer, from the table or the source.

    Raises:
        ModelError: if there is no transformer, or its blocks are not known.
    """
    block_lists = []
    for transformer in find_transformers(pipe):
        block_lists.append(TransformerBlockLists(unwrap_module(transformer), find_block_lists(transformer)))
    return block_lists


def find_transformers(pipe: Any) -> list[nn.Module]:
    """Return the transformers called by a pipeline: `transformer`, `transformer_2`, `prior` and the like.

    Raises:
        ModelError: if there is none.
    """
    if isinstance(pipe, nn.Module):
        return [pipe]
    transformers = []
    for name, part in list_pipeline_parts(pipe).items():
        if not isinstance(part, nn.Module):
            continue
        # Some pipelines give their transformer another name; the table knows it by its class.
        if "transformer" in name or find_table_entry(type(unwrap_module(part))):
            transformers.append(part)
    if not transformers:
        raise ModelError(
            f"{type(pipe).__name__} has no transformer whose blocks could be left out; give a pipeline with one, or a "
            "transformer or BlockAdapter, or leave out whole calls by EasyCacheConfig()"
        )
    return list(dict.fromkeys(transformers))


def _split_adapter_field(what: str, value: Any, count: int) -> list[list[Any] | None]:
    """Split a field into a list for each transformer; a single value counts for all of them."""
    if not isinstance(value, (list, tuple)):
        entries = None if value is None else [value]
        return [entries] * count
    if not value:
        raise ModelError(f"{what} is empty; leave it out, or name one")
    if count == 1:
        # With one transformer, [[a, b]] means [a, b].
        if len(value) == 1 and isinstance(value[0], (list, tuple)) and not _is_list_of_blocks(value[0]):
            value = value[0]
        return [_list_field_entries(value)]
    # With several transformers, a list must have an entry for each of them.
    if len(value) != count:
        raise ModelError(f"{what} has {len(value)} entries for {count} transformers; give a list with one for each")
    return [_list_field_entries(entries) for entries in value]


def _list_field_entries(value: Any) -> list[Any]:
    """Return the entries for one transformer; blocks in a plain list are one entry."""
    if isinstance(value, (list, tuple)) and not _is_list_of_blocks(value):
        return list(value)
    return [value]


def _is_list_of_blocks(value: Any) -> bool:
    """Return whether a list holds blocks rather than lists of blocks."""
    if any(isinstance(item, nn.ModuleList) for item in value):
        return False
    return bool(value) and all(isinstance(item, nn.Module) for item in value)


def _flatten_nested(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value]
    return [item for part in value for item in _flatten_nested(part)]


def _resolve_transformer(
    adapter: BlockAdapter,
    model: nn.Module,
    blocks_by_list: list[Any] | None,
    patterns: list[ForwardPattern | None],
    modifiers: list[Any],
) -> TransformerBlockLists:
    """Resolve the lists of one transformer; patterns and modifiers have one entry for each list, or one for all."""
    # This refuses a transformer whose blocks must not be skipped, also if the adapter names its blocks.
    known_lists = look_up_block_lists(model)
    dummies = adapter.dummy_blocks_names or ()
    # An unknown name is refused.
    for name in dummies:
        get_module_list(model, name)
    parts: list[list[NamedBlocks]]
    if adapter.auto:
        parts = [[_search_block_list(adapter, model, patterns[0])]]
    elif blocks_by_list is None:
        parts = [[(name, blocks)] for name, blocks, _ in known_lists or find_block_lists(model)]
    else:
        parts = [_group_by_owner(model, blocks) for blocks in blocks_by_list]
    patterns = _repeat_for_lists("forward_pattern", patterns, len(parts))
    if modifiers:
        modifiers = _repeat_for_lists("params_modifiers", modifiers, len(parts))
    lists = []
    settings = []
    for index, part in enumerate(parts):
        for name, blocks in part:
            # A dummy that the user joined with other lists is kept.
            if name in dummies and len(part) == 1:
                continue
            flow = _resolve_flow(adapter, model, name, blocks, patterns[index])
            lists.append(BlockList(name, tuple(blocks), flow))
            if modifiers:
                settings.append(modifiers[index])
    if not lists:
        raise ModelError(f"dummy_blocks_names={adapter.dummy_blocks_names} leaves no block of {type(model).__name__}")
    return TransformerBlockLists(model, lists, settings, adapter.has_separate_cfg)


def _repeat_for_lists(what: str, values: list[Any], count: int) -> list[Any]:
    """Return one value for each list."""
    if len(values) not in (1, count):
        raise ModelError(f"{what} has {len(values)} entries for {count} lists of blocks; give one, or one for each")
    if len(values) == 1:
        return values * count
    return values


def _group_by_owner(model: nn.Module, blocks: Any) -> list[NamedBlocks]:
    """Group blocks by their lists in the transformer; a user's list may join several of these."""
    if isinstance(blocks, str):
        return [(blocks, tuple(get_module_list(model, blocks)))]
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList):
        raise ModelError(f"blocks is a {type(blocks).__name__}; it must be a ModuleList of {type(model).__name__}")
    members = list(blocks)
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            lists[name] = module
    owners: dict[int, str] = {}
    for name, block_list in lists.items():
        for member in block_list:
            # A block that is in several lists belongs to the first one.
            owners.setdefault(id(member), name)
    for member in members:
        if id(member) not in owners:
            stranger = type(unwrap_module(member)).__name__
            names = ", ".join(name for name in lists if "." not in name) or "none"
            raise ModelError(
                f"{stranger} in blocks is not in a ModuleList of {type(model).__name__}; its lists are {names}"
            )
    groups: list[NamedBlocks] = []
    for name, group in groupby(members, lambda member: owners[id(member)]):
        groups.append((name, list(group)))
    return groups


def _search_block_list(adapter: BlockAdapter, model: nn.Module, pattern: ForwardPattern | None) -> NamedBlocks:
    """Return the list that auto=True finds. Raises `ModelError` if none matches the adapter."""
    matches = []
    names = []
    prefixes = tuple(adapter.allow_prefixes)
    suffixes = tuple(adapter.allow_suffixes)
    for name, blocks, call in import_lab("study.flows").find_candidate_lists(model):
        flow = find_list_flow(model, name, blocks)
        classes = [type(unwrap_module(block)).__name__ for block in blocks]
        is_named = not adapter.check_prefixes or name.startswith(prefixes)
        is_classed = not adapter.check_suffixes or all(cls.endswith(suffixes) for cls in classes)
        # Either the source or the pattern must say how blocks pass tokens on; if both do, they must agree.
        is_alike = flow is not None or pattern is not None
        if flow is not None and pattern is not None and adapter.check_forward_pattern is not False:
            is_alike = pattern.flow.returns == flow.returns
        is_usable = (call is None or call.alone) and name not in (adapter.dummy_blocks_names or ())
        if is_named and is_classed and is_alike and is_usable:
            matches.append((name, tuple(blocks)))
        names.append(name)
    if not matches:
        pattern_name = None if pattern is None else pattern.name
        raise ModelError(
            f"auto=True finds no list of {type(model).__name__} with forward_pattern="
            f"{pattern_name} and allow_prefixes={list(adapter.allow_prefixes)}; "
            f"it has {', '.join(names) or 'no list of blocks'}"
        )
    matches.sort(key=lambda match: len(match[1]), reverse=adapter.blocks_policy == "max")
    return matches[0]


def _resolve_flow(
    adapter: BlockAdapter, model: nn.Module, name: str, blocks: Sequence[nn.Module], pattern: ForwardPattern | None
) -> Flow:
    """Return the flow of a list's blocks: the known one, or the pattern's if none is known or nothing is checked."""
    known_flow = find_list_flow(model, name, blocks)
    where = f"{type(model).__name__}.{name}"
    # Without a pattern, the table or the source must determine the flow.
    if pattern is None:
        if known_flow is None:
            raise ModelError(
                f"{where}: it cannot be told in which order its blocks return image and text; say it with "
                "forward_pattern=ForwardPattern...."
            )
        return known_flow
    if known_flow is None:
        return _bind_pattern(pattern, where, blocks[0])
    actual = find_flow_pattern(known_flow)
    mismatch = f"{where}: forward_pattern={pattern}, and its blocks are {actual}"
    if adapter.check_num_outputs and len(known_flow.returns) != len(pattern.flow.returns):
        raise ModelError(f"{mismatch}; give ForwardPattern.{actual.name}, or check_num_outputs=False")
    if adapter.check_forward_pattern is False:
        return _bind_pattern(pattern, where, blocks[0])
    if known_flow.returns != pattern.flow.returns:
        if adapter.check_forward_pattern:
            raise ModelError(f"{mismatch}; give ForwardPattern.{actual.name}, or check_forward_pattern=False")
        warnings.warn(f"{mismatch}; ForwardPattern.{actual.name} is used", UserWarning, stacklevel=4)
    return known_flow


def _bind_pattern(pattern: ForwardPattern, where: str, block: nn.Module) -> Flow:
    """Return the flow of a pattern, with the names of a block's parameters."""
    parameters = list_forward_parameters(block)
    image, text = find_token_parameters(parameters)
    if pattern.flow.text is None:
        return Flow(pattern.flow.returns, image, None)
    if text is None and "text" in pattern.flow.returns:
        text = next((name for name in parameters if name != image), None)
        if text is None:
            raise ModelError(f"{where}: forward_pattern={pattern}, and its blocks take {', '.join(parameters)} alone")
    return Flow(pattern.flow.returns, image, text)


def _apply_functor(model: nn.Module, functor: Any, stack: ExitStack) -> None:
    """Let a functor edit a transformer; closing the stack restores the attributes set on instances."""
    if functor is None:
        return
    # Only attributes of instances can be restored.
    before = [(module, dict(vars(module))) for module in model.modules()]
    edited = unwrap_module(functor.apply(model))
    edits: list[tuple[nn.Module, dict[str, Any], str, Any]] = []
    for module, attributes in before:
        for name, value in vars(module).items():
            if name not in attributes or attributes[name] is not value:
                edits.append((module, attributes, name, value))

    def undo_edits() -> None:
        for module, attributes, name, value in edits:
            # An attribute that was set again since is left unchanged.
            if vars(module).get(name) is value:
                vars(module).pop(name)
                if name in attributes:
                    vars(module)[name] = attributes[name]

    stack.callback(undo_edits)
    if edited is not model:
        raise ModelError(
            f"{type(functor).__name__}.apply returned another module; edit the one it is given, and return it"
        )


class ForwardPattern(Enum):
    """The token inputs and outputs of a block's forward; each value is the number in the name."""

    Pattern_0 = 0
    Pattern_1 = 1
    Pattern_2 = 2
    Pattern_3 = 3
    Pattern_4 = 4
    Pattern_5 = 5

    @property
    def flow(self) -> Flow:
        """Return the pattern's `Flow`, with diffusers' usual names of parameters."""
        return _FLOWS[self.value]

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the parameters for tokens."""
        if self.flow.text is None:
            return ("hidden_states",)
        return ("hidden_states", "encoder_hidden_states")

    @property
    def gives(self) -> tuple[str, ...]:
        """Return the names of the returned streams, in order."""
        names = {"image": "hidden_states", "text": "encoder_hidden_states"}
        return tuple(names[stream] for stream in self.flow.returns)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.takes)} -> {', '.join(self.gives)})"


Pattern_0, Pattern_1, Pattern_2, Pattern_3, Pattern_4, Pattern_5 = ForwardPattern
"""The patterns as names of this module, as in cache-dit."""

_FLOWS = (
    Flow(("image", "text")),
    Flow(("text", "image")),
    Flow(("image",)),
    Flow(("image",), text=None),
    Flow(("image", "text"), text=None),
    Flow(("text", "image"), text=None),
)


def find_flow_pattern(flow: Flow) -> ForwardPattern:
    """Return the pattern of a flow, whatever the names of its parameters; raise `ModelError` if there is none."""
    for pattern in ForwardPattern:
        # Names of parameters differ from model to model, so only the presence of a text parameter counts.
        takes_alike = (pattern.flow.text is None) == (flow.text is None)
        if takes_alike and pattern.flow.returns == flow.returns:
            return pattern
    raise ModelError(f"no pattern returns {flow.returns}; known are 'image' alone, and 'image' and 'text' in any order")

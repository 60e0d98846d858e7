"""Records calls of a transformer: its arguments, the arguments of its blocks, and their attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.block_lists import find_block_lists
from ditile.model.hooks.attention_hooks import AttentionWatch
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.overrides import override_attribute
from ditile.model.hooks.pieces import find_run, flag_nan_tokens, has_nan
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError
from ditile_lab.study.capture import Call


class AttentionCall(NamedTuple):
    """One call of scaled dot-product attention: queries, keys, the mask's shape, which keys are NaN and which are not.

    `real_pairs` is whether a mask over pairs has one for each query and key that are both real.
    """

    queries: int
    keys: int
    mask: tuple[int, ...] | None
    real_pairs: bool
    causal: bool
    poisoned: range | None = None
    finite: range | None = None


@dataclass(slots=True)
class BlockRecord:
    """One call of a block: its arguments by parameter, and by path the attention calls within it.

    `outside` has the paths of modules in the block that were called outside it.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Any, ...] | None = None
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)
    outside: dict[str, None] = field(default_factory=dict)


class ChainBlock(NamedTuple):
    """A block of the chain."""

    list_name: str
    name: str
    block: nn.Module
    flow: Flow


def list_chain(transformer: nn.Module) -> list[ChainBlock]:
    """List the blocks of a transformer in order of execution; raise `ModelError` if they are unknown."""
    chain = []
    for name, blocks, flow in find_block_lists(transformer):
        for index, block in enumerate(blocks):
            chain.append(ChainBlock(name, f"{name}.{index}", block, flow))
    return chain


def record_blocks(
    transformer: nn.Module,
    chain: Sequence[ChainBlock],
    call: Call,
    *,
    bypass: bool = False,
    poisons: Collection[str] = (),
) -> list[BlockRecord]:
    """Record the arguments and attention calls of every block in one call of a transformer.

    Args:
        transformer, chain, call: the model, its blocks, the arguments.
        bypass: whether blocks pass their inputs on, although they run.
        poisons: the streams, `image` and `text`, that are NaN in the blocks' inputs.

    Raises:
        ModelError: if a block is called twice, or not at all.
    """
    records = [BlockRecord() for _ in chain]
    path: list[tuple[BlockRecord, str]] = []

    def note(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
        # Attention outside all blocks does not belong to them.
        if not path:
            return
        record, name = path[-1]
        shape = None if mask is None else tuple(mask.shape)
        attention = AttentionCall(query.shape[-2], key.shape[-2], shape, has_real_pairs(mask), causal)
        if bypass:
            bad = flag_nan_tokens(key, -2)
            attention = attention._replace(poisoned=find_run(bad), finite=find_run(~bad))
        record.attention.setdefault(name, []).append(attention)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # Other backends of diffusers bypass torch's attention, which is watched here.
        stack.enter_context(attention_backend(AttentionBackendName.NATIVE))
        for record, (_, name, block, flow) in zip(records, chain, strict=True):
            for _, _, processor in find_attention_processors(block):
                if getattr(processor, "_attention_backend", None) is not None:
                    override_attribute(stack, processor, "_attention_backend", AttentionBackendName.NATIVE)
            # An attention call belongs to the innermost module that makes it.
            for module_path, module in block.named_modules():
                if module_path:
                    track_path(stack, path, (record, module_path), module, _note_outside)
            _record_block(stack, path, record, name, block, flow, bypass=bypass, poisons=poisons)
        stack.enter_context(AttentionWatch(note))
        transformer(**call)
    for record, (_, name, _, _) in zip(records, chain, strict=True):
        if not record.arguments:
            raise ModelError(f"{type(transformer).__name__} did not call its block {name}")
    return records


def has_real_pairs(mask: Tensor | None) -> bool:
    """Return whether a mask pairs exactly the real queries with the real keys."""
    if mask is None or mask.dtype != torch.bool:
        return False
    # A mask over keys has no pairs.
    if mask.ndim < 3 or mask.shape[-2] == 1:
        return False
    return torch.equal(mask, mask.any(dim=-2, keepdim=True) & mask.any(dim=-1, keepdim=True))


def _note_outside(path: Sequence[tuple[BlockRecord, str]], place: tuple[BlockRecord, str]) -> None:
    record, name = place
    if all(outer is not record for outer, _ in path):
        record.outside[name] = None


def track_path(
    stack: ExitStack,
    path: list[Any],
    place: Any,
    module: nn.Module,
    note: Callable[[list[Any], Any], None] = lambda path, place: None,
) -> None:
    """Make `path` end with `place` while a module's forward runs, until the stack is closed; `note` is called
    before."""
    forward = module.forward

    @functools.wraps(forward)
    def forward_on_path(*args: Any, **kwargs: Any) -> Any:
        note(path, place)
        path.append(place)
        try:
            return forward(*args, **kwargs)
        finally:
            path.pop()

    override_attribute(stack, module, "forward", forward_on_path)


def _record_block(
    stack: ExitStack,
    path: list[Any],
    record: BlockRecord,
    name: str,
    block: nn.Module,
    flow: Flow,
    *,
    bypass: bool,
    poisons: Collection[str],
) -> None:
    # The forward that records, below, wraps the forward that tracks the path.
    track_path(stack, path, (record, ""), block)
    forward = block.forward
    # This is the signature of the class, because an instance may have a replaced forward.
    signature = inspect.signature(type(block).forward)

    @functools.wraps(forward)
    def forward_and_record(*args: Any, **kwargs: Any) -> Any:
        # A second call would be mixed with the first one, so it is refused.
        if record.arguments:
            raise ModelError(f"block {name} is called more than once in a call of the transformer")
        record.arguments.update(signature.bind(block, *args, **kwargs).arguments)
        del record.arguments[next(iter(signature.parameters))]
        if poisons:
            args, kwargs = spread_arguments(block, _poison_streams(record.arguments, flow, poisons))
        out = forward(*args, **kwargs)
        record.outputs = out if isinstance(out, tuple) else None
        if bypass:
            return _pass_on(record.arguments, flow, out)
        return out

    override_attribute(stack, block, "forward", forward_and_record)


def spread_arguments(block: nn.Module, arguments: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn arguments by parameter into the arguments of a call."""
    signature = inspect.signature(type(block).forward)
    bound = inspect.BoundArguments(signature, {next(iter(signature.parameters)): block, **arguments})
    return bound.args[1:], bound.kwargs


def _poison_streams(arguments: Call, flow: Flow, poisons: Collection[str]) -> dict[str, Any]:
    poisoned = dict(arguments)
    names = {"image": flow.image}
    if flow.text is not None and "text" in flow.returns:
        names["text"] = flow.text
    for stream, name in names.items():
        if stream in poisons and isinstance(arguments.get(name), Tensor):
            poisoned[name] = torch.full_like(arguments[name], float("nan"))
    return poisoned


def _pass_on(arguments: Mapping[str, Any], flow: Flow, out: Any) -> Any:
    """Return the inputs of a block, in the form of its outputs."""
    streams = {"image": arguments[flow.image], "text": arguments.get(flow.text or "")}
    if not isinstance(out, tuple):
        return streams["image"]
    passed = []
    for name, part in zip(flow.returns, out, strict=False):
        stream = None if part is None else streams[name]
        passed.append(stream)
    return tuple(passed)


def find_skip(transformer: nn.Module, chain: Sequence[ChainBlock], call: Call) -> tuple[str, str] | None:
    """Find a block with tokens that reach anything but the next block, and name the receiver; None if there is none."""
    for at, source in enumerate(chain[:-1]):
        receivers: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for place, block in enumerate(chain):
                # Blocks in between return zeros, so NaN that arrives elsewhere did not pass through them.
                fill = float("nan") if place == at else 0.0
                receiver = block.name if place > at + 1 else ""
                _replace_outputs(stack, block.block, fill, receiver, receivers)
            if has_nan(transformer(**call)):
                receivers.append("what comes after the blocks")
        if receivers:
            return source.name, receivers[0]
    return None


def _replace_outputs(stack: ExitStack, block: nn.Module, fill: float, receiver: str, receivers: list[str]) -> None:
    """Make a block return one number everywhere until the stack is closed; note `receiver` if it receives NaN."""
    forward = block.forward

    @functools.wraps(forward)
    def forward_and_fill(*args: Any, **kwargs: Any) -> Any:
        if receiver and has_nan([args, kwargs]):
            receivers.append(receiver)
        return pytree.tree_map_only(Tensor, lambda x: torch.full_like(x, fill), forward(*args, **kwargs))

    override_attribute(stack, block, "forward", forward_and_fill)
